"""The jitted steps: initialise, sample, score, update. No other file compiles anything.

Each `make_*` returns one compiled function for one set of static choices, and the same function for
the same choices: stages that sample alike share a program. All array arguments are traced.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from opd_jax import rollout as sampler
from opd_jax import scoring
from opd_jax.config import GrpoSettings
from opd_jax.core import sharding
from opd_jax.core.types import Mean, Metrics, Params, PromptBatch, Rollout, Scores, TrainState
from opd_jax.losses import Group, LossSettings, group_loss, weigh
from opd_jax.models import lora, transformer
from opd_jax.models.config import ModelConfig
from opd_jax.objectives import opd
from opd_jax.objectives.grpo import group_advantages
from opd_jax.optim import OptimizerSettings, make_optimizer
from opd_jax.repetition import repeated_share


@functools.cache
def make_init(config: ModelConfig, mesh: jax.sharding.Mesh) -> Callable[[jax.Array], Params]:
    """key -> random parameters, created in their layout: no unsharded copy ever exists."""
    layout = transformer.shardings(config, mesh)
    return jax.jit(functools.partial(transformer.init, config), out_shardings=layout)


@functools.cache
def make_delta(config: ModelConfig, mesh: jax.sharding.Mesh) -> Callable[[jax.Array], Params]:
    """key -> fresh LoRA deltas alone, in their layout; the model they belong to is not made."""
    _, layout = lora.split(transformer.shardings(config, mesh))
    return jax.jit(lambda key: lora.split(transformer.init(config, key))[1], out_shardings=layout)


@jax.jit
def add_vector_step(params: Params, initial: Params, other: Params, weight: float) -> Params:
    """Weights with a task vector added: a share of the way from `initial` to `other`."""
    return jax.tree.map(lambda p, i, o: p + weight * (o - i), params, initial, other)


@functools.cache
def make_merge(config: ModelConfig) -> Callable[[Params], Params]:
    """A model with LoRA deltas -> the fp32 model that they amount to."""
    return jax.jit(functools.partial(lora.merge, config=config))


@functools.cache
def make_state(settings: OptimizerSettings, steps: int) -> Callable[[Params], TrainState]:
    """parameters -> a fresh TrainState with buffers of its own."""
    optimizer = make_optimizer(settings, steps)

    def init_state(params: Params) -> TrainState:
        params = jax.tree.map(jnp.copy, params)
        return TrainState(jnp.int32(0), params, optimizer.init(params))

    return jax.jit(init_state)


@functools.cache
def make_rollout_step(
    config: ModelConfig, sampling: sampler.Sampling
) -> Callable[[Params, PromptBatch, jax.Array], tuple[Rollout, jax.Array]]:
    """(params, prompts, key) -> (rollout, decode steps taken)."""

    def rollout_step(params, prompt, key):
        return sampler.sample(params, config, prompt, key, sampling)

    return jax.jit(rollout_step)


@functools.cache
def make_score_step(
    config: ModelConfig, temperature: float, top_k: int, classes: scoring.Classes = ()
) -> Callable[[Params, Rollout], Scores]:
    """(params, rollout) -> scores of its completions: teacher, reference and behaviour check."""

    def score_step(params, rollout):
        hidden = transformer.completion_hidden(params, config, rollout.prompt, rollout.tokens_BR)
        return scoring.score(
            hidden,
            transformer.unembedding(params),
            rollout.tokens_BR,
            temperature=temperature,
            softcap=config.final_softcap,
            tokens=config.num_tokens,
            top_k=top_k,
            classes=classes,
        )

    return jax.jit(score_step)


@functools.cache
def make_hidden_step(config: ModelConfig) -> Callable[[Params, Rollout], jax.Array]:
    """(params, rollout) -> hidden states that predict its completions, for exact divergences.

    A teacher's logits are never kept: its hidden states are, and the loss unembeds them tile by
    tile beside the student's.
    """

    def hidden_step(params, rollout):
        return transformer.completion_hidden(params, config, rollout.prompt, rollout.tokens_BR)

    return jax.jit(hidden_step)


@functools.cache
def make_weigh_step(
    aggregation: str, constant: float | None, mask_truncated: bool
) -> Callable[[Rollout, jax.Array | None], Group]:
    """(rollout, rows to keep or None) -> the rows with their aggregation weights."""

    def weigh_step(rollout, keep_B):
        return weigh(rollout, keep_B, aggregation, constant, mask_truncated)

    return jax.jit(weigh_step)


@functools.cache
def make_grpo_step(
    settings: GrpoSettings, aggregation: str, constant: float | None, mask_truncated: bool
) -> Callable[[Rollout, jax.Array, jax.Array | None], tuple[Group, jax.Array]]:
    """(rollout, rewards [P, n], reference log-probs or None) -> (group, zero-variance prompts)."""

    def grpo_step(rollout, reward_Pn, reference_logp_BR):
        valid_Pn = None
        if not settings.truncated_in_baseline:
            valid_Pn = rollout.stopped_B.reshape(reward_Pn.shape)
        advantage_Pn, constant_P = group_advantages(
            reward_Pn,
            scale=settings.advantage_scale,
            ddof=settings.advantage_ddof,
            eps=settings.advantage_eps,
            valid_Pn=valid_Pn,
        )
        keep_B = None
        if settings.drop_zero_variance:
            keep_B = transformer.repeat_rows(~constant_P, rollout.samples)
        group = weigh(rollout, keep_B, aggregation, constant, mask_truncated)
        advantage_BR = jnp.broadcast_to(
            advantage_Pn.reshape(-1)[:, None],
            rollout.tokens_BR.shape,
            out_sharding=sharding.spec("batch", "time"),
        )
        group = group.replace(advantage_BR=advantage_BR, reference_logp_BR=reference_logp_BR)
        return group, constant_P

    return jax.jit(grpo_step)


@jax.jit
def replicate_step(tree: Any) -> Any:
    """The same arrays, whole on every device."""
    return jax.tree.map(lambda x: jax.sharding.reshard(x, sharding.spec()), tree)


def everywhere(tree: Any) -> Any:
    """Small arrays as numpy, whole in every process; waits for them. Collective on several hosts.

    Waiting has no time limit there: exchange something (`Context.check`) after the dispatch.
    """
    return jax.device_get(tree if jax.process_count() == 1 else replicate_step(tree))


@jax.jit
def facts_step(rollout: Rollout) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lengths, whether rows stopped, and the share of each that repeats itself, all `[B]`."""
    repeated_B = repeated_share(rollout.tokens_BR, rollout.mask_BR)
    return rollout.length_B, rollout.stopped_B, repeated_B


@jax.jit
def join_step(parts: Sequence[Rollout]) -> Rollout:
    """Rollouts of several teachers as one, in their order."""
    return jax.tree.map(
        lambda *xs: jax.sharding.reshard(
            jnp.concatenate(xs), sharding.spec("batch", *(None,) * (xs[0].ndim - 1))
        ),
        *parts,
    )


@jax.jit
def fixed_negative_step(group: Group) -> Group:
    """The teacher-free control of OPD: see opd.fixed_negative_advantage."""
    rollout = group.rollout
    # The threshold is a quantile over all rows, and a sort needs them in one place.
    logp_BR, mask_BR = jax.sharding.reshard((rollout.logp_BR, rollout.mask_BR), sharding.spec())
    advantage_BR = opd.fixed_negative_advantage(logp_BR, mask_BR)
    layout = sharding.spec("batch", "time")
    return group.replace(advantage_BR=jax.sharding.reshard(advantage_BR, layout))


@functools.cache
def make_take_step(start: int, stop: int) -> Callable[[Group], Group]:
    """group -> the rows of prompts start..stop-1, laid out over the batch axes again."""

    def take_step(group):
        return take_prompts(group, start, stop)

    return jax.jit(take_step)


@functools.cache
def make_update_step(
    config: ModelConfig,
    optimizer: OptimizerSettings,
    steps: int,
    loss: LossSettings,
    micro_batches: int,
) -> Callable[[TrainState, Sequence[Group], Params | None], tuple[TrainState, dict[str, Any]]]:
    """(state, groups, base) -> (state, metrics); the state is donated.

    The base is what the state's parameters are deltas of (models/lora.py), or None. The loss is the
    sum over all groups' rows; gradients of groups and micro-batches are added.
    Returned metrics: one dict of Means per group under "groups", the batch's "loss", "grad_norm",
    "update_norm" and "param_norm", and "finite": per parameter leaf, whether its gradient is.
    """
    tx = make_optimizer(optimizer, steps)

    def loss_of(trained: Params, base: Params | None, group: Group):
        return group_loss(lora.join(base, trained), config, group, loss)

    value_and_grad = jax.value_and_grad(loss_of, has_aux=True)

    def update_step(state: TrainState, groups: Sequence[Group], base: Params | None = None):
        total, grads, metrics = 0.0, None, []
        for group in groups:
            loss_sum, group_metrics, g = accumulate(state.params, base, group)
            total += loss_sum
            grads = g if grads is None else jax.tree.map(jnp.add, grads, g)
            metrics.append(group_metrics)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        one = jnp.float32(1)
        report = {
            "groups": metrics,
            "loss": Mean(total, one),
            "grad_norm": Mean(optax.global_norm(grads), one),
            "update_norm": Mean(optax.global_norm(updates), one),
            "param_norm": Mean(optax.global_norm(params), one),
            "finite": jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]),
        }
        return TrainState(state.step + 1, params, opt_state), report

    def accumulate(
        params: Params, base: Params | None, group: Group
    ) -> tuple[jax.Array, Metrics, Params]:
        if micro_batches == 1:
            (loss_sum, metrics), grads = value_and_grad(params, base, group)
            return loss_sum, metrics, grads
        table = group.teacher_table_VD  # Belongs to no row: the same in every micro-batch.

        def add(carry, micro):
            micro = micro.replace(teacher_table_VD=table)
            (loss_sum, metrics), grads = value_and_grad(params, base, micro)
            return jax.tree.map(jnp.add, carry, (loss_sum, metrics, grads)), None

        pieces = split_prompts(group.replace(teacher_table_VD=None), micro_batches)
        first = jax.tree.map(lambda x: x[0], pieces).replace(teacher_table_VD=table)
        (loss_sum, metrics), grads = jax.eval_shape(
            lambda p: value_and_grad(p, base, first), params
        )
        nothing = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding),
            (loss_sum, metrics, grads),
        )
        return jax.lax.scan(add, nothing, pieces)[0]

    return jax.jit(update_step, donate_argnums=0)


def take_prompts(group: Group, start: int, stop: int) -> Group:
    """The rows of prompts start..stop-1 of a group that has no teacher yet."""
    P = group.rollout.prompt.length_P.shape[0]

    def take(x):
        per_prompt = x.shape[0] // P
        rows = jnp.arange(start * per_prompt, stop * per_prompt)
        rows = jax.sharding.reshard(rows, sharding.spec("batch"))
        return sharding.take_rows(x, rows, "batch", *(None,) * (x.ndim - 1))

    return jax.tree.map(take, group)


def split_prompts(group: Group, pieces: int) -> Group:
    """A leading axis of `pieces` micro-batches; piece j holds prompts j, j+pieces, ...

    Strided, so that every shard of the batch keeps its own rows and nothing moves.
    """
    P = group.rollout.prompt.length_P.shape[0]

    def split(x):
        per_prompt = x.shape[0] // P
        x = x.reshape(P // pieces, pieces, per_prompt, *x.shape[1:])
        x = jnp.moveaxis(x, 1, 0)
        x = x.reshape(pieces, P // pieces * per_prompt, *x.shape[3:])
        # Where a piece is one prompt, reshape takes the axis of pieces for the batch.
        return jax.sharding.reshard(x, sharding.spec(None, "batch", *(None,) * (x.ndim - 2)))

    return jax.tree.map(split, group)
