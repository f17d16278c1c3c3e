"""config.json of a Hugging Face folder: read into a ModelConfig, and written.

What the file asks for and the transformer cannot do is refused by name, never ignored.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from opd_jax.models import hf_families
from opd_jax.models.config import ModelConfig, RopeScaling, yarn_attention_factor
from opd_jax.models.hf_families import LOCAL, WHOLE, Raw

CONFIG = "config.json"

# Fields of the RoPE blocks by type, besides the base: what an absent one means; ... if it must be.
_ROPE_FIELDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": ...},
    "dynamic": {"factor": ...},
    "llama3": {"factor": ..., "low_freq_factor": ..., "high_freq_factor": ...,
               "original_max_position_embeddings": None},
    "yarn": {"factor": None, "original_max_position_embeddings": None, "attention_factor": None,
             "beta_fast": None, "beta_slow": None, "mscale": None, "mscale_all_dim": None,
             "truncate": True},
}  # fmt: skip

# What a family means that does not read such a key.
_NO_WINDOW = {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0,
              "layer_types": None}  # fmt: skip


def read_config(
    hf_dir: epath.PathLike, *, dtype: str = "float32", remat: str = "matmuls"
) -> ModelConfig:
    """The ModelConfig of a Hugging Face folder.

    Args:
      hf_dir: a folder with a `config.json` of one of the architectures in hf_families.
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
    config = parse(json.loads(file.read_text()), str(file))
    return config.replace(dtype=dtype, remat=remat)


def parse(raw: Raw, where: str) -> ModelConfig:
    """The ModelConfig that the content of a config.json describes; see `read_config`."""
    raw, family = hf_families.complete(raw, where)
    width, heads = raw["hidden_size"], raw["num_attention_heads"]
    if raw["head_dim"] is None and width % heads:
        raise ValueError(
            f"{where}: no head_dim, and hidden_size={width} is not a multiple of "
            f"num_attention_heads={heads}; state head_dim"
        )
    head_dim = width // heads if raw["head_dim"] is None else raw["head_dim"]
    window, local_layers = _local_layers(raw, where)
    theta, scaling, local_theta = _rope(raw, where)
    max_length = raw["max_position_embeddings"]
    if scaling is not None and scaling.kind in ("dynamic", "yarn"):
        # Such files often state the context before scaling.
        max_length = max(max_length, int(scaling.original_length * scaling.factor))
    optional = {
        "query_pre_attn_scalar": "query_pre_attn_scalar",
        "attn_logit_softcapping": "attention_softcap",
        "final_logit_softcapping": "final_softcap",
    }
    read = {field: raw[key] for key, field in optional.items() if key in family.absent}
    if "query_pre_attn_scalar" in read and read["query_pre_attn_scalar"] == head_dim:
        read["query_pre_attn_scalar"] = None
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        embed_dim=width,
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=heads if raw["num_key_value_heads"] is None else raw["num_key_value_heads"],
        head_dim=head_dim,
        mlp_dim=raw["intermediate_size"],
        max_length=max_length,
        rope_theta=theta,
        norm_eps=raw["rms_norm_eps"],
        tie_embeddings=raw["tie_word_embeddings"],
        rope_scaling=scaling,
        window=window if local_layers else None,
        local_layers=local_layers,
        local_rope_theta=local_theta if local_layers else None,
        **read,
        **family.fields,
    )


# --- layers ------------------------------------------------------------------------------------


def _local_layers(raw: Raw, where: str) -> tuple[int | None, tuple[int, ...]]:
    """The window, and the layers that have it: an explicit list wins over a pattern."""
    raw = _NO_WINDOW | raw
    count, types = raw["num_hidden_layers"], raw["layer_types"]
    window = raw["sliding_window"] if raw["use_sliding_window"] else None
    if types is None:
        return window, _by_pattern(raw, window, count, where)
    if len(types) != count or not set(types) <= {LOCAL, WHOLE}:
        raise ValueError(
            f"{where}: layer_types={types!r} is not a list of {count} times {LOCAL!r} or {WHOLE!r}"
        )
    local = tuple(i for i, kind in enumerate(types) if kind == LOCAL)
    if local and window is None:
        raise ValueError(
            f"{where}: layer_types has {LOCAL!r}, but sliding_window={raw['sliding_window']!r} is "
            "none or switched off by use_sliding_window"
        )
    return window, local


def _by_pattern(raw: Raw, window: int | None, count: int, where: str) -> tuple[int, ...]:
    if "query_pre_attn_scalar" in raw:  # Gemma: every so many layers a global one.
        stated = {
            key: raw[key]
            for key in ("sliding_window_pattern", "_sliding_window_pattern")
            if key in raw and raw[key] is not None
        }
        if len(set(stated.values())) > 1:
            raise ValueError(f"{where}: contradictory {stated}; keep one")
        usual = 6 if "rope_local_base_freq" in raw else 2
        every = next(iter(stated.values()), usual)
        if every < 1 or window is None:
            raise ValueError(
                f"{where}: sliding_window_pattern={every}, sliding_window={window}: each must be "
                "at least 1"
            )
        return tuple(i for i in range(count) if (i + 1) % every)
    if window is None:
        return ()
    return tuple(range(raw["max_window_layers"], count))


# --- rope --------------------------------------------------------------------------------------


def _rope(raw: Raw, where: str) -> tuple[float, RopeScaling | None, float | None]:
    """Base and scaling of the layers that see everything, and the base of local ones if it differs.

    The base stands beside the sizes or in the block that newer files nest it in; the block of
    Gemma 3 has one part for each kind of layer.
    """
    parameters, local_blocks = raw["rope_parameters"] or {}, {}
    blocks = {"rope_parameters": parameters, "rope_scaling": raw["rope_scaling"] or {}}
    two_bases = "rope_local_base_freq" in raw
    if two_bases:
        odd = parameters.keys() - {LOCAL, WHOLE}
        if odd:
            raise ValueError(
                f"{where}: rope_parameters.{min(odd)}={parameters[min(odd)]!r} is not supported: "
                f"only a part for {LOCAL!r} and one for {WHOLE!r} are"
            )
        parts = {f"rope_parameters.{kind}": block or {} for kind, block in parameters.items()}
        local_blocks = {k: v for k, v in parts.items() if k.endswith(LOCAL)}
        blocks = {k: v for k, v in parts.items() if k.endswith(WHOLE)}
        blocks["rope_scaling"] = raw["rope_scaling"] or {}
    theta, scaling = _rope_block(raw, "rope_theta", blocks, where)
    if not two_bases:
        return 10_000.0 if theta is None else theta, scaling, None
    local, local_scaling = _rope_block(raw, "rope_local_base_freq", local_blocks, where)
    if local_scaling is not None:
        raise ValueError(
            f"{where}: rope_parameters.{LOCAL}={local_blocks!r} is not supported: local layers "
            "are rotated without scaling"
        )
    return 1e6 if theta is None else theta, scaling, 1e4 if local is None else local


def _rope_block(
    raw: Raw, base_key: str, blocks: Mapping[str, Raw], where: str
) -> tuple[float | None, RopeScaling | None]:
    """One base and one scaling out of all the places that may state them."""
    stated: dict[str, dict[str, Any]] = {}
    if raw[base_key] is not None:
        stated["rope_theta"] = {base_key: raw[base_key]}
    for name, block in blocks.items():
        for field, value in block.items():
            kind = "rope_type" if field == "type" else field
            stated.setdefault(kind, {})[f"{name}.{field}"] = value
    original = raw["original_max_position_embeddings"]
    if original is not None:
        key = "original_max_position_embeddings"
        stated.setdefault(key, {})[key] = original
    for field, found in stated.items():
        if len(set(found.values())) > 1:
            raise ValueError(f"{where}: contradictory RoPE {field}: {found}; keep one")
    values = {field: next(iter(found.values())) for field, found in stated.items()}
    theta = values.pop("rope_theta", None)
    kind = values.pop("rope_type", None) or "default"
    if kind not in _ROPE_FIELDS:
        name = next(iter(stated["rope_type"]))
        raise ValueError(
            f"{where}: {name}={kind!r} is not supported, only {', '.join(_ROPE_FIELDS)} are"
        )
    if values.pop("partial_rotary_factor", None) not in (1, None):
        raise ValueError(f"{where}: partial_rotary_factor is not supported: {stated}")
    fields = _ROPE_FIELDS[kind]
    for field in values.keys() - fields.keys():
        name = next(iter(stated[field]))
        raise ValueError(f"{where}: {name}={values[field]!r} is not supported with {kind!r} RoPE")
    missing = [field for field, value in fields.items() if value is ... and field not in values]
    if missing:
        raise ValueError(f"{where}: {kind!r} RoPE lacks {', '.join(missing)}")
    scaling = _scaling(kind, fields | values, raw["max_position_embeddings"])
    return None if theta is None else float(theta), scaling


def _scaling(kind: str, values: Raw, max_positions: int) -> RopeScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(values["factor"]))
    if kind == "dynamic":
        return RopeScaling("dynamic", float(values["factor"]), max_positions)
    original = values["original_max_position_embeddings"] or max_positions
    if kind == "llama3":
        return RopeScaling(
            "llama3", float(values["factor"]), original,
            low_freq_factor=float(values["low_freq_factor"]),
            high_freq_factor=float(values["high_freq_factor"]),
        )  # fmt: skip
    factor = float(values["factor"] or max_positions / original)
    attention = values["attention_factor"]
    if attention is None and values["mscale"] and values["mscale_all_dim"]:
        attention = yarn_attention_factor(factor, values["mscale"])
        attention /= yarn_attention_factor(factor, values["mscale_all_dim"])
    return RopeScaling(
        "yarn", factor, original,
        beta_fast=float(values["beta_fast"] or 32),
        beta_slow=float(values["beta_slow"] or 1),
        truncate=values["truncate"],
        attention_factor=float(yarn_attention_factor(factor) if attention is None else attention),
    )  # fmt: skip


# --- writing -----------------------------------------------------------------------------------


def _architecture(c: ModelConfig) -> str:
    """The architecture that comes closest to a model."""
    if c.post_norms:
        return "Gemma3ForCausalLM" if c.qk_norm else "Gemma2ForCausalLM"
    if c.qk_norm:
        return "Qwen3ForCausalLM"
    if c.qkv_bias:
        return "Qwen2ForCausalLM"
    return "MistralForCausalLM" if c.local_layers else "LlamaForCausalLM"


def _new_config(c: ModelConfig) -> dict[str, Any]:
    architecture = _architecture(c)
    scaling = c.rope_scaling
    dynamic = scaling is not None and scaling.kind == "dynamic"
    gemma = architecture.startswith("Gemma")
    content = {
        "architectures": [architecture],
        "model_type": hf_families.FAMILIES[architecture].model_type,
        "vocab_size": c.vocab_size,
        "hidden_size": c.embed_dim,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.mlp_dim,
        "max_position_embeddings": scaling.original_length if dynamic else c.max_length,
        "rope_theta": c.rope_theta,
        "rms_norm_eps": c.norm_eps,
        "hidden_activation" if gemma else "hidden_act": "gelu_pytorch_tanh" if gemma else "silu",
        "tie_word_embeddings": c.tie_embeddings,
        # Null, since transformers takes an absent key to mean 1 and 2.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if scaling is not None:
        content["rope_scaling"] = _rope_scaling_block(scaling)
    if architecture == "LlamaForCausalLM":
        content |= {"attention_bias": False, "mlp_bias": False}
    elif architecture == "MistralForCausalLM":
        content["sliding_window"] = c.window
    elif c.local_layers:
        kinds = [LOCAL if i in c.local_layers else WHOLE for i in range(c.num_layers)]
        content |= {"sliding_window": c.window, "layer_types": kinds}
        if not gemma:
            content |= {"use_sliding_window": True, "max_window_layers": min(c.local_layers)}
    if gemma:
        scalar = c.head_dim if c.query_pre_attn_scalar is None else c.query_pre_attn_scalar
        content["query_pre_attn_scalar"] = int(scalar) if scalar == int(scalar) else scalar
        content["final_logit_softcapping"] = c.final_softcap
        content["attn_logit_softcapping"] = c.attention_softcap
        if not c.local_layers:
            content["layer_types"] = [WHOLE] * c.num_layers
    if architecture == "Gemma3ForCausalLM" and c.local_layers:
        content["rope_local_base_freq"] = c.local_rope_theta
    return content


def _rope_scaling_block(s: RopeScaling) -> dict[str, Any]:
    block = {"rope_type": s.kind, "factor": s.factor}
    if s.kind in ("llama3", "yarn"):
        block["original_max_position_embeddings"] = s.original_length
    if s.kind == "llama3":
        block |= {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
    if s.kind == "yarn":
        block |= {"beta_fast": s.beta_fast, "beta_slow": s.beta_slow, "truncate": s.truncate}
        block["attention_factor"] = s.attention_factor
    return block


# What may differ from the source of a model: it is ours to choose.
_FREE = ("dtype", "remat", "max_length", "tie_embeddings", "num_tokens")


def _differences(theirs: ModelConfig, ours: ModelConfig, name: str) -> list[str]:
    a, b = dataclasses.asdict(theirs), dataclasses.asdict(ours)
    return [
        f"{field}: {name} {a[field]!r}, params {b[field]!r}"
        for field in a
        if field not in _FREE and a[field] != b[field]
    ]


def render(config: ModelConfig, source_dir: epath.PathLike | None, dtype: str | None) -> str:
    """The text of the config.json of a model.

    Args:
      config: the model.
      source_dir: the folder that it was imported from, all of whose keys are kept; None means none.
      dtype: how the weights are stored; None: as in the source.

    Raises:
      ValueError: `source_dir` holds another model, or without it no supported architecture is this
        model; every differing field is named.
    """
    if source_dir is None:
        content = _new_config(config)
        architecture = content["architectures"][0]
        changed = _differences(parse(content, "config"), config, architecture)
        what = f"no supported architecture is this model; {architecture} comes closest"
    else:
        changed = _differences(read_config(source_dir), config, "source")
        content = json.loads((epath.Path(source_dir) / CONFIG).read_text())
        what = f"source_dir={source_dir} is another model"
    if changed:
        raise ValueError(f"{what}: {'; '.join(changed)}")
    content["tie_word_embeddings"] = config.tie_embeddings
    if "text_config" in content and "tie_word_embeddings" in content["text_config"]:
        content["text_config"]["tie_word_embeddings"] = config.tie_embeddings
    if dtype is None:
        return json.dumps(content, indent=2) + "\n"
    # Releases of transformers differ in the key's name; the old one is understood by all.
    stored = [key for key in ("torch_dtype", "dtype") if key in content] or ["torch_dtype"]
    return json.dumps(content | dict.fromkeys(stored, dtype), indent=2) + "\n"
