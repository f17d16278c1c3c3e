"""How much of a completion it has said before: policies that fall into loops, seen early."""

import jax
import jax.numpy as jnp

NGRAM = 4  # Tokens.


def repeated_share(tokens_BR: jax.Array, mask_BR: jax.Array, n: int = NGRAM) -> jax.Array:
    """Share of each completion's n-grams that stood in it before, fp32 `[B]`; 0 without n-grams.

    Example, n = 2: a b a b a has 4 bigrams, ab ba ab ba, of which 2 are repeated: 0.5.
    """
    R = tokens_BR.shape[1]
    if n > R:
        return jnp.zeros_like(mask_BR[:, 0], jnp.float32)
    W = R - n + 1
    whole_BW = mask_BR[:, n - 1 :]  # Masks begin at column 0 and have no holes.
    # A window that is not one differs from all others in its first key.
    nowhere_W = -1 - jnp.arange(W, dtype=jnp.int32)
    first_BW = jnp.where(whole_BW, tokens_BR[:, :W], nowhere_W[None, :])
    keys = (first_BW, *(tokens_BR[:, j : j + W] for j in range(1, n)))
    keys = jax.lax.sort(keys, dimension=1, num_keys=n)
    same_BW = jnp.stack([key[:, 1:] == key[:, :-1] for key in keys]).all(0)
    count_B = jnp.maximum(whole_BW.sum(-1), 1)
    return same_BW.sum(-1, dtype=jnp.float32) / count_B
