"""Every family against transformers: stored logits always, the library itself where it is there."""

import functools
import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from opd_jax import losses, rollout, scoring, steps
from opd_jax.core import sharding, tree
from opd_jax.core.types import PromptBatch
from opd_jax.models import hf, transformer
from opd_jax.models.config import RopeScaling
from tests import batches, families, make_family_goldens

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
    prefix = transformer.unstack_prefix(prefix)
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


# --- in and out --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma2", "gemma3"])
def test_h24_import_and_export_are_the_identity(tmp_path, name, dtype):
    source = families.write(tmp_path / "source", name, np.dtype(dtype))
    config = hf.read_config(source)
    params = hf.load_params(source, config)
    hf.save_params(params, config, tmp_path / "kept", source_dir=source, dtype=None)
    hf.save_params(params, config, tmp_path / "made", dtype=dtype, max_shard_bytes=8000)
    raw = json.loads((source / "config.json").read_text())
    assert json.loads((tmp_path / "kept/config.json").read_text()) == raw
    before = load_file(source / "model.safetensors")
    for folder in (tmp_path / "kept", tmp_path / "made"):
        assert hf.read_config(folder) == config
        after = {}
        for file in folder.glob("*.safetensors"):
            after |= load_file(file)
        assert after.keys() == before.keys()
        for tensor, x in before.items():
            assert after[tensor].dtype == x.dtype
            assert after[tensor].tobytes() == x.tobytes(), tensor


def test_every_number_of_half_precision_survives(tmp_path):
    """All finite bf16 and fp16 values, subnormal ones and both zeros among them."""
    for dtype in ("bfloat16", "float16"):
        every = np.arange(2**16, dtype=np.uint16).view(dtype)
        every = every[np.isfinite(every.astype(np.float32))]
        every = np.resize(every, (families.VOCAB * 43, families.WIDTH * 2))
        source = families.write(tmp_path / dtype, "qwen2", np.dtype(dtype))
        raw = families.CONFIGS["qwen2"] | {"vocab_size": len(every), "hidden_size": 48,
                                           "num_hidden_layers": 1}  # fmt: skip
        tensors = families.tensors(raw, np.dtype(dtype)) | {"model.embed_tokens.weight": every}
        (source / "config.json").write_text(json.dumps(raw))
        save_file(tensors, source / "model.safetensors")
        config, out = hf.read_config(source), tmp_path / f"{dtype}_out"
        hf.save_params(hf.load_params(source, config), config, out, dtype=dtype)
        after = load_file(out / "model.safetensors")["model.embed_tokens.weight"]
        assert after.tobytes() == every.tobytes()


def test_dtypes_of_a_mixed_file_are_kept(tmp_path):
    source = families.write(tmp_path / "source", "gemma3", np.dtype("bfloat16"))
    tensors = load_file(source / "model.safetensors")
    tensors |= {k: x.astype(np.float32) for k, x in tensors.items() if "norm" in k}
    save_file(tensors, source / "model.safetensors")
    config = hf.read_config(source)
    params = hf.load_params(source, config)
    hf.save_params(params, config, tmp_path / "out", source_dir=source, dtype=None)
    after = load_file(tmp_path / "out/model.safetensors")
    assert {k: x.dtype for k, x in after.items()} == {k: x.dtype for k, x in tensors.items()}
    with pytest.raises(ValueError, match="give one of the two"):
        hf.save_params(params, config, tmp_path / "other", dtype=None)


def test_sharded_import_of_biases_norms_and_few_heads(mesh_2x2x2, tmp_path):
    for name in ("qwen2", "gemma2"):
        source = families.write(tmp_path / name, name)
        config = hf.read_config(source)
        layout = transformer.shardings(config, mesh_2x2x2)
        params, plain = hf.load_params(source, config, layout), hf.load_params(source, config)
        same = jax.tree.map(lambda x, s: x.sharding == s, params, layout)
        assert all(jax.tree.leaves(same)), same
        for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(plain), strict=True):
            np.testing.assert_array_equal(got, want)
        wanted = jax.eval_shape(lambda c=config: transformer.init(c, jax.random.key(0)))
        tree.check_same(wanted, params, "tree")


def test_h15_biases_are_all_or_an_error(tmp_path):
    source = families.write(tmp_path / "source", "qwen2")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    tensors["model.layers.0.self_attn.o_proj.bias"] = np.zeros(24, np.float32)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"2 problem\(s\)") as caught:
        hf.load_params(source, hf.read_config(source))
    assert str(caught.value).splitlines()[1:] == [
        "  model.layers.0.self_attn.o_proj.bias: unexpected, got F32[24]",
        "  model.layers.1.self_attn.k_proj.bias: missing, expected [16]",
    ]


def test_h06_norms_over_the_whole_projection_are_another_family(tmp_path):
    source = families.write(tmp_path / "source", "qwen3")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(32, np.float32)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"q_norm\.weight: expected .*\[8\], got F32\[32\]"):
        hf.load_params(source, hf.read_config(source))


def test_h07_the_format_decides_about_the_offset_and_not_the_weights(tmp_path):
    source = families.write(tmp_path / "source", "gemma2")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] += 1.0  # As if the source had folded it in.
    save_file(tensors, source / "model.safetensors")
    config = hf.read_config(source)
    assert config.unit_offset_norm
    got = hf.load_params(source, config)["final_norm"]
    np.testing.assert_array_equal(got, tensors["model.norm.weight"])


# --- memory ------------------------------------------------------------------------------------


def wide(folder):
    """A bf16 model in three shards whose largest tensor is a fraction of any stacked leaf."""
    raw = families.CONFIGS["gemma3"] | {
        "hidden_size": 384, "intermediate_size": 2048, "vocab_size": 1000,
        "num_hidden_layers": 6, "layer_types": None, "num_key_value_heads": 2,
    }  # fmt: skip
    rng = np.random.default_rng(0)
    shapes = families.shapes(raw) | {"model.embed_tokens.weight": (1000, 384)}
    tensors = {
        name: rng.standard_normal(shape, np.float32).astype("bfloat16")
        for name, shape in shapes.items()
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    weight_map = {}
    for i in range(3):
        part = dict(list(tensors.items())[i::3])
        weight_map |= dict.fromkeys(part, f"{i}.safetensors")
        save_file(part, folder / f"{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def host_peak(run):
    """Bytes that numpy and the file library held at most: device buffers are not theirs."""
    run()  # What is compiled stays in caches.
    peaks = []
    for _ in range(3):  # On a busy machine a runtime's thread may let go of a block late.
        tracemalloc.start()
        kept = run()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        del kept
    return min(peaks)


@pytest.mark.parametrize("sharded", [False, True])
def test_h17_the_host_never_holds_more_than_a_tensor_and_a_shard(tmp_path, request, sharded):
    source = wide(tmp_path / "m")
    config = hf.read_config(source)
    layout = None
    if sharded:
        mesh = request.getfixturevalue("mesh_2x2x2")
        layout = transformer.shardings(config, mesh)
    files = sorted(source.glob("*.safetensors"))
    largest = max(x.nbytes for file in files for x in load_file(file).values())
    # Mapped files are not in the count, so a shard's size is not added: the bound is tighter.
    limit = 1.3 * largest + 1.0 * largest

    assert host_peak(lambda: hf.load_params(source, config, layout)) < limit

    def by_leaf():
        names = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(config.num_layers)]
        tensors = {}
        for file in files:
            tensors |= {k: v for k, v in load_file(file).items() if k in names}
        return np.stack([tensors[name].astype(np.float32) for name in names])

    # Control: a leaf's layers joined on the host.
    assert host_peak(by_leaf) > limit + max(file.stat().st_size for file in files)


# --- transformers itself -----------------------------------------------------------------------


@pytest.mark.parametrize("model", NAMES, indirect=True)
def test_exported_models_load_in_transformers_and_give_the_same_logits(mesh, model, tmp_path):
    reason = "compares with transformers, which is in the extra `convert` only"
    pytest.importorskip("torch", reason=reason)
    pytest.importorskip("transformers", reason=reason)
    name, config, params = model
    hf.save_params(params, config, tmp_path / "made", max_shard_bytes=20_000)
    rows, whole = families.rows(), golden(name, "full")
    for i, row in enumerate(rows):
        theirs = make_family_goldens.load(tmp_path / "made")
        got = make_family_goldens.logits(theirs, row)
        np.testing.assert_allclose(got, whole[i], atol=TOLERANCE)
        theirs = make_family_goldens.load(tmp_path / "made")
        cached = make_family_goldens.cached_logits(theirs, row, families.PROMPTS[i])
        np.testing.assert_allclose(cached, golden(name, "cached")[i], atol=TOLERANCE)
    if "dynamic" not in name:  # There a batch's longest row decides about all of them.
        padded = make_family_goldens.padded_logits(theirs, rows)
        for got, want in zip(padded, whole, strict=True):
            np.testing.assert_allclose(got, want, atol=TOLERANCE)


# --- sampler, scorer, loss ---------------------------------------------------------------------


@pytest.mark.parametrize("model", ["gemma2"], indirect=True)
def test_sampler_scorer_and_losses_apply_the_final_softcap(mesh, model):
    _, config, params = model
    _, _, prompt, _ = batch(mesh)
    sampling = rollout.Sampling(samples=2, max_new_tokens=8, temperature=0.7)
    made, _ = steps.make_rollout_step(config, sampling)(params, prompt, jax.random.key(3))
    scores = steps.make_score_step(config, 0.7, 0)(params, made)
    np.testing.assert_allclose(scores.logp_BR, made.logp_BR, atol=1e-5)
    # Control: a scorer without the cap.
    bare = steps.make_score_step(config.replace(final_softcap=None), 0.7, 0)(params, made)
    assert np.abs(bare.logp_BR - made.logp_BR).max() > 0.01

    # A teacher that is the student has nothing to teach, if its logits are capped as well.
    group = losses.weigh(made, None, "token-mean", None, False).replace(
        teacher_hidden_BRD=steps.make_hidden_step(config)(params, made),
        teacher_table_VD=params["embedding"],
        teacher_softcap=config.final_softcap,
    )
    settings = batches.settings("reverse_kl")
    loss = jax.jit(lambda g: losses.group_loss(params, config, g, settings)[0])
    assert abs(float(loss(group))) < 1e-6
    assert float(loss(group.replace(teacher_softcap=None))) > 0.01
