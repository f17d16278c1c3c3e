"""Masked statistics, KL estimators on sampled tokens, and importance ratios.

In all formulas l = log p(y) - log r(y), where y ~ p was sampled and r is the reference.
"""

from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp

_Value = TypeVar("_Value")

# exp(20) = 4.9e8 is far outside any clip range and still finite when summed or squared in fp32.
LOG_RATIO_LIMIT = 20.0


def choose(table: Mapping[str, _Value], name: str, what: str) -> _Value:
    """`table[name]`, or a ValueError that lists the names there are."""
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}; one of {', '.join(table)}")
    return table[name]


def check_same_shape(**arrays: jax.Array) -> None:
    """ValueError with every name and shape, unless all arrays have one shape."""
    shapes = {name: list(x.shape) for name, x in arrays.items()}
    if any(shape != next(iter(shapes.values())) for shape in shapes.values()):
        raise ValueError(f"shapes differ: {shapes}")


# Masked statistics. Under jit, on sharded arrays, these are statistics of the global array.


def masked_mean(
    x: jax.Array, mask: jax.Array, axis: int | None = None, keepdims: bool = False
) -> jax.Array:
    """Mean of `x` where `mask`; 0 over nothing. What `x` holds elsewhere is not read."""
    check_same_shape(x=x, mask=mask)
    total = jnp.sum(jnp.where(mask, x, 0), axis=axis, keepdims=keepdims, dtype=jnp.float32)
    return total / jnp.maximum(jnp.sum(mask, axis=axis, keepdims=keepdims, dtype=jnp.float32), 1)


def centre(x: jax.Array, mask: jax.Array, axis: int | None = None) -> tuple[jax.Array, jax.Array]:
    """Deviations from the masked mean, and whether all kept values are equal.

    Equal values give exactly 0: the fp32 mean of eight 0.2 is off by 1.5e-8, and a division by a
    standard deviation just as small would make a signal of that.

    Returns:
      (centred, constant): `x` minus its mean, 0 where masked; bool, `axis` kept with size 1.
    """
    mean = masked_mean(x, mask, axis, keepdims=True)
    low = jnp.min(jnp.where(mask, x, jnp.inf), axis=axis, keepdims=True)
    high = jnp.max(jnp.where(mask, x, -jnp.inf), axis=axis, keepdims=True)
    constant = high <= low
    return jnp.where(mask & ~constant, x - mean, 0), constant


def standard_deviation(
    x: jax.Array, mask: jax.Array, axis: int | None = None, *, ddof: int
) -> jax.Array:
    """sqrt(Σ (x - mean)² / (n - ddof)) where `mask`, `axis` kept with size 1.

    Args:
      x: any shape.
      mask: bool, the shape of x.
      axis: the axis to reduce; None for all.
      ddof: 0 for the population's, 1 for the sample's (Bessel). Fewer than two values give 0.

    Raises:
      ValueError: ddof is neither 0 nor 1.
    """
    if ddof not in (0, 1):
        raise ValueError(f"ddof={ddof}: 0 (population) or 1 (sample)")
    centred, _ = centre(x, mask, axis)
    count = jnp.sum(mask, axis=axis, keepdims=True, dtype=jnp.float32)
    squares = jnp.sum(jnp.square(centred), axis=axis, keepdims=True, dtype=jnp.float32)
    return jnp.sqrt(squares / jnp.maximum(count - ddof, 1))


def whiten(x: jax.Array, mask: jax.Array, *, ddof: int = 0, eps: float = 1e-8) -> jax.Array:
    """(x - mean) / (std + eps) over all kept values; 0 where masked.

    One kept value, or several equal ones, give 0; none gives all 0.
    """
    centred, _ = centre(x, mask)
    return centred / (standard_deviation(x, mask, ddof=ddof) + eps)


# KL estimators (Schulman, "Approximating KL Divergence", 2020). Their values estimate KL(p || r);
# differentiated as they stand they do something else, tokens having been sampled from p:
#
#               value                        expected gradient, if differentiated directly
#     k1        unbiased, high variance      0: E_p[∇ log p] = 0, the reference never enters
#     k2        biased                       ∇ KL(p || r), right
#     k3        unbiased, never negative     ∇ KL(r || p), the other direction

KL_ESTIMATORS = {
    "k1": lambda l: l,
    "k2": lambda l: jnp.square(l) / 2,
    "k3": lambda l: jnp.expm1(-l) + l,
}


def kl_estimate(logp: jax.Array, ref_logp: jax.Array, kind: str) -> jax.Array:
    """Per-token estimate of KL(p || r) by `kind`, a key of KL_ESTIMATORS: for metrics and rewards.

    Args:
      logp: log p of the sampled tokens, any shape.
      ref_logp: log r of the same tokens, same shape.
      kind: "k1" is l, "k2" l²/2, "k3" exp(-l) - 1 + l. l is limited to ±LOG_RATIO_LIMIT.

    Raises:
      ValueError: unknown kind, or the shapes differ.
    """
    estimator = choose(KL_ESTIMATORS, kind, "KL estimator")
    return estimator(_log_ratio(logp, ref_logp))


def kl_penalty(logp: jax.Array, ref_logp: jax.Array, kind: str) -> jax.Array:
    """The value of `kl_estimate` with the gradient of the reverse KL: for use inside a loss.

        ∇ penalty = l · ∇ log p        and     E_p[l ∇ log p] = ∇ KL(p || r)

    which is k2's own gradient, and for k1 and k3 a straight-through one. It is bounded by
    LOG_RATIO_LIMIT, also where the value of k3 is huge, so k3 needs no clamp of its own. Exact for
    tokens sampled from p as it is now; for later updates of one rollout, multiply by `ratio`.

    Args and errors as in `kl_estimate`. No gradient flows to `ref_logp`.
    """
    value = kl_estimate(logp, ref_logp, kind)
    slope = _log_ratio(logp, ref_logp)
    stop = jax.lax.stop_gradient
    return stop(value) + stop(slope) * (logp - stop(logp))


# Importance ratios.


def ratio(logp: jax.Array, behaviour_logp: jax.Array) -> jax.Array:
    """p(y) / μ(y) per token, the log-ratio limited to ±LOG_RATIO_LIMIT; gradient to `logp` only.

    `behaviour_logp` is what the sampler stored, never a copy of `logp`: with that the ratio would
    be 1 at every update and nothing would ever be clipped.
    """
    return jnp.exp(_log_ratio(logp, jax.lax.stop_gradient(behaviour_logp)))


def sequence_ratio(
    logp_BR: jax.Array, behaviour_logp_BR: jax.Array, mask_BR: jax.Array
) -> jax.Array:
    """Π_t p(y_t) / μ(y_t) over the kept tokens of each row, [B, 1]. Same limit as `ratio`.

    Small differences add up: 100 tokens of +0.012 nats each make 3.32.
    """
    check_same_shape(logp=logp_BR, behaviour_logp=behaviour_logp_BR, mask=mask_BR)
    behaviour_logp_BR = jax.lax.stop_gradient(behaviour_logp_BR)
    difference_BR = jnp.where(mask_BR, logp_BR - behaviour_logp_BR, 0)
    return jnp.exp(_limited(jnp.sum(difference_BR, axis=1, keepdims=True)))


def truncated_importance(
    trainer_logp: jax.Array, behaviour_logp: jax.Array, cap: float
) -> jax.Array:
    """TIS: min(p_trainer / p_sampler, cap), a constant that multiplies the per-token loss.

    Corrects for a sampler whose numerics or weights differ from the trainer's; both log-probs are
    of the weights that sampled. Unbiased while nothing reaches the cap; the usual cap is 2.

    Raises:
      ValueError: cap is not positive, or the shapes differ.
    """
    if not cap > 0:
        raise ValueError(f"cap={cap}: must be positive (usual: 2)")
    return jax.lax.stop_gradient(jnp.minimum(ratio(trainer_logp, behaviour_logp), cap))


def gated_importance(
    trainer_logp_BR: jax.Array,
    behaviour_logp_BR: jax.Array,
    mask_BR: jax.Array,
    *,
    low: float,
    high: float,
    level: str,
) -> tuple[jax.Array, jax.Array]:
    """Masked importance sampling: the ratio where it lies in [low, high], 0 elsewhere.

    Args:
      trainer_logp_BR: log-probs the trainer gives the tokens under the weights that sampled.
      behaviour_logp_BR: log-probs the sampler stored.
      mask_BR: bool.
      low: smallest ratio kept (IcePop: 0.5).
      high: largest ratio kept (IcePop: 2; TRL's sequence gate: 3).
      level: "token" gates each token by its own ratio; "sequence" a whole row by the product.

    Returns:
      (weight_BR, kept_BR): a constant that multiplies the per-token loss, 0 where masked; bool,
      tokens inside mask and gate. Log the dropped share: 1 - Σ kept / Σ mask.

    Raises:
      ValueError: unknown level, empty interval, or the shapes differ.
    """
    if not 0 <= low < high:
        raise ValueError(f"low={low}, high={high}: needs 0 <= low < high")
    check_same_shape(logp=trainer_logp_BR, behaviour_logp=behaviour_logp_BR, mask=mask_BR)
    levels = {
        "token": lambda logp, behaviour: ratio(logp, behaviour),
        "sequence": lambda logp, behaviour: sequence_ratio(logp, behaviour, mask_BR),
    }
    weight = choose(levels, level, "importance level")(trainer_logp_BR, behaviour_logp_BR)
    kept_BR = mask_BR & (weight >= low) & (weight <= high)
    return jax.lax.stop_gradient(jnp.where(kept_BR, weight, 0)), kept_BR


def _log_ratio(logp: jax.Array, other_logp: jax.Array) -> jax.Array:
    check_same_shape(logp=logp, other_logp=other_logp)
    return _limited(logp - other_logp)


def _limited(log_ratio: jax.Array) -> jax.Array:
    return jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
