"""The scorer: from hidden states and an unembedding table to log-probs, entropies and top-k.

One scorer serves the teacher, the reference, the behaviour check and, with gradient, the student
in every loss. It works in tiles of rows that each cover the whole vocabulary: inside a tile
everything is a plain reduction over logits, and then the tile is dropped. `[B, R, V]` never exists;
the largest array is one tile of fp32 logits, and in the backward pass that tile is computed again.

Under a mesh whose `tensor` axis shards the vocabulary, reductions become partial ones (a maximum
and a sum per shard); only gathers and top-k need care, and they exchange k numbers per row, never
logits.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opd_jax.core import sharding
from opd_jax.core.types import Scores

# Logits of one tile, fp32: enough rows to keep a matmul efficient, few enough to stay small.
TILE_BYTES = 64 * 2**20
MIN_TILE_ROWS, MAX_TILE_ROWS = 1024, 8192


def logits(
    hidden_BCD: jax.Array,
    table_VD: jax.Array,
    temperature: float = 1.0,
    softcap: float | None = None,
    tokens: int | None = None,
) -> jax.Array:
    """fp32 logits `[B, C, V]` of some columns, divided by the temperature; vocabulary-sharded.

    With a softcap (ModelConfig.final_softcap) the model's logits are `cap * tanh(z / cap)`; the
    temperature divides these. Ids from `tokens` on (ModelConfig.num_tokens) have no probability,
    and their rows of the table no gradient: what is left is renormalised by any softmax.

    Raises:
      ValueError: the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature={temperature}: log-probs need a positive one; score greedy samples at 1"
        )
    z_BCV = jnp.einsum(
        "BCD,VD->BCV",
        hidden_BCD,
        table_VD.astype(hidden_BCD.dtype),
        out_sharding=sharding.spec("batch", "time", "vocab"),
        preferred_element_type=jnp.float32,
    )
    if softcap is not None:
        z_BCV = softcap * jnp.tanh(z_BCV / softcap)
    if temperature != 1.0:
        z_BCV = z_BCV / temperature
    if tokens is None:
        return z_BCV
    return jnp.where((np.arange(z_BCV.shape[-1]) < tokens)[None, None, :], z_BCV, _NEVER)


def fit_rows(table_VD: jax.Array, rows: int) -> jax.Array:
    """A teacher's table with as many rows as the student's: cut, or filled up with zeros.

    Rows of zeros are no tokens: the caller gives `logits` the number of real ones.
    """
    if table_VD.shape[0] == rows:
        return table_VD
    # Both tables are parted over the same shards, so that nearly every row moves.
    table_VD = jax.sharding.reshard(table_VD, sharding.spec(None, "act"))[:rows]
    table_VD = jnp.pad(table_VD, ((0, rows - table_VD.shape[0]), (0, 0)))
    return jax.sharding.reshard(table_VD, sharding.spec("vocab", "act"))


Classes = tuple[tuple[int, ...], ...]  # Tokens of one meaning, e.g. two ways to end a turn.
_NEVER = -1e30  # The logit of a token that no longer is one; finite, so that 0 * it is 0.


def join_logits(z_BCV: jax.Array, classes: Classes) -> jax.Array:
    """Logits in which each class is one token: its first has the mass of all, the others none.

    Example: probabilities .5, .3, .2 and the class (0, 2) -> .7, .3, 0.
    """
    for ids in classes:
        member_V = np.isin(np.arange(z_BCV.shape[-1]), ids)[None, None, :]
        first_V = (np.arange(z_BCV.shape[-1]) == ids[0])[None, None, :]
        mass_BC = jax.nn.logsumexp(jnp.where(member_V, z_BCV, -jnp.inf), axis=-1)
        rest_BCV = jnp.where(member_V, _NEVER, z_BCV)
        z_BCV = jnp.where(first_V, mass_BC[..., None], rest_BCV)
    return z_BCV


def join_tokens(tokens_BC: jax.Array, classes: Classes) -> jax.Array:
    """Each token of a class as the class's first."""
    for ids in classes:
        member_BC = (tokens_BC[..., None] == jnp.array(ids)[None, None, :]).any(-1)
        tokens_BC = jnp.where(member_BC, ids[0], tokens_BC)
    return tokens_BC


def pick(x_BCV: jax.Array, ids_BCk: jax.Array) -> jax.Array:
    """`x[b, c, ids[b, c, k]]` along the vocabulary, `[B, C, k]`, without moving it.

    Each vocabulary shard looks up the ids that fall into it and contributes zero for the others.
    """

    def shard(x_BCV, ids_BCk):
        local = ids_BCk - jax.lax.axis_index("tensor") * x_BCV.shape[-1]
        here = (local >= 0) & (local < x_BCV.shape[-1])
        found = jnp.take_along_axis(x_BCV, jnp.where(here, local, 0), axis=-1)
        return jax.lax.psum(jnp.where(here, found, 0), "tensor")

    rows = sharding.spec("batch", None, None)
    in_specs = (sharding.spec("batch", None, "vocab"), rows)
    return jax.shard_map(shard, in_specs=in_specs, out_specs=rows)(x_BCV, ids_BCk)


def top(x_BCV: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest values along the vocabulary and their ids, `[B, C, k]`, largest first. Exact.

    Each vocabulary shard offers its own k; the winners are chosen among k candidates per shard.
    Of equal values the lower id comes first.

    Raises:
      ValueError: k is more than the vocabulary.
    """
    if k > x_BCV.shape[-1]:
        raise ValueError(f"top_k={k} is more than the vocabulary, {x_BCV.shape[-1]} tokens")

    def shard(x_BCV):
        value, index = jax.lax.top_k(x_BCV, min(k, x_BCV.shape[-1]))
        index = index + jax.lax.axis_index("tensor") * x_BCV.shape[-1]
        return value, index

    candidates = sharding.spec("batch", None, "vocab")
    rows = sharding.spec("batch", None, None)
    value, index = jax.shard_map(shard, in_specs=candidates, out_specs=(candidates,) * 2)(x_BCV)
    value, index = jax.sharding.reshard((value, index), rows)
    if sharding.axis_size("tensor") == 1:
        return value, index
    value, best = jax.shard_map(
        lambda v: tuple(jax.lax.top_k(v, k)), in_specs=rows, out_specs=(rows, rows)
    )(value)
    return value, jax.shard_map(
        functools.partial(jnp.take_along_axis, axis=-1), in_specs=(rows, rows), out_specs=rows
    )(index, best)


def entropy(z_BCV: jax.Array, lse_BC: jax.Array) -> jax.Array:
    """Entropy in nats, `sum p (lse - z)`: no cancellation, and a logit of -inf adds exactly 0."""
    gap_BCV = jnp.where(jnp.isneginf(z_BCV), 0, lse_BC[..., None] - z_BCV)
    return jnp.sum(jnp.exp(z_BCV - lse_BC[..., None]) * gap_BCV, axis=-1)


def score_logits(z_BCV: jax.Array, tokens_BC: jax.Array, top_k: int = 0) -> Scores:
    """Scores of one tile of logits; the reference for any faster kernel."""
    lse_BC = jax.nn.logsumexp(z_BCV, axis=-1)
    logp_BC = pick(z_BCV, tokens_BC[..., None])[..., 0] - lse_BC
    if top_k:
        value_BCk, ids_BCk = top(jax.lax.stop_gradient(z_BCV), top_k)
    else:
        ids_BCk = tokens_BC[..., None][..., :0]
        value_BCk = ids_BCk.astype(z_BCV.dtype)
    top_logp_BCk = value_BCk - jax.lax.stop_gradient(lse_BC)[..., None]
    return Scores(logp_BC, entropy(z_BCV, lse_BC), ids_BCk, top_logp_BCk)


def score(
    hidden_BRD: jax.Array,
    table_VD: jax.Array,
    tokens_BR: jax.Array,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    tokens: int | None = None,
    top_k: int = 0,
    classes: Classes = (),
    tile_rows: int | None = None,
) -> Scores:
    """Scores of given tokens under a model, in tiles.

    Args:
      hidden_BRD: final hidden states that predict the tokens, any float dtype.
      table_VD: unembedding, fp32 (cast to the hidden states' dtype; accumulation is fp32).
      tokens_BR: int32 ids to score.
      temperature: logits are divided by it, as the sampler divides them; a number, not traced.
      softcap: the model's final_softcap.
      tokens: the model's num_tokens.
      top_k: size of the top-k set to report; 0 for none. No gradient flows into it.
      classes: tokens that count as one, see `join_logits`.
      tile_rows: positions per tile; None chooses by the size of the vocabulary.

    Returns:
      Scores, fp32. Differentiable in `hidden_BRD` and `table_VD` through log-probs and entropy.
    """
    # Gathered over `fsdp` once and not in every tile. It stays fp32, and so does the sum of its
    # gradients over tiles.
    table_VD = jax.sharding.reshard(table_VD, sharding.spec("vocab", "act"))

    def tile(hidden_BCD, tokens_BC):
        z_BCV = logits(hidden_BCD, table_VD, temperature, softcap, tokens)
        z_BCV = join_logits(z_BCV, classes)
        return score_logits(z_BCV, join_tokens(tokens_BC, classes), top_k)

    return map_tiles(tile, (hidden_BRD, tokens_BR), table_VD.shape[0], tile_rows)


def map_tiles(
    tile: Callable[..., Any], arrays: tuple[Any, ...], vocab: int, tile_rows: int | None = None
) -> Any:
    """Applies `tile` to runs of columns of arrays `[B, R, ...]` and joins the results.

    Several columns of all B rows make one tile, so a tile holds rows of every shard of the batch.
    What a tile computes is not kept for the backward pass; it is computed again (except where one
    tile is all there is).

    Args:
      tile: maps `[B, C, ...]` arrays to a tree of `[B, C, ...]` arrays.
      arrays: trees of inputs with leading axes `[B, R]`.
      vocab: width of the logits that a tile makes.
      tile_rows: positions per tile; None chooses.
    """
    B, R = jax.tree.leaves(arrays)[0].shape[:2]
    if tile_rows is None:
        tile_rows = min(max(TILE_BYTES // (4 * vocab), MIN_TILE_ROWS), MAX_TILE_ROWS)
        tile_rows *= sharding.axis_size(sharding.BATCH)
    C = min(R, max(1, tile_rows // B))
    if C == R:
        return tile(*arrays)
    count = -(-R // C)

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, count * C - R)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, count, C, *x.shape[2:]), 1, 0)

    def join(x):
        return jnp.moveaxis(x, 0, 1).reshape(B, count * C, *x.shape[3:])[:, :R]

    step = jax.checkpoint(lambda _, xs: (None, tile(*xs)))
    _, out = jax.lax.scan(step, None, jax.tree.map(split, arrays))
    return jax.tree.map(join, out)
