"""The command line: whatever is wrong ends in one clear error, no traceback, before any training.

All cases run as processes of their own, forked one by one from a process that has imported
opd_jax.main: importing it takes longer than all of them.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from etils import epath

from configs import smoke
from opd_jax import config, domains, pipeline

ROOT = pathlib.Path(__file__).parent.parent

LAUNCHER = """
import json, os, sys
from opd_jax import main
for name, argv in json.load(sys.stdin).items():
    pid = os.fork()
    if pid == 0:
        out = os.open(f"{sys.argv[1]}/{name}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1), os.dup2(out, 2)
        sys.argv = ["main", *argv]
        main.cli()
        os._exit(0)
    print(json.dumps([name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]), flush=True)
"""

# As configs/smoke.py, but the plan is one stage on `arithmetic`, then one on `program`.
TWO_STAGES = """
from configs import base, smoke

def get_config():
    c = smoke.get_config()
    c.plan = ("base", "expert_p")
    c.routes = type(c)({"joint": ("expert_p",)})
    c.stages.base.domains = type(c)({"arithmetic": 1.0})
    return c
"""

# name -> (what stands in the one line of the error, in order)
EXPECTED = {
    "no_flags": ("config", "workdir"),
    "no_config": ("--config",),
    "no_workdir": ("--workdir",),
    "stray_argument": ("unexpected argument(s): hello",),
    "wrong_config": ("error: ", "configs/smoek.py", "No such file"),
    "config_is_a_folder": ("error: ", "Is a directory", "'configs'"),
    "unknown_override": ("error: ", "promtps", "prompts"),
    "unknown_section": ("error: ", "stagse", "stages"),
    "override_of_wrong_type": ("config.stages.merge.steps=many", "many"),
    "value_out_of_range": ("error: config.stages.merge", "steps=-1", "at least 0"),
    "guard": ("error: stages.merge.prompts=8", "3 micro-batch(es)", "make it a multiple of"),
    "platform": ("error: ", "'gpu'", "JAX_PLATFORMS"),
    "workdir_is_a_file": ("error: ", "cannot write", "another workdir"),
    "workdir_unwritable": ("error: ", "cannot write /proc/x", "another workdir"),
    "changed_config": ("error: ", "another config", "seed: was 0, is 3", "clip_low: was 0.2"),
    "tokenizer_missing": ("error: tokenizer 'nowhere.model'", "give 'nano'"),
    "vocabulary_mismatch": ("error: models.student has 32 rows", "320 tokens", "tokenizer"),
    "broken_jsonl": ("error: ", "broken.jsonl, line 2", "not valid JSON"),
    "broken_jsonl_of_a_later_stage": ("error: ", "broken.jsonl, line 2", "not valid JSON"),
    "corrupt_tfds": ("error: ", "cannot be read", "Delete the folder"),
}


def arguments(tmp):
    """The command line of each case."""
    plain, run = ["--config=configs/smoke.py"], f"--workdir={tmp}/run"
    start = [*plain, run, f"--config.runtime.data_dir={tmp}/data"]
    jsonl = ["source=jsonl:" + str(tmp / "broken.jsonl"), "levels=(1,)"]
    return {
        "no_flags": [],
        "no_config": [run],
        "no_workdir": plain,
        "stray_argument": [*start, "hello"],
        "wrong_config": ["--config=configs/smoek.py", run],
        "config_is_a_folder": ["--config=configs", run],
        "unknown_override": [*start, "--config.stages.merge.promtps=3"],
        "unknown_section": [*start, "--config.stagse.merge.prompts=3"],
        "override_of_wrong_type": [*start, "--config.stages.merge.steps=many"],
        "value_out_of_range": [*start, "--config.stages.merge.steps=-1"],
        "guard": [*start, "--config.stages.merge.micro_batches=3"],
        "platform": [*start, "--config.runtime.platform=gpu"],
        "workdir_is_a_file": [*plain, f"--workdir={tmp}/broken.jsonl"],
        "workdir_unwritable": [*plain, "--workdir=/proc/x"],
        "changed_config": [
            *plain,
            f"--workdir={tmp}/begun",
            "--config.seed=3",
            "--config.stages.merge.clip_low=0.1",
            "--config.runtime.progress_seconds=5",
        ],
        "tokenizer_missing": [*start, "--config.tokenizer=nowhere.model"],
        "vocabulary_mismatch": [
            *start, "--config.models.student.preset=", f"--config.models.student.hf={tmp}/model",
        ],
        "broken_jsonl": [*start, *(f"--config.domains.arithmetic.{x}" for x in jsonl)],
        "broken_jsonl_of_a_later_stage": [
            f"--config={tmp}/two_stages.py", *start[1:],
            *(f"--config.domains.program.{x}" for x in jsonl),
        ],
        "corrupt_tfds": [*plain, run, f"--config.runtime.data_dir={tmp}/corrupt"],
    }  # fmt: skip


def prepare(tmp):
    """What the cases find: a file, a model, a begun run, a good data folder and a corrupt one."""
    lines = ['{"prompt": "1+1=", "answer": "2", "verifier": "integer"}', '{"prompt": "1+']
    (tmp / "broken.jsonl").write_text("\n".join(lines))
    (tmp / "two_stages.py").write_text(TWO_STAGES)
    (tmp / "model").mkdir()
    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32,
        "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4,
        "num_key_value_heads": 1, "intermediate_size": 8, "max_position_embeddings": 64,
        "rope_theta": 1e4, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp / "model" / "config.json").write_text(json.dumps(shape))
    (tmp / "begun").mkdir()
    pipeline.record_plan(config.parse(smoke.get_config()), epath.Path(tmp / "begun"))
    for name in ("arithmetic", "program"):
        domains.load(name, "train", (1,), str(tmp / "data"))
    shutil.copytree(tmp / "data", tmp / "corrupt")
    for path in (tmp / "corrupt").rglob("*.array_record*"):
        os.truncate(path, path.stat().st_size // 2)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """name -> (exit status, output) of every case; and the folder that they worked in."""
    tmp = tmp_path_factory.mktemp("main")
    prepare(tmp)
    (tmp / "out").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, str(tmp / "out")],
        input=json.dumps(arguments(tmp)),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=240,
        check=True,
    )
    status = dict(map(json.loads, done.stdout.splitlines()))
    return {name: (status[name], (tmp / "out" / f"{name}.txt").read_text()) for name in status}, tmp


def errors(output):
    """The output without the lines that logging writes, e.g. "I1130 21:34:18.847593 ..."."""
    return [
        line
        for line in output.splitlines()
        if line.strip() and not (line[0] in "IW" and line[1:5].isdigit())
    ]


@pytest.mark.parametrize("name", EXPECTED)
def test_bad_input_is_one_clear_error(outcomes, name):
    found, _ = outcomes
    status, output = found[name]
    assert status not in (0, None), output
    assert "Traceback" not in output, output
    text = "\n".join(errors(output))
    place = 0
    for needle in EXPECTED[name]:
        place = text.find(needle, place)
        assert place >= 0, f"{needle!r} is not in, or not in this order: {output}"
    if EXPECTED[name][0].startswith("error: "):
        assert len(errors(output)) == (3 if name == "changed_config" else 1), output


def test_bad_input_is_found_before_anything_is_trained(outcomes):
    _, tmp = outcomes
    assert [str(p.relative_to(tmp)) for p in tmp.glob("*/*/metrics.jsonl")] == []
    assert [str(p.relative_to(tmp)) for p in tmp.glob("*/*/checkpoints")] == []


def test_a_start_that_failed_does_not_bind_the_workdir(outcomes):
    """The cases above share a workdir: the next start may have the mistake corrected."""
    _, tmp = outcomes
    assert not (tmp / "run" / "plan.json").exists()


def test_lines_of_logging_are_no_errors():
    assert errors("I1130 21:34:18.8 x\nerror: y\n\nW1130 z\nI see\n") == ["error: y", "I see"]
