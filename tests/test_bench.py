"""The benchmark tool: what it counts, what it times, and that it runs on any mesh."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opd_jax import ledger
from opd_jax.core import sharding
from tests import tiny
from tools import bench

WORKLOAD = bench.Workload(
    tiny.CONFIG, prompts=4, samples=2, prompt_tokens=5, new_tokens=4, micro_batches=4
)


@pytest.fixture(scope="module")
def measured():
    """The Bench of a tiny workload, and its figures."""
    made = []

    class Kept(bench.Bench):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    mesh = sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])
    with pytest.MonkeyPatch.context() as patch, jax.set_mesh(mesh):
        patch.setattr(bench, "peak_side", lambda: 32)
        patch.setattr(bench, "Bench", Kept)
        figures = bench.measure(WORKLOAD, mesh, 2)
    return made[0], figures


def test_every_phase_is_timed_and_priced(measured):
    _, figures = measured
    phases = figures["phases"]
    assert set(phases) == {
        "matmul", "prefill", "decode", "rollout", "score", "update_grpo", "update_opd",
        "grpo_step", "opd_step",
    }  # fmt: skip
    for name, phase in phases.items():
        # The difference of two phases this small may be anything.
        if name != "decode":
            assert 0 < phase["min_s"] <= phase["median_s"] <= phase["max_s"]
    for key in ("grpo_step_s", "opd_step_s", "decode_tokens_per_s", "peak_bytes", "matmul_gflops"):
        assert np.isfinite(figures[key])
    assert phases["matmul"]["of_peak"] <= 1
    assert all(seconds > 0 for seconds in figures["compile_s"].values())
    assert set(figures["compile_s"]) == set(figures["bytes"])

    gflop = {name: phase["gflop"] for name, phase in phases.items()}
    prompt_P, length_B = np.full(4, 5), np.full(8, 4)
    decode = ledger.decode(tiny.CONFIG, np.repeat(prompt_P, 2), length_B)
    score = ledger.score(tiny.CONFIG, prompt_P, length_B)
    assert gflop["decode"] == pytest.approx(decode / 1e9)
    assert gflop["grpo_step"] == pytest.approx(gflop["rollout"] + 3 * score / 1e9)
    assert gflop["opd_step"] == pytest.approx(gflop["rollout"] + 4 * score / 1e9)
    assert gflop["update_grpo"] < gflop["update_opd"] < gflop["update_grpo"] + score / 1e9
    assert gflop["matmul"] == pytest.approx(2 * 32**3 / 1e9)


def test_no_completion_stops_and_both_updates_learn(measured):
    made, _ = measured
    assert np.asarray(made.rollout.length_B).tolist() == [4] * 8
    assert not np.asarray(made.rollout.stopped_B).any()
    rewards = np.asarray(made.rewards(made.rollout))
    assert rewards.shape == (4, 2)
    assert 0 < rewards.mean() < 1
    updates = int(made.state.step)
    for algorithm, group in made.groups.items():
        before = np.asarray(made.state.params["embedding"])
        _, metrics = made.learn(algorithm, group)
        assert metrics["grad_norm"].value() > 0
        assert not np.array_equal(before, made.state.params["embedding"])
    assert int(made.state.step) == updates + 2


def test_the_command_prints_and_writes_the_figures(measured, tmp_path, monkeypatch, capsys):
    _, figures = measured
    file = tmp_path / "out.json"
    asked = types.SimpleNamespace(preset="peer_tiny", repeats=2, json=str(file))
    monkeypatch.setattr(bench.flags, "FLAGS", asked)
    monkeypatch.setattr(bench, "measure", lambda *_: figures)
    bench.main(["bench"])
    assert json.loads(file.read_text()) == {"preset": "peer_tiny"} | json.loads(json.dumps(figures))
    printed = capsys.readouterr().out
    for name in (*figures["phases"], *figures["compile_s"], jax.devices()[0].device_kind):
        assert name in printed


def test_phases_alternate_and_the_first_run_is_not_counted():
    ran = []

    def phase(name):
        return bench.Phase(lambda: ran.append(name) or jnp.zeros(()), 1.0)

    taken = bench.seconds({name: phase(name) for name in "abc"}, repeats=3)
    assert "".join(ran) == "abc" + "abc" + "cba" + "abc"
    assert {name: values.shape for name, values in taken.items()} == dict.fromkeys("abc", (3,))


def test_the_peers_model_has_the_size_they_were_timed_at():
    w = bench.WORKLOADS["peer_tiny"]
    shapes = jax.eval_shape(lambda: bench.transformer.init(w.model, jax.random.key(0)))
    assert sum(x.size for x in jax.tree.leaves(shapes)) == 853_120
    assert (w.prompts, w.samples, w.prompt_tokens, w.new_tokens) == (64, 8, 16, 32)
    assert (w.model.vocab_size, w.model.dtype) == (512, "float32")
