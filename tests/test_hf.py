"""Import and export of Hugging Face folders, against a plain numpy Llama and the stored bytes."""

import gc
import json
import math
import sys
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from opd_jax.core import tree
from opd_jax.models import hf, layers, rope, transformer

# Width / heads is 4, not the head size: what is derived instead of read shows everywhere.
RAW = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
TOKENS = np.array([3, 1, 4, 1, 5, 9, 26, 5], np.int32)


def make_tensors(raw, seed=0, dtype=np.float32):
    """Random weights under the file's names, large enough that every part matters."""
    rng = np.random.default_rng(seed)
    D, F, V = raw["hidden_size"], raw["intermediate_size"], raw["vocab_size"]
    head_dim = raw["head_dim"]
    q_rows, k_rows = raw["num_attention_heads"] * head_dim, raw["num_key_value_heads"] * head_dim
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not raw["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, D)
    for n in range(raw["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{n}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (D,),
                "self_attn.q_proj": (q_rows, D),
                "self_attn.k_proj": (k_rows, D),
                "self_attn.v_proj": (k_rows, D),
                "self_attn.o_proj": (D, q_rows),
                "post_attention_layernorm": (D,),
                "mlp.gate_proj": (F, D),
                "mlp.up_proj": (F, D),
                "mlp.down_proj": (D, F),
            }.items()
        }
    tensors = {}
    for name, shape in shapes.items():
        center, scale = (1.0, 0.3) if len(shape) == 1 else (0.0, 1.5 * shape[1] ** -0.5)
        tensors[name] = (center + scale * rng.standard_normal(shape)).astype(dtype)
    return tensors


def write(folder: Path, raw, tensors) -> Path:
    """A folder with one file of weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, raw, tensors, shards=3) -> Path:
    """A folder with shards and an index; neighbours in the table are in different files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    weight_map = {}
    for i in range(shards):
        part = dict(list(tensors.items())[i::shards][::-1])
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def numpy_logits(raw, tensors, tokens):
    """Llama in float64 numpy, one loop per head: nothing shared with the package."""
    w = {name: x.astype(np.float64) for name, x in tensors.items()}
    head_dim, T = raw["head_dim"], len(tokens)
    group = raw["num_attention_heads"] // raw["num_key_value_heads"]

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + raw["rms_norm_eps"]) * w[name]

    def rope(x):
        half = head_dim // 2
        angle = np.outer(np.arange(T), raw["rope_theta"] ** (-np.arange(half) / half))
        z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], -1)

    x = w["model.embed_tokens.weight"][tokens]
    for n in range(raw["num_hidden_layers"]):
        at = f"model.layers.{n}."
        h = norm(x, at + "input_layernorm.weight")
        q, k, v = (h @ w[f"{at}self_attn.{p}_proj.weight"].T for p in "qkv")
        heads = []
        for i in range(raw["num_attention_heads"]):
            mine, theirs = (slice(j * head_dim, (j + 1) * head_dim) for j in (i, i // group))
            scores = rope(q[:, mine]) @ rope(k[:, theirs]).T / math.sqrt(head_dim)
            scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(p / p.sum(-1, keepdims=True) @ v[:, theirs])
        x = x + np.concatenate(heads, -1) @ w[at + "self_attn.o_proj.weight"].T
        h = norm(x, at + "post_attention_layernorm.weight")
        gate, up = (h @ w[f"{at}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if raw["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, "model.norm.weight") @ w[head].T


def our_logits(folder, tokens=TOKENS):
    """Logits [T, V] of the imported model."""
    config = hf.read_config(folder)
    params = hf.load_params(folder, config)
    length_B = np.array([len(tokens)], np.int32)
    hidden_BTD = transformer.forward(params, config, tokens[None], length_B)
    return np.asarray(hidden_BTD[0] @ transformer.unembedding(params).T)


def permute_for_interleaved(x, heads):
    """Rows [0, 4, 1, 5, 2, 6, 3, 7] of each head of 8: the layout that pairs neighbours."""
    rows, width = x.shape
    return x.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


@pytest.fixture
def folder(tmp_path):
    """An untied model with one file."""
    return write(tmp_path / "source", RAW, make_tensors(RAW))


# --- config ------------------------------------------------------------------------------------


def config_with(tmp_path, **changes):
    raw = {k: v for k, v in (RAW | changes).items() if v != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return hf.read_config(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": "absent", "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_scaling": {"type": "default"}},
        {"rope_scaling": None},
    ],
)
def test_h02_rope_base_from_either_key(tmp_path, changes):
    theta = config_with(tmp_path, **changes).rope_theta
    angle_BTe = rope.angles(jnp.array([[1]]), 8, theta)
    np.testing.assert_allclose(angle_BTe[0, 0, 1], 0.031623, rtol=1e-4)


def test_h02_absent_base_means_what_transformers_means(tmp_path):
    assert config_with(tmp_path, rope_theta="absent").rope_theta == 10_000.0


def test_h02_contradictory_bases_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"contradictory.*rope_parameters\.rope_theta"):
        config_with(tmp_path, rope_parameters={"rope_theta": 5e5})


@pytest.mark.parametrize("absent", ["absent", None])
def test_h05_head_dim_is_read_and_else_derived(tmp_path, absent):
    wide = {"hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = config_with(tmp_path, **wide, head_dim=128)
    shapes = {row.path[-1]: row.file_shape(config) for row in hf.TABLE}
    assert shapes["q"] == (4096, 2560)
    assert shapes["k"] == shapes["v"] == (1024, 2560)
    assert shapes["o"] == (2560, 4096)
    assert config_with(tmp_path, **wide, head_dim=absent).head_dim == 80
    with pytest.raises(ValueError, match="state head_dim"):
        config_with(tmp_path, num_attention_heads=6, num_key_value_heads=2, head_dim=absent)


@pytest.mark.parametrize(("eps", "expected"), [(1e-6, 0.707107), (1e-5, 0.301511)])
def test_h10_norm_epsilon_is_read(tmp_path, eps, expected):
    config = config_with(tmp_path, rms_norm_eps=eps)
    x_BTD = jnp.full((1, 1, 2), 1e-3)
    y_BTD = layers.rms_norm(x_BTD, jnp.ones(2), config.norm_eps)
    np.testing.assert_allclose(y_BTD[0, 0], expected, atol=1e-5)


def test_h10_variance_in_fp32():
    y_BTD = layers.rms_norm(jnp.ones((1, 1, 4096), jnp.bfloat16), jnp.ones(4096), 1e-6)
    assert (y_BTD == 1).all()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["SmolLM3ForCausalLM"]}, "SmolLM3ForCausalLM"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForConditionalGeneration"),
        ({"model_type": "mistral"}, "model_type='mistral'"),
        ({"architectures": "absent"}, "architectures=None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"sliding_window": 4}, "sliding_window=4"),
        ({"residual_multiplier": 0.2}, "residual_multiplier=0.2 is not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_scaling.type='su'"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor=2.0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 4}}, "beta_fast=4"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor=0.5: must be at least"),
        ({"rope_scaling": {"rope_type": "linear", "type": "dynamic"}}, "contradictory RoPE rope_t"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"intermediate_size": "absent"}, "lacks intermediate_size"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path, changes, named):
    with pytest.raises(ValueError, match=named):
        config_with(tmp_path, **changes)


def test_every_refused_key_is_named_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"hidden_act='relu'.*some_scale=2.*lacks vocab_size"):
        config_with(tmp_path, hidden_act="relu", some_scale=2, vocab_size="absent")


def test_missing_config_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        hf.read_config(tmp_path)


# --- parity ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_h03_logits_equal_numpy_at_every_position(tmp_path, tied):
    raw = RAW | {"tie_word_embeddings": tied}
    tensors = make_tensors(raw)
    got = our_logits(write(tmp_path / "m", raw, tensors))
    np.testing.assert_allclose(got, numpy_logits(raw, tensors, TOKENS), atol=2e-4)


def test_h03_the_check_sees_permuted_rows_at_position_5(tmp_path):
    tensors = make_tensors(RAW)
    expected = numpy_logits(RAW, tensors, TOKENS)
    for name, x in tensors.items():
        for part, heads in (("q_proj", 8), ("k_proj", 2)):
            if part in name:
                tensors[name] = permute_for_interleaved(x, heads)
    got = our_logits(write(tmp_path / "m", RAW, tensors))
    # Rotation by angle 0 hides the fault in the first position.
    np.testing.assert_allclose(got[0], expected[0], atol=2e-4)
    assert np.abs(got[5] - expected[5]).max() > 0.1


@pytest.mark.parametrize(
    "wrong", [{"rope_theta": 1e4}, {"rms_norm_eps": 1e-2}, {"num_key_value_heads": 4}]
)
def test_the_check_sees_a_wrong_config(tmp_path, wrong):
    tensors = make_tensors(RAW)
    expected = numpy_logits(RAW, tensors, TOKENS)
    if "num_key_value_heads" in wrong:  # The same number of rows, in other groups.
        wrong |= {"num_attention_heads": 16, "head_dim": 4}
    got = our_logits(write(tmp_path / "m", RAW | wrong, tensors))
    assert np.abs(got - expected).max() > 1e-2


def test_logits_equal_transformers(tmp_path):
    reason = "compares with transformers, which is in the extra `convert` only"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    source = write(tmp_path / "m", RAW, make_tensors(RAW))
    exported = tmp_path / "exported"
    config = hf.read_config(source)
    hf.save_params(hf.load_params(source, config), config, exported)
    for folder in (source, exported):
        model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            expected = model(torch.tensor(TOKENS[None].astype(np.int64))).logits[0].numpy()
        np.testing.assert_allclose(our_logits(folder), expected, atol=2e-4)


# --- tensors and files -------------------------------------------------------------------------


def test_h12_tied_without_head(tmp_path):
    raw = RAW | {"tie_word_embeddings": True}
    source = write(tmp_path / "m", raw, make_tensors(raw))
    params = hf.load_params(source, hf.read_config(source))
    assert "head" not in params
    assert transformer.unembedding(params) is params["embedding"]


def test_h12_tied_with_identical_head_is_one_array(tmp_path):
    raw = RAW | {"tie_word_embeddings": True}
    tensors = make_tensors(raw)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    source = write(tmp_path / "m", raw, tensors)
    assert "head" not in hf.load_params(source, hf.read_config(source))
    tensors["lm_head.weight"][3, 4] += 1
    write(source, raw, tensors)
    with pytest.raises(ValueError, match=r"lm_head\.weight: differs from model\.embed_tokens"):
        hf.load_params(source, hf.read_config(source))


def test_h12_untied_without_head_is_an_error_unless_tied_by_hand(tmp_path):
    tensors = make_tensors(RAW)
    del tensors["lm_head.weight"]
    source = write(tmp_path / "m", RAW, tensors)
    config = hf.read_config(source)
    with pytest.raises(ValueError, match=r"lm_head\.weight: missing, expected \[32, 32\]; tie"):
        hf.load_params(source, config)
    params = hf.load_params(source, config.replace(tie_embeddings=True))
    assert "head" not in params


def test_h12_head_gradient_flows_into_a_tied_embedding(tmp_path):
    raw = RAW | {"tie_word_embeddings": True}
    source = write(tmp_path / "m", raw, make_tensors(raw))
    config = hf.read_config(source)
    params = hf.load_params(source, config)

    @jax.jit
    @jax.grad
    def gradient(params):
        tokens_BT, length_B = np.array([[1, 2]], np.int32), np.array([2], np.int32)
        hidden_BTD = transformer.forward(params, config, tokens_BT, length_B)
        seventh_V = (jnp.arange(32) == 7).astype(jnp.float32)
        return jnp.einsum("BTD,VD,V->", hidden_BTD, transformer.unembedding(params), seventh_V)

    grad_VD = gradient(params)["embedding"]
    # Token 7 is not in the input: its row can only be reached through the head.
    assert np.abs(grad_VD[7]).max() > 0.1
    assert np.abs(grad_VD[1]).max() > 0
    assert not grad_VD[9].any()


def test_h15_every_missing_extra_and_misshaped_tensor_is_listed(tmp_path):
    tensors = make_tensors(RAW)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.self_attn.k_proj.weight"] = np.zeros((32, 16), np.float32)
    tensors["model.norm.weight"] = np.zeros(32, np.int8)
    source = write(tmp_path / "m", RAW, tensors)
    with pytest.raises(ValueError, match=r"4 problem\(s\)") as caught:
        hf.load_params(source, hf.read_config(source))
    assert str(caught.value).splitlines()[1:] == [
        "  model.layers.0.self_attn.q_proj.bias: unexpected, got F32[64]",
        "  model.layers.1.mlp.up_proj.weight: missing, expected [24, 32]",
        "  model.layers.2.self_attn.k_proj.weight: expected F32|BF16|F16[16, 32], got F32[32, 16]",
        "  model.norm.weight: expected F32|BF16|F16[32], got I8[32]",
    ]


def test_h16_shards_out_of_order(tmp_path, folder):
    sharded = write_shards(tmp_path / "shards", RAW, make_tensors(RAW))
    config = hf.read_config(sharded)
    expected = hf.load_params(folder, config)
    tree.check_same(expected, hf.load_params(sharded, config), "shards", values=True)


def broken_missing_shard(folder):
    (folder / "model-00002-of-00003.safetensors").unlink()
    return r"model\.norm\.weight: its file model-00002-of-00003\.safetensors is missing"


def broken_listed_but_absent(folder):
    file = folder / "model-00002-of-00003.safetensors"
    part = load_file(file)
    del part["model.norm.weight"]
    save_file(part, file)
    return r"model\.norm\.weight: listed in the index, absent from model-00002-of-00003"


def broken_present_twice(folder):
    save_file({"model.norm.weight": np.ones(32, np.float32)}, folder / "model.safetensors")
    return r"model\.norm\.weight: present twice, in model-00002.* and model\.safetensors"


def broken_not_in_index(folder):
    file = folder / "model-00002-of-00003.safetensors"
    save_file(load_file(file) | {"extra": np.ones(1, np.float32)}, file)
    return r"extra: in model-00002-of-00003\.safetensors, absent from the index"


def broken_half_a_file(folder):
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return r"model-00002-of-00003\.safetensors: not a whole safetensors file"


@pytest.mark.parametrize(
    "damage",
    [broken_missing_shard, broken_listed_but_absent, broken_present_twice, broken_not_in_index,
     broken_half_a_file],
)  # fmt: skip
def test_h16_index_and_files_must_agree_before_the_device_is_touched(tmp_path, damage):
    source = write_shards(tmp_path / "m", RAW, make_tensors(RAW))
    message = damage(source)
    config = hf.read_config(source)
    gc.collect()
    before = len(jax.live_arrays())
    with pytest.raises(ValueError, match=message):
        hf.load_params(source, config)
    assert len(jax.live_arrays()) == before


def test_no_safetensors_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        hf.load_params(tmp_path, hf.read_config(tmp_path))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_h17_half_precision_files_without_torch(tmp_path, monkeypatch, dtype):
    monkeypatch.setitem(sys.modules, "torch", None)  # Importing it would now fail.
    tensors = make_tensors(RAW, dtype=dtype)
    tensors["model.norm.weight"][:2] = [1.5, -2.25]
    source = write(tmp_path / "m", RAW, tensors)
    params = hf.load_params(source, hf.read_config(source))
    np.testing.assert_array_equal(params["final_norm"][:2], np.array([1.5, -2.25], np.float32))
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype("float32")}
    assert params["layers"]["up"][1, 2, 3] == tensors["model.layers.1.mlp.up_proj.weight"][3, 2]


def test_h17_host_memory_stays_near_the_file(tmp_path):
    raw = RAW | {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 512,
                 "num_hidden_layers": 8}  # fmt: skip
    source = write(tmp_path / "m", raw, make_tensors(raw))
    config, size = hf.read_config(source), (source / "model.safetensors").stat().st_size

    def peak(load):
        tracemalloc.start()
        kept = load()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        del kept
        return peak

    assert peak(lambda: hf.load_params(source, config)) < 1.3 * size

    def naive():
        tensors = load_file(source / "model.safetensors")
        return {k: v.astype(np.float32) for k, v in tensors.items()}

    assert peak(naive) > 1.3 * size


def test_sharded_load_equals_plain_load(mesh_2x2x2, folder):
    config = hf.read_config(folder)
    shardings = transformer.shardings(config, mesh_2x2x2)
    params = hf.load_params(folder, config, shardings)
    tensors = load_file(folder / "model.safetensors")
    assert all(jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding == s, params, shardings)))
    assert params["layers"]["q"].addressable_data(0).shape == (3, 16, 4, 8)
    for n in range(3):
        q = tensors[f"model.layers.{n}.self_attn.q_proj.weight"]
        o = tensors[f"model.layers.{n}.self_attn.o_proj.weight"]
        np.testing.assert_array_equal(params["layers"]["q"][n], q.T.reshape(32, 8, 8))
        np.testing.assert_array_equal(params["layers"]["o"][n], o.T.reshape(8, 8, 32))
    wanted = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))
    tree.check_same(wanted, params, "tree")


def test_shardings_of_another_tree_are_refused(folder, mesh):
    config = hf.read_config(folder)
    shardings = transformer.shardings(config.replace(tie_embeddings=True), mesh)
    with pytest.raises(ValueError, match=r"shardings: not the tree .*\['head'\]"):
        hf.load_params(folder, config, shardings)


# --- export ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("limit", [10**9, 20_000])
def test_h24_export_of_an_import_is_the_same_to_the_bit(tmp_path, dtype, limit):
    tensors = make_tensors(RAW, dtype=np.dtype(dtype))
    source = write(tmp_path / "m", RAW, tensors)
    config = hf.read_config(source)
    params = hf.load_params(source, config)
    out = tmp_path / "out"
    hf.save_params(params, config, out, dtype=dtype, max_shard_bytes=limit)
    files = sorted(out.glob("*.safetensors"))
    assert (len(files) > 1) == (limit == 20_000)
    assert all(file.stat().st_size < limit + 4096 for file in files)
    got = {name: x for file in files for name, x in load_file(file).items()}
    assert got.keys() == tensors.keys()
    for name, x in tensors.items():
        assert got[name].dtype == x.dtype
        assert got[name].tobytes() == x.tobytes(), name
    assert hf.read_config(out) == config
    tree.check_same(params, hf.load_params(out, config), "second import", values=True)


def test_h24_config_and_tokenizer_of_the_source_are_kept(tmp_path):
    raw = RAW | {
        "eos_token_id": [1, 2],
        "bos_token_id": 0,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "dtype": "float32",
        "transformers.js_config": {"kept": True},
    }
    source = write(tmp_path / "m", raw, make_tensors(raw))
    (source / "tokenizer.json").write_text('{"é": 1}')
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (source / "optimizer.pt").write_text("not ours")
    config = hf.read_config(source, dtype="bfloat16", remat="full").replace(max_length=16)
    out = tmp_path / "out"
    hf.save_params(hf.load_params(source, config), config, out, source_dir=source, dtype="bfloat16")
    assert json.loads((out / "config.json").read_text()) == raw | {"dtype": "bfloat16"}
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert (out / "generation_config.json").exists()
    assert not (out / "optimizer.pt").exists()
    assert hf.read_config(out) == hf.read_config(source)


@pytest.mark.parametrize("with_source", [False, True])
def test_h12_a_model_tied_by_hand_is_exported_as_tied(tmp_path, with_source):
    tensors = make_tensors(RAW)
    del tensors["lm_head.weight"]
    source = write(tmp_path / "m", RAW, tensors)
    config = hf.read_config(source).replace(tie_embeddings=True)
    params, out = hf.load_params(source, config), tmp_path / "out"
    hf.save_params(params, config, out, source_dir=source if with_source else None)
    assert hf.read_config(out) == config
    tree.check_same(params, hf.load_params(out, config), "second import", values=True)


def test_export_into_a_used_folder_or_from_another_model_is_refused(tmp_path, folder):
    config = hf.read_config(folder)
    params = hf.load_params(folder, config)
    with pytest.raises(FileExistsError, match="not empty"):
        hf.save_params(params, config, folder)
    other = write(tmp_path / "other", RAW | {"rope_theta": 5e5}, make_tensors(RAW))
    with pytest.raises(ValueError, match=r"another model: rope_theta: source 500000\.0"):
        hf.save_params(params, config, tmp_path / "out", source_dir=other)
    with pytest.raises(ValueError, match=r"\['head'\]: unexpected"):
        hf.save_params(params, config.replace(tie_embeddings=True), tmp_path / "out")
    with pytest.raises(ValueError, match="dtype='int8'"):
        hf.save_params(params, config, tmp_path / "out", dtype="int8")


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_failed_export_leaves_nothing_behind_that_looks_whole(tmp_path, folder):
    config = hf.read_config(folder)
    params = hf.load_params(folder, config)
    large = params | {"final_norm": params["final_norm"].at[0].set(1e6)}
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"model\.norm\.weight: not finite in float16"):
        hf.save_params(large, config, out, dtype="float16")
    assert not out.exists()
    hf.save_params(large, config, out, dtype="bfloat16")
    assert not list(tmp_path.glob("*.partial"))
    assert hf.read_config(out) == config


def test_export_of_sharded_parameters(mesh_2x2x2, tmp_path, folder):
    config = hf.read_config(folder)
    params = hf.load_params(folder, config, transformer.shardings(config, mesh_2x2x2))
    hf.save_params(params, config, tmp_path / "out")
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "out"))
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)


# --- a real model ------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2_agrees_with_transformers():
    """246 positions; the file was made by transformers in float32 (see its `made_by`)."""
    reason = "the model comes as GGUF: needs the extra `convert`"
    assets = pytest.importorskip("tools.fetch_real_assets", reason=reason)
    folder, _ = assets.fetch(Path("~/.cache/opd_jax/assets").expanduser())
    config = hf.read_config(folder)
    params = hf.load_params(folder, config)
    assert tree.count(params) == 134_515_008
    stored = json.loads((Path(__file__).parent / "data/smollm2_reference.json").read_text())

    @jax.jit
    def logp_fn(params, tokens_BT, length_B):
        hidden_BTD = transformer.forward(params, config, tokens_BT, length_B)
        return jax.nn.log_softmax(hidden_BTD[0] @ transformer.unembedding(params).T)

    positions = 0
    for row in stored["sequences"]:
        ids, top_ids = np.array(row["ids"], np.int32), np.array(row["top_ids"])
        padded = np.zeros((1, 96), np.int32)
        padded[0, : len(ids)] = ids
        logp_TV = np.asarray(logp_fn(params, padded, np.array([len(ids)], np.int32)))
        logp_TV = logp_TV[: len(top_ids)]
        np.testing.assert_array_equal(logp_TV.argmax(-1), top_ids)
        each = np.arange(len(top_ids))
        np.testing.assert_allclose(logp_TV[each, top_ids], row["top_logp"], atol=1e-3)
        np.testing.assert_allclose(logp_TV[each, ids[1:]], row["next_logp"], atol=1e-3)
        positions += len(top_ids)
    assert positions >= 200
