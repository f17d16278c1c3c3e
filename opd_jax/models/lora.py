"""Low-rank adaptation (arXiv 2106.09685): a stage trains deltas beside a base that stays as it is.

A model with deltas is one tree, the base's with two more leaves per adapted matrix:

    layers.q            [N, D, H, E]    frozen
    layers.q_lora_a     [N, D, r]       trained, random at first
    layers.q_lora_b     [N, r, H, E]    trained, 0 at first: the model begins as its base

`split` and `join` take such a tree apart and put it together without touching an array. So experts
that share a base share its buffers, and only deltas are optimised, saved and loaded.
"""

import jax
import jax.numpy as jnp

from opd_jax.core.types import Params
from opd_jax.models.config import ModelConfig

A, B = "_lora_a", "_lora_b"


def is_delta(name: str) -> bool:
    """Whether a leaf of this name is part of a delta."""
    return name.endswith((A, B))


def split(params: Params) -> tuple[Params, Params]:
    """A tree as (base, deltas); leaves may be arrays, shapes or layouts."""
    base = {name: leaf for name, leaf in params.items() if name != "layers"}
    layers, delta = {}, {}
    for name, leaf in params["layers"].items():
        (delta if is_delta(name) else layers)[name] = leaf
    return base | {"layers": layers}, {"layers": delta}


def join(base: Params | None, trained: Params) -> Params:
    """The whole model: what is trained, beside a base if there is one."""
    if base is None:
        return trained
    return base | {"layers": base["layers"] | trained["layers"]}


def merge(params: Params, config: ModelConfig) -> Params:
    """The deltas added to the weights: a model of the same outputs without any, all fp32."""
    base, delta = split(params)
    layers = dict(base["layers"])
    for target in config.lora.targets:
        w, a, b = layers[target], delta["layers"][target + A], delta["layers"][target + B]
        inner, outer = "xy"[: a.ndim - 2], "zw"[: b.ndim - 2]
        product = jnp.einsum(
            f"n{inner}r,nr{outer}->n{inner}{outer}", a, b, out_sharding=jax.typeof(w).sharding
        )
        layers[target] = w.astype(jnp.float32) + config.lora.scale * product
    return jax.tree.map(lambda x: x.astype(jnp.float32), base | {"layers": layers})
