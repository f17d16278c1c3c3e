"""The whole pipeline in two processes of four devices, as two hosts: against one process of eight.

Tokens, marks and FLOPs are equal to the bit, because a row's sampling noise is a function of its
problem. Sums over devices are added up in another order between processes than within one, so the
rest is equal within TOLERANCE: losses and norms relative to 1, weights after up to six updates.
"""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from opd_jax.core import tree
from opd_jax.infra import checkpoint

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parent.parent
STAGES = ("base", "expert", "merge", "cold")
TOLERANCE = 1e-4
EXACT = ("reward", "length", "truncated", "zero_variance", "kept")
SHORT = "--config.plan=('base','expert')", "--config.routes={}"
TIMEOUT = 40  # Seconds until a process gives another up.


class Hosts:
    """`count` processes of one run, on `8 / count` devices each."""

    def __init__(self, tmp, workdir, count, *overrides):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.logs = [tmp / f"{workdir.name}.{time.monotonic_ns()}.{i}.log" for i in range(count)]
        self.processes = []
        for i, log in enumerate(self.logs):
            joined = [
                "--config.runtime.multihost=True",
                f"--config.runtime.coordinator=127.0.0.1:{port}",
                f"--config.runtime.processes={count}",
                f"--config.runtime.process={i}",
                f"--config.runtime.host_timeout={TIMEOUT}",
            ]
            arguments = [
                "--config=tests/two_hosts_config.py",
                f"--workdir={workdir}",
                f"--config.runtime.data_dir={tmp}/data{count}",
                f"--config.runtime.compilation_cache={tmp}/cache{count}",
                *(joined if count > 1 else ()),
                *overrides,
            ]
            environment = {
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": str(8 // count),
                "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "opd_jax.main", *arguments],
                    cwd=ROOT,
                    env=os.environ | environment,
                    stdout=log.open("w"),
                    stderr=subprocess.STDOUT,
                )
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def ended(self, seconds=900):
        """Exit statuses and outputs of all."""
        deadline = time.monotonic() + seconds
        codes = [p.wait(max(0.1, deadline - time.monotonic())) for p in self.processes]
        return codes, [log.read_text() for log in self.logs]


def run(tmp, workdir, count, *overrides):
    with Hosts(tmp, workdir, count, *overrides) as hosts:
        codes, outputs = hosts.ended()
        assert codes == [0] * count, outputs
        return outputs


def lines(workdir, stage, name):
    records = [json.loads(line) for line in (workdir / stage / name).read_text().splitlines()]
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records]


def weights(workdir, stage):
    return checkpoint.load_params(workdir / stage / "checkpoints")


def assert_alike(one, other, stages):
    """The same but for the rounding of sums."""
    for stage in stages:
        assert lines(one, stage, "evals.jsonl") == lines(other, stage, "evals.jsonl"), stage
        pairs = zip(lines(one, stage, "metrics.jsonl"), lines(other, stage, "metrics.jsonl"),
                    strict=True)  # fmt: skip
        for a, b in pairs:
            assert (a["step"], a["flops"]) == (b["step"], b["flops"])
            for name, value in a["metrics"].items():
                if name.split("/")[0].startswith(EXACT):
                    assert value == b["metrics"][name], (stage, a["step"], name)
                close = pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE)
                assert b["metrics"][name] == close, (stage, a["step"], name)
        x, y = weights(one, stage), weights(other, stage)
        assert x.meta["stream"] == y.meta["stream"]
        apart = jax.tree.map(lambda u, v: float(np.abs(u - v).max()), x.state, y.state)
        assert max(jax.tree.leaves(apart)) < TOLERANCE, (stage, apart)


def assert_same(one, other, stages):
    """The same to the bit: same number of processes."""
    for stage in stages:
        for name in ("metrics.jsonl", "evals.jsonl"):
            assert lines(one, stage, name) == lines(other, stage, name), (stage, name)
        tree.check_same(weights(one, stage).state, weights(other, stage).state, stage, values=True)


@pytest.fixture(scope="module")
def tmp(tmp_path_factory):
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def one(tmp):
    """One process of eight devices."""
    run(tmp, tmp / "one", 1)
    return tmp / "one"


@pytest.fixture(scope="module")
def two(tmp):
    """Two of four; both build the problem sets, which are not there yet."""
    outputs = run(tmp, tmp / "two", 2)
    return tmp / "two", outputs


def test_two_processes_do_what_one_does(one, two):
    assert_alike(one, two[0], STAGES)
    learnt = lines(one, "expert", "metrics.jsonl")
    assert max(r["metrics"]["grad_norm"] for r in learnt) > 0.01  # There was something to learn.
    assert len({r["metrics"]["reward"] for r in learnt}) > 1
    negative = dict(lines(one, "merge", "metrics.jsonl")[0]["metrics"])
    assert abs(negative["loss"]) > 100 * TOLERANCE  # Nor do all losses agree by being 0.
    results = [json.loads((w / "results.json").read_text()) for w in (one, two[0])]
    assert results[0]["routes"].keys() == results[1]["routes"].keys()


@pytest.mark.parametrize(("metric", "change"), [("loss", 1e-3), ("length", 1e-6)])
def test_control_a_small_difference_is_seen(two, tmp_path, metric, change):
    changed = shutil.copytree(two[0], tmp_path / "changed")
    path = changed / "merge" / "metrics.jsonl"
    first, *rest = path.read_text().splitlines()
    record = json.loads(first)
    record["metrics"][metric] += change
    path.write_text("\n".join([json.dumps(record), *rest]))
    with pytest.raises(AssertionError):
        assert_alike(two[0], changed, STAGES)


def test_process_0_alone_writes_and_prints(two):
    workdir, outputs = two
    assert "two_hosts · seed 0" in outputs[0]
    assert "two_hosts · seed 0" not in outputs[1]
    assert [o.count("downloaded and prepared") for o in outputs] == [2, 0]
    assert not list(workdir.rglob(".probe-*"))
    steps = [r["step"] for r in lines(workdir, "expert", "metrics.jsonl")]
    assert steps == sorted(set(steps))


def when(condition, hosts, seconds=600):
    """Waits for a moment of the run."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, [log.read_text() for log in hosts.logs]
        assert hosts.processes[0].poll() is None, [log.read_text() for log in hosts.logs]
        time.sleep(0.05)


def reached(workdir, stage, step):
    def condition():
        path = workdir / stage / "metrics.jsonl"
        return path.exists() and len(path.read_text().splitlines()) >= step

    return condition


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_ends_the_other_and_both_go_on(two, tmp, killed):
    workdir = tmp / f"killed{killed}"
    with Hosts(tmp, workdir, 2, *SHORT) as hosts:
        when(reached(workdir, "expert", 2), hosts)
        hosts.processes[killed].kill()
        began = time.monotonic()
        codes, outputs = hosts.ended(4 * TIMEOUT)
        assert time.monotonic() - began < 3 * TIMEOUT
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] not in (0, None)
    said = outputs[1 - killed]
    assert "is gone" in said or "another task died" in said or "Gloo" in said.split("error: ")[-1]
    run(tmp, workdir, 2, *SHORT)
    assert_same(two[0], workdir, ("base", "expert"))


def test_c18_a_signal_to_one_stops_all_in_order_and_one_process_goes_on(two, tmp):
    """C16: the number of hosts may change at a restart."""
    workdir = tmp / "stopped"
    with Hosts(tmp, workdir, 2, *SHORT) as hosts:
        when(reached(workdir, "expert", 1), hosts)
        hosts.processes[1].send_signal(signal.SIGTERM)
        codes, outputs = hosts.ended(300)
    assert codes == [0, 0], outputs
    for said in outputs:
        assert "start again with the same --workdir" in said
        assert "saved at step" in said
    saved = weights(workdir, "expert").step
    assert 1 <= saved < 4
    assert not (workdir / "expert" / "result.json").exists()
    (output,) = run(tmp, workdir, 1, *SHORT)
    assert f"expert: goes on from step {saved}" in output
    assert_alike(two[0], workdir, ("base", "expert"))


def test_nan_ends_all_in_the_same_step(tmp):
    rate = "--config.stages.base.optimizer.learning_rate=1e38"
    with Hosts(tmp, tmp / "nan", 2, SHORT[0], SHORT[1], rate) as hosts:
        codes, outputs = hosts.ended(300)
    assert codes == [1, 1], outputs
    reasons = [said[said.index("error: ") :].splitlines()[0] for said in outputs]
    assert reasons[0] == reasons[1]
    assert "stage base, step 2" in reasons[0]
    assert "NaN or infinite; the last good checkpoint is step" in reasons[0]


def test_processes_with_other_configs_are_refused(tmp):
    with Hosts(tmp, tmp / "differ", 2) as hosts:
        hosts.processes[1].kill()
        hosts.processes[1].wait()
        arguments = [*hosts.processes[1].args, "--config.seed=7"]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
        hosts.processes[1] = subprocess.Popen(
            arguments, cwd=ROOT, env=environment, stdout=hosts.logs[1].open("w"),
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        codes, outputs = hosts.ended(120)
    assert codes == [1, 1]
    for said in outputs:
        assert "error: process 1 (" in said
        assert "another configuration than process 0" in said
    assert not (tmp / "differ" / "plan.json").exists()
