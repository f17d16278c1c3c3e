"""What a config.json of each supported architecture means, key by key.

A key is read, or has one implemented value, or is known not to touch the forward pass. There is no
fourth kind: whatever else a file holds is refused by name.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

Raw = Mapping[str, Any]
LOCAL, WHOLE = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture."""

    architecture: str
    model_type: str
    absent: Raw  # Keys that it reads besides REQUIRED, and what transformers means without them.
    fields: Raw  # Of ModelConfig: what the architecture always does.
    implemented: Mapping[str, tuple]  # Keys with the values that can be represented, besides ONLY.


REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
            "intermediate_size")  # fmt: skip

# Of every architecture.
_ABSENT = {
    "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": None,
    "rope_parameters": None, "rope_scaling": None, "original_max_position_embeddings": None,
}  # fmt: skip
_SILU = {"hidden_act": ("silu", "swish")}
ONLY: dict[str, tuple] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "use_bidirectional_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": ({}, None),
    "chunk_size_feed_forward": (0, None),
}

# Ids, training, generation, bookkeeping: the logits of given tokens do not depend on them.
_HARMLESS_KEYS = """
    architectures model_type text_config _name_or_path name_or_path transformers_version torch_dtype
    dtype initializer_range use_cache cache_implementation _attn_implementation attn_implementation
    _attn_implementation_autoset bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id
    decoder_start_token_id tokenizer_class prefix model_max_length max_sequence_length
    pretraining_tp is_llama_config is_decoder torchscript output_attentions output_hidden_states
    return_dict use_bfloat16 tf_legacy_loss finetuning_task task_specific_params problem_type
    id2label label2id num_labels transformers.js_config unsloth_version unsloth_fixed
    cross_attention_hidden_size max_length min_length do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens
"""
HARMLESS = frozenset(_HARMLESS_KEYS.split())

_WINDOWED = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
             "layer_types": None}  # fmt: skip
_GEMMA = {
    "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None,
}  # fmt: skip
_GEMMA_FIELDS = {"unit_offset_norm": True, "post_norms": True, "scale_embeddings": True,
                 "activation": "gelu_tanh"}  # fmt: skip
_GELU = {"hidden_activation": ("gelu_pytorch_tanh", None), "hidden_act": ("gelu_pytorch_tanh",)}

FAMILIES = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", "llama", _ABSENT, {}, _SILU),
        Family(
            "MistralForCausalLM",
            "mistral",
            _ABSENT
            | {"num_key_value_heads": 8, "max_position_embeddings": 131_072}
            | {"sliding_window": 4096},
            {},
            _SILU,
        ),
        Family(
            "Qwen2ForCausalLM",
            "qwen2",
            _ABSENT | {"max_position_embeddings": 32_768} | _WINDOWED,
            {"qkv_bias": True},
            _SILU | {"attention_bias": (True, None)},
        ),
        Family(
            "Qwen3ForCausalLM",
            "qwen3",
            _ABSENT | {"max_position_embeddings": 32_768, "head_dim": 128} | _WINDOWED,
            {"qk_norm": True},
            _SILU,
        ),
        Family(
            "Gemma2ForCausalLM",
            "gemma2",
            _ABSENT
            | _GEMMA
            | {"max_position_embeddings": 8192}
            | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            _GEMMA_FIELDS,
            _GELU,
        ),
        Family(
            "Gemma3ForCausalLM",
            "gemma3_text",
            _ABSENT
            | _GEMMA
            | {"max_position_embeddings": 131_072, "final_logit_softcapping": None}
            | {"rope_local_base_freq": None}
            | {"sliding_window_pattern": None, "_sliding_window_pattern": None},
            _GEMMA_FIELDS | {"qk_norm": True},
            # transformers keeps this cap in the config of Gemma 3 and does not apply it.
            _GELU | {"attn_logit_softcapping": (None,)},
        ),
    )
}


def complete(raw: Raw, where: str) -> tuple[Raw, Family]:
    """A file's keys with those of a nested `text_config`, and what absent ones mean.

    Args:
      raw: the content of config.json.
      where: the file, for messages.

    Raises:
      ValueError: the architecture is not supported, or keys contradict each other, are missing, or
        cannot be represented; every key is named.
    """
    raw = {"architectures": None, "model_type": None} | raw
    architectures = raw["architectures"]
    known = len(architectures or ()) == 1 and architectures[0] in FAMILIES
    if not known:
        raise ValueError(
            f"{where}: architectures={architectures!r} is not supported; one of "
            f"{', '.join(FAMILIES)} can be imported"
        )
    family = FAMILIES[architectures[0]]
    raw = _flatten(raw, where)
    model_type, problems = raw["model_type"], []
    if model_type not in (family.model_type, None):
        problems.append(f"model_type={model_type!r} is not that of {family.architecture}")
    implemented = {k: v for k, v in ONLY.items() if k not in family.absent} | family.implemented
    known_keys = {*REQUIRED, *family.absent, *implemented, *HARMLESS}
    for key, value in raw.items():
        if key not in known_keys:
            problems.append(
                f"{key}={value!r} is not supported: {family.architecture} is not known to have "
                "this key; if it does not change the forward pass, remove it"
            )
        elif key in implemented and value not in implemented[key]:
            problems.append(f"{key}={value!r} is not supported, only {implemented[key][0]!r} is")
    missing = [key for key in REQUIRED if key not in raw]
    if missing:
        problems.append(f"lacks {', '.join(missing)}")
    if problems:
        raise ValueError(f"{where}: " + "; ".join(problems))
    return family.absent | raw, family


def _flatten(raw: Raw, where: str) -> Raw:
    """The keys of a multimodal file's text model, which may stand at either level."""
    if "text_config" not in raw:
        return raw
    text = raw["text_config"]
    contradictory = [
        f"{key}: {raw[key]!r}, text_config {value!r}"
        for key, value in text.items()
        if key not in HARMLESS and key in raw and None not in (raw[key], value)
        and raw[key] != value
    ]  # fmt: skip
    if contradictory:
        raise ValueError(f"{where}: contradictory {'; '.join(contradictory)}; keep one")
    outer = {k: v for k, v in raw.items() if k != "text_config" and v is not None}
    return text | {k: v for k, v in outer.items() if k not in text or text[k] is None}
