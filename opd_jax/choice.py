"""From logits to a token: one draw per row, and the log-prob of what was drawn.

A token is drawn by adding Gumbel noise to the logits and taking the largest: exact, and without a
running sum over the vocabulary. Noise for every token would cost more than the logits of a small
model, so it is added twice to fewer numbers: the vocabulary is cut into blocks, a block is drawn by
the mass of its tokens, then a token within it. The law is the same,

    p(token) = p(block) * p(token | block),

for about 2 sqrt(V) random numbers instead of V.
"""

import math

import jax
import jax.numpy as jnp

from opd_jax import scoring
from opd_jax.core import sharding

_SHARDS = 64  # A vocabulary parted over up to so many devices keeps each block on one of them.


def draw(
    z_BV: jax.Array, keys_B: jax.Array, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """One token per row and its log-prob under the distribution it was drawn from.

    Args:
      z_BV: raw logits, fp32.
      keys_B: one key per row, used up.
      temperature: 0: the likeliest token, ties to the lowest id.
      top_k: see `keep_likeliest`.
      top_p: see `keep_likeliest`.

    Returns:
      int32 tokens `[B]` and fp32 log-probs `[B]`: of the tempered, filtered distribution; of the
      plain one (temperature 1) where the choice is greedy.
    """
    if temperature == 0:
        token_B = jnp.argmax(z_BV, axis=-1).astype(jnp.int32)
        chosen_B = scoring.pick(z_BV[:, None], token_B[:, None, None])[:, 0, 0]
        return token_B, chosen_B - jax.nn.logsumexp(z_BV, axis=-1)
    z_BV = keep_likeliest(z_BV / temperature, top_k, top_p)
    B, V = z_BV.shape
    W = block_width(V, sharding.axis_size("tensor"))
    N = V // W
    noise_BM = jax.vmap(lambda key: jax.random.gumbel(key, (N + W,), jnp.float32))(keys_B)
    block_noise_BN = jax.sharding.reshard(noise_BM[:, :N], sharding.spec("batch", "vocab"))
    blocks = sharding.spec("batch", "vocab", None)
    z_BNW = jnp.reshape(z_BV, (B, N, W), out_sharding=blocks)
    mass_BN = jax.nn.logsumexp(z_BNW, axis=-1)  # -inf, and no NaN, where all are filtered away.
    block_B = jnp.argmax(mass_BN + block_noise_BN, axis=-1).astype(jnp.int32)

    def draw_within(z_BNW, block_B, noise_BW):
        local_B = block_B - jax.lax.axis_index("tensor") * z_BNW.shape[1]
        here_B = (local_B >= 0) & (local_B < z_BNW.shape[1])
        row_B = jnp.where(here_B, local_B, 0)
        z_BW = jnp.take_along_axis(z_BNW, row_B[:, None, None], axis=1)[:, 0]
        z_BW = jax.lax.psum(jnp.where(here_B[:, None], z_BW, 0), "tensor")
        inside_B = jnp.argmax(z_BW + noise_BW, axis=-1).astype(jnp.int32)
        return inside_B, jnp.take_along_axis(z_BW, inside_B[:, None], axis=-1)[:, 0]

    rows, whole = sharding.spec("batch"), sharding.spec("batch", None)
    # On jax 0.12 the noise of a batch of one row comes without a layout.
    noise_BW = jax.sharding.reshard(noise_BM[:, N:], whole)
    inside_B, chosen_B = jax.shard_map(
        draw_within, in_specs=(blocks, rows, whole), out_specs=(rows, rows)
    )(z_BNW, block_B, noise_BW)
    return block_B * W + inside_B, chosen_B - jax.nn.logsumexp(mass_BN, axis=-1)


def block_width(vocab: int, shards: int = 1) -> int:
    """The width that makes blocks and tokens of a block fewest together; it divides the vocabulary.

    Which tokens are drawn depends on it, so it is the same on every mesh whose `tensor` axis is a
    power of two up to 64: the blocks can then be parted like the vocabulary.

    Example: 320 tokens -> 5 (64 blocks); 151,936 -> 1,187 (128 blocks).
    """
    most = vocab // math.gcd(vocab, _SHARDS)
    widths = [w for w in range(1, most + 1) if most % w == 0 and vocab // w % shards == 0]
    return min(widths, key=lambda w: vocab // w + w, default=1)


def keep_likeliest(z_BV: jax.Array, top_k: int, top_p: float) -> jax.Array:
    """Logits with all but the likeliest tokens at -inf.

    A token stays if fewer than k tokens are likelier, and if the mass of the likelier ones is still
    below p. So the token that crosses p stays, and of equal tokens the lower id counts as likelier.
    Example: [.5, .41, .09], p=.9 keeps two; [.25, .25, .25, .25], p=.5 keeps the first two.
    """
    V = z_BV.shape[-1]
    if top_p == 1 and not 0 < top_k < V:
        return z_BV
    z = jax.sharding.reshard(z_BV, sharding.spec("batch", None))
    order_BV = jnp.argsort(z, axis=-1, descending=True, stable=True)
    rank_BV = jnp.argsort(order_BV, axis=-1)
    keep_BV = rank_BV < (top_k or V)
    sorted_BV = -jnp.sort(-jax.nn.softmax(z, axis=-1), axis=-1)
    before_BV = jnp.cumsum(sorted_BV, axis=-1) - sorted_BV
    # The slack keeps .5 + .3 from passing as < .8; the likeliest token stays at any p.
    allowed_B = jnp.maximum((before_BV < top_p - 1e-6).sum(-1), 1)
    keep_BV &= (rank_BV < allowed_B[:, None]) | (top_p == 1)
    z = jnp.where(keep_BV, z, -jnp.inf)
    return jax.sharding.reshard(z, sharding.spec("batch", "vocab"))
