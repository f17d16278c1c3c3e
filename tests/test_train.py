"""The loop and the pipeline on a miniature of the miniature: what they write, and exact resume."""

import dataclasses
import json
import os
import signal
import zlib

import jax
import pytest

from configs import base
from opd_jax import algorithms, config, domains, pipeline, train
from opd_jax.config import StopRule
from opd_jax.core import tree
from opd_jax.infra import checkpoint
from opd_jax.infra.preemption import StopSignal


def experiment(data_dir, **changes):
    """sft -> grpo -> opd from that expert, six updates each of the last two."""
    a = {"arithmetic": 1.0}
    small = {"prompts": 4, "steps": 6, "sampling": {"samples": 4, "max_new_tokens": 6}}
    stages = {
        "base": base.stage("sft", init="scratch", domains=a, **(small | {"steps": 2})),
        # Not the best weights: those may be the initial ones, a teacher that differs by rounding.
        "expert": base.stage(
            "grpo", init="stage:base", domains=a, stop={"select": "last"}, **small
        ),
        "merge": base.stage(
            "opd", init="stage:base", domains=a, teachers={"arithmetic": "stage:expert"}, **small
        ),
    }
    c = base.experiment(
        "miniature",
        domains={"arithmetic": {"source": "arithmetic", "levels": (1,)}},
        plan=tuple(stages),
        stages=stages,
        routes={"divide_and_merge": ("expert", "merge")},
        baseline="base",
        prompt_buckets=(8,),
        evaluation={"every": 2, "validation_problems": 8, "test_problems": 8, "batch": 8},
        checkpoint={"every": 1},
        mesh={"fsdp": 1},
        runtime={"data_dir": str(data_dir)},
        **changes,
    )
    return config.parse(c)


def checksum_reward(problem, text):
    return zlib.crc32(f"{problem.id}{text}".encode()) % 2 == 0


@pytest.fixture(scope="module", autouse=True)
def reward():
    """An untrained model solves nothing; a reward by checksum gives GRPO something to follow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(domains, "verify", checksum_reward)
        yield


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("tfds")


def run(x, workdir):
    return pipeline.run(x, workdir, devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def whole(data_dir, tmp_path_factory):
    """An uninterrupted run."""
    workdir = tmp_path_factory.mktemp("whole")
    table = run(experiment(data_dir), workdir)
    return workdir, table


def lines(workdir, stage, name):
    records = [json.loads(line) for line in (workdir / stage / name).read_text().splitlines()]
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records]


def final(workdir, stage):
    return checkpoint.load_params(workdir / stage / "checkpoints")


def assert_same_run(a, b):
    for stage in ("base", "expert", "merge"):
        for name in ("metrics.jsonl", "evals.jsonl"):
            assert lines(a, stage, name) == lines(b, stage, name), (stage, name)
        x, y = final(a, stage), final(b, stage)
        tree.check_same(x.state, y.state, stage, values=True)
        for key in ("ledger", "stream"):
            assert x.meta[key] == y.meta[key]


def test_a_stage_of_no_steps_only_measures(whole, data_dir, tmp_path):
    """It hands its weights on as they came, costs nothing, and can be the report's baseline."""
    before = json.loads((whole[0] / "results.json").read_text())["stages"]["base"]
    folder, step = whole[0] / "base" / "checkpoints", before["selected_step"]
    x = experiment(data_dir)
    measured = dataclasses.replace(x.stages["base"], steps=0, init=f"orbax:{folder}@{step}")
    x = dataclasses.replace(
        x, plan=("measured",), stages={"measured": measured}, routes={}, baseline="measured"
    )
    run(x, tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())["stages"]["measured"]
    assert results["flops_total"] == 0 < results["flops"]["evaluation"]
    assert results["accuracy"] == before["accuracy"]
    kept = checkpoint.load_params(folder, step).state
    tree.check_same(kept, final(tmp_path, "measured").state, "measured", values=True)
    assert not (tmp_path / "measured" / "metrics.jsonl").exists()


def test_what_a_run_leaves_behind(whole):
    workdir, table = whole
    results = json.loads((workdir / "results.json").read_text())
    assert list(results["stages"]) == ["base", "expert", "merge"]
    assert results["seed"] == 0
    assert {"jax", "python"} <= set(results["versions"])
    assert (workdir / "report.html").exists()
    assert "expert" in table
    for stage in ("expert", "merge"):
        steps = lines(workdir, stage, "metrics.jsonl")
        assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
        evals = lines(workdir, stage, "evals.jsonl")
        sampled = [(r["step"], r["split"]) for r in evals if not r["greedy"]]
        assert sampled == [(s, split) for s in (0, 2, 4, 6) for split in ("validation", "test")]
        assert [r["split"] for r in evals if r["greedy"]] == ["test"]
        record = json.loads((workdir / stage / "result.json").read_text())
        assert record["steps"] == 6
        assert record["stopped_by"] == "budget"
        last = steps[-1]["flops"]
        assert steps[-1]["flops_total"] == sum(
            v for k, v in last.items() if k not in ("evaluation", "remat")
        )
        assert record["flops_total"] == steps[-1]["flops_total"]
        assert record["flops"]["evaluation"] > 0
    merged = lines(workdir, "merge", "metrics.jsonl")[-1]["metrics"]
    for name in ("overlap_ratio", "overlap_advantage", "overlap_mass_student",
                 "overlap_mass_teacher", "entropy_student", "entropy_teacher", "entropy_gap",
                 "kl"):  # fmt: skip
        assert f"{name}/arithmetic" in merged
    assert 0 < merged["overlap_ratio"] <= 1
    assert merged["overlap_advantage"] <= 1e-6


def test_checkpoints_hold_all_that_a_resume_needs(whole):
    workdir, _ = whole
    meta = final(workdir, "merge").meta
    assert meta["teachers"]["arithmetic"]["spec"] == "stage:expert"
    assert meta["teachers"]["arithmetic"]["flops"] > 0
    assert meta["journal"]["step"] == 6
    assert meta["model"]["embed_dim"] == 64
    assert set(meta) >= {"stream", "ledger", "init"}


def test_a_second_run_with_another_seed_differs(whole, data_dir, tmp_path):
    # The control of all the equalities below.
    other = dataclasses.replace(experiment(data_dir), seed=1, plan=("base", "expert"), routes={})
    run(other, tmp_path)
    assert lines(tmp_path, "expert", "metrics.jsonl") != lines(whole[0], "expert", "metrics.jsonl")


@pytest.mark.parametrize("stage", ["expert", "merge"])
@pytest.mark.parametrize("at", [3, 4])
def test_c16_three_steps_stop_three_steps_equal_six(
    whole, data_dir, tmp_path, monkeypatch, stage, at
):
    # Step 4 is one where an evaluation is due, which the stop then comes before.
    current = {}

    def agreed(self, step, phase):
        return current["stage"] == stage and step == at

    begin = train.StageRun.__init__

    def remember(self, job, *args):
        current["stage"] = job.name
        begin(self, job, *args)

    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "agreed", agreed)
        patch.setattr(train.StageRun, "__init__", remember)
        with pytest.raises(train.Stopped):
            run(experiment(data_dir), tmp_path)
    assert final(tmp_path, stage).step == at
    assert not (tmp_path / stage / "result.json").exists()
    run(experiment(data_dir), tmp_path)
    assert_same_run(whole[0], tmp_path)


def test_c18_sigterm_in_the_middle_of_a_step_saves_the_last_finished_one(
    whole, data_dir, tmp_path, monkeypatch
):
    texts, calls = algorithms.texts, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return texts(*args)

    with monkeypatch.context() as patch:
        patch.setattr(algorithms, "texts", interrupted)
        with pytest.raises(train.Stopped):
            run(experiment(data_dir), tmp_path)
    run(experiment(data_dir), tmp_path)
    assert_same_run(whole[0], tmp_path)


def test_resume_on_another_mesh_is_the_same_within_rounding(whole, data_dir, tmp_path, monkeypatch):
    def agreed(self, step, phase):
        return step == 3

    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "agreed", agreed)
        with pytest.raises(train.Stopped):
            run(experiment(data_dir), tmp_path)  # "base" has 2 steps, so "expert" stops.
    x = dataclasses.replace(
        experiment(data_dir), mesh=config.MeshSettings(data=1, fsdp=2, tensor=2),
        plan=("base", "expert", "merge"),
    )  # fmt: skip
    pipeline.run(x, tmp_path, devices=jax.devices()[:4])
    for stage in ("expert", "merge"):
        both = [lines(workdir, stage, "metrics.jsonl") for workdir in (whole[0], tmp_path)]
        for a, b in zip(*both, strict=True):
            assert a["flops"] == b["flops"]  # So every row has drawn as many tokens.
            for name in ("loss", "grad_norm", "reward", "param_norm"):
                assert a["metrics"][name] == pytest.approx(b["metrics"][name], rel=1e-3, abs=1e-5)


def test_nan_stops_the_stage_and_names_step_and_leaf(data_dir, tmp_path):
    x = experiment(data_dir)
    bad = dataclasses.replace(
        x.stages["base"], steps=4,
        optimizer=dataclasses.replace(x.stages["base"].optimizer, learning_rate=1e38),
    )  # fmt: skip
    x = dataclasses.replace(x, stages=x.stages | {"base": bad}, plan=("base",), routes={})
    with pytest.raises(train.NonFiniteError, match=r"stage base, step 2.*\['embedding'\]") as error:
        run(x, tmp_path)
    assert "last good checkpoint is step" in str(error.value)
    assert not (tmp_path / "base" / "result.json").exists()


def test_plateau_by_hand():
    rule = StopRule(patience=2, min_delta=0.01, select="best")
    points = [[0, 0.30], [2, 0.40], [4, 0.405], [6, 0.39]]
    assert not train.plateaued(points[:3], rule)
    assert train.plateaued(points, rule)
    assert not train.plateaued([*points[:3], [6, 0.42]], rule)
    assert not train.plateaued(points, StopRule(patience=0))


def test_a_stage_ends_at_its_plateau_and_hands_on_its_best_weights(data_dir, tmp_path):
    x = experiment(data_dir)
    stop = StopRule(patience=1, min_delta=2.0, select="best")  # Nothing can be that much better.
    stages = x.stages | {"base": dataclasses.replace(x.stages["base"], steps=20, stop=stop)}
    run(dataclasses.replace(x, stages=stages, plan=("base",), routes={}), tmp_path)
    record = json.loads((tmp_path / "base" / "result.json").read_text())
    assert record["stopped_by"] == "plateau"
    assert record["steps"] == 2
    history = final(tmp_path, "base").meta["journal"]["history"]
    best = max(accuracy for _, accuracy in history)
    assert record["selected_step"] == next(int(s) for s, accuracy in history if accuracy == best)


def test_a_stage_ends_when_it_is_good_enough(data_dir, tmp_path):
    # The checksum reward marks about half of all answers as right, from the start.
    x = experiment(data_dir)
    stages = x.stages | {"base": dataclasses.replace(x.stages["base"], stop=StopRule(target=0.1))}
    run(dataclasses.replace(x, stages=stages, plan=("base",), routes={}), tmp_path)
    record = json.loads((tmp_path / "base" / "result.json").read_text())
    assert (record["stopped_by"], record["steps"]) == ("target", 0)


def test_another_config_on_the_same_workdir_names_the_keys(whole, data_dir):
    x = experiment(data_dir)
    stages = x.stages | {"merge": dataclasses.replace(x.stages["merge"], steps=7)}
    with pytest.raises(ValueError, match=r"stages\.merge\.steps: was 6, is 7"):
        run(dataclasses.replace(x, stages=stages), whole[0])
    # The machine may change.
    runtime = dataclasses.replace(x.runtime, progress_seconds=1.0)
    run(dataclasses.replace(x, runtime=runtime), whole[0])
