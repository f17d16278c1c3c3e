import dataclasses

import numpy as np
import pytest

from opd_jax import domains, evaluate, ledger, steps
from opd_jax.config import EvaluationSettings
from opd_jax.core import rng
from opd_jax.data import tokenizer
from opd_jax.models.config import preset


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    found = domains.load("arithmetic", "test", (2,), str(tmp_path_factory.mktemp("tfds")))
    return list(found[:10])


@pytest.fixture
def evaluator(mesh, problems):
    tok = tokenizer.load("nano")
    tok.stop_ids = tuple(range(4, 320, 3))  # So that an untrained model stops now and then.
    return evaluate.Evaluator(
        config=preset("nano", tok.vocab_size),
        mesh=mesh,
        tokenizer=tok,
        problems={"test": {"arithmetic": problems}},
        settings=EvaluationSettings(samples=2, batch=4),
        max_new_tokens=5,
        buckets=(8,),
        seed=0,
    )


def params(evaluator):
    return steps.make_init(evaluator.config, evaluator.mesh)(rng.stream(0, "init"))


def test_records_hold_every_problem_once_and_count_real_lengths(evaluator, problems):
    (record,), flops = evaluator.run(params(evaluator), step=7, split="test")
    assert record["id"] == [p.id for p in problems]
    assert record["step"] == 7
    assert np.shape(record["correct"]) == np.shape(record["length"]) == (10, 2)
    assert set(np.ravel(record["truncated"])) <= {0, 1}
    config, length = evaluator.config, np.ravel(record["length"])
    tokens = [1 + len(evaluator.tokenizer.encode(p.prompt)) for p in problems]
    want = ledger.prefill(config, np.array(tokens))
    want += ledger.decode(config, np.repeat(tokens, 2), length)
    assert flops == want


def test_the_size_of_batches_changes_nothing(evaluator):
    # Ten problems in batches of four: the last is filled up, and its filling is not counted.
    weights = params(evaluator)
    whole = dataclasses.replace(evaluator, settings=EvaluationSettings(samples=2, batch=10))
    assert evaluator.run(weights, step=0, split="test") == whole.run(weights, step=0, split="test")
    # Control: other noise gives other answers.
    other = dataclasses.replace(evaluator, seed=1)
    (a,), (b,) = (e.run(weights, step=0, split="test")[0] for e in (evaluator, other))
    assert a["length"] != b["length"]


def test_greedy_is_one_sample_and_repeats(evaluator):
    weights = params(evaluator)
    (a,), _ = evaluator.run(weights, step=0, split="test", greedy=True)
    (b,), _ = dataclasses.replace(evaluator, seed=5).run(weights, step=0, split="test", greedy=True)
    assert np.shape(a["correct"]) == (10, 1)
    assert a["greedy"]
    assert a == b


def test_giving_up_is_possible_between_batches(evaluator):
    calls = []

    def check(phase):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluator.run(params(evaluator), step=0, split="test", check=check)


def test_every_domain_counts_once_whatever_its_size():
    records = [{"correct": [[1, 1]] * 90}, {"correct": [[0, 0]] * 10}]
    assert evaluate.accuracy(records) == 0.5
