"""The sampler: prompts in, completions out, in one jitted program.

Every unique prompt is prefilled once, whatever the number of samples, and its keys and values are
shared by them. All completions start in column 0 of their own cache, so one decode step runs token
t of every row. The loop ends when every row has stopped. The sampler knows token ids only.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from opd_jax import choice, scoring
from opd_jax.core import sharding
from opd_jax.core.types import Params, PromptBatch, Rollout
from opd_jax.models import transformer
from opd_jax.models.config import ModelConfig
from opd_jax.models.layers import KV

TABLES = ("embedding", "head")  # Parameters that hold a row for every token.
# Completions of so many tokens are decoded with a cache that grows, see `cache_sizes`.
LONG = 512


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How completions are drawn."""

    samples: int  # n, per prompt.
    max_new_tokens: int  # R, the stop token included.
    temperature: float = 1.0  # 0: the likeliest token, ties to the lowest id.
    top_k: int = 0  # Keep the k likeliest tokens; 0 or at least V: no filter.
    top_p: float = 1.0  # Keep tokens until their mass reaches p, the crossing one included.

    def __post_init__(self):
        for name in ("samples", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"sampling.{name}={getattr(self, name)}: must be at least 1")
        if not self.temperature >= 0:
            raise ValueError(f"sampling.temperature={self.temperature}: must not be negative")
        if self.top_k < 0:
            raise ValueError(f"sampling.top_k={self.top_k}: must not be negative (0: no filter)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p={self.top_p}: must be in (0, 1]")

    def check_trainable(self) -> None:
        """Raises ValueError where a policy gradient on such samples would be wrong.

        The scorer reports log-probs over the whole vocabulary, so a truncated distribution would
        give ratios other than 1 on the very weights that sampled; greedy samples have no spread.
        """
        if self.top_k or self.top_p < 1:
            raise ValueError(
                f"sampling.top_k={self.top_k}, top_p={self.top_p}: truncated sampling biases the "
                "training ratio; use top_k=0 and top_p=1 in training (evaluation may truncate)"
            )
        if self.temperature == 0:
            raise ValueError(
                "sampling.temperature=0: greedy samples of a prompt are all alike and carry no "
                "signal; use a positive temperature in training"
            )


@struct.dataclass
class DecodeState:
    """What the decode loop carries. Column t is the last one written."""

    t: jax.Array  # int32 scalar.
    token_B: jax.Array  # int32, the token in column t; feeds the next step.
    done_B: jax.Array  # bool; a done row is frozen: its columns stay 0.
    cache: list[KV]  # The rows' own keys and values, filled up to column t-1.
    tokens_BR: jax.Array
    logp_BR: jax.Array
    mask_BR: jax.Array
    stopped_B: jax.Array


def sample(
    params: Params,
    config: ModelConfig,
    prompt: PromptBatch,
    key: jax.Array,
    sampling: Sampling,
) -> tuple[Rollout, jax.Array]:
    """Draws `samples` completions of every prompt.

    Args:
      params: the policy's parameters.
      config: its shape.
      prompt: P left-padded prompts.
      key: the step's key; each row folds in its problem's id and its sample number.
      sampling: how to draw.

    Returns:
      The Rollout, and the number of decode steps that the loop took (int32 scalar).
    """
    n, R = sampling.samples, sampling.max_new_tokens
    B = prompt.length_P.shape[0] * n
    # Whole along `fsdp` before the loop: inside it every token would gather all weights again.
    layers = sharding.gathered(transformer.unstack(params, config))
    tables = {name: x.astype(config.dtype) for name, x in params.items() if name in TABLES}
    top = {"final_norm": params["final_norm"]} | sharding.gathered(tables)
    table_VD = transformer.unembedding(top)
    keys_B = row_keys(key, prompt.id_P, n)
    stop_BS = transformer.repeat_rows(prompt.stop_PS, n)
    length_B = transformer.repeat_rows(prompt.length_P, n)
    last_PD, prefix = transformer.prefill(params, config, prompt.tokens_PL, prompt.length_P)
    prefix = transformer.unstack_prefix(prefix)

    def zeros(dtype, *shape):
        layout = sharding.spec("batch", *(None,) * (len(shape) - 1))
        return jnp.zeros(shape, dtype, out_sharding=layout)

    def logits(hidden_BD: jax.Array) -> jax.Array:
        return scoring.logits(
            hidden_BD[:, None], table_VD, softcap=config.final_softcap, tokens=config.num_tokens
        )[:, 0]

    def choose(z_BV: jax.Array, s: DecodeState) -> DecodeState:
        """Draws the tokens of column t from their logits and records them."""
        noise_B = jax.vmap(jax.random.fold_in, (0, None))(keys_B, s.t)
        token_B, logp_B = choice.draw(
            z_BV, noise_B, sampling.temperature, sampling.top_k, sampling.top_p
        )
        going_B = ~s.done_B
        token_B = jnp.where(going_B, token_B, 0)
        stop_B = going_B & (token_B[:, None] == stop_BS).any(-1)

        def write(x_BR, column_B):
            return jax.lax.dynamic_update_slice(x_BR, column_B[:, None], (0, s.t))

        return s.replace(
            token_B=token_B,
            done_B=s.done_B | stop_B,
            tokens_BR=write(s.tokens_BR, token_B),
            logp_BR=write(s.logp_BR, jnp.where(going_B, logp_B, 0)),
            mask_BR=write(s.mask_BR, going_B),
            stopped_B=s.stopped_B | stop_B,
        )

    def unfinished(s: DecodeState) -> jax.Array:
        has_room = s.t < R - 1
        some_go_on = ~s.done_B.all()
        return has_room & some_go_on

    def advance(s: DecodeState) -> DecodeState:
        hidden_BD, cache = transformer.decode(
            top, layers, config, s.token_B, s.t, length_B, s.cache, prefix
        )
        z_BV = logits(hidden_BD)
        return choose(z_BV, s.replace(t=s.t + 1, cache=cache))

    state = DecodeState(
        t=jnp.int32(0),
        token_B=zeros(jnp.int32, B),
        done_B=zeros(bool, B),
        cache=transformer.empty_cache(config, B, 0),
        tokens_BR=zeros(jnp.int32, B, R),
        logp_BR=zeros(jnp.float32, B, R),
        mask_BR=zeros(bool, B, R),
        stopped_B=zeros(bool, B),
    )
    first_PV = logits(last_PD)
    first_BV = jnp.repeat(first_PV, n, axis=0, out_sharding=sharding.spec("batch", "vocab"))
    state = choose(first_BV, state)
    for columns in cache_sizes(R):
        state = state.replace(cache=transformer.grow(state.cache, columns))
        state = jax.lax.while_loop(
            lambda s, columns=columns: unfinished(s) & (s.t < columns), advance, state
        )
    rollout = Rollout(
        prompt=prompt,
        tokens_BR=state.tokens_BR,
        mask_BR=state.mask_BR,
        logp_BR=state.logp_BR,
        length_B=state.mask_BR.sum(-1, dtype=jnp.int32),
        stopped_B=state.stopped_B,
    )
    return rollout, state.t


def cache_sizes(new_tokens: int) -> list[int]:
    """Columns of the cache, loop after loop: attention reads all of it, filled or not.

    A quarter, a half, then all of a long one: two thirds of the reads of one loop if every row goes
    to its end, a quarter if most stop early; each size is a program of its own to compile. The
    last token has no column, since it predicts nothing.
    """
    whole = new_tokens - 1
    parts = (4, 2, 1) if new_tokens >= LONG else (1,)
    return [-(-whole // part) for part in parts] if whole else []


def row_keys(key: jax.Array, id_P: jax.Array, n: int) -> jax.Array:
    """One key per row, `[P * n]`: a function of the step's key, the problem's id, the sample.

    So a row draws the same tokens wherever it stands in the batch and on whichever host.
    """
    id_B = transformer.repeat_rows(id_P, n)
    sample_P_n = jnp.broadcast_to(jnp.arange(n, dtype=jnp.uint32)[None, :], (id_P.shape[0], n))
    sample_B = jax.sharding.reshard(sample_P_n.reshape(-1), sharding.spec("batch"))

    def one(id, i):
        return jax.random.fold_in(jax.random.fold_in(key, id), i)

    return jax.vmap(one)(id_B, sample_B)
