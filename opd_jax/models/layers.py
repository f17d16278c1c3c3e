"""Parts of a transformer block: parameters with logical axes, norm, attention, the block."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from opd_jax.core import sharding
from opd_jax.core.types import Params
from opd_jax.models.config import ModelConfig
from opd_jax.models.rope import rotate

# Finite, so that a row whose every key is masked gives a uniform softmax and not NaN.
MASKED = -1e30

# Logical axes by letter: of weights, and of activations.
AXIS_OF = {"D": "embed", "H": "heads", "K": "kv_heads", "E": "head", "F": "mlp"}
ACTIVATION_AXIS_OF = AXIS_OF | {"B": "batch", "T": "time", "D": "act", "r": "rank", "G": None}

ACTIVATION = {"silu": nn.silu, "gelu_tanh": functools.partial(nn.gelu, approximate=True)}


@struct.dataclass
class KV:
    """Keys and values of one layer, or with a leading `[N]` of a stack of layers.

    Heads come before positions: a product over E or S then has its batch axes in front, so no
    decode step copies the cache to bring them there.
    """

    k: jax.Array  # [B, K, S, E]; in decoding [B, K, E, S], as a thin product reads it fastest.
    v: jax.Array  # [B, K, S, E]


@struct.dataclass
class Prefix:
    """The prompts' keys and values, one row per PROMPT: its n samples attend to the same row."""

    kv: KV | list[KV]  # A stack, or each layer by itself; P rows, S = L.
    mask_PL: jax.Array  # bool, real columns.


class Linear(NamedTuple):
    """How a weight is applied: an einsum, its letters those of the legend, and how it begins."""

    equation: str
    stddev: float

    @property
    def letters(self) -> tuple[str, str, str]:
        """Of the activations, of the weight, of the result."""
        x, rest = self.equation.split(",")
        w, y = rest.split("->")
        return x, w, y


@struct.dataclass
class View:
    """What the tokens of one run see in a layer. Masks are bool; an axis of 1 holds for all."""

    angle_BTe: jax.Array  # Rotary angles, of queries and of the keys that the tokens add.
    mask_BTS: jax.Array  # Own keys; S = T without a cache, else the cache's length.
    prefix_mask_PTL: jax.Array | None  # The prompts' keys, T counted as in the run.


def weight(module: nn.Module, name: str, shape: tuple[int, ...], axes: Sequence[str],
           stddev: float) -> jax.Array:  # fmt: skip
    """An fp32 parameter, normal with the given deviation, its logical axes beside its shape."""
    init = nn.with_logical_partitioning(nn.initializers.normal(stddev), tuple(axes))
    return module.param(name, init, shape)


def zeros(module: nn.Module, name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> jax.Array:
    """An fp32 parameter that starts at zero: a bias."""
    init = nn.with_logical_partitioning(nn.initializers.zeros, axes)
    return module.param(name, init, shape)


def gain(module: nn.Module, name: str, dim: int, config: ModelConfig) -> jax.Array:
    """The fp32 weight of a norm; at first the norm multiplies by 1."""
    init = nn.initializers.zeros if config.unit_offset_norm else nn.initializers.ones
    return module.param(name, nn.with_logical_partitioning(init, ("norm",)), (dim,))


def norm(x: jax.Array, weight_D: jax.Array, config: ModelConfig) -> jax.Array:
    """The norm of the family: its scale is the weight, or 1 + weight."""
    scale_D = 1 + weight_D.astype(jnp.float32) if config.unit_offset_norm else weight_D
    return rms_norm(x, scale_D, config.norm_eps)


def rms_norm(x: jax.Array, gain_D: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis; all of it in fp32 whatever the activations are."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * jnp.expand_dims(gain_D, range(x.ndim - 1))).astype(x.dtype)


def cap_softly(x: jax.Array, cap: float | None) -> jax.Array:
    """`cap * tanh(x / cap)`, or `x` without a cap. Before any mask, which it would undo."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def attend(
    q_BHTE: jax.Array,
    own: KV,
    view: View,
    prefix: KV | None,
    scale: float,
    softcap: float | None,
    decoding: bool = False,
) -> jax.Array:
    """Grouped-query attention over a row's own keys and, before them, its prompt's.

    The prompt's keys are stored once and never copied per sample: the n rows of a prompt are folded
    into the query axis instead, which makes one `[n*Q*T, L]` product of n thin ones.

    Args:
      q_BHTE: queries, rotated.
      own: the row's own keys and values.
      view: which keys each query may see.
      prefix: one layer's shared keys and values of the prompts, or None.
      scale: of the products.
      softcap: of the scaled products, or None.
      decoding: whether keys lie as in decoding, see KV.

    Returns:
      `[B, H, T, E]`.
    """
    B, H, T, E = q_BHTE.shape
    K = own.k.shape[1]
    SE, LE = ("ES", "EL") if decoding else ("SE", "LE")
    Q = H // K

    def reshape(x, shape, *axes):
        """Layouts are named, since with P or n of 1 the split of a sharded axis is ambiguous."""
        return jnp.reshape(x, shape, out_sharding=sharding.spec(*axes))

    by_rows = ("batch", "kv_heads", None, None, None)
    f32 = {"preferred_element_type": jnp.float32}
    q_BKQTE = reshape(q_BHTE * scale, (B, K, Q, T, E), *by_rows)
    own_scores = jnp.einsum(f"BKQTE,BK{SE}->BKQTS", q_BKQTE, own.k, **f32)
    own_scores = cap_softly(own_scores, softcap)
    own_scores = jnp.where(view.mask_BTS[:, None, None, :, :], own_scores, MASKED)
    if prefix is None:
        p = jax.nn.softmax(own_scores, axis=-1).astype(q_BHTE.dtype)
        out = jnp.einsum("BKQTS,BKSE->BKQTE", p, own.v)
        return reshape(out, (B, H, T, E), "batch", "heads", None, None)

    P = prefix.k.shape[0]
    n = B // P
    by_prompt = ("batch", "samples", "kv_heads", None, None, None)

    def rows(x_PKnQT1):
        """From the prompts' order of axes to that of rows."""
        x_PnKQT1 = x_PKnQT1.transpose(0, 2, 1, 3, 4, 5)
        return reshape(x_PnKQT1, (B, K, Q, T, x_PKnQT1.shape[-1]), *by_rows)

    q_PnKQTE = reshape(q_BKQTE, (P, n, K, Q, T, E), *by_prompt)
    scores = jnp.einsum(f"PnKQTE,PK{LE}->PKnQTL", q_PnKQTE, prefix.k, **f32)
    scores = cap_softly(scores, softcap)
    scores = jnp.where(view.prefix_mask_PTL[:, None, None, None, :, :], scores, MASKED)
    # One softmax over both parts: each has exponentials of its own maximum, and what a part weighs
    # in the whole is put right by a factor per query.
    own_top, top = own_scores.max(-1, keepdims=True), scores.max(-1, keepdims=True)
    own_top, top = jax.lax.stop_gradient((own_top, top))
    own_e, e = jnp.exp(own_scores - own_top), jnp.exp(scores - top)
    own_out = jnp.einsum("BKQTS,BKSE->BKQTE", own_e.astype(q_BHTE.dtype), own.v, **f32)
    out = jnp.einsum("PKnQTL,PKLE->PKnQTE", e.astype(q_BHTE.dtype), prefix.v, **f32)
    top, total, out = rows(top), rows(e.sum(-1, keepdims=True)), rows(out)
    own_factor = jnp.exp(own_top - jnp.maximum(own_top, top))
    factor = jnp.exp(top - jnp.maximum(own_top, top))
    total = own_e.sum(-1, keepdims=True) * own_factor + total * factor
    out = ((own_out * own_factor + out * factor) / total).astype(q_BHTE.dtype)
    return reshape(out, (B, H, T, E), "batch", "heads", None, None)


def join(layer: Params) -> Params:
    """Joins the weights of a layer that multiply one input: fewer and larger products in decoding.

    Queries, keys and values are joined per kv head, `[D, K, Q + 2, E]`, gate and up per column,
    `[D, 2, F]`: along axes that no mesh splits.
    """
    layer = dict(layer)
    q_DHE, k_DKE, v_DKE = (layer.pop(name) for name in "qkv")
    D, K, E = k_DKE.shape
    wide, heads, _ = jax.typeof(k_DKE).sharding.spec
    by_kv_heads = jax.sharding.PartitionSpec(wide, heads, None, None)
    q_DKQE = jnp.reshape(q_DHE, (D, K, -1, E), out_sharding=by_kv_heads)
    layer["qkv"] = jnp.concatenate([q_DKQE, k_DKE[:, :, None], v_DKE[:, :, None]], axis=2)
    layer["gate_up"] = jnp.stack([layer.pop("gate"), layer.pop("up")], axis=1)
    heads, _, wide = jax.typeof(layer["o"]).sharding.spec
    by_heads = jax.sharding.PartitionSpec(heads, wide)
    layer["o"] = jnp.reshape(layer["o"], (-1, D), out_sharding=by_heads)
    return layer


class Block(nn.Module):
    """One layer: attention and gated MLP, each behind a norm and added to the residual stream."""

    config: ModelConfig
    joined: bool = False  # Whether weights of one input are one array, see `join`.

    @nn.compact
    def __call__(self, x_BTD, prefix, cache, local, view, local_view, write_at):
        """Runs the layer.

        Args:
          x_BTD: residual stream.
          prefix: the prompts' keys and values in this layer, or None.
          cache: the rows' own earlier keys and values in this layer, or None.
          local: in a stack of mixed layers, whether this one is local (a traced bool); else None.
          view: what the tokens see.
          local_view: what they see if `local`; None if `local` is.
          write_at: the cache column of the first of the T tokens; unused without a cache.

        Returns:
          The residual stream, and the rows' own keys and values: those of the T tokens, or the
          whole cache with them written in.
        """
        c = self.config
        if local is not None:
            view = jax.tree.map(functools.partial(jnp.where, local), local_view, view)
        attn_gain = gain(self, "attn_norm", c.embed_dim, c)
        mlp_gain = gain(self, "mlp_norm", c.embed_dim, c)
        a_BTD, own = self._attention(norm(x_BTD, attn_gain, c), prefix, cache, view, write_at)
        if c.post_norms:
            a_BTD = norm(a_BTD, gain(self, "attn_post_norm", c.embed_dim, c), c)
        x_BTD = x_BTD + a_BTD
        m_BTD = self._mlp(norm(x_BTD, mlp_gain, c))
        if c.post_norms:
            m_BTD = norm(m_BTD, gain(self, "mlp_post_norm", c.embed_dim, c), c)
        return x_BTD + m_BTD, own

    def _attention(self, h_BTD, prefix, cache, view, write_at):
        c = self.config
        E = c.head_dim
        with jax.named_scope("qkv"):
            q_BHTE, k_BKTE, v_BKTE = self._qkv(h_BTD)
            if c.qkv_bias:
                q_BHTE += self._bias("q_bias", c.num_heads, "heads")
                k_BKTE += self._bias("k_bias", c.num_kv_heads, "kv_heads")
                v_BKTE += self._bias("v_bias", c.num_kv_heads, "kv_heads")
            if c.qk_norm:
                q_BHTE = norm(q_BHTE, gain(self, "q_norm", E, c), c)
                k_BKTE = norm(k_BKTE, gain(self, "k_norm", E, c), c)
            q_BHTE, k_BKTE = rotate(q_BHTE, view.angle_BTe), rotate(k_BKTE, view.angle_BTe)
        with jax.named_scope("cache"):
            own = KV(k_BKTE, v_BKTE)
            if cache is not None:
                write = jax.lax.dynamic_update_slice_in_dim
                k_BKES = write(cache.k, k_BKTE.swapaxes(2, 3), write_at, axis=3)
                own = KV(k_BKES, write(cache.v, v_BKTE, write_at, axis=2))
        with jax.named_scope("attention"):
            scale, softcap, decoding = c.attention_scale, c.attention_softcap, cache is not None
            a_BHTE = attend(q_BHTE, own, view, prefix, scale, softcap, decoding)
            return self._out(a_BHTE), own

    def _out(self, a_BHTE):
        B, H, T, E = a_BHTE.shape
        D = self.config.embed_dim
        if self.joined:
            by_heads = sharding.spec("batch", "time", "heads")
            a_BTX = jnp.reshape(a_BHTE.swapaxes(1, 2), (B, T, H * E), out_sharding=by_heads)
            return self._product("BTX,XD->BTD", a_BTX, self.get_variable("params", "o"))
        back = Linear("BHTE,HED->BTD", (H * E) ** -0.5 * self._deep)
        return self._linear("o", back, a_BHTE, H, E, D)

    def _qkv(self, h_BTD):
        c = self.config
        D, H, K, E = c.embed_dim, c.num_heads, c.num_kv_heads, c.head_dim
        if self.joined:
            w_DKGE = self.get_variable("params", "qkv")
            y_BTKGE = self._product("BTD,DKGE->BTKGE", h_BTD, w_DKGE)
            y_BKGTE = y_BTKGE.transpose(0, 2, 3, 1, 4)
            q_BKQTE, k_BKTE, v_BKTE = y_BKGTE[:, :, :-2], y_BKGTE[:, :, -2], y_BKGTE[:, :, -1]
            by_heads = sharding.spec("batch", "heads", "time", "head")
            shape = (h_BTD.shape[0], H, h_BTD.shape[1], E)
            return jnp.reshape(q_BKQTE, shape, out_sharding=by_heads), k_BKTE, v_BKTE
        to_q, to_kv = Linear("BTD,DHE->BHTE", D**-0.5), Linear("BTD,DKE->BKTE", D**-0.5)
        return (
            self._linear("q", to_q, h_BTD, D, H, E),
            self._linear("k", to_kv, h_BTD, D, K, E),
            self._linear("v", to_kv, h_BTD, D, K, E),
        )

    def _mlp(self, h_BTD):
        c = self.config
        F, D = c.mlp_dim, c.embed_dim
        narrow = Linear("BTF,FD->BTD", F**-0.5 * self._deep)
        with jax.named_scope("mlp"):
            gate_BTF, up_BTF = self._gate_up(h_BTD)
            hidden_BTF = ACTIVATION[c.activation](gate_BTF) * up_BTF
            return self._linear("down", narrow, hidden_BTF, F, D)

    def _gate_up(self, h_BTD):
        D, F = self.config.embed_dim, self.config.mlp_dim
        if self.joined:
            w_DGF = self.get_variable("params", "gate_up")
            y_BTGF = self._product("BTD,DGF->BTGF", h_BTD, w_DGF)
            return y_BTGF[:, :, 0], y_BTGF[:, :, 1]
        widen = Linear("BTD,DF->BTF", D**-0.5)
        return self._linear("gate", widen, h_BTD, D, F), self._linear("up", widen, h_BTD, D, F)

    @property
    def _deep(self) -> float:
        """Keeps the residual stream's size independent of depth."""
        return (2 * self.config.num_layers) ** -0.5

    def _linear(self, name: str, linear: Linear, x: jax.Array, *shape: int) -> jax.Array:
        """`x` by the weight `name`, and by its low-rank delta where there is one."""
        x_letters, w_letters, y_letters = linear.letters
        axes = [AXIS_OF[letter] for letter in w_letters]
        w = weight(self, name, shape, axes, linear.stddev)
        y = self._product(linear.equation, x, w)
        lora = self.config.lora
        if lora is None or name not in lora.targets:
            return y
        # The weight's first axes are those that x has too; a delta has the rank in between.
        n = sum(letter in x_letters for letter in w_letters)
        fan_in = math.prod(shape[:n])
        a = weight(self, f"{name}_lora_a", (*shape[:n], lora.rank), (*axes[:n], "rank"),
                   fan_in**-0.5)  # fmt: skip
        b = zeros(self, f"{name}_lora_b", (lora.rank, *shape[n:]), ("rank", *axes[n:]))
        low_BTr = self._product(f"{x_letters},{w_letters[:n]}r->BTr", x, a)
        return y + self._product(f"BTr,r{w_letters[n:]}->{y_letters}", low_BTr, b) * lora.scale

    def _product(self, equation, x, w):
        names = (ACTIVATION_AXIS_OF[letter] for letter in equation.split("->")[1])
        w = w.astype(self.config.dtype)
        return jnp.einsum(equation, x, w, out_sharding=sharding.spec(*names))

    def _bias(self, name, heads, axis):
        """A bias per head, to be added to `[B, heads, T, E]`."""
        bias = zeros(self, name, (heads, self.config.head_dim), (axis, "head"))
        return bias.astype(self.config.dtype)[None, :, None, :]
