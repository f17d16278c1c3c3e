"""The nouns of opd_jax, and the legend of the letters that name array dimensions.

Every array name ends in its shape, e.g. `logp_BR`:

    P  prompts in a batch            V  vocabulary
    n  samples per prompt            D  model width
    B  rows = P * n, prompt-major    N  layers
    L  prompt columns (left-padded)  H  query heads, K kv heads, E head size
    R  completion columns            F  MLP width
    S  size of a stop-token set      C  columns of one scorer tile
    k  size of a top-k set           M  teachers

Row `p * n + i` is sample i of prompt p, everywhere. A prompt ends in column L-1 and its completions
begin in column 0 of the completion arrays, so no index ever depends on a row's length.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

Params = Any  # A nested dict of arrays, as linen makes it.


@struct.dataclass
class PromptBatch:
    """Prompts as the sampler takes them. Token values never say where padding is: lengths do."""

    tokens_PL: jax.Array  # int32, left-padded: the last `length` columns are real.
    length_P: jax.Array  # int32, real tokens, at least 1.
    domain_P: jax.Array  # int32, index into the stage's domains.
    id_P: jax.Array  # uint32, names the problem; keys its sampling noise.
    stop_PS: jax.Array  # int32, tokens that end a completion; padded with -1.


@struct.dataclass
class Rollout:
    """Completions of a PromptBatch, n per prompt, and all that was known when they were sampled.

    The masks are made once, here, from positions. Nobody rebuilds a mask from token values.
    """

    prompt: PromptBatch
    tokens_BR: jax.Array  # int32, the completion; 0 beyond its length.
    mask_BR: jax.Array  # bool, tokens the policy chose: the stop token included, padding not.
    logp_BR: jax.Array  # fp32, behaviour log-prob at the temperature sampled at; 0 where masked.
    length_B: jax.Array  # int32, completion tokens, the stop token included.
    stopped_B: jax.Array  # bool, ended by a stop token; False means cut at R tokens.

    @property
    def samples(self) -> int:
        """n, samples per prompt."""
        return self.tokens_BR.shape[0] // self.prompt.length_P.shape[0]


@struct.dataclass
class Scores:
    """What the scorer reports about given tokens under one model; all fp32, all [B, R, ...]."""

    logp_BR: jax.Array  # log-prob of the given tokens.
    entropy_BR: jax.Array  # nats, over the whole vocabulary.
    top_ids_BRk: jax.Array  # int32, the k likeliest tokens, likeliest first (k may be 0).
    top_logp_BRk: jax.Array  # their log-probs over the whole vocabulary.


@struct.dataclass
class TrainState:
    """Everything that an update changes. fp32 parameters and moments, whatever the matmul dtype."""

    step: jax.Array  # int32, updates done.
    params: Params
    opt_state: Any


@struct.dataclass
class Mean:
    """A mean not taken yet, so that micro-batches, shards and padding cannot bend it."""

    total: jax.Array
    count: jax.Array

    @classmethod
    def of(cls, values: jax.Array, mask: jax.Array) -> "Mean":
        """Sum and count of `values` where `mask`; what padding holds, even NaN, is never read."""
        kept = jnp.where(mask, values, 0)
        return cls(
            jnp.sum(kept, dtype=jnp.float32),
            jnp.sum(jnp.broadcast_to(mask, values.shape), dtype=jnp.float32),
        )

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float:
        """The mean as a Python float; 0 over nothing."""
        return float(self.total) / max(float(self.count), 1.0)


Metrics = dict[str, Mean]
