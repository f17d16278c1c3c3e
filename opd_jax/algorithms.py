"""Where a batch's signal comes from: verifiers (GRPO), teachers (OPD), given completions (SFT).

Each algorithm is one function from prompts to groups of rows ready for the update. They share the
prompts, the sampler, the aggregation and the ledger; the loss that turns groups into a gradient is
chosen in `loss_settings` and written in losses.py.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from opd_jax import ledger, rewards, steps
from opd_jax.config import Stage
from opd_jax.core import rng, sharding
from opd_jax.core.types import Params, PromptBatch, Rollout
from opd_jax.data import prompts as prompt_data
from opd_jax.data.problem import Problem
from opd_jax.data.stopping import cut_rollout
from opd_jax.data.tokenizer import Tokenizer
from opd_jax.losses import Group, LossSettings
from opd_jax.models import transformer
from opd_jax.models.config import ModelConfig

FIXED_NEGATIVE = "fixed_negative"


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A frozen model that scores, or a control in its place."""

    spec: str  # As the config names it.
    config: ModelConfig
    params: Params | None  # None: the student itself ("self"), or no model ("fixed_negative").
    manifest: dict[str, Any]  # Where it comes from and what it cost; saved with each checkpoint.


@dataclasses.dataclass(frozen=True)
class Context:
    """What the algorithms of one stage need besides the student's weights."""

    stage: Stage
    seed: int
    config: ModelConfig
    mesh: jax.sharding.Mesh
    tokenizer: Tokenizer
    ranges: Mapping[str, tuple[int, int]]  # Domain -> its prompts in every batch, contiguous.
    teachers: Mapping[str, Teacher]  # By domain.
    reference: Params | None  # The stage's initial weights, if a KL to them is in the loss.
    check: Callable[[], None] = lambda: None  # Called between phases; may raise to give up.
    verifiers: rewards.Pool = dataclasses.field(default_factory=rewards.Pool)
    stop_strings: tuple[str, ...] = ()  # Texts that end a completion, besides the stop tokens.


@dataclasses.dataclass
class Batch:
    """One step's input to the update."""

    groups: list[Group]
    names: list[str]  # Per group: the teacher's name, or "".
    prompt_P: np.ndarray  # Prompt lengths of all rows trained on.
    length_B: np.ndarray  # Completion lengths.
    collect: Callable[[], dict[str, float]]  # Makes `facts`; may wait for verifiers.

    @functools.cached_property
    def facts(self) -> dict[str, float]:
        """Means over rows known on the host: reward, length, truncation."""
        return self.collect()


def loss_settings(stage: Stage) -> LossSettings:
    """The static half of the stage's loss."""
    opd_loss = stage.opd.loss if stage.opd.loss != "sampled" else "sampled_token"
    if any(spec == FIXED_NEGATIVE for spec in stage.teachers.values()):
        opd_loss = "policy_gradient"
    return LossSettings(
        kind={"grpo": "policy_gradient", "sft": "supervised", "opd": opd_loss}[stage.algorithm],
        temperature=1.0 if stage.algorithm == "sft" else stage.sampling.temperature,
        clip_low=stage.clip_low,
        clip_high=stage.clip_high,
        dual_clip=stage.dual_clip,
        kl_coefficient=stage.grpo.kl_coefficient if stage.algorithm == "grpo" else 0.0,
        kl_kind=stage.grpo.kl_kind,
        top_k=stage.opd.top_k if stage.algorithm == "opd" else 0,
        top_k_form=stage.opd.top_k_form,
        jsd_beta=stage.opd.jsd_beta,
        stop_token_classes=stage.opd.stop_token_classes if stage.algorithm == "opd" else (),
    )


def grpo(
    ctx: Context, params: Params, problems: Sequence[Problem], prompt: PromptBatch,
    step: int, book: ledger.Ledger,
) -> Batch:  # fmt: skip
    """n samples per prompt, verified; each is compared with its siblings."""
    rollout, text_B = _sample(ctx, params, prompt, step, book)
    marks = ctx.verifiers.submit(problems, text_B)
    length_P, length_B = _lengths(prompt, rollout)
    reference_logp_BR = None
    if ctx.reference is not None:
        score = steps.make_score_step(ctx.config, ctx.stage.sampling.temperature, 0)
        reference_logp_BR = score(ctx.reference, rollout).logp_BR
        book.add("reference_score", ledger.score(ctx.config, length_P, length_B))
    verdicts = marks.result()  # Here at last: the device has been busy meanwhile.
    limit = ctx.stage.sampling.max_new_tokens
    reward_B, terms = rewards.combine(ctx.stage.reward, verdicts.right_B, text_B, length_B, limit)
    shape = len(problems), -1
    reward_Pn = rewards.neutral(reward_B.reshape(shape), verdicts.valid_B.reshape(shape))
    signal = steps.make_grpo_step(ctx.stage.grpo, *weighing(ctx.stage))
    group, constant_P = signal(rollout, sharding.put(ctx.mesh, reward_Pn), reference_logp_BR)
    facts = _facts(ctx, rollout, length_B, reward_Pn.reshape(-1), terms) | verdicts.counts
    same_P = reward_Pn.min(axis=1) == reward_Pn.max(axis=1)
    facts["zero_variance"] = float(np.mean(same_P))
    if ctx.stage.grpo.drop_zero_variance:
        dropped = np.asarray(constant_P)
        n = ctx.stage.sampling.samples
        _discard(book, ctx.config, length_P[dropped], length_B[np.repeat(dropped, n)])
    return Batch([group], [""], length_P, length_B, lambda: facts)


def opd(
    ctx: Context, params: Params, problems: Sequence[Problem], prompt: PromptBatch,
    step: int, book: ledger.Ledger,
) -> Batch:  # fmt: skip
    """Samples of the student, each scored by the one teacher of its domain."""
    rollout, text_B = _sample(ctx, params, prompt, step, book)
    marks = ctx.verifiers.submit(problems, text_B)
    length_P, length_B = _lengths(prompt, rollout)
    whole = steps.make_weigh_step(*weighing(ctx.stage))(rollout, None)
    if loss_settings(ctx.stage).kind == "policy_gradient":  # The control that has no teacher.
        groups, names = [steps.fixed_negative_step(whole)], [""]
    else:
        groups, names = _taught(ctx, params, whole, length_P, length_B, book)
    # The reward only informs: it is waited for after the update has been dispatched.
    collect = functools.partial(_marked_facts, ctx, rollout, length_B, marks)
    return Batch(groups, names, length_P, length_B, collect)


def sft(
    ctx: Context, params: Params, problems: Sequence[Problem], prompt: PromptBatch,
    step: int, book: ledger.Ledger,
) -> Batch:  # fmt: skip
    """Given completions: the domain's solutions, or rollouts of the teachers made on the spot."""
    if ctx.stage.sft.source == "teacher":
        rollout, text_B = _teacher_rollouts(ctx, prompt, step, book)
        marks = ctx.verifiers.submit(problems, text_B)
        keep_B = np.ones(len(text_B), bool)
        if ctx.stage.sft.reject_wrong:
            keep_B = marks.result().right_B > 0
    else:
        columns = ctx.stage.sampling.max_new_tokens
        tokens_BR, length_B, whole_B = prompt_data.encode_solutions(
            problems, ctx.stage.sft.style, ctx.tokenizer, columns
        )
        mask_BR = np.arange(columns)[None, :] < length_B[:, None]
        rollout = sharding.put(
            ctx.mesh,
            Rollout(prompt, tokens_BR, mask_BR, mask_BR * np.float32(0), length_B, whole_B),
        )
        keep_B = np.ones(len(problems), bool)
        marks = None  # Solutions verify by construction.
    length_P, length_B = _lengths(prompt, rollout)
    if not keep_B.all():
        n = rollout.samples
        for domain, (start, stop) in ctx.ranges.items():
            gone = ~keep_B[start * n : stop * n]
            flops = ledger.decode(
                ctx.teachers[domain].config,
                np.repeat(length_P[start:stop], n)[gone],
                length_B[start * n : stop * n][gone],
            )
            book.discard("generation", flops)
    group = steps.make_weigh_step(*weighing(ctx.stage))(rollout, sharding.put(ctx.mesh, keep_B))
    kept = {"kept": float(keep_B.mean())}
    collect = functools.partial(_marked_facts, ctx, rollout, length_B, marks, kept)
    return Batch([group], [""], length_P, length_B, collect)


ALGORITHMS = {"grpo": grpo, "opd": opd, "sft": sft}


def texts(tokenizer: Tokenizer, rollout: Rollout) -> list[str]:
    """The completions as text, stop tokens left out."""
    tokens_BR, length_B = np.asarray(rollout.tokens_BR), np.asarray(rollout.length_B)
    end_B = length_B - np.asarray(rollout.stopped_B)
    return [
        tokenizer.decode(row[:end].tolist(), continues=True)
        for row, end in zip(tokens_BR, end_B, strict=True)
    ]


def _sample(ctx, params, prompt, step, book):
    """A rollout of the student, its texts, and its FLOPs in the ledger."""
    rollout_step = steps.make_rollout_step(ctx.config, ctx.stage.sampling)
    rollout, _ = rollout_step(params, prompt, rng.stream(ctx.seed, "rollout", step))
    length_P, length_B = _lengths(prompt, rollout)
    prompt_B = np.repeat(length_P, rollout.samples)
    book.add("prefill", ledger.prefill(ctx.config, length_P))
    book.add("decode", ledger.decode(ctx.config, prompt_B, length_B))
    ctx.check()
    if ctx.stop_strings:
        cut, text_B = cut_rollout(ctx.tokenizer, rollout, ctx.stop_strings)
        return sharding.put(ctx.mesh, cut), text_B
    return rollout, texts(ctx.tokenizer, rollout)


def _taught(ctx, params, whole, length_P, length_B, book):
    """The batch in one group per domain, each with what its teacher says; and the groups' names."""
    settings, n = loss_settings(ctx.stage), whole.rollout.samples
    groups = []
    for domain, (start, stop) in ctx.ranges.items():
        teacher = ctx.teachers[domain]
        part = whole if len(ctx.ranges) == 1 else steps.make_take_step(start, stop)(whole)
        teacher_params = params if teacher.params is None else teacher.params
        if settings.kind == "sampled_token":
            score = steps.make_score_step(
                teacher.config, settings.temperature, settings.top_k, settings.stop_token_classes
            )
            part = part.replace(teacher=score(teacher_params, part.rollout))
        else:
            hidden = steps.make_hidden_step(teacher.config)
            # The table is copied where it is the student's own: the update donates that buffer.
            table_VD = transformer.unembedding(teacher_params)
            part = part.replace(
                teacher_hidden_BRD=hidden(teacher_params, part.rollout),
                teacher_table_VD=table_VD.copy() if teacher.params is None else table_VD,
                teacher_softcap=teacher.config.final_softcap,
            )
        rows = slice(start * n, stop * n)
        book.add(
            "teacher_score", ledger.score(teacher.config, length_P[start:stop], length_B[rows])
        )
        groups.append(part)
    return groups, list(ctx.ranges)


def _teacher_rollouts(ctx, prompt, step, book):
    """Rollouts of each domain's teacher, joined in row order."""
    parts, n = [], ctx.stage.sampling.samples
    prompt = jax.tree.map(np.asarray, prompt)
    for domain, (start, stop) in ctx.ranges.items():
        teacher = ctx.teachers[domain]
        some = jax.tree.map(lambda x, rows=slice(start, stop): x[rows], prompt)
        some = sharding.put(ctx.mesh, some)
        generate = steps.make_rollout_step(teacher.config, ctx.stage.sampling)
        part, _ = generate(teacher.params, some, rng.stream(ctx.seed, "generate", step))
        length_P, length_B = _lengths(some, part)
        flops = ledger.prefill(teacher.config, length_P)
        flops += ledger.decode(teacher.config, np.repeat(length_P, n), length_B)
        book.add("generation", flops)
        parts.append(jax.tree.map(np.asarray, part))
    joined = jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
    rollout = sharding.put(ctx.mesh, joined)
    return rollout, texts(ctx.tokenizer, rollout)


def _lengths(prompt: PromptBatch, rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(prompt.length_P), np.asarray(rollout.length_B)


def weighing(stage: Stage) -> tuple[str, float | None, bool]:
    constant = float(stage.sampling.max_new_tokens)
    uses_constant = stage.aggregation == "constant-norm"
    return stage.aggregation, constant if uses_constant else None, stage.mask_truncated


def _discard(book: ledger.Ledger, config: ModelConfig, length_P, length_B) -> None:
    """Moves the sampling of whole groups that were thrown away to where it can be seen."""
    if len(length_P):
        n = len(length_B) // len(length_P)
        book.discard("prefill", ledger.prefill(config, length_P))
        book.discard("decode", ledger.decode(config, np.repeat(length_P, n), length_B))


def _marked_facts(ctx, rollout, length_B, marks, more=types.MappingProxyType({})):
    """Facts of an algorithm that does not train on the reward; waits for the marks."""
    if marks is None:
        return _facts(ctx, rollout, length_B, np.ones(len(length_B)), {}) | more
    verdicts = marks.result()
    return _facts(ctx, rollout, length_B, verdicts.right_B, {}) | verdicts.counts | more


def _facts(ctx: Context, rollout: Rollout, length_B, reward_B, terms) -> dict[str, float]:
    """Means over rows, of the batch and by domain."""
    rows = {
        "reward": reward_B,
        "length": length_B,
        "truncated": ~np.asarray(rollout.stopped_B),
        **terms,
    }
    facts, n = {}, rollout.samples
    for name, x_B in rows.items():
        facts[name] = float(np.mean(x_B))
        for domain, (start, stop) in ctx.ranges.items():
            facts[f"{name}/{domain}"] = float(np.mean(x_B[start * n : stop * n]))
    return facts
