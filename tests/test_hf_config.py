"""What the files of each family say, key by key, and what is written."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from opd_jax.models import hf_config, rope
from opd_jax.models.config import ModelConfig, RopeScaling
from tests import families


def parse(name, **changes):
    """A family's config with some keys changed; "absent" takes one away."""
    raw = {k: v for k, v in (families.CONFIGS[name] | changes).items() if v != "absent"}
    return hf_config.parse(raw, "config")


def plain_frequencies(head_dim, theta):
    return theta ** (-np.arange(0, head_dim, 2) / head_dim)


# --- rope --------------------------------------------------------------------------------------

LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("block", ["rope_scaling", "rope_parameters"])
def test_h01_llama3_scaling(key, block):
    config = parse("llama2", head_dim=64, rope_theta=5e5, **{block: {key: "llama3"} | LLAMA3})
    assert config.rope_theta == 5e5
    ratio = rope.frequencies(64, 5e5, config.rope_scaling) / plain_frequencies(64, 5e5)
    np.testing.assert_allclose(ratio[:15], 1, rtol=1e-5)
    np.testing.assert_allclose(ratio[15:18], [0.605573, 0.303743, 0.103448], rtol=1e-4)
    np.testing.assert_allclose(ratio[18:], 1 / 32, rtol=1e-5)


def test_h01_llama3_scaling_of_wider_heads():
    scaling = parse(
        "llama2", head_dim=128, rope_scaling={"rope_type": "llama3"} | LLAMA3 | {"factor": 8.0}
    ).rope_scaling
    ratio = rope.frequencies(128, 5e5, scaling) / plain_frequencies(128, 5e5)
    np.testing.assert_allclose(ratio[:29], 1, rtol=1e-5)
    blended = [0.828168, 0.643743, 0.493507, 0.371122, 0.271425, 0.190211]
    np.testing.assert_allclose(ratio[29:35], blended, rtol=1e-4)
    np.testing.assert_allclose(ratio[35:], 1 / 8, rtol=1e-5)


def test_h01_unknown_scaling_is_an_error():
    with pytest.raises(ValueError, match=r"rope_scaling\.rope_type='longrope' is not supported"):
        parse("llama2", rope_scaling={"rope_type": "longrope", "factor": 2.0})
    with pytest.raises(ValueError, match=r"rope_scaling\.kind='longrope'"):
        RopeScaling("longrope", 2.0)


def test_linear_scaling_divides_every_frequency():
    got = rope.frequencies(8, 1e4, RopeScaling("linear", 4.0))
    np.testing.assert_allclose(got, plain_frequencies(8, 1e4) / 4, rtol=1e-6)


def test_dynamic_scaling_begins_beyond_the_original_length():
    scaling = parse("llama_dynamic", max_position_embeddings=10).rope_scaling
    got = rope.frequencies(8, 1e4, scaling, jnp.array([[4, 10, 20]]))[0]
    np.testing.assert_allclose(got[:2], [plain_frequencies(8, 1e4)] * 2, rtol=1e-5)
    # Twice the length with factor 3: 3 * 2 - 2 = 4, to the power of 8/6.
    np.testing.assert_allclose(got[2], plain_frequencies(8, 1e4 * 4 ** (8 / 6)), rtol=1e-5)


def test_scaling_at_run_time_makes_the_model_longer():
    assert parse("llama_dynamic").max_length == 18
    assert parse("qwen2_yarn", max_position_embeddings=16).max_length == 64
    assert parse("llama3", max_position_embeddings=128).max_length == 128


def test_yarn_keeps_fast_dimensions_and_scales_scores():
    config = parse("qwen2_yarn", head_dim=64, rope_theta=1e4, rope_scaling={
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048,
    })  # fmt: skip
    ratio = rope.frequencies(64, 1e4, config.rope_scaling) / plain_frequencies(64, 1e4)
    # 32 turns in 2048 tokens: dimension 8.07, rounded down; one turn: 20.1, rounded up.
    np.testing.assert_allclose(ratio[:9], 1, rtol=1e-5)
    np.testing.assert_allclose(ratio[9], 1 - 1 / 13 * 0.75, rtol=1e-4)
    np.testing.assert_allclose(ratio[21:], 0.25, rtol=1e-5)
    factor = 0.1 * np.log(4) + 1
    np.testing.assert_allclose(config.attention_scale, 64**-0.5 * factor**2, rtol=1e-6)


@pytest.mark.parametrize(
    ("block", "factor", "attention"),
    [
        ({"factor": 4.0}, 4.0, 1.138629),
        ({"factor": None, "original_max_position_embeddings": 32}, 2.0, 1.069315),
        ({"factor": 4.0, "attention_factor": 1.5}, 4.0, 1.5),
        ({"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 4.0, 1.0),
        ({"factor": 4.0, "mscale": 0.707, "mscale_all_dim": 0.0}, 4.0, 1.138629),
    ],
)
def test_yarns_attention_factor_is_that_of_transformers(block, factor, attention):
    scaling = parse("llama2", rope_scaling={"rope_type": "yarn"} | block).rope_scaling
    assert scaling.factor == factor
    np.testing.assert_allclose(scaling.attention_factor, attention, rtol=1e-5)


def test_h02_h19_gemma3_has_two_bases(mesh):
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "head_dim": 256}
    config = parse("gemma3", **old, rope_scaling={"rope_type": "linear", "factor": 8.0})
    local = rope.frequencies(256, config.local_rope_theta)
    whole = rope.frequencies(256, config.rope_theta, config.rope_scaling)
    np.testing.assert_allclose(local[:2], [1, 0.930572], rtol=1e-5)
    np.testing.assert_allclose(whole[:2], [0.125, 0.112211], rtol=1e-5)
    unscaled = parse("gemma3", **old, rope_scaling=None)
    np.testing.assert_allclose(
        rope.frequencies(256, unscaled.rope_theta, unscaled.rope_scaling)[1], 0.897687, rtol=1e-5
    )
    nested = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    gone = dict.fromkeys(("rope_theta", "rope_local_base_freq", "rope_scaling"), "absent")
    assert parse("gemma3", **gone, head_dim=256, rope_parameters=nested) == config
    # What transformers means by absent ones.
    bare = parse("gemma3", **gone)
    assert (bare.rope_theta, bare.local_rope_theta, bare.rope_scaling) == (1e6, 1e4, None)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"rope_theta": 1e6}, r"rope_parameters\.rope_theta=1000000\.0 is not supported"),
        ({"sliding_attention": {"rope_type": "linear", "factor": 2.0}}, "without scaling"),
        ({"sliding_attention": {"rope_theta": 7.0}}, "contradictory RoPE rope_theta"),
    ],
)
def test_h19_other_settings_of_local_layers_are_refused(parameters, named):
    with pytest.raises(ValueError, match=named):
        parse("gemma3", rope_parameters=parameters)


# --- sizes, layers, norms ----------------------------------------------------------------------


def test_h05_an_absent_head_dim_means_what_the_family_means():
    assert parse("qwen3", head_dim="absent").head_dim == 128
    assert parse("qwen3", head_dim=None).head_dim == 6
    assert parse("gemma2", head_dim="absent").head_dim == 256
    assert parse("qwen2", head_dim="absent").head_dim == 6


@pytest.mark.parametrize(("layers", "whole"), [(26, [5, 11, 17, 23]), (34, [5, 11, 17, 23, 29])])
def test_h18_gemma3_without_a_pattern(layers, whole):
    config = parse("gemma3", layer_types="absent", num_hidden_layers=layers)
    assert sorted(set(range(layers)) - set(config.local_layers)) == whole


def test_h18_an_explicit_list_wins_and_a_pattern_is_checked():
    assert parse("gemma3", sliding_window_pattern=6).local_layers == (0,)
    by_pattern = {"layer_types": "absent", "num_hidden_layers": 4}
    assert parse("gemma3", **by_pattern, _sliding_window_pattern=2).local_layers == (0, 2)
    assert parse("gemma2", **by_pattern).local_layers == (0, 2)
    with pytest.raises(ValueError, match="sliding_window_pattern=0"):
        parse("gemma3", **by_pattern, sliding_window_pattern=0)
    with pytest.raises(ValueError, match="contradictory"):
        parse("gemma3", **by_pattern, sliding_window_pattern=2, _sliding_window_pattern=3)
    with pytest.raises(ValueError, match="layer_types="):
        parse("gemma3", layer_types=["sliding_attention", "chunked_attention"])
    with pytest.raises(ValueError, match="layer_types="):
        parse("gemma3", layer_types=["sliding_attention"])


def test_windows_of_mistral_and_qwen():
    assert parse("mistral").local_layers == (0, 1)
    assert parse("mistral", sliding_window=None).window is None
    assert parse("mistral", sliding_window="absent").window == 4096
    assert parse("qwen2").local_layers == ()
    assert parse("qwen2", sliding_window=4, max_window_layers=0).window is None
    assert parse("qwen2_windows").local_layers == (1,)
    with pytest.raises(ValueError, match="switched off by use_sliding_window"):
        parse("qwen2", layer_types=["sliding_attention", "full_attention"])


@pytest.mark.parametrize(("scalar", "scale"), [(144, 0.083333), (128, 0.088388)])
def test_h23_attention_scale(scalar, scale):
    config = parse("gemma2", query_pre_attn_scalar=scalar, head_dim=128)
    np.testing.assert_allclose(config.attention_scale, scale, rtol=1e-5)
    assert parse("qwen3", head_dim=128).attention_scale == 128**-0.5


def test_h14_sizes_and_flags_inside_a_text_config():
    raw = families.CONFIGS["gemma3"]
    inner = {k: v for k, v in raw.items() if k != "architectures"}
    outer = {"architectures": raw["architectures"], "text_config": inner}
    assert hf_config.parse(outer, "config") == parse("gemma3")
    outer["tie_word_embeddings"] = None
    assert hf_config.parse(outer, "config").tie_embeddings
    outer["tie_word_embeddings"] = False
    message = "contradictory tie_word_embeddings: False, text_config True; keep one"
    with pytest.raises(ValueError, match=message):
        hf_config.parse(outer, "config")
    untied = {k: v for k, v in inner.items() if k != "tie_word_embeddings"}
    assert not hf_config.parse(outer | {"text_config": untied}, "config").tie_embeddings
    with pytest.raises(ValueError, match="vision_config="):
        hf_config.parse(
            {k: v for k, v in outer.items() if k[0] != "t"} | raw | {"vision_config": {}}, "config"
        )


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("qwen2", {"use_mrope": True}, "use_mrope=True"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma2", {"final_logit_softcapping": 0.0}, "final_softcap=0.0: must be positive"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types="),
    ],
)  # fmt: skip
def test_what_a_family_cannot_do_is_refused(name, changes, named):
    with pytest.raises(ValueError, match=named):
        parse(name, **changes)


# --- written -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(families.CONFIGS))
def test_a_config_written_from_nothing_means_the_same(name):
    config = parse(name)
    content = json.loads(hf_config.render(config, None, "float32"))
    assert hf_config.parse(content, "config") == config
    # As a checkpoint of ours keeps it: through JSON.
    assert ModelConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_what_no_architecture_is_cannot_be_written():
    strange = parse("gemma3").replace(qkv_bias=True, activation="silu")
    with pytest.raises(ValueError, match=r"Gemma3ForCausalLM comes closest: qkv_bias: .*; activat"):
        hf_config.render(strange, None, "float32")


# --- files like those that are published -------------------------------------------------------

PUBLISHED = {
    "Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
    },
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "Qwen2.5-0.5B-Instruct": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896,
        "initializer_range": 0.02, "intermediate_size": 4864, "max_position_embeddings": 32768,
        "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.43.1", "use_cache": True,
        "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "gemma-2-2b": {
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid",
        "eos_token_id": 1, "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 9216,
        "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
        "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
        "sliding_window": 4096, "torch_dtype": "float32", "transformers_version": "4.42.4",
        "use_cache": True, "vocab_size": 256000,
    },
    "gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid",
        "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
        "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
        "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Llama-3.2-1B", {"rope_theta": 5e5, "max_length": 131072, "tie_embeddings": True}),
        ("Mistral-7B-v0.1", {"window": 4096, "local_layers": tuple(range(32)), "head_dim": 128}),
        ("Qwen2.5-0.5B-Instruct", {"qkv_bias": True, "local_layers": (), "head_dim": 64}),
        ("Qwen3-0.6B", {"qk_norm": True, "head_dim": 128, "num_heads": 16, "embed_dim": 1024}),
        ("gemma-2-2b", {"attention_softcap": 50.0, "final_softcap": 30.0, "tie_embeddings": True,
                        "local_layers": tuple(range(0, 26, 2)), "local_rope_theta": None}),
        ("gemma-3-1b-it", {"local_rope_theta": 1e4, "rope_theta": 1e6, "window": 512,
                           "unit_offset_norm": True}),
    ],
)  # fmt: skip
def test_files_like_the_published_ones_are_read(name, expected):
    config = hf_config.parse(PUBLISHED[name], name)
    assert {field: getattr(config, field) for field in expected} == expected
