"""Parts of a transformer block: parameters with logical axes, norm, rotary angles, attention."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from opd_jax.core import sharding
from opd_jax.models.config import ModelConfig

# Finite, so that a row whose every key is masked gives a uniform softmax and not NaN.
MASKED = -1e30


@struct.dataclass
class KV:
    """Keys and values; `[B, K, S, E]` for one layer, with a leading `[N]` for a stack of layers.

    Heads come before positions: a product over E or S then has its batch axes in front, so no
    decode step copies the cache to bring them there.
    """

    k: jax.Array
    v: jax.Array


@struct.dataclass
class Prefix:
    """The prompts' keys and values, one row per PROMPT: its n samples attend to the same row."""

    kv: KV  # [N, P, K, L, E], or one layer's [P, K, L, E].
    mask_PL: jax.Array  # bool, real columns.


def weight(module: nn.Module, name: str, shape: tuple[int, ...], axes: tuple[str, ...],
           stddev: float) -> jax.Array:  # fmt: skip
    """An fp32 parameter, normal with the given deviation, its logical axes beside its shape."""
    init = nn.with_logical_partitioning(nn.initializers.normal(stddev), axes)
    return module.param(name, init, shape)


def gain(module: nn.Module, name: str, dim: int) -> jax.Array:
    """The fp32 scale of a norm, ones at first."""
    return module.param(name, nn.with_logical_partitioning(nn.initializers.ones, ("norm",)), (dim,))


def rms_norm(x_BTD: jax.Array, gain_D: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm; the mean of squares in fp32 whatever the activations are."""
    x = x_BTD.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (x * scale * gain_D[None, None, :]).astype(x_BTD.dtype)


def rope_angles(position_BT: jax.Array, head_dim: int, theta: float) -> jax.Array:
    """Rotation angles `[B, T, E/2]`, fp32 (bf16 would round position 257 to 256)."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    return position_BT.astype(jnp.float32)[..., None] * frequency[None, None, :]


def rotate(x_BHTE: jax.Array, angle_BTe: jax.Array) -> jax.Array:
    """Rotary position embedding in the half-split layout: dimension i turns with i + E/2."""
    cos = jnp.cos(angle_BTe)[:, None].astype(x_BHTE.dtype)
    sin = jnp.sin(angle_BTe)[:, None].astype(x_BHTE.dtype)
    a, b = jnp.split(x_BHTE, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attend(q_BHTE: jax.Array, own: KV, mask_BTS: jax.Array, prefix: Prefix | None) -> jax.Array:
    """Grouped-query attention over a row's own keys and, before them, its prompt's.

    The prompt's keys are stored once and never copied per sample: the n rows of a prompt are folded
    into the query axis instead, which makes one `[n*Q*T, L]` product of n thin ones.

    Args:
      q_BHTE: queries, rotated.
      own: the row's own keys and values `[B, K, S, E]`.
      mask_BTS: which own keys each query may see. Here B may be 1: the same for all rows.
      prefix: one layer's shared prompt keys, or None.

    Returns:
      `[B, H, T, E]`.
    """
    B, H, T, E = q_BHTE.shape
    K = own.k.shape[1]
    Q = H // K

    def reshape(x, shape, *axes):
        """Layouts are named, since with P or n of 1 the split of a sharded axis is ambiguous."""
        return jnp.reshape(x, shape, out_sharding=sharding.spec(*axes))

    by_rows = ("batch", "kv_heads", None, None, None)
    f32 = {"preferred_element_type": jnp.float32}
    q_BKQTE = reshape(q_BHTE * E**-0.5, (B, K, Q, T, E), *by_rows)
    own_scores = jnp.einsum("BKQTE,BKSE->BKQTS", q_BKQTE, own.k, **f32)
    own_scores = jnp.where(mask_BTS[:, None, None, :, :], own_scores, MASKED)
    if prefix is None:
        p = jax.nn.softmax(own_scores, axis=-1).astype(q_BHTE.dtype)
        out = jnp.einsum("BKQTS,BKSE->BKQTE", p, own.v)
        return reshape(out, (B, H, T, E), "batch", "heads", None, None)

    P = prefix.mask_PL.shape[0]
    n = B // P
    by_prompt = ("batch", "samples", "kv_heads", None, None, None)

    def rows(x_PKnQT1):
        """From the prompts' order of axes to that of rows."""
        x_PnKQT1 = x_PKnQT1.transpose(0, 2, 1, 3, 4, 5)
        return reshape(x_PnKQT1, (B, K, Q, T, x_PKnQT1.shape[-1]), *by_rows)

    q_PnKQTE = reshape(q_BKQTE, (P, n, K, Q, T, E), *by_prompt)
    scores = jnp.einsum("PnKQTE,PKLE->PKnQTL", q_PnKQTE, prefix.kv.k, **f32)
    scores = jnp.where(prefix.mask_PL[:, None, None, None, None, :], scores, MASKED)
    # One softmax over both parts: each has exponentials of its own maximum, and what a part weighs
    # in the whole is put right by a factor per query.
    own_top, top = own_scores.max(-1, keepdims=True), scores.max(-1, keepdims=True)
    own_top, top = jax.lax.stop_gradient((own_top, top))
    own_e, e = jnp.exp(own_scores - own_top), jnp.exp(scores - top)
    own_out = jnp.einsum("BKQTS,BKSE->BKQTE", own_e.astype(q_BHTE.dtype), own.v, **f32)
    out = jnp.einsum("PKnQTL,PKLE->PKnQTE", e.astype(q_BHTE.dtype), prefix.kv.v, **f32)
    top, total, out = rows(top), rows(e.sum(-1, keepdims=True)), rows(out)
    own_factor = jnp.exp(own_top - jnp.maximum(own_top, top))
    factor = jnp.exp(top - jnp.maximum(own_top, top))
    total = own_e.sum(-1, keepdims=True) * own_factor + total * factor
    out = ((own_out * own_factor + out * factor) / total).astype(q_BHTE.dtype)
    return reshape(out, (B, H, T, E), "batch", "heads", None, None)


class Block(nn.Module):
    """One layer: attention and gated MLP, each behind a norm and added to the residual stream."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD, prefix_kv, cache, angle_BTe, mask_BTS, prefix_mask_PL, write_at):
        """Runs the layer.

        Args:
          x_BTD: residual stream.
          prefix_kv: the prompts' keys and values in this layer, or None.
          cache: the rows' own earlier keys and values in this layer, or None.
          angle_BTe: rotary angles of the tokens.
          mask_BTS: which own keys each token sees; S = T without a cache, else the cache's length.
          prefix_mask_PL: real columns of the prompts, or None.
          write_at: the cache column of the first of the T tokens; unused without a cache.

        Returns:
          The residual stream, and the rows' own keys and values: those of the T tokens, or the
          whole cache with them written in.
        """
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        D, H, K, E, F = c.embed_dim, c.num_heads, c.num_kv_heads, c.head_dim, c.mlp_dim
        deep = (2 * c.num_layers) ** -0.5  # Keeps the residual stream's size independent of depth.
        attn_gain, mlp_gain = gain(self, "attn_norm", D), gain(self, "mlp_norm", D)
        q = weight(self, "q", (D, H, E), ("embed", "heads", "head"), D**-0.5)
        k = weight(self, "k", (D, K, E), ("embed", "kv_heads", "head"), D**-0.5)
        v = weight(self, "v", (D, K, E), ("embed", "kv_heads", "head"), D**-0.5)
        o = weight(self, "o", (H, E, D), ("heads", "head", "embed"), (H * E) ** -0.5 * deep)
        gate = weight(self, "gate", (D, F), ("embed", "mlp"), D**-0.5)
        up = weight(self, "up", (D, F), ("embed", "mlp"), D**-0.5)
        down = weight(self, "down", (F, D), ("mlp", "embed"), F**-0.5 * deep)

        def project(equation, x, w, *axes):
            return jnp.einsum(equation, x, w.astype(dtype), out_sharding=sharding.spec(*axes))

        with jax.named_scope("qkv"):
            h = rms_norm(x_BTD, attn_gain, c.norm_eps)
            q_BHTE = project("BTD,DHE->BHTE", h, q, "batch", "heads", "time", "head")
            k_BKTE = project("BTD,DKE->BKTE", h, k, "batch", "kv_heads", "time", "head")
            v_BKTE = project("BTD,DKE->BKTE", h, v, "batch", "kv_heads", "time", "head")
            q_BHTE, k_BKTE = rotate(q_BHTE, angle_BTe), rotate(k_BKTE, angle_BTe)
        with jax.named_scope("cache"):
            own = KV(k_BKTE, v_BKTE)
            if cache is not None:
                at = (0, 0, write_at, 0)
                own = jax.tree.map(lambda c, x: jax.lax.dynamic_update_slice(c, x, at), cache, own)
        with jax.named_scope("attention"):
            prefix = None if prefix_kv is None else Prefix(prefix_kv, prefix_mask_PL)
            a_BHTE = attend(q_BHTE, own, mask_BTS, prefix)
            x_BTD = x_BTD + project("BHTE,HED->BTD", a_BHTE, o, "batch", "time", "act")
        with jax.named_scope("mlp"):
            h = rms_norm(x_BTD, mlp_gain, c.norm_eps)
            gate_BTF = project("BTD,DF->BTF", h, gate, "batch", "time", "mlp")
            up_BTF = project("BTD,DF->BTF", h, up, "batch", "time", "mlp")
            hidden_BTF = jax.nn.silu(gate_BTF) * up_BTF
            x_BTD = x_BTD + project("BTF,FD->BTD", hidden_BTF, down, "batch", "time", "act")
        return x_BTD, own
