"""tools/bench_rollout.py: both ways draw the same tokens, and are as different as they are said."""

import dataclasses

import jax
import pytest

from opd_jax import rollout
from opd_jax.models import transformer
from tests import tiny
from tools import bench, bench_rollout

MODEL = tiny.CONFIG.replace(num_layers=1)
WORK = bench.Workload(MODEL, prompts=4, samples=4, prompt_tokens=5, new_tokens=10)
TAIL = bench_rollout.Case(WORK, stops=8)
ONE = bench_rollout.Case(dataclasses.replace(WORK, prompts=1), repeated=True)


@pytest.fixture
def traced(monkeypatch):
    """(rows, prompts) of every decode loop that is traced."""
    sizes, decode = [], transformer.decode

    def spy(top, layers, config, token_B, t, length_B, cache, prefix):
        sizes.append((token_B.shape[0], prefix.mask_PL.shape[0]))
        return decode(top, layers, config, token_B, t, length_B, cache, prefix)

    monkeypatch.setattr(transformer, "decode", spy)
    monkeypatch.setattr(rollout, "LONG", 10)
    monkeypatch.setattr(rollout, "FEWEST", 4)
    return sizes


def test_a_batch_that_shrinks_against_one_that_does_not(mesh, traced):
    found = bench_rollout.measure(TAIL, mesh, 2)
    sizes = list(dict.fromkeys(traced))
    assert sizes == [(16, 4), (8, 8), (4, 4)]
    assert traced.count((8, 8)) == traced.count((4, 4))  # The slower way has none of either.
    assert traced.count((16, 4)) == 6 * traced.count((8, 8))  # Three sizes of the cache, twice.
    assert found["same_tokens"] > 0.99
    assert 1 < found["mean_length"] < 10
    assert found["speedup_min"] <= found["speedup"] <= found["speedup_max"]


def test_a_prompt_prefilled_once_against_one_for_each_sample(mesh, traced):
    found = bench_rollout.measure(ONE, mesh, 1)
    assert set(traced) == {(4, 1), (4, 4)}
    assert found["same_tokens"] > 0.99
    assert found["mean_length"] == 10


def test_other_tokens_are_an_error(mesh, monkeypatch):
    sample, calls = rollout.sample, []

    def other(params, config, prompt, key, sampling):
        calls.append(key)
        return sample(params, config, prompt, jax.random.fold_in(key, len(calls)), sampling)

    monkeypatch.setattr(rollout, "sample", other)
    with pytest.raises(RuntimeError, match=r"same token in .*% of all places only"):
        bench_rollout.measure(TAIL, mesh, 1)
