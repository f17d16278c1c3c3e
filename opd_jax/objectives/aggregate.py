"""How per-token terms become one number: a loss aggregation is nothing but a weight per token.

The weights are made once, from the mask of the WHOLE batch. After that a loss is a plain sum, so
micro-batches and shards just add up, and neither padding nor the order of rows can bend it.
"""

import jax
import jax.numpy as jnp

from opd_jax.objectives.estimators import check_same_shape, choose

# What each kept token is divided by. Three rows of 1, 2 and 5 tokens, constant 8:
# every token weighs 1/8; 1/3, 1/6 and 1/15; 1/3; 1/24.
AGGREGATIONS = {
    "token-mean": lambda rows, length_B1, constant: jnp.sum(length_B1),
    "seq-mean-token-mean": lambda rows, length_B1, constant: rows * length_B1,
    "seq-mean-token-sum": lambda rows, length_B1, constant: rows,
    "constant-norm": lambda rows, length_B1, constant: rows * constant,
}


def token_weights(
    mask_BR: jax.Array, mode: str, *, constant: float | None = None, empty_rows: bool = False
) -> jax.Array:
    """Weights w_BR such that `loss = Σ w_BR · term_BR` is the aggregation named by `mode`.

        token-mean             (Σ_i Σ_t term_it) / Σ_i |o_i|             DAPO, 2503.14476
        seq-mean-token-mean    1/rows Σ_i (1/|o_i|) Σ_t term_it          GRPO, 2402.03300 eq. 3
        seq-mean-token-sum     1/rows Σ_i Σ_t term_it                    plain policy gradient
        constant-norm          1/rows Σ_i (1/constant) Σ_t term_it       Dr.GRPO, 2503.20783

    A sequence mean weighs the tokens of long completions less, which lets long wrong answers grow;
    the other three do not.

    Args:
      mask_BR: bool, tokens that train; |o_i| is the number of them in row i.
      mode: a key of AGGREGATIONS.
      constant: tokens, for "constant-norm" only: the longest completion allowed.
      empty_rows: whether `rows` counts rows without a single kept token. By default it does not:
        rows that were dropped (truncated, of a zero-variance group) or that only fill up a batch
        leave numerator and denominator together. True divides by the number of rows in the array,
        so dropping rows makes the step smaller.

    Returns:
      fp32 [B, R], 0 wherever the mask is False, all 0 if nothing is kept. Call this on the whole
      batch, before it is split into micro-batches.

    Raises:
      ValueError: unknown mode; constant missing, below 1, or given to another mode.
    """
    divisor = choose(AGGREGATIONS, mode, "loss aggregation")
    if mask_BR.ndim != 2 or mask_BR.dtype != jnp.bool_:
        raise ValueError(f"mask_BR must be bool [B, R], got {mask_BR.dtype}{list(mask_BR.shape)}")
    if (mode == "constant-norm") != (constant is not None):
        raise ValueError(
            f"aggregation {mode!r} with constant={constant}: 'constant-norm' needs one (the "
            "longest completion allowed, in tokens), the others take none"
        )
    if constant is not None and not constant >= 1:
        raise ValueError(f"constant={constant}: must be at least 1 token")
    length_B1 = jnp.sum(mask_BR, axis=1, keepdims=True, dtype=jnp.float32)
    rows = mask_BR.shape[0] if empty_rows else jnp.sum(length_B1 > 0, dtype=jnp.float32)
    # Below 1 only where nothing is kept.
    per_token = 1 / jnp.maximum(divisor(rows, length_B1, constant), 1)
    return jnp.where(mask_BR, per_token, 0)


def weighted_sum(w_BR: jax.Array, term_BR: jax.Array) -> jax.Array:
    """Σ w · term in fp32; where w is 0 the term is not read, whatever it holds (NaN included).

    Where w is 0 the gradient that flows back into the term is 0. What produced the term must not
    turn that 0 into NaN: see `keep`.

    Raises:
      ValueError: the shapes differ.
    """
    check_same_shape(w_BR=w_BR, term_BR=term_BR)
    return jnp.sum(w_BR * jnp.where(w_BR != 0, term_BR, 0), dtype=jnp.float32)


def keep(mask_BR: jax.Array, x: jax.Array) -> jax.Array:
    """`x` with 0 wherever the mask is False, and no gradient from there.

    Apply it to every input of a term, not to the term: exp(200) at a padded token is inf, and its
    derivative times a masked gradient is inf · 0 = NaN.

    Args:
      mask_BR: bool [B, R].
      x: [B, R] or [B, R, ...].

    Raises:
      ValueError: the leading axes differ.
    """
    if x.shape[: mask_BR.ndim] != mask_BR.shape:
        raise ValueError(f"mask {list(mask_BR.shape)} does not fit an array {list(x.shape)}")
    return jnp.where(jnp.expand_dims(mask_BR, tuple(range(mask_BR.ndim, x.ndim))), x, 0)
