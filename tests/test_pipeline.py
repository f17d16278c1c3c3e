"""The smoke config, every kind of stage, through the real pipeline."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from configs import smoke
from opd_jax import config, pipeline, steps, teachers, train
from opd_jax.algorithms import loss_settings
from opd_jax.core import tree
from opd_jax.infra import checkpoint
from opd_jax.models.config import preset
from opd_jax.optim import budget


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    x = config.parse(smoke.get_config())
    data_dir = str(tmp_path_factory.mktemp("tfds"))
    return dataclasses.replace(x, runtime=dataclasses.replace(x.runtime, data_dir=data_dir))


@pytest.fixture(scope="module")
def workdir(experiment, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("smoke")
    steps.make_update_step.cache_clear()  # What other tests compiled with the same settings.
    pipeline.run(experiment, workdir, devices=jax.devices()[:1])
    return workdir


def test_every_kind_of_stage_runs_to_its_result(experiment, workdir):
    results = json.loads((workdir / "results.json").read_text())
    assert tuple(results["stages"]) == experiment.plan
    for name, stage in results["stages"].items():
        assert stage["steps"] == experiment.stages[name].steps
        assert stage["algorithm"] == experiment.stages[name].algorithm
        assert stage["flops_total"] > 0
        assert set(stage["accuracy"]) == set(experiment.stages[name].domains)
    routes = results["routes"]
    assert set(routes) == {"divide_and_merge", "joint"}
    parts = ("expert_a", "expert_p", "merge")
    total = sum(results["stages"][name]["flops_total"] for name in parts)
    assert routes["divide_and_merge"]["flops_total"] == pytest.approx(total)
    comparison = results["comparison"]
    merged, taught = results["stages"]["merge"], total - results["stages"]["merge"]["flops_total"]
    assert comparison["distill_share"] == pytest.approx(merged["flops_total"] / taught)
    assert results["stages"]["merge"]["flops"]["teacher_score"] > 0
    assert results["stages"]["cold"]["flops"]["generation"] > 0
    assert results["stages"]["expert_a"]["flops"]["teacher_score"] == 0


def test_the_report_says_how_many_problems_there_are_and_how_clean(experiment, workdir):
    found = json.loads((workdir / "problems.json").read_text())
    assert set(found) == set(experiment.domains)
    assert json.loads((workdir / "results.json").read_text())["problems"] == found
    counts = found["program"]["problems"]
    assert min(counts.values()) > 100
    row = next(
        line for line in (workdir / "report.md").read_text().splitlines()
        if line.startswith(f"| program | {counts['train']} | ")
    )  # fmt: skip
    assert row.split("|")[5:7] == [" 0 ", " 0 + 0 "]


def test_the_chat_template_is_the_tokenizers_own_or_a_file(experiment, tmp_path):
    source = (
        "{{ bos_token }}{% for m in messages %}Q: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}A:{% else %}</s>{% endif %}"
    )
    (tmp_path / "chat.jinja").write_text(source)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    chat = config.ChatSettings(template=str(tmp_path / "chat.jinja"))
    tokenizer = pipeline.load_tokenizer(dataclasses.replace(experiment, chat=chat))
    ids = tokenizer.encode_prompt("1+2=")
    assert ids[0] == tokenizer.bos_id
    assert tokenizer.decode(ids) == "Q: 1+2=\nA:"
    bare = pipeline.load_tokenizer(experiment)
    assert bare.decode(bare.encode_prompt("1+2=")) == "1+2="
    own = dataclasses.replace(experiment, chat=config.ChatSettings(template="own"))
    with pytest.raises(ValueError, match="no chat template; give a folder"):
        pipeline.load_tokenizer(own)


def test_each_update_step_was_compiled_once(experiment, workdir, mesh):
    student = preset("nano", 320)
    for name in experiment.plan:
        s = experiment.stages[name]
        step = steps.make_update_step(
            student,
            s.optimizer,
            budget(s.optimizer, s.steps * s.updates_per_rollout),
            loss_settings(s),
            s.micro_batches,
        )
        # Stages with equal settings and shapes share a program, and no stage compiles a second.
        assert step._cache_size() == 1, name


def test_a_student_starts_with_what_experts_learnt(experiment, workdir, mesh):
    def saved(stage, step=None):
        if step is None:
            step = json.loads((workdir / stage / "result.json").read_text())["selected_step"]
        return checkpoint.load_params(workdir / stage / "checkpoints", step).state

    def initial(vectors):
        stage = dataclasses.replace(experiment.stages["merge"], task_vectors=vectors)
        x = dataclasses.replace(experiment, stages=experiment.stages | {"merge": stage})
        models = {"student": preset("nano", 320), "wide": preset("nano_wide", 320)}
        return jax.device_get(teachers.Weights(x, workdir, mesh, models).initial("merge")[0])

    # Last weights, not the best ones: nothing is solved here, and those are the initial ones.
    last = {name: experiment.stages[name].steps for name in ("sampled", "cold")}
    base, (one, two) = saved("base"), (saved(*item) for item in last.items())
    vectors = dict(zip((f"{name}@{step}" for name, step in last.items()), (0.25, 0.5), strict=True))
    plain, moved = initial({}), initial(vectors)
    want = jax.tree.map(lambda b, x, y: b + 0.25 * (x - b) + 0.5 * (y - b), base, one, two)
    tree.check_same(plain, base, "plain", values=True)
    for got, expected in zip(jax.tree.leaves(moved), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-7)
    apart = jax.tree.map(lambda x, y: np.abs(x - y).max(), moved, plain)
    assert max(jax.tree.leaves(apart)) > 1e-4  # Control: plain weights would not pass.


def test_a_second_start_skips_everything(experiment, workdir, monkeypatch):
    monkeypatch.setattr(pipeline.train, "run", lambda *_: pytest.fail("a stage ran again"))
    table = pipeline.run(experiment, workdir, devices=jax.devices()[:1])
    assert "merge" in table


@pytest.mark.parametrize("reason", [train.Stopped, train.NonFiniteError])
def test_a_run_that_ends_early_leaves_a_report(experiment, workdir, tmp_path, monkeypatch, reason):
    part = tmp_path / "part"
    unwritten = shutil.ignore_patterns("merge", "report.*", "results.json")
    shutil.copytree(workdir, part, ignore=unwritten)

    def fails(*_):
        raise reason

    monkeypatch.setattr(pipeline.train, "run", fails)
    with pytest.raises(reason):
        pipeline.run(experiment, part, devices=jax.devices()[:1])
    results = json.loads((part / "results.json").read_text())
    assert "merge" in results["unfinished"]
    assert "expert_a" in results["stages"]
    assert "Not finished: merge" in (part / "report.md").read_text()
    assert (part / "report.html").exists()


def test_the_report_grows_with_every_stage(experiment, workdir, tmp_path, monkeypatch):
    part, seen = tmp_path / "part", []
    shutil.copytree(workdir, part, ignore=shutil.ignore_patterns("merge", "joint", "report.*"))
    write = pipeline.report.write

    def records(directory):
        summary = write(directory)
        seen.append(json.loads((directory / "results.json").read_text())["unfinished"])
        return summary

    def finishes(job, stop):
        shutil.copytree(workdir / job.name, job.directory)

    monkeypatch.setattr(pipeline.report, "write", records)
    monkeypatch.setattr(pipeline.train, "run", finishes)
    pipeline.run(experiment, part, devices=jax.devices()[:1])
    assert seen == [["merge"], []]
