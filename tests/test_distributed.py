"""Hosts and devices: the platform asked for, the compilation cache, agreement of real processes."""

import logging
import os
import pathlib
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from opd_jax.infra import distributed

REPOSITORY = pathlib.Path(__file__).parent.parent


def _python(code, *arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_one_process_agrees_with_itself():
    distributed.start(False)
    distributed.check_same("configuration", "anything", "nothing to fix")
    distributed.barrier("nobody else")
    assert distributed.is_writer()
    assert distributed.all_agree(True)
    assert not distributed.all_agree(False)
    assert distributed.from_writer(lambda: [7, 3], "steps") == [7, 3]
    distributed.require_shared("nowhere")


def test_multihost_without_other_hosts_is_an_error_with_a_remedy():
    process = _python("from opd_jax.infra import distributed; distributed.start(True)")
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "coordinator_address should be defined" in err
    assert "on a single host leave it out" in err


def test_jax_finds_what_is_not_given(monkeypatch):
    """A TPU slice, Slurm and MPI name the processes themselves; what is given goes before."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *a, **k: calls.append((a, k)))
    distributed.start(True)
    distributed.start(True, coordinator="a:1", processes=4, process=0, patience=30)
    assert calls[0] == ((None, None, None), {"heartbeat_timeout_seconds": 100})
    assert calls[1] == (("a:1", 4, 0), {"heartbeat_timeout_seconds": 30})


def test_c24_platform_not_obtained(tmp_path, monkeypatch):
    distributed.require_platform(None)
    distributed.require_platform("cpu")
    lock = tmp_path / "lockfile"
    lock.touch()
    monkeypatch.setitem(distributed._DEVICE_FILES, "tpu", (str(lock),))
    with pytest.raises(RuntimeError, match=r"'tpu' .* came up on 'cpu'; no process seen"):
        distributed.require_platform("tpu")
    with lock.open() as handle, subprocess.Popen(["sleep", "60"], stdin=handle) as holder:
        with pytest.raises(RuntimeError) as error:
            distributed.require_platform("tpu")
        holder.kill()
    assert f"held open by pid {holder.pid} ({lock})" in str(error.value)
    assert "End that process or wait for it" in str(error.value)


def test_c24_platform_forced_and_missing():
    """Where JAX itself refuses, its reason is kept and the remedy added."""
    process = _python(
        "from opd_jax.infra import distributed; distributed.require_platform('tpu')",
        JAX_PLATFORMS="tpu",
    )
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "platform 'tpu' was asked for and not obtained (JAX says:" in err


@pytest.fixture
def fresh_cache(caplog):
    """JAX's cache as at start-up, every program stored; all put back afterwards."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.reset_cache()
    yield caplog
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def _compute():
    """A program of its own in each call, always the same one to the cache."""

    @jax.jit
    def cached_program(x):
        return jnp.tanh(x @ x).sum()

    return float(cached_program(jnp.full((7, 7), 0.1)))


@pytest.mark.filterwarnings("ignore:Error (reading|writing) persistent compilation cache")
@pytest.mark.parametrize("content", [b"", b"garbage" * 100])
def test_c25_corrupt_cache_entries_change_nothing(tmp_path, fresh_cache, content):
    assert not distributed.enable_compilation_cache(None)
    expected = _compute()
    assert distributed.enable_compilation_cache(tmp_path / "new" / "cache")
    compilation_cache.reset_cache()
    assert _compute() == expected
    entries = [p for p in (tmp_path / "new" / "cache").iterdir() if "cached_program" in p.name]
    assert entries  # Otherwise nothing was cached and nothing tested.
    for entry in entries:
        entry.write_bytes(content)
    (tmp_path / "new" / "cache" / "orphan-atime").write_bytes(content)
    compilation_cache.reset_cache()
    assert _compute() == expected


def test_c25_unusable_cache_is_a_warning(tmp_path, fresh_cache):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    for directory in (blocked, blocked / "below"):
        assert not distributed.enable_compilation_cache(directory)
    warnings = [r.getMessage() for r in fresh_cache.records if r.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert all("going on without" in w and str(blocked) in w for w in warnings)
    assert jax.config.jax_compilation_cache_dir is None
