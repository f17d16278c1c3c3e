"""Every family against transformers: stored logits always, the library itself where it is there."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from opd_jax import scoring
from opd_jax.core import sharding
from opd_jax.core.types import PromptBatch
from opd_jax.models import hf, transformer
from opd_jax.models.config import RopeScaling
from tests import families, make_family_goldens

TOLERANCE = 1e-4
NAMES = sorted(families.CONFIGS)


@functools.cache
def goldens():
    return json.loads(families.GOLDEN.read_text())


def golden(name, key):
    """transformers' logits of both rows."""
    stored = goldens()[name]
    return [np.array(x) for x in stored[key if key in stored else "full"]]


def batch(mesh):
    """The rows right-padded; their prompts left-padded; and two completions of each prompt.

    The first of the two is the row's own, the second something else. One token more than a row
    has, so that its last position predicts something.
    """
    rows, others = families.rows(), np.random.RandomState(1)
    whole = np.full((2, max(families.LENGTHS)), 7, np.int32)
    prompts = np.full((2, max(families.PROMPTS) + 1), 9, np.int32)
    most = max(t - p for t, p in zip(families.LENGTHS, families.PROMPTS, strict=True)) + 1
    completions = others.randint(0, families.VOCAB, (2, 2, most)).astype(np.int32)
    for i, (row, prompt) in enumerate(zip(rows, families.PROMPTS, strict=True)):
        whole[i, : len(row)] = row
        prompts[i, -prompt:] = row[:prompt]
        completions[i, 0, : len(row) - prompt] = row[prompt:]
    prompt = PromptBatch(
        prompts, np.array(families.PROMPTS, np.int32), np.zeros(2, np.int32),
        np.arange(2).astype(np.uint32), np.full((2, 1), -1, np.int32),
    )  # fmt: skip
    lengths = np.array(families.LENGTHS, np.int32)
    return sharding.put(mesh, (whole, lengths, prompt, completions.reshape(4, most)))


def decoded(params, config, prompt, tokens_BR):
    """Hidden states [B, R, D] as the sampler makes them: one token at a time, from caches."""
    B, R = tokens_BR.shape
    last_PD, prefix = transformer.prefill(params, config, prompt.tokens_PL, prompt.length_P)
    layers = transformer.unstack(params, config)
    length_B = transformer.repeat_rows(prompt.length_P, 2)

    def step(cache, t):
        token_B = jax.lax.dynamic_index_in_dim(tokens_BR, t, 1, keepdims=False)
        hidden_BD, cache = transformer.decode(
            params, layers, config, token_B, t, length_B, cache, prefix
        )
        return cache, hidden_BD

    cache = transformer.empty_cache(config, B, R - 1)
    _, hidden = jax.lax.scan(step, cache, jnp.arange(R - 1))
    first_BD = transformer.repeat_rows(last_PD, 2)
    return jnp.concatenate([first_BD[:, None], jnp.moveaxis(hidden, 0, 1)], axis=1)


# The ways through the network: whole rows, shared prompts, caches.
PATHS = {
    "full": lambda p, c, whole, lengths, *_: transformer.forward(p, c, whole, lengths),
    "shared": lambda p, c, _, __, prompt, rows: transformer.completion_hidden(p, c, prompt, rows),
    "cached": lambda p, c, _, __, prompt, rows: decoded(p, c, prompt, rows),
}


def run(config, paths, params, *inputs):
    """Logits by some of the paths."""
    table_VD, cap = transformer.unembedding(params), config.final_softcap
    hidden = {key: PATHS[key](params, config, *inputs) for key in paths}
    return {key: scoring.logits(x, table_VD, softcap=cap) for key, x in hidden.items()}


def errors(config, params, mesh, name, paths=tuple(PATHS)):
    """By path, the largest |difference| to transformers at real positions of both rows."""
    found = jax.jit(functools.partial(run, config, paths))(params, *batch(mesh))
    largest = dict.fromkeys(paths, 0)
    for key, logits in found.items():
        whole = key == "full"
        for i, want in enumerate(golden(name, "full" if whole else "cached")):
            want = want if whole else want[families.PROMPTS[i] - 1 :]
            got = np.asarray(logits)[i if whole else 2 * i, : len(want)]
            largest[key] = max(largest[key], float(np.abs(got - want).max()))
    return largest


@pytest.fixture
def model(request, tmp_path):
    """Name, config and parameters of an imported model."""
    folder = families.write(tmp_path / "model", request.param)
    config = hf.read_config(folder)
    return request.param, config, hf.load_params(folder, config)


@pytest.mark.parametrize("model", NAMES, indirect=True)
def test_every_path_gives_the_logits_of_transformers(mesh, model):
    name, config, params = model
    found = errors(config, params, mesh, name)
    assert max(found.values()) <= TOLERANCE, found


WRONG = {
    "llama2": {"rope_theta": 1e4},
    "llama_linear": {"rope_scaling": RopeScaling("linear", 2.0)},
    "llama3": {"rope_scaling": RopeScaling("llama3", 8.0, 32)},
    "qwen2_windows": {"local_layers": (0, 1)},
    "qwen2_yarn": {"rope_scaling": RopeScaling("yarn", 4.0, 16, beta_fast=4.0)},
    "qwen3": {"norm_eps": 1e-2},
}
GEMMA = (
    {"final_softcap": None}, {"query_pre_attn_scalar": None}, {"unit_offset_norm": False},
    {"scale_embeddings": False}, {"activation": "silu"}, {"local_layers": (1,)},
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "wrong"),
    [*WRONG.items(), *(("gemma2", wrong) for wrong in GEMMA)],
    indirect=["model"],
)
def test_a_wrong_config_is_seen(mesh, model, wrong):
    name, config, params = model
    found = errors(config.replace(**wrong), params, mesh, name, ["full"])
    assert found["full"] > 50 * TOLERANCE


@pytest.mark.parametrize(
    ("model", "wrong"),
    [
        ("mistral", {"window": 5}),
        ("llama_dynamic", {"rope_scaling": None}),
        ("gemma2", {"attention_softcap": None}),
        ("gemma3", {"local_rope_theta": None}),
    ],
    indirect=["model"],
)
def test_a_wrong_window_base_or_softcap_is_seen_on_every_path(mesh, model, wrong):
    name, config, params = model
    found = errors(config.replace(**wrong), params, mesh, name)
    assert min(found.values()) > 50 * TOLERANCE, found
