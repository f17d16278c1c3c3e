"""The transformer: tokens in, final hidden states out. The unembedding belongs to the scorer.

One network serves four uses that differ only in what a token may look at:

    forward            whole sequences, right-padded                      (import checks, tests)
    prefill            left-padded prompts, keys and values kept          (sampler, scorer, update)
    completion_hidden  completions behind their shared prompts            (scorer, update)
    decode             one token per row behind its prompt and its cache  (sampler)

A prompt's keys and values exist once, however many samples are drawn from it.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from opd_jax.core import sharding
from opd_jax.core.types import Params, PromptBatch
from opd_jax.models.config import ModelConfig
from opd_jax.models.layers import KV, Block, Prefix, gain, rms_norm, rope_angles, weight

# What of a layer the backward pass computes again. "matmuls" keeps the results of matmuls only:
# norms, rotations and activations cost few FLOPs and would fill memory with copies of the stream.
REMAT = {
    "none": lambda block: block,
    "matmuls": functools.partial(
        nn.remat, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False
    ),
    "full": functools.partial(nn.remat, prevent_cse=False),
}


class Transformer(nn.Module):
    """The network with its layers scanned; see the functions below for its uses."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens_BT, position_BT, mask_BTS, prefix: Prefix | None):
        """Returns final hidden states `[B, T, D]` and the tokens' KV, `[N, B, K, T, E]` each."""
        c = self.config
        embedding = weight(
            self, "embedding", (c.vocab_size, c.embed_dim), ("vocab", "embed"), c.embed_dim**-0.5
        )
        if not c.tie_embeddings:
            # Declared here to be initialised and sharded with the rest; the scorer reads it.
            weight(self, "head", (c.vocab_size, c.embed_dim), ("vocab", "embed"), c.embed_dim**-0.5)
        x_BTD = embed(embedding, tokens_BT, c)
        layers = nn.scan(
            REMAT[c.remat](Block),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, *(nn.broadcast,) * 5),
            length=c.num_layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(c, name="layers")
        angle_BTe = rope_angles(position_BT, c.head_dim, c.rope_theta)
        kv, mask_PL = (None, None) if prefix is None else (prefix.kv, prefix.mask_PL)
        x_BTD, kv = layers(x_BTD, kv, None, angle_BTe, mask_BTS, mask_PL, None)
        return rms_norm(x_BTD, gain(self, "final_norm", c.embed_dim), c.norm_eps), kv


def embed(table_VD: jax.Array, tokens_BT: jax.Array, config: ModelConfig) -> jax.Array:
    """Rows of the embedding table, in the dtype of the activations."""
    # Gather the width first: looking up rows of a table split along D would move activations.
    table_VD = jax.sharding.reshard(table_VD, sharding.spec("vocab", "act"))
    x = table_VD.at[tokens_BT].get(out_sharding=sharding.spec("batch", "time", "act"))
    return x.astype(config.dtype)


def unembedding(params: Params) -> jax.Array:
    """The `[V, D]` table that turns hidden states into logits: its own, or the embedding's."""
    return params["head"] if "head" in params else params["embedding"]


def init(config: ModelConfig, key: jax.Array) -> Params:
    """Random fp32 parameters, boxes of metadata taken off. Jitted, with a layout, in steps.py."""
    return nn.unbox(_init_boxed(config, key))


def logical_axes(config: ModelConfig) -> Params:
    """The tree of logical axis names of the parameters, as PartitionSpecs of names."""
    boxed = jax.eval_shape(lambda: _init_boxed(config, jax.random.key(0)))
    return nn.get_partition_spec(boxed)


def shardings(config: ModelConfig, mesh: jax.sharding.Mesh) -> Params:
    """The tree of NamedShardings of the parameters on `mesh`."""
    return jax.tree.map(
        lambda names: sharding.sharding(mesh, *names),
        logical_axes(config),
        is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec),
    )


def _init_boxed(config: ModelConfig, key: jax.Array):
    # Parameters do not depend on the input's size: the smallest that divides over the mesh will do.
    rows = sharding.axis_size(sharding.BATCH)
    tokens = jax.sharding.reshard(jnp.zeros((rows, 1), jnp.int32), sharding.spec("batch", "time"))
    mask = jax.sharding.reshard(jnp.ones((rows, 1, 1), bool), sharding.spec("batch", "time", None))
    return Transformer(config).init(key, tokens, tokens, mask, None)["params"]


def _apply(params, config, tokens_BT, position_BT, mask_BTS, prefix):
    return Transformer(config).apply({"params": params}, tokens_BT, position_BT, mask_BTS, prefix)


def forward(
    params: Params, config: ModelConfig, tokens_BT: jax.Array, length_B: jax.Array
) -> jax.Array:
    """Hidden states `[B, T, D]` of right-padded sequences; those of padding mean nothing."""
    T = tokens_BT.shape[1]
    column = jnp.arange(T)
    real_BT = column[None, :] < length_B[:, None]
    mask_BTS = (column[None, :] <= column[:, None])[None] & real_BT[:, None, :]
    position_BT = jnp.where(real_BT, column[None, :], 0)
    return _apply(params, config, tokens_BT, position_BT, mask_BTS, None)[0]


def prefill(
    params: Params, config: ModelConfig, tokens_PL: jax.Array, length_P: jax.Array
) -> tuple[jax.Array, Prefix]:
    """Runs left-padded prompts once each.

    Example: L=5, length 3 -> positions [0, 0, 0, 1, 2], real columns [0, 0, 1, 1, 1].

    Returns:
      The hidden state of each prompt's last token `[P, D]` (it predicts the first completion
      token), and the keys and values that its samples will share.
    """
    L = tokens_PL.shape[1]
    column = jnp.arange(L)
    pad_P = L - length_P
    real_PL = column[None, :] >= pad_P[:, None]
    position_PL = jnp.maximum(column[None, :] - pad_P[:, None], 0)
    mask_PLL = (column[None, :] <= column[:, None])[None] & real_PL[:, None, :]
    hidden_PLD, kv = _apply(params, config, tokens_PL, position_PL, mask_PLL, None)
    return hidden_PLD[:, -1], Prefix(kv, real_PL)


def completion_hidden(
    params: Params, config: ModelConfig, prompt: PromptBatch, tokens_BR: jax.Array
) -> jax.Array:
    """The hidden states that predict each completion token, `[B, R, D]`.

    Column 0 comes from the prompt's last token, column j from completion token j-1; the last
    completion token predicts nothing and is not run. Differentiable, through the shared prompt too.
    """
    B, R = tokens_BR.shape
    n = B // prompt.length_P.shape[0]
    last_PD, prefix = prefill(params, config, prompt.tokens_PL, prompt.length_P)
    first_B1D = repeat_rows(last_PD, n)[:, None]
    if R == 1:
        return first_B1D
    T = R - 1
    position_BT = repeat_rows(prompt.length_P, n)[:, None] + jnp.arange(T)[None, :]
    mask_1TT = jnp.tril(jnp.ones((T, T), bool))[None]
    rest_BTD, _ = _apply(params, config, tokens_BR[:, :T], position_BT, mask_1TT, prefix)
    return jnp.concatenate([first_B1D, rest_BTD], axis=1)


def repeat_rows(x_P: jax.Array, n: int) -> jax.Array:
    """Each row of the first axis n times in a row, `[P * n, ...]`, batch-sharded as before."""
    out_sharding = sharding.spec("batch", *(None,) * (x_P.ndim - 1))
    return jnp.repeat(x_P, n, axis=0, out_sharding=out_sharding)


def unstack(params: Params, config: ModelConfig) -> list[Params]:
    """Each layer's parameters on their own, cut from the stack ONCE, before the decode loop.

    A decode body that scans the stack would slice every weight again for every token.
    """
    cast = jax.tree.map(lambda w: w.astype(config.dtype), params["layers"])
    return [jax.tree.map(lambda w, i=i: w[i], cast) for i in range(config.num_layers)]


def empty_cache(config: ModelConfig, rows: int, columns: int) -> list[KV]:
    """One zeroed K and one zeroed V array `[B, K, S, E]` per layer, in the activations' dtype."""
    shape = (rows, config.num_kv_heads, columns, config.head_dim)
    layout = sharding.spec("batch", "kv_heads", "time", "head")
    zeros = jnp.zeros(shape, config.dtype, out_sharding=layout)
    return [KV(zeros, zeros) for _ in range(config.num_layers)]


def decode(
    params: Params,
    layers: list[Params],
    config: ModelConfig,
    token_B: jax.Array,
    t: jax.Array,
    length_B: jax.Array,
    cache: list[KV],
    prefix: Prefix,
) -> tuple[jax.Array, list[KV]]:
    """Runs completion token number `t` (from 0) of every row.

    Args:
      params: for the embedding and the final norm.
      layers: `unstack(params, config)`.
      token_B: the rows' completion tokens in column t.
      t: scalar; the same for all rows, since completions start in column 0 of the cache.
      length_B: the rows' prompt lengths; the token's position is `length + t`.
      cache: the rows' own keys and values, filled up to column t-1.
      prefix: the prompts' keys and values.

    Returns:
      The hidden states `[B, D]` that predict token t+1, and the cache with column t filled.
    """
    x_B1D = embed(params["embedding"], token_B[:, None], config)
    angle_B1e = rope_angles((length_B + t)[:, None], config.head_dim, config.rope_theta)
    seen_11S = (jnp.arange(cache[0].k.shape[2]) <= t)[None, None, :]
    block, filled = Block(config), []
    for i, (layer, own) in enumerate(zip(layers, cache, strict=True)):
        prefix_kv = jax.tree.map(lambda x, i=i: x[i], prefix.kv)
        x_B1D, own = block.apply(
            {"params": layer}, x_B1D, prefix_kv, own, angle_B1e, seen_11S, prefix.mask_PL, t
        )
        filled.append(own)
    return rms_norm(x_B1D, params["final_norm"], config.norm_eps)[:, 0], filled
