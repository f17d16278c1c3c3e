"""Converts GGUF files of Llama and Gemma 3 to Hugging Face folders, fp32 whatever they hold.

GGUF keeps tensors as llama.cpp wants them, and this undoes it: query and key rows of Llama are
interleaved for its rotary layout, and 1 is added to the weights of Gemma's norms.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers

# GGUF's names of tensors; the norms of Gemma's MLP have other names than Llama's.
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
_GEMMA_BLOCK = _BLOCK | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# What a GGUF file of Gemma 3 does not say; the same for all sizes.
_GEMMA_LOCAL_THETA, _GEMMA_PATTERN = 10_000.0, 6


def convert_llama(file: Path, folder: Path) -> None:
    """Converts a GGUF file of the Llama family, with a byte-level BPE, to a Hugging Face folder.

    Args:
      file: the GGUF file, in any quantisation; weights become fp32.
      folder: an existing folder for config, weights, tokenizer and generation config.
    """
    reader, fields = _read(file)
    config = llama_config(fields, tied=_is_tied(reader))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for name, kind, x in _tensors(reader):
        tensors[hf_name(name, _BLOCK)] = unpermute(x, heads[kind]) if kind in heads else x
    _write(folder, config, tensors, build_tokenizer(fields), tokenizer_config(fields))


def convert_gemma3(file: Path, folder: Path) -> None:
    """Converts a GGUF file of a Gemma 3 text model to a Hugging Face folder, as above."""
    reader, fields = _read(file)
    config = gemma3_config(fields, tied=_is_tied(reader))
    tensors = {
        hf_name(name, _GEMMA_BLOCK): x - 1 if kind.endswith("norm") else x
        for name, kind, x in _tensors(reader)
    }
    _write(folder, config, tensors, build_gemma_tokenizer(fields), tokenizer_config(fields))


def _read(file: Path) -> tuple[gguf.GGUFReader, dict[str, Any]]:
    reader = gguf.GGUFReader(file)
    return reader, {key: field.contents() for key, field in reader.fields.items()}


def _is_tied(reader: gguf.GGUFReader) -> bool:
    return all(tensor.name != "output.weight" for tensor in reader.tensors)


def _tensors(reader: gguf.GGUFReader):
    """Name, kind ("attn_q") and fp32 values of every tensor."""
    for tensor in reader.tensors:
        x = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        yield tensor.name, tensor.name.split(".")[-2], x


def _write(folder: Path, config, tensors, tokenizer: tokenizers.Tokenizer, own) -> None:
    tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {key: config[key] for key in special})
    _write_json(folder / "tokenizer_config.json", own)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def hf_name(name: str, block: Mapping[str, str]) -> str:
    """A GGUF tensor's Hugging Face name.

    Raises:
      ValueError: it is no tensor of the family whose layers have the names in `block`.
    """
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in block:
        raise ValueError(f"GGUF tensor {name!r} is not one of its family")
    return f"model.layers.{match[1]}.{block[match[2]]}.weight"


def unpermute(x: np.ndarray, heads: int) -> np.ndarray:
    """Query or key rows from GGUF's interleaved rotary layout back to Hugging Face's half-split.

    With one head of size 8 row i of the result is row [0, 2, 4, 6, 1, 3, 5, 7][i] of `x`.
    """
    rows, width = x.shape
    pairs = x.reshape(heads, rows // heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


# --- configs -----------------------------------------------------------------------------------


def llama_config(fields: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """config.json from the fields of a GGUF file.

    Raises:
      ValueError: it is not of the Llama family, or its RoPE is scaled or partial.
    """
    config = _common_config(fields, "llama", tied)
    head_dim, width = fields["llama.rope.dimension_count"], config["hidden_size"]
    if head_dim != width // config["num_attention_heads"]:
        raise ValueError(f"RoPE of {head_dim} dimensions: not supported")
    return config | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def gemma3_config(fields: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """config.json from the fields of a GGUF file.

    Raises:
      ValueError: it is not of the Gemma 3 family, or its RoPE is scaled.
    """
    config = _common_config(fields, "gemma3", tied)
    head_dim = fields["gemma3.attention.key_length"]
    kinds = [
        "sliding_attention" if (n + 1) % _GEMMA_PATTERN else "full_attention"
        for n in range(config["num_hidden_layers"])
    ]
    return config | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "sliding_window": fields["gemma3.attention.sliding_window"],
        "layer_types": kinds,
        "rope_local_base_freq": _GEMMA_LOCAL_THETA,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


def _common_config(fields: Mapping[str, Any], kind: str, tied: bool) -> dict[str, Any]:
    if fields["general.architecture"] != kind:
        raise ValueError(f"general.architecture={fields['general.architecture']!r}, need {kind!r}")
    scaled = [key for key in fields if key.startswith(f"{kind}.rope.scaling")]
    if scaled:
        raise ValueError(f"scaled RoPE is not supported: {scaled}")
    return {
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields[f"{kind}.embedding_length"],
        "num_hidden_layers": fields[f"{kind}.block_count"],
        "num_attention_heads": fields[f"{kind}.attention.head_count"],
        "num_key_value_heads": fields[f"{kind}.attention.head_count_kv"],
        "intermediate_size": fields[f"{kind}.feed_forward_length"],
        "max_position_embeddings": fields[f"{kind}.context_length"],
        "rope_theta": fields[f"{kind}.rope.freq_base"],
        # GGUF holds fp32; its shortest decimal is the number that was meant: 1e-05.
        "rms_norm_eps": float(str(np.float32(fields[f"{kind}.attention.layer_norm_rms_epsilon"]))),
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }


# --- tokenizers --------------------------------------------------------------------------------


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
    tokenizer.add_special_tokens(_of_type(fields, gguf.TokenType.CONTROL))
    return tokenizer


def build_gemma_tokenizer(fields: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Gemma's SentencePiece BPE: spaces become "▁", what is not in the vocabulary becomes bytes.

    SentencePiece joins the pair whose result has the best score; the merges below say the same in
    order. Tokens that it takes whole before that (runs of spaces and newlines, HTML tags) are added
    tokens here.

    Raises:
      ValueError: the file's tokenizer is of another kind.
    """
    if fields["tokenizer.ggml.model"] != "llama" or fields["tokenizer.ggml.add_space_prefix"]:
        raise ValueError(
            f"tokenizer.ggml.model={fields['tokenizer.ggml.model']!r}, add_space_prefix="
            f"{fields['tokenizer.ggml.add_space_prefix']}; need 'llama' without a prefix"
        )
    # llama.cpp's converter writes runs of spaces as they are in a text.
    tokens = [token.replace(" ", "▁") for token in fields["tokenizer.ggml.tokens"]]
    whole = [t.replace(" ", "▁") for t in _of_type(fields, gguf.TokenType.USER_DEFINED)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(fields, vocabulary),
            unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_tokens([tokenizers.AddedToken(t, normalized=True) for t in whole])
    tokenizer.add_special_tokens(_of_type(fields, gguf.TokenType.CONTROL))
    return tokenizer


def _merges(fields: Mapping[str, Any], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, the best result first; of one result, in order."""
    found = []
    types, scores = fields["tokenizer.ggml.token_type"], fields["tokenizer.ggml.scores"]
    for token, i in vocabulary.items():
        if types[i] != gguf.TokenType.NORMAL:
            continue
        for cut in range(1, len(token)):
            pair = token[:cut], token[cut:]
            if pair[0] in vocabulary and pair[1] in vocabulary:
                found.append((-scores[i], vocabulary[pair[0]], vocabulary[pair[1]], pair))
    return [pair for *_, pair in sorted(found)]


def _of_type(fields: Mapping[str, Any], kind: gguf.TokenType) -> list[str]:
    types, tokens = fields["tokenizer.ggml.token_type"], fields["tokenizer.ggml.tokens"]
    return [token for token, own in zip(tokens, types, strict=True) if own == kind]


def tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json: special tokens and the chat template, if there is one."""
    tokens, kind = fields["tokenizer.ggml.tokens"], fields["general.architecture"]
    config = {
        # Named so that transformers takes tokenizer.json as it is; GPT2Tokenizer would replace the
        # pre-tokeniser by GPT-2's own, which does not take digits apart.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "add_bos_token": fields["tokenizer.ggml.add_bos_token"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields[f"{kind}.context_length"],
    }
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    return config
