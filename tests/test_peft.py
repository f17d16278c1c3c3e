"""The exported adapter against the `peft` library itself: what it loads says what we say.

Needs torch, transformers and peft (the extra `convert`), which the other tests do without.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opd_jax import scoring
from opd_jax.models import hf, lora, peft, transformer
from opd_jax.models.config import PROJECTIONS, Lora
from tests import families, make_family_goldens

pytestmark = pytest.mark.slow
REASON = "needs torch, transformers and peft: pip install -e '.[convert]'"
TOLERANCE = 1e-4


@pytest.fixture
def library():
    """The library itself."""
    for name in ("torch", "transformers"):
        pytest.importorskip(name, reason=REASON)
    return pytest.importorskip("peft", reason=REASON)


def adapted(folder, targets):
    """An imported base, its config with deltas, and deltas that change every logit."""
    config = hf.read_config(folder)
    base = hf.load_params(folder, config)
    config = config.replace(lora=Lora(rank=3, alpha=6.0, targets=targets))
    _, shapes = lora.split(jax.eval_shape(lambda: transformer.init(config, jax.random.key(0))))
    draws = np.random.RandomState(0)
    delta = jax.tree.map(
        lambda x: jnp.asarray(0.2 * draws.standard_normal(x.shape), x.dtype), shapes
    )
    return config, base, delta


@functools.partial(jax.jit, static_argnums=1)
def ours(params, config, tokens_BT):
    length_B = jnp.full(tokens_BT.shape[0], tokens_BT.shape[1], jnp.int32)
    hidden = transformer.forward(params, config, tokens_BT, length_B)
    return scoring.logits(hidden, transformer.unembedding(params), softcap=config.final_softcap)


def gap(config, params, model):
    """The largest |difference| of two models' logits over the rows of families."""
    return max(
        np.abs(ours(params, config, row[None])[0] - make_family_goldens.logits(model, row)).max()
        for row in families.rows()
    )


@pytest.mark.parametrize("targets", [PROJECTIONS, ("q", "down")], ids=["all", "two"])
@pytest.mark.parametrize("name", ["llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_peft_loads_the_adapter_and_gives_the_same_logits(library, tmp_path, name, targets):
    folder = families.write(tmp_path / "base", name)
    config, base, delta = adapted(folder, targets)
    whole = lora.join(base, delta)
    peft.save_adapter(delta, config, tmp_path / "adapter", str(folder))
    plain = make_family_goldens.load(folder)
    assert gap(config, whole, plain) > 0.05  # Control: without the adapter it is another model.
    model = library.PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()
    found = {key for key in model.state_dict() if "lora_" in key}
    assert len(found) == 2 * len(targets) * config.num_layers
    assert gap(config, whole, model) < TOLERANCE
    # What the library merges is what we merge.
    merged = lora.merge(whole, config)
    assert gap(config.replace(lora=None), merged, model.merge_and_unload()) < TOLERANCE


def test_the_base_is_found_by_the_name_in_the_adapters_config(library, tmp_path):
    folder = families.write(tmp_path / "base", "qwen2")
    config, base, delta = adapted(folder, PROJECTIONS)
    peft.save_adapter(delta, config, tmp_path / "adapter", str(folder), dtype="bfloat16")
    model = library.AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "adapter")).eval()
    stored = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), delta)
    assert gap(config, lora.join(base, stored), model) < TOLERANCE
    assert gap(config, lora.join(base, delta), model) > TOLERANCE  # Control: rounded.
