"""The round trip as a command: its verdict, and its exit status."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from opd_jax.models import hf, hf_files
from tests import families
from tools import convert_checkpoint

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def source(tmp_path):
    """A bf16 model with a tokenizer."""
    folder = families.write(tmp_path / "in", "gemma3", np.dtype("bfloat16"))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def run(*args):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tools.convert_checkpoint", *map(str, args)]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_the_command_makes_the_round_trip_and_says_so(source, tmp_path):
    done = run(f"--hf_dir={source}", f"--out={tmp_path / 'out'}", "--check")
    assert done.returncode == 0, done.stderr
    assert "bits equal: yes" in done.stdout
    assert "config equal: yes" in done.stdout
    assert "largest |dlogit| against transformers: " in done.stdout
    assert (tmp_path / "out/tokenizer.json").exists()


def test_another_dtype_is_a_difference_and_exit_status_1(source, tmp_path, monkeypatch):
    monkeypatch.setattr(convert_checkpoint, "has_transformers", lambda: False)
    convert_checkpoint.convert(source, tmp_path / "out", dtype="float16")
    assert not convert_checkpoint.check(source, tmp_path / "out", 1e-3)
    done = run(f"--hf_dir={source}", f"--out={tmp_path / 'other'}", "--dtype=float32", "--check")
    assert done.returncode == 1
    assert (
        "bits equal: no\n  model.embed_tokens.weight: bfloat16[40, 24] and float32" in done.stdout
    )


def test_one_changed_bit_is_seen(source, tmp_path):
    out, config = tmp_path / "out", hf.read_config(source)
    convert_checkpoint.convert(source, out, max_shard_bytes=4000)
    assert convert_checkpoint.differing_tensors(source, out, config) == []
    file = next(iter(sorted(out.glob("*.safetensors"))))
    tensors = load_file(file)
    name = min(tensors)
    tensors[name].view(np.uint16).flat[0] ^= 1
    save_file(tensors, file)
    found = convert_checkpoint.differing_tensors(source, out, config)
    assert [line.split(":")[0] for line in found] == [name]


def test_a_changed_config_and_a_spare_head_are_told_apart(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(convert_checkpoint, "has_transformers", lambda: False)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, source / "model.safetensors")
    out = tmp_path / "out"
    convert_checkpoint.convert(source, out)
    assert convert_checkpoint.check(source, out, 1e-3)
    assert "not measured, it is not installed" in capsys.readouterr().out
    raw = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(raw | {"sliding_window": 5}))
    assert not convert_checkpoint.check(source, out, 1e-3)
    assert "bits equal: yes\nconfig equal: no" in capsys.readouterr().out


def test_logits_that_differ_are_a_difference(mesh, source, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    convert_checkpoint.convert(source, out)
    ours = convert_checkpoint.our_logits
    monkeypatch.setattr(convert_checkpoint, "has_transformers", lambda: True)
    monkeypatch.setattr(convert_checkpoint, "their_logits", ours)
    assert convert_checkpoint.check(source, out, 1e-3)
    monkeypatch.setattr(convert_checkpoint, "their_logits", lambda *a: ours(*a) + 0.01)
    assert not convert_checkpoint.check(source, out, 1e-3)
    assert "largest |dlogit| against transformers: 0.01 (limit 0.001)" in capsys.readouterr().out


def test_remote_folders_pass_through_temporary_files(mesh, source, tmp_path, monkeypatch):
    """A path that the safetensors library may not open itself, in and out."""
    opened, open_file = [], hf_files.safe_open
    monkeypatch.setattr(hf_files, "_is_local", lambda path: False)
    monkeypatch.setattr(
        hf_files, "safe_open", lambda file, **kw: opened.append(file) or open_file(file, **kw)
    )
    convert_checkpoint.convert(source, tmp_path / "out", max_shard_bytes=4000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert opened
    assert not any(str(tmp_path) in os.fspath(file) for file in opened)
    assert not any(os.path.exists(file) for file in opened)
    monkeypatch.undo()
    config = hf.read_config(source)
    assert convert_checkpoint.differing_tensors(source, tmp_path / "out", config) == []
