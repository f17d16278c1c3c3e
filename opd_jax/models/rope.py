"""Rotary position embedding: frequencies, plain or stretched to a longer context, and rotation.

    linear    all frequencies divided by the factor
    dynamic   a larger base, by the length of the context (NTK-aware)
    llama3    low frequencies divided, high ones kept, a blend between (Llama 3.1)
    yarn      the same idea by dimensions (arXiv 2309.00071); its attention factor is a scale of
              scores, see ModelConfig.attention_scale

"dynamic" depends on how long the context is when a token is run: all tokens of a prompt have the
prompt's length, a completion's token has its own position + 1. That is what cached generation does,
and the scorer does the same, so sampler and scorer agree; one forward over a whole sequence longer
than `original_length` is another function.
"""

import math

import jax
import jax.numpy as jnp

from opd_jax.models.config import RopeScaling


def angles(
    position_BT: jax.Array,
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
    context_BT: jax.Array | None = None,
) -> jax.Array:
    """Rotation angles `[B, T, E/2]`, fp32 (bf16 would round position 257 to 256).

    Args:
      position_BT: positions of the tokens.
      head_dim: E.
      theta: base.
      scaling: how frequencies are stretched, or None.
      context_BT: tokens in context when each token is run; read by "dynamic" only.
    """
    frequency = frequencies(head_dim, theta, scaling, context_BT)
    if frequency.ndim == 1:
        frequency = frequency[None, None, :]
    return position_BT.astype(jnp.float32)[..., None] * frequency


def frequencies(
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
    context_BT: jax.Array | None = None,
) -> jax.Array:
    """Radians per position, `[E/2]`; with "dynamic" scaling `[B, T, E/2]`."""
    exponent = -jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    if scaling is None:
        return theta**exponent
    if scaling.kind == "dynamic":
        length_BT = jnp.maximum(context_BT, scaling.original_length).astype(jnp.float32)
        stretch_BT = scaling.factor * length_BT / scaling.original_length - (scaling.factor - 1)
        base_BT = theta * stretch_BT ** (head_dim / (head_dim - 2))
        return base_BT[..., None] ** exponent[None, None, :]
    plain = theta**exponent
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        # How often a dimension turns within the original context.
        turns = scaling.original_length * plain / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = jnp.clip((turns - low) / (high - low), 0, 1)
    else:
        low, high = _yarn_range(head_dim, theta, scaling)
        kept = 1 - jnp.clip((jnp.arange(head_dim // 2) - low) / (high - low), 0, 1)
    return plain * kept + plain / scaling.factor * (1 - kept)


def _yarn_range(head_dim: int, theta: float, scaling: RopeScaling) -> tuple[float, float]:
    """The dimensions between which YaRN goes from kept to divided frequencies."""

    def dimension(turns):
        ratio = scaling.original_length / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high if high != low else high + 0.001


def rotate(x_BHTE: jax.Array, angle_BTe: jax.Array) -> jax.Array:
    """Turns queries or keys, in the half-split layout: dimension i turns with i + E/2."""
    cos = jnp.cos(angle_BTe)[:, None].astype(x_BHTE.dtype)
    sin = jnp.sin(angle_BTe)[:, None].astype(x_BHTE.dtype)
    a, b = jnp.split(x_BHTE, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
