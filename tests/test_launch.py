"""docs/launch.md and tools/tpu_vm.sh: flags that exist, and the script against a gcloud of ours."""

import json
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

from configs import smoke
from opd_jax import config

ROOT = pathlib.Path(__file__).parent.parent

# Stands for gcloud: notes how it was called, and runs commands in the home of each worker.
GCLOUD = """#!{python}
import json, os, subprocess, sys
with open("{tmp}/calls.jsonl", "a") as f:
    f.write(json.dumps(sys.argv[1:]) + "\\n")
flags = dict(a[2:].split("=", 1) for a in sys.argv if a.startswith("--"))
workers = (0, 1) if flags["worker"] == "all" else (int(flags["worker"]),)
for worker in workers:
    home = f"{tmp}/worker{{worker}}"
    os.makedirs(home, exist_ok=True)
    if "scp" in sys.argv:
        source, target = sys.argv[5], sys.argv[6].split(":")[1]
        subprocess.run(["cp", source, f"{{home}}/{{target}}"], check=True)
    else:
        subprocess.run(["bash", "-c", flags["command"]], cwd=home, check=True)
"""

# Stands for the interpreter of the venv: writes down its arguments, and ends on SIGTERM.
PYTHON = """#!{python}
import json, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
print(json.dumps(sys.argv[1:]), flush=True)
signal.pause()
"""


def script(tmp, *arguments):
    environment = os.environ | {"PATH": f"{tmp}/bin{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        [ROOT / "tools" / "tpu_vm.sh", *arguments],
        env=environment, capture_output=True, text=True, timeout=30,
    )  # fmt: skip


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def eventually(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_run_and_stop_on_all_workers(tmp_path):
    executable(tmp_path / "bin" / "gcloud", GCLOUD.format(python=sys.executable, tmp=tmp_path))
    homes = [tmp_path / f"worker{i}" for i in range(2)]
    for home in homes:
        executable(home / "opd_venv" / "bin" / "python", PYTHON.format(python=sys.executable))
        (home / "opd_jax").mkdir()
    fields = ["--config=configs/smoke.py", "--workdir=gs://b/d", "--config.plan=('base',)"]
    done = script(tmp_path, "my-tpu", "my-zone", "run", *fields)
    assert done.returncode == 0, done.stderr
    called = json.loads((tmp_path / "calls.jsonl").read_text())
    assert called[:5] == ["compute", "tpus", "tpu-vm", "ssh", "my-tpu"]
    assert {"--zone=my-zone", "--worker=all"} <= set(called)
    expected = ["-m", "opd_jax.main", *fields, "--config.runtime.multihost=True",
                "--config.runtime.platform=tpu"]  # fmt: skip
    pids = []
    for home in homes:
        assert eventually((home / "opd_jax.log").read_text)
        assert json.loads((home / "opd_jax.log").read_text()) == expected
        pids.append(int((home / "opd_jax.pid").read_text()))
    assert script(tmp_path, "my-tpu", "my-zone", "stop").returncode == 0
    assert eventually(lambda: ended(pids[0]))
    assert not ended(pids[1])  # The real ones stop one another.
    os.kill(pids[1], 15)


def ended(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


def test_install_copies_the_committed_checkout(tmp_path):
    executable(tmp_path / "bin" / "gcloud", GCLOUD.format(python=sys.executable, tmp=tmp_path))
    # A python3 whose venv has a pip that notes its arguments.
    pip = r"""printf '#!/bin/sh\necho "$@" >pip.txt\n' >$3/bin/pip; chmod +x $3/bin/pip"""
    executable(tmp_path / "bin" / "python3", f"#!/bin/sh\nmkdir -p $3/bin\n{pip}\n")
    done = script(tmp_path, "my-tpu", "my-zone", "install")
    assert done.returncode == 0, done.stderr
    for worker in range(2):
        there = tmp_path / f"worker{worker}" / "opd_jax"
        assert (there / "opd_jax" / "main.py").exists()
        assert "-e .[tpu]" in (there / "pip.txt").read_text()


@pytest.mark.parametrize("arguments", [(), ("name", "zone"), ("name", "zone", "fly")])
def test_wrong_arguments_are_told(tmp_path, arguments):
    done = script(tmp_path, *arguments)
    assert done.returncode == 2
    assert "install" in done.stderr


def test_every_flag_of_the_page_is_a_field():
    text = (ROOT / "docs" / "launch.md").read_text()
    parsed = config.parse(smoke.get_config())
    found = re.findall(r"--config\.([\w.]+)=", text)
    assert len(set(found)) >= 6
    for path in found:
        node = parsed
        for name in path.split("."):
            node = node[name] if isinstance(node, dict) else vars(node)[name]
    for name in re.findall(r"`runtime\.(\w+)`", text):
        assert name in vars(parsed.runtime)
