"""Rows and facts of several hosts: who marks what, and what is said when one is missing."""

import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from opd_jax import steps
from opd_jax.core import hosts, sharding
from opd_jax.data.problem import Problem
from opd_jax.data.prompts import PromptStream

REPOSITORY = pathlib.Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class Device:
    number: int
    process_index: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """Rows held by each device: (process, first, last plus one)."""

    held: tuple[tuple[int, int, int], ...]

    def devices_indices_map(self, shape):
        return {
            Device(i, process): (slice(first, end), slice(None))
            for i, (process, first, end) in enumerate(self.held)
        }


@pytest.mark.parametrize(
    ("held", "rows", "expected"),
    [
        ([(0, 0, 4), (1, 4, 8)], 8, [0, 0, 0, 0, 1, 1, 1, 1]),
        ([(0, 0, 2), (0, 2, 4), (1, 4, 6), (1, 6, 8)], 8, [0, 0, 0, 0, 1, 1, 1, 1]),
        # A tensor axis over two hosts: both hold the rows, and each marks half of them.
        ([(0, 0, 8), (1, 0, 8)], 8, [0, 1, 0, 1, 0, 1, 0, 1]),
        ([(0, 0, 4), (1, 0, 4), (2, 4, 8), (3, 4, 8)], 8, [0, 1, 0, 1, 2, 3, 2, 3]),
    ],
)
def test_every_row_is_read_by_one_process_that_holds_it(held, rows, expected):
    assert hosts.owners(Layout(tuple(held)), (rows, 5)).tolist() == expected


@pytest.mark.parametrize(
    ("rows", "processes", "shares"), [(50_000, 8, [6250] * 8), (10, 4, [3, 3, 2, 2])]
)
def test_c04_shares_differ_by_one_at_most_and_leave_nothing_out(rows, processes, shares):
    whole = Layout(tuple((process, 0, rows) for process in range(processes)))
    owner_B = hosts.owners(whole, (rows,))
    assert np.bincount(owner_B).tolist() == shares
    if rows % processes == 0:
        size = rows // processes
        parts = Layout(tuple((p, p * size, (p + 1) * size) for p in range(processes)))
        assert np.bincount(hosts.owners(parts, (rows,))).tolist() == shares


def test_c01_hosts_never_run_out_of_prompts_at_different_steps():
    """10 problems, 4 hosts, one row each: the stream wraps, and all hosts hold the same batches."""
    problems = [Problem("d", i, 1, f"{i}", f"{i}", {}) for i in range(10)]
    streams = [PromptStream({"d": problems}, {"d": 4}, seed=0) for _ in range(4)]
    layout = Layout(tuple((p, p, p + 1) for p in range(4)))
    seen = []
    for _ in range(5):
        batches = [[p.id for p in next(stream)] for stream in streams]
        assert all(batch == batches[0] for batch in batches)
        assert np.bincount(hosts.owners(layout, (len(batches[0]),))).tolist() == [1] * 4
        seen += batches[0]
    # Two whole epochs in five steps: every problem twice, none dropped.
    assert sorted(seen) == sorted([*range(10)] * 2)


def test_one_process_holds_everything(mesh_2x2x2):
    x_BR = np.arange(16).reshape(8, 2)
    placed = sharding.put(mesh_2x2x2, x_BR)
    for x in (x_BR, placed):
        np.testing.assert_array_equal(hosts.local(x), x_BR)
        assert hosts.own_rows(x).all()
        np.testing.assert_array_equal(steps.everywhere(x), x_BR)
    own_B = np.zeros(8, bool)
    np.testing.assert_array_equal(hosts.merge_rows(x_BR, own_B, "marks"), x_BR)
    assert hosts.exchange("hello", "here") == ["hello"]
    assert hosts.tell_failure("nobody hears it")


def test_a_replicated_step_and_joined_rollouts_keep_values_and_layout(mesh_2x2x2):
    x_BR = np.arange(32, dtype=np.int32).reshape(16, 2)
    placed = sharding.put(mesh_2x2x2, x_BR)
    whole = steps.replicate_step(placed)
    assert whole.sharding.is_fully_replicated
    np.testing.assert_array_equal(whole, x_BR)
    parts = [sharding.put(mesh_2x2x2, part) for part in (x_BR[:4], x_BR[4:])]
    joined = steps.join_step(parts)
    np.testing.assert_array_equal(joined, x_BR)
    assert joined.sharding.is_equivalent_to(placed.sharding, 2)


START = """
import sys, time
import jax
from opd_jax.infra import distributed
process, coordinator = int(sys.argv[1]), sys.argv[2]
distributed.start(True, coordinator=coordinator, processes=2, process=process, patience=20)
import numpy as np
from opd_jax.core import hosts, sharding
"""

FACTS = """
from opd_jax import steps, rewards
from opd_jax.data.problem import Problem
from opd_jax.infra.preemption import StopSignal

assert jax.process_count() == 2 and distributed.is_writer() == (process == 0)
assert distributed.all_agree(True) and not distributed.all_agree(process == 0)
assert distributed.from_writer(lambda: {"from": process}, "who") == {"from": 0}
distributed.barrier("here")
made = []
with distributed.writer_first("made once"):
    made.append(time.monotonic())
    time.sleep(0.3 * (process == 0))
times = [float(x) for x in hosts.exchange(str(made[0]), "times")]
assert times[1] >= times[0] + 0.3, times
distributed.check_same("configuration", "the same", "fix it")
try:
    distributed.check_same("configuration", "theirs" if process else "ours", "fix it")
except ValueError as error:
    assert str(error).startswith("process 1 ("), error
else:
    raise AssertionError("a different config was not seen")

for shape, own in (((1, 4, 1), [0, 0, 0, 0, 1, 1, 1, 1]), ((1, 1, 4), [0, 1] * 4)):
    mesh = sharding.make_mesh(*shape)
    with jax.set_mesh(mesh):
        x_BR = np.arange(16, dtype=np.int32).reshape(8, 2)
        x = sharding.put(mesh, x_BR)
        mine = np.array(own) == process
        assert (hosts.own_rows(x) == mine).all()
        assert (hosts.local(x)[mine] == x_BR[mine]).all()
        assert (steps.everywhere(x) == x_BR).all()
        told = hosts.merge_rows(np.where(mine[:, None], x_BR, -9), mine, "rows")
        assert told.dtype == np.int32 and (told == x_BR).all()

problems = [Problem("arithmetic", i, 1, "1+1=", "2", {}, "integer") for i in range(4)]
texts = ["2", "3", "2", "2", "4", "2", "2", "2"]
part = [t if i // 4 == process else None for i, t in enumerate(texts)]
with rewards.Pool(workers=1) as pool:
    verdicts = pool.submit(problems, part).result()
    # Isolated: a worker process of this host, which sees this host's rows only.
    math = [Problem("math", i, 1, "?", "2", {}, "math") for i in range(2)]
    boxed = [r"\\boxed{2}" if i == process else None for i in range(2)]
    marks = pool.submit(math, boxed)
    assert list(marks._pending) == [process]
    isolated = marks.result()
    assert isolated.right_B.tolist() == [1, 1] and isolated.counts["verifier_errors"] == 0
right = [1, 0, 1, 1, 0, 1, 1, 1]
assert verdicts.right_B.tolist() == right and verdicts.valid_B.all()
settings = rewards.RewardSettings(format="^[23]$", format_factor=0.5)
reward_B, _ = rewards.combine(settings, np.ones(8, np.float32), part, np.full(8, 3), 4)
assert reward_B.tolist() == [1, 1, 1, 1, 0.5, 1, 1, 1]

with StopSignal() as stop:
    assert not stop.agreed(1)
    if process == 1:
        stop.request()
    assert stop.agreed(2)
    assert stop.requested == (process == 1)
distributed._VISIBLE_SECONDS = 1.0
distributed.require_shared(sys.argv[3])
try:
    distributed.require_shared(f"{sys.argv[3]}/{process}")
except ValueError as error:
    assert "process 1 (" in str(error) and "gs://" in str(error), error
else:
    raise AssertionError("two local folders passed for one")
print("fine")
"""

# Each ends with an error in both processes: what process 0 and process 1 have to say.
ENDINGS = {
    "c03_stuck": (
        """
hosts._link.patience = 2
hosts.exchange("", "step 2: sampling")
time.sleep(4 * process)
hosts.exchange("", "step 3: start")
""",
        ("process 1 (", "did not come to 'step 3: start' within 2 s",
         "last together at 'step 2: sampling'"),
        ("another task died",),  # JAX ends a process that wakes up alone.
    ),
    "one_fails": (
        """
if process == 0:
    raise OSError("no space left on the device")
hosts.exchange("", "step 3: start")
""",
        ("OSError: no space left",),
        ("HostError: process 0 (", ") failed: no space left on the device"),
    ),
    "elsewhere": (
        """
hosts.exchange("", f"step {3 + process}")
""",
        ("HostError: processes are at different places: process 0 (", "at 'step 3'",
         "process 1 (", "at 'step 4'"),
        ("HostError: processes are at different places",),
    ),
}  # fmt: skip


def endings(body):
    """The body, ended as opd_jax.main ends."""
    inner = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return f"try:\n{inner}except Exception as error:\n    distributed.leave(error)\n    raise\n"


def two_processes(code, *arguments, by_environment=False):
    """Exit statuses and what was printed to standard output and error."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{s.getsockname()[1]}"
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2",
    }  # fmt: skip
    if by_environment:
        environment["JAX_COORDINATOR_ADDRESS"], coordinator = coordinator, ""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", START + code, str(i), coordinator, *map(str, arguments)],
            cwd=REPOSITORY, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for i in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs


def test_two_processes_agree(tmp_path):
    for process in range(2):
        (tmp_path / str(process)).mkdir()
    codes, outputs = two_processes(FACTS, tmp_path)
    assert codes == [0, 0], outputs
    assert all(output.endswith("fine\n") for output in outputs)
    assert not list(tmp_path.rglob(".probe*"))


@pytest.mark.parametrize("name", ENDINGS)
def test_whatever_ends_one_process_ends_both_and_is_named(name):
    body, *expected = ENDINGS[name]
    codes, outputs = two_processes(endings(body), by_environment=True)
    assert codes[0] == 1, outputs
    assert codes[1] == (-signal.SIGABRT if name == "c03_stuck" else 1), outputs
    for output, needles in zip(outputs, expected, strict=True):
        for needle in needles:
            assert needle in output, (needle, output)
    # The control: without the cause both go on to the end.
    if name == "c03_stuck":
        codes, outputs = two_processes(endings(body.replace("4 * process", "0")))
        assert codes == [0, 0], outputs


def test_processes_without_jax_distributed_are_told_so(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(hosts.HostLostError, match=r"set runtime\.multihost=True"):
        hosts.exchange("", "start")
