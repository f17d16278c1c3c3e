"""config.json of a Hugging Face folder of the Llama family: read into a ModelConfig, and written.

What the file asks for and the transformer cannot do is refused by name, never ignored.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from opd_jax.models.config import ModelConfig

CONFIG = "config.json"

# What transformers' LlamaConfig means by an absent key.
_ABSENT = {"architectures": None, "model_type": None, "num_key_value_heads": None,
           "head_dim": None, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
           "tie_word_embeddings": False, "rope_theta": None, "rope_parameters": None,
           "rope_scaling": None}  # fmt: skip

# Keys that change the forward pass, and the values of them that are implemented.
_IMPLEMENTED: dict[str, tuple] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False, None),
    "sliding_window": (None,),
    "quantization_config": (None,),
}

_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
             "intermediate_size")  # fmt: skip


def read_config(
    hf_dir: epath.PathLike, *, dtype: str = "float32", remat: str = "matmuls"
) -> ModelConfig:
    """The ModelConfig of a Hugging Face folder of the Llama family.

    Args:
      hf_dir: a folder with a `config.json` whose architecture is LlamaForCausalLM.
      dtype: of matmuls and activations; the file's own dtype says only how weights are stored.
      remat: see ModelConfig.

    Raises:
      FileNotFoundError: there is no config.json.
      ValueError: the config asks for something that is not implemented, contradicts itself, or
        lacks a size; the message names the field.
    """
    file = epath.Path(hf_dir) / CONFIG
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist: not a Hugging Face model folder")
    raw = _ABSENT | json.loads(file.read_text())
    if raw["architectures"] != ["LlamaForCausalLM"]:
        raise ValueError(
            f"{file}: architectures={raw['architectures']!r} is not supported; "
            "only ['LlamaForCausalLM'] can be imported"
        )
    for key, allowed in _IMPLEMENTED.items():
        if key in raw and raw[key] not in allowed:
            raise ValueError(f"{file}: {key}={raw[key]!r} is not supported, only {allowed[0]!r} is")
    missing = [key for key in _REQUIRED if key not in raw]
    if missing:
        raise ValueError(f"{file}: lacks {', '.join(missing)}")
    width, heads = raw["hidden_size"], raw["num_attention_heads"]
    if raw["head_dim"] is None and width % heads:
        raise ValueError(
            f"{file}: no head_dim, and hidden_size={width} is not a multiple of "
            f"num_attention_heads={heads}; state head_dim"
        )
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        embed_dim=width,
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=heads if raw["num_key_value_heads"] is None else raw["num_key_value_heads"],
        head_dim=width // heads if raw["head_dim"] is None else raw["head_dim"],
        mlp_dim=raw["intermediate_size"],
        max_length=raw["max_position_embeddings"],
        rope_theta=_rope_theta(raw, file),
        norm_eps=raw["rms_norm_eps"],
        tie_embeddings=raw["tie_word_embeddings"],
        dtype=dtype,
        remat=remat,
    )


def _rope_theta(raw: Mapping[str, Any], file: epath.Path) -> float:
    """RoPE's base, from the old key or from the block that newer files nest it in."""
    found = {} if raw["rope_theta"] is None else {"rope_theta": raw["rope_theta"]}
    for key in ("rope_parameters", "rope_scaling"):
        for field, value in (raw[key] or {}).items():
            where = f"{key}.{field}"
            if field == "rope_theta":
                found[where] = value
            elif field in ("rope_type", "type"):
                if value != "default":
                    raise ValueError(
                        f"{file}: {where}={value!r} is not supported, only 'default' is: scaled "
                        "RoPE is not implemented"
                    )
            elif field != "partial_rotary_factor" or value != 1:
                raise ValueError(f"{file}: {where}={value!r} is not supported")
    if len(set(found.values())) > 1:
        raise ValueError(f"{file}: contradictory RoPE bases {found}; keep one")
    return float(next(iter(found.values()), 10_000.0))


def _new_config(config: ModelConfig) -> dict[str, Any]:
    # The ids of special tokens are null, since transformers takes an absent key to mean 1 and 2.
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_dim,
        "max_position_embeddings": config.max_length,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _source_config(config: ModelConfig, source_dir: epath.Path) -> dict[str, Any]:
    """The config.json that `config` was imported from, which must describe the same model."""
    free = {"dtype": config.dtype, "remat": config.remat, "max_length": config.max_length,
            "tie_embeddings": config.tie_embeddings}  # fmt: skip
    source, ours = read_config(source_dir).replace(**free), dataclasses.asdict(config)
    changed = [
        f"{field}: source {value!r}, params {ours[field]!r}"
        for field, value in dataclasses.asdict(source).items()
        if value != ours[field]
    ]
    if changed:
        raise ValueError(f"source_dir={source_dir} is another model: {'; '.join(changed)}")
    return json.loads((source_dir / CONFIG).read_text())


def render(config: ModelConfig, source_dir: epath.PathLike | None, dtype: str) -> str:
    """The text of the config.json of a model.

    Args:
      config: the model.
      source_dir: the folder that it was imported from, all of whose keys are kept; None means none.
      dtype: how the weights are stored.

    Raises:
      ValueError: `source_dir` holds another model; every differing field is named.
    """
    if source_dir is None:
        content = _new_config(config)
    else:
        content = _source_config(config, epath.Path(source_dir))
    content["tie_word_embeddings"] = config.tie_embeddings
    # Releases of transformers differ in the key's name; the old one is understood by all.
    stored = [key for key in ("torch_dtype", "dtype") if key in content] or ["torch_dtype"]
    return json.dumps(content | dict.fromkeys(stored, dtype), indent=2) + "\n"
