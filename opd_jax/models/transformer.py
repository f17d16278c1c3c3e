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
from flax import struct

from opd_jax.core import sharding
from opd_jax.core.types import Params, PromptBatch
from opd_jax.models import rope
from opd_jax.models.config import ModelConfig
from opd_jax.models.layers import KV, Block, Prefix, View, gain, join, norm, weight

# What of a layer the backward pass computes again. "matmuls" keeps the results of matmuls only:
# norms, rotations and activations cost few FLOPs and would fill memory with copies of the stream.
REMAT = {
    "none": lambda block: block,
    "matmuls": functools.partial(
        nn.remat, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False
    ),
    "full": functools.partial(nn.remat, prevent_cse=False),
}


@struct.dataclass
class Views:
    """What tokens see in either kind of layer; None where the model has no such layer."""

    whole: View | None
    local: View | None


class Transformer(nn.Module):
    """The network with its layers scanned; see the functions below for its uses."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens_BT, views: Views, prefix: KV | None):
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
            in_axes=(0, nn.broadcast, 0, *(nn.broadcast,) * 3),
            length=c.num_layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(c, name="layers")
        if views.whole is None or views.local is None:
            only = views.local if views.whole is None else views.whole
            x_BTD, kv = layers(x_BTD, prefix, None, None, only, None, None)
        else:
            local_N = jnp.isin(jnp.arange(c.num_layers), jnp.array(c.local_layers))
            x_BTD, kv = layers(x_BTD, prefix, None, local_N, views.whole, views.local, None)
        return norm(x_BTD, gain(self, "final_norm", c.embed_dim, c), c), kv


def embed(table_VD: jax.Array, tokens_BT: jax.Array, config: ModelConfig) -> jax.Array:
    """Rows of the embedding table, in the dtype of the activations."""
    # Gather the width first: looking up rows of a table split along D would move activations.
    table_VD = jax.sharding.reshard(table_VD, sharding.spec("vocab", "act"))
    x = table_VD.at[tokens_BT].get(out_sharding=sharding.spec("batch", "time", "act"))
    x = x.astype(config.dtype)
    if config.scale_embeddings:
        # In bf16 the root is rounded as well: so it was when these models were trained.
        x *= jnp.asarray(config.embed_dim**0.5, config.dtype)
    return x


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
    views = look(config, tokens, tokens, jnp.arange(1), tokens == 0)
    return Transformer(config).init(key, tokens, views, None)["params"]


def _apply(params, config, tokens_BT, views, prefix):
    return Transformer(config).apply({"params": params}, tokens_BT, views, prefix)


def look(
    config: ModelConfig,
    position_BT: jax.Array,
    context_BT: jax.Array,
    column_T: jax.Array,
    real_BS: jax.Array,
    prefix_mask_PL: jax.Array | None = None,
) -> Views:
    """What the tokens of one run see, in layers of each kind.

    Where rows are padded, two real tokens are as many positions apart as columns. A completion's
    column 0 comes after its prompt's column L-1, so windows can be measured in columns.

    Args:
      config: the model.
      position_BT: the tokens' positions.
      context_BT: tokens in context when each is run, see models/rope.py.
      column_T: the tokens' columns among their own keys.
      real_BS: own keys that are not padding; B may be 1.
      prefix_mask_PL: real columns of the prompts, or None.
    """

    def view(theta, scaling, window):
        column_S = jnp.arange(real_BS.shape[1])
        mask_TS = column_S[None, :] <= column_T[:, None]
        prefix_mask_PTL = None if prefix_mask_PL is None else prefix_mask_PL[:, None, :]
        if window is not None:
            mask_TS &= column_T[:, None] - column_S[None, :] < window
        if window is not None and prefix_mask_PL is not None:
            L = prefix_mask_PL.shape[1]
            back_TL = column_T[:, None] + (L - jnp.arange(L))[None, :]
            prefix_mask_PTL = prefix_mask_PTL & (back_TL < window)[None]
        angle_BTe = rope.angles(position_BT, config.head_dim, theta, scaling, context_BT)
        return View(angle_BTe, mask_TS[None] & real_BS[:, None, :], prefix_mask_PTL)

    c, whole, local = config, None, None
    if len(c.local_layers) < c.num_layers:
        whole = view(c.rope_theta, c.rope_scaling, None)
    if c.local_layers:
        own = c.local_rope_theta
        rotation = (c.rope_theta, c.rope_scaling) if own is None else (own, None)
        local = view(*rotation, c.window)
    return Views(whole, local)


def forward(
    params: Params, config: ModelConfig, tokens_BT: jax.Array, length_B: jax.Array
) -> jax.Array:
    """Hidden states `[B, T, D]` of right-padded sequences; those of padding mean nothing."""
    column = jnp.arange(tokens_BT.shape[1])
    real_BT = column[None, :] < length_B[:, None]
    position_BT = jnp.where(real_BT, column[None, :], 0)
    views = look(config, position_BT, length_B[:, None], column, real_BT)
    return _apply(params, config, tokens_BT, views, None)[0]


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
    views = look(config, position_PL, length_P[:, None], column, real_PL)
    hidden_PLD, kv = _apply(params, config, tokens_PL, views, None)
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
    column = jnp.arange(T)
    position_BT = repeat_rows(prompt.length_P, n)[:, None] + column[None, :]
    all_1T = jnp.ones((1, T), bool)
    views = look(config, position_BT, position_BT + 1, column, all_1T, prefix.mask_PL)
    rest_BTD, _ = _apply(params, config, tokens_BR[:, :T], views, prefix.kv)
    return jnp.concatenate([first_B1D, rest_BTD], axis=1)


def repeat_rows(x_P: jax.Array, n: int) -> jax.Array:
    """Each row of the first axis n times in a row, `[P * n, ...]`, batch-sharded as before."""
    out_sharding = sharding.spec("batch", *(None,) * (x_P.ndim - 1))
    return jnp.repeat(x_P, n, axis=0, out_sharding=out_sharding)


def unstack(params: Params, config: ModelConfig) -> list[Params]:
    """Each layer's parameters on their own, cut from the stack ONCE, before the decode loop.

    A decode body that scans the stack would slice every weight again for every token. Weights of
    one input are joined (`layers.join`), except beside deltas, which are each weight's own.
    """
    cast = jax.tree.map(lambda w: w.astype(config.dtype), params["layers"])
    layers = [jax.tree.map(lambda w, i=i: w[i], cast) for i in range(config.num_layers)]
    return layers if config.lora else [join(layer) for layer in layers]


def unstack_prefix(prefix: Prefix) -> Prefix:
    """The prompts' keys and values layer by layer, cut and turned before the decode loop."""
    k_NPKEL, v_NPKLE = prefix.kv.k.swapaxes(3, 4), prefix.kv.v
    return prefix.replace(kv=[KV(k_NPKEL[i], v_NPKLE[i]) for i in range(v_NPKLE.shape[0])])


def empty_cache(config: ModelConfig, rows: int, columns: int) -> list[KV]:
    """A KV of zeros per layer, in the activations' dtype, its keys as in decoding."""
    layout = sharding.spec("batch", "kv_heads", None, None)

    def zeros(*shape):
        shape = (rows, config.num_kv_heads, *shape)
        return jnp.zeros(shape, config.dtype, out_sharding=layout)

    k, v = zeros(config.head_dim, columns), zeros(columns, config.head_dim)
    return [KV(k, v) for _ in range(config.num_layers)]


def grow(cache: list[KV], columns: int) -> list[KV]:
    """The cache with columns of zeros added up to a number."""
    more = columns - cache[0].v.shape[2]
    none = (0, 0)
    return [
        KV(
            jnp.pad(own.k, (none, none, none, (0, more))),
            jnp.pad(own.v, (none, none, (0, more), none)),
        )
        for own in cache
    ]


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
      prefix: the prompts' keys and values, `unstack_prefix(prefix)`.

    Returns:
      The hidden states `[B, D]` that predict token t+1, and the cache with column t filled.
    """
    c = config
    x_B1D = embed(params["embedding"], token_B[:, None], c)
    position_B1 = (length_B + t)[:, None]
    all_1S = jnp.ones((1, cache[0].v.shape[2]), bool)
    views = look(c, position_B1, position_B1 + 1, t[None], all_1S, prefix.mask_PL)
    block, filled = Block(c, joined=c.lora is None), []
    for i, (layer, own, shared) in enumerate(zip(layers, cache, prefix.kv, strict=True)):
        view = views.local if i in c.local_layers else views.whole
        x_B1D, own = block.apply({"params": layer}, x_B1D, shared, own, None, view, None, t)
        filled.append(own)
    return norm(x_B1D, params["final_norm"], c)[:, 0], filled
