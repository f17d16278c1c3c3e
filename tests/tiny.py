"""A model, prompts and completions small enough to check by hand."""

import functools

import jax
import numpy as np

from opd_jax.core import sharding
from opd_jax.core.types import PromptBatch
from opd_jax.models import transformer
from opd_jax.models.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=32, embed_dim=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=24,
    max_length=64,
)  # fmt: skip


@functools.cache
def host_params(config=CONFIG, seed=0):
    """Random parameters as numpy; gains away from 1, so that attention is not drowned."""
    mesh = sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        params = jax.jit(functools.partial(transformer.init, config))(jax.random.key(seed))
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: np.asarray(x) * (1 + 0.3 * rng.normal(size=x.shape).astype(np.float32)), params
    )


def params(mesh, config=CONFIG, seed=0):
    """The same parameters on a mesh."""
    layout = transformer.shardings(config, mesh)
    return jax.tree.map(jax.device_put, host_params(config, seed), layout)


def prompts(mesh, lengths=(6, 3, 4, 1), columns=6, stop=(-1,), seed=0, vocab=32):
    """Left-padded random prompts of the given lengths; padding is random too, on purpose."""
    rng = np.random.default_rng(seed)
    P = len(lengths)
    batch = PromptBatch(
        tokens_PL=rng.integers(0, vocab, (P, columns)).astype(np.int32),
        length_P=np.array(lengths, np.int32),
        domain_P=np.zeros(P, np.int32),
        id_P=np.arange(100, 100 + P).astype(np.uint32),
        stop_PS=np.tile(np.array(stop, np.int32), (P, 1)),
    )
    return sharding.put(mesh, batch)


def completions(mesh, rows=8, columns=5, seed=1, vocab=32):
    """Random completion tokens `[B, R]`."""
    tokens = np.random.default_rng(seed).integers(0, vocab, (rows, columns)).astype(np.int32)
    return sharding.put(mesh, tokens)


def whole_rows(prompt, tokens_BR):
    """Each row's prompt and completion side by side, right-padded, and the rows' lengths."""
    tokens_PL, length_P = np.asarray(prompt.tokens_PL), np.asarray(prompt.length_P)
    tokens_BR = np.asarray(tokens_BR)
    (P, L), (B, R) = tokens_PL.shape, tokens_BR.shape
    rows = np.zeros((B, L + R), np.int32)
    length_B = np.repeat(length_P, B // P)
    for b in range(B):
        rows[b, : length_B[b]] = tokens_PL[b // (B // P), L - length_B[b] :]
        rows[b, length_B[b] : length_B[b] + R] = tokens_BR[b]
    return rows, length_B + R
