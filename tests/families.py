"""Tiny models of every family: configs as their files have them, and weights that never change.

Sizes are such that what a family does shows in the logits: heads are wider than width / heads,
windows shorter than the rows, and rows longer than the context before RoPE scaling.
"""

import json
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

GOLDEN = Path(__file__).parent / "data/families.json"
LENGTHS = (14, 9)
PROMPTS = (8, 4)  # Of each row, where it is taken apart into prompt and completion.
VOCAB, WIDTH, MLP, HEAD_DIM = 40, 24, 32, 8


def _config(architecture, model_type, **changes):
    common = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "intermediate_size": MLP,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e3,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return common | changes


def _llama(**changes):
    return _config("LlamaForCausalLM", "llama", **changes)


_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 5,
    "sliding_window": 4,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
}
_LOCAL, _WHOLE = "sliding_attention", "full_attention"

CONFIGS = {
    "llama2": _llama(num_key_value_heads=4),
    "llama_linear": _llama(rope_scaling={"type": "linear", "factor": 4.0}),
    "llama_dynamic": _llama(
        rope_scaling={"rope_type": "dynamic", "factor": 3.0}, max_position_embeddings=6
    ),
    "llama3": _llama(
        rope_theta=300.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "smollm2": _llama(num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True),
    "mistral": _config("MistralForCausalLM", "mistral", sliding_window=4),
    "qwen2": _config("Qwen2ForCausalLM", "qwen2", tie_word_embeddings=True),
    "qwen2_yarn": _config(
        "Qwen2ForCausalLM",
        "qwen2",
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 4.0,
        },
    ),
    "qwen2_windows": _config(
        "Qwen2ForCausalLM",
        "qwen2",
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
    ),
    "qwen3": _config("Qwen3ForCausalLM", "qwen3", attention_bias=False),
    "gemma2": _config(
        "Gemma2ForCausalLM",
        "gemma2",
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        **_GEMMA,
    ),
    "gemma3": _config(
        "Gemma3ForCausalLM",
        "gemma3_text",
        num_key_value_heads=1,
        rope_theta=1e5,
        rope_local_base_freq=100.0,
        rope_scaling={"rope_type": "linear", "factor": 2.0},
        layer_types=[_LOCAL, _WHOLE],
        **_GEMMA,
    ),
}


def shapes(raw):
    """Name and shape of every tensor, as transformers names them."""
    width, heads = raw["hidden_size"], raw["num_attention_heads"]
    kv, head, mlp = raw["num_key_value_heads"], raw["head_dim"], raw["intermediate_size"]
    kind = raw["model_type"]
    found = {"model.embed_tokens.weight": (VOCAB, width), "model.norm.weight": (width,)}
    if not raw["tie_word_embeddings"]:
        found["lm_head.weight"] = (VOCAB, width)
    layer = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (heads * head, width),
        "self_attn.k_proj.weight": (kv * head, width),
        "self_attn.v_proj.weight": (kv * head, width),
        "self_attn.o_proj.weight": (width, heads * head),
        "mlp.gate_proj.weight": (mlp, width),
        "mlp.up_proj.weight": (mlp, width),
        "mlp.down_proj.weight": (width, mlp),
    }
    if kind == "qwen2":
        layer |= {"self_attn.q_proj.bias": (heads * head,), "self_attn.k_proj.bias": (kv * head,)}
        layer["self_attn.v_proj.bias"] = (kv * head,)
    if kind in ("qwen3", "gemma3_text"):
        layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    if kind.startswith("gemma"):
        layer |= dict.fromkeys(
            ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"), (width,)
        )
    for n in range(raw["num_hidden_layers"]):
        found |= {f"model.layers.{n}.{name}": shape for name, shape in layer.items()}
    return found


def tensors(raw, dtype=np.float32):
    """The weights, by a generator that numpy keeps as it is for ever, each from its own name."""
    return {name: _tensor(name, shape, raw, dtype) for name, shape in shapes(raw).items()}


def _tensor(name, shape, raw, dtype):
    draws = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith(".bias"):
        return (0.5 * draws).astype(dtype)
    if "norm" in name:
        center = 0.0 if raw["model_type"].startswith("gemma") else 1.0
        return (center + 0.3 * draws).astype(dtype)
    return (1.5 * shape[1] ** -0.5 * draws).astype(dtype)


def write(folder: Path, name: str, dtype=np.float32) -> Path:
    """A model's folder, in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    save_file(tensors(CONFIGS[name], dtype), folder / "model.safetensors")
    return folder


def rows():
    """Two rows of tokens, of LENGTHS."""
    draws = np.random.RandomState(0)
    return [draws.randint(0, VOCAB, length).astype(np.int32) for length in LENGTHS]
