"""Rewards: the pool of verifiers with its limits, the terms, and what training makes of them."""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from opd_jax import algorithms, domains, ledger, rewards
from opd_jax.config import GrpoSettings, Stage
from opd_jax.core import sharding
from opd_jax.data.problem import Problem
from opd_jax.domains import jsonl as jsonl_domain
from opd_jax.domains import worker
from opd_jax.domains.answers import Verifier, VerifierSettings
from opd_jax.objectives.grpo import group_advantages
from opd_jax.rewards import RewardSettings, combine, neutral, overlong_penalty
from opd_jax.rollout import Sampling
from tests import batches, test_algorithms, tiny

ROOT = pathlib.Path(__file__).parent.parent
QUICK = VerifierSettings(seconds=1, code_seconds=1, memory_mb=512, code_memory_mb=512)
ADD = json.dumps({"kind": "functions", "entry_point": "add",
                  "tests": [{"args": [1, 2], "expected": 3}]})  # fmt: skip
pytestmark = pytest.mark.usefixtures("alone")
GOOD, BAD = "def add(a, b): return a + b", "def add(a, b): return a - b"
TOWER, LOOP = r"\boxed{9^{9^{9^{9}}}}", "while True: pass"


def problem(verifier, answer):
    return Problem("d", 1, 1, "p", answer, {}, verifier)


MATH, CODE, INTEGER = problem("math", r"2\sqrt{2}"), problem("python", ADD), problem("integer", "5")


@pytest.fixture(scope="module")
def pool():
    """One pool for the tests that do not break it."""
    with rewards.Pool(QUICK, workers=2) as pool:
        yield pool


def processes():
    """Workers of this checkout, and what they started."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes()
            ours = f"PYTHONPATH={ROOT}".encode() in (entry / "environ").read_bytes()
        except (OSError, ValueError):
            continue
        sandboxed = str(ROOT / "opd_jax/domains/sandbox/child.py").encode() in command
        if sandboxed or (b"opd_jax.domains.worker" in command and ours):
            found.append(int(entry.name))
    return found


def gone(pids, seconds=10):
    deadline = time.monotonic() + seconds
    while set(pids) & set(processes()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not set(pids) & set(processes())


# The pool.


def test_verdicts_come_in_row_order_and_limits_are_counted(pool):
    found = pool.submit([MATH, CODE, INTEGER], [
        r"\boxed{\sqrt{8}}", TOWER, r"\boxed{3}", GOOD, BAD, LOOP, "5", "6", "2+3=5",
    ]).result()  # fmt: skip
    np.testing.assert_array_equal(found.right_B, [1, 0, 0, 1, 0, 0, 1, 0, 1])
    assert found.right_B.dtype == np.float32
    assert found.valid_B.all()
    assert found.counts == {"verifier_timeouts": 2, "verifier_errors": 0}


def test_fast_verifiers_start_no_process_and_report_nothing():
    with rewards.Pool(QUICK) as pool:
        found = pool.submit([INTEGER], ["5", "6"]).result()
        assert pool._workers == []
    np.testing.assert_array_equal(found.right_B, [1, 0])
    assert found.counts == {}


def test_submitting_does_not_wait(pool):
    pool.submit([CODE], [GOOD]).result()  # The workers are up.
    start = time.monotonic()
    marks = pool.submit([CODE], [LOOP] * 2)
    assert time.monotonic() - start < 0.5
    assert marks.result().counts["verifier_timeouts"] == 2
    assert marks.result() is marks.result()


def test_verdicts_do_not_depend_on_workers_or_order():
    texts = [r"\boxed{\sqrt{8}}", r"\boxed{2.83}", TOWER, r"\boxed{8^{1/2}}", "nothing"] * 2
    runs = []
    for size, order in ((1, 1), (3, -1)):
        with rewards.Pool(QUICK, workers=size) as pool:
            runs.append(pool.submit([MATH], texts[::order]).result().right_B[::order])
    np.testing.assert_array_equal(runs[0], runs[1])
    np.testing.assert_array_equal(runs[0], [1, 0, 0, 1, 0] * 2)


def test_a_hang_costs_one_problem_and_the_next_is_marked_at_once(pool):
    pool.submit([MATH], [r"\boxed{1}"]).result()
    texts = [TOWER if i % 10 == 0 else r"\boxed{\sqrt{8}}" for i in range(20)]
    found = pool.submit([MATH], texts).result()
    np.testing.assert_array_equal(found.right_B, [i % 10 != 0 for i in range(20)])
    assert found.counts == {"verifier_timeouts": 2, "verifier_errors": 0}


@pytest.mark.parametrize("answer", [
    "9^{9^{9^{9}}}", "(10^{10})!", "(" * 2000 + "1" + ")" * 2000, "10^{10^{10}}",
    r"\sum_{n=1}^{10^{12}} n!", "1" * 10**6,
])  # fmt: skip
def test_r15_a_symbolic_engine_that_hangs(answer, pool):
    start = time.monotonic()
    found = pool.submit([MATH], [rf"\boxed{{{answer}}}"]).result()
    assert found.right_B[0] == 0
    assert time.monotonic() - start < worker.WALL_FACTOR * QUICK.seconds + 4
    # And the worker is as good as before.
    assert pool.submit([MATH], [r"\boxed{\sqrt{8}}"]).result().right_B[0] == 1


def test_r16_marking_from_another_thread(pool):
    found = []
    thread = threading.Thread(
        target=lambda: found.append(pool.submit([MATH], [r"\boxed{\sqrt{8}}"]).result())
    )
    thread.start()
    thread.join()
    assert found[0].right_B[0] == 1


def test_r20_r28_code_in_the_pool_earns_by_its_tests_alone(pool):
    texts = ["print('ALL_TESTS_PASSED')\nopen('reward.txt', 'w').write('1.0')",
             "import os\nos._exit(0)", "import os, signal\nos.kill(os.getppid(), 9)\n" + GOOD,
             GOOD]  # fmt: skip
    np.testing.assert_array_equal(pool.submit([CODE], texts).result().right_B, [0, 0, 0, 1])


def test_r25_r26_other_samples_are_not_affected(pool):
    texts = [
        "x = bytearray(10**11)", "import os\nwhile 1: os.fork()", GOOD,
        "import time\ntime.sleep(600)", GOOD, "import os\nos.close(1)\nwhile 1: pass",
    ]  # fmt: skip
    np.testing.assert_array_equal(pool.submit([CODE], texts).result().right_B, [0, 0, 1, 0, 1, 0])


def test_a_killed_worker_is_replaced_and_counted():
    before = processes()
    with rewards.Pool(QUICK, workers=1) as pool:
        assert pool.submit([CODE], [GOOD]).result().right_B[0] == 1
        marks = pool.submit([CODE], ["import time\ntime.sleep(600)", GOOD])
        time.sleep(0.3)
        os.kill(pool._workers[0]._process.pid, signal.SIGKILL)
        found = marks.result()
        np.testing.assert_array_equal(found.right_B, [0, 1])
        assert found.counts == {"verifier_timeouts": 0, "verifier_errors": 1}
    assert gone(set(processes()) - set(before))


def test_closing_leaves_no_process_and_no_waiting_forever():
    before = processes()
    pool = rewards.Pool(QUICK, workers=2)
    marks = pool.submit([CODE], ["import time\ntime.sleep(600)"] * 4)
    pool.submit([MATH], [TOWER] * 4)
    time.sleep(1.5)
    started = set(processes()) - set(before)
    assert len(started) > 2
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 5
    assert gone(started, seconds=1)
    assert not marks._pending[3].done() or marks._pending[3].exception()
    with pytest.raises(ValueError, match="was closed"):
        pool.submit([CODE], [GOOD])


@pytest.mark.parametrize("ending", ["kill", "term", "exit"])
def test_however_the_training_process_ends_nothing_is_left(ending):
    code = (
        "import sys, time; from tests import test_rewards as t; from opd_jax import rewards\n"
        "pool = rewards.Pool(t.QUICK, workers=2)\n"
        "pool.submit([t.CODE], ['import time\\ntime.sleep(600)'] * 2)\n"
        "time.sleep(1.5); print('up', flush=True)\n"
    ) + {"exit": "sys.exit(0)"}.get(ending, "time.sleep(600)")
    before = processes()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment,
                              stdout=subprocess.PIPE)  # fmt: skip
    assert parent.stdout.readline() == b"up\n"
    started = set(processes()) - set(before) - {parent.pid}
    assert started or ending == "exit"
    if ending != "exit":
        parent.send_signal({"kill": signal.SIGKILL, "term": signal.SIGTERM}[ending])
    parent.wait(20)
    assert gone(started)


def test_a_worker_inherits_no_file_no_secret_and_no_jax(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_TOKEN", "4711")
    with (tmp_path / "open").open("w") as file, rewards.Pool(QUICK, workers=1) as pool:
        os.set_inheritable(file.fileno(), True)
        pool.submit([MATH], [r"\boxed{1}"]).result()
        pid = pool._workers[0]._process.pid
        names = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        assert not [name for name in names if str(tmp_path) in name]
        assert b"SECRET_TOKEN" not in pathlib.Path(f"/proc/{pid}/environ").read_bytes()
        assert "jaxlib" not in pathlib.Path(f"/proc/{pid}/maps").read_text()
        assert len(os.listdir(f"/proc/{pid}/task")) == 1  # It forks, so it has no other thread.


def test_check_says_what_is_missing_before_training(monkeypatch, caplog):
    pool = rewards.Pool(QUICK)
    pool.check([INTEGER])
    monkeypatch.setattr(domains.sandbox, "probe", lambda: domains.sandbox.Isolation(()))
    with pytest.raises(domains.sandbox.SandboxError, match="allow_unsandboxed"):
        pool.check([INTEGER, CODE])
    rewards.Pool(QUICK, allow_unsandboxed=True).check([CODE])
    found = domains.sandbox.Isolation(("landlock", "seccomp"))
    monkeypatch.setattr(domains.sandbox, "probe", lambda: found)
    with caplog.at_level("INFO", logger="absl"):
        pool.check([CODE])
    assert "isolation of untrusted code: landlock, seccomp" in caplog.text


# Verifiers that fail.


def replied(*statuses):
    """Marks whose rows were answered like this."""
    pending = {}
    for row, status in enumerate(statuses):
        pending[row] = concurrent.futures.Future()
        pending[row].set_result({"status": status, "text": f"trace of row {row}"})
    own_B = np.ones(len(statuses), bool)
    return rewards.Marks(np.zeros(len(statuses), np.int32), pending, own_B, isolated=True)


def test_r18_an_exception_makes_its_row_invalid_and_is_counted():
    found = replied("right", "error", "crash", "limit", "wrong").result()
    np.testing.assert_array_equal(found.right_B, [1, 0, 0, 0, 0])
    np.testing.assert_array_equal(found.valid_B, [True, False, True, True, True])
    assert found.counts == {"verifier_timeouts": 1, "verifier_errors": 2}


def test_r18_exceptions_everywhere_stop_the_run_with_the_first_traceback():
    with pytest.raises(rewards.VerifierError, match=r"all 8 completions:\ntrace of row 0"):
        replied(*["error"] * 8).result()


def raises(error):
    def verify(answer, completion):
        raise error

    return Verifier(verify, lambda answer: None, isolated=True)


def test_r18_what_a_worker_makes_of_exceptions():
    reply = worker.mark(raises(KeyError("x")), "", "")
    assert reply["status"] == "error"
    assert "KeyError: 'x'" in reply["text"]
    for error in (MemoryError(), TimeoutError("output"), domains.sandbox.OutOfLimits("CPU time")):
        assert worker.mark(raises(error), "", "")["status"] == "limit"


EIGHT = Sampling(samples=8, max_new_tokens=4, temperature=0.9)


def by_grpo(mesh, verifiers, problems=None):
    """GRPO's batch on eight samples of each prompt."""
    context = test_algorithms.context(mesh)
    stage = dataclasses.replace(context.stage, sampling=EIGHT)
    context = dataclasses.replace(context, stage=stage, verifiers=verifiers)
    params, placed = tiny.params(mesh, batches.CONFIG), sharding.put(mesh, test_algorithms.prompt())
    problems = problems or test_algorithms.problems()
    return algorithms.grpo(context, params, problems, placed, 5, ledger.Ledger())


def failing_at(lost, isolated, monkeypatch):
    """A pool whose verifier raises on one row: here, or in a worker."""
    pool, submit, verify, calls = rewards.Pool(), rewards.Pool.submit, domains.verify, []

    def in_worker(problems, texts):
        marks = submit(pool, problems, texts)
        marks._pending[lost] = concurrent.futures.Future()
        marks._pending[lost].set_result(worker.mark(raises(KeyError("x")), "", ""))
        return marks

    def here(problem, text):
        calls.append(text)
        if len(calls) == lost + 1:
            raise KeyError("x")
        return verify(problem, text)

    monkeypatch.setattr(*((pool, "submit", in_worker) if isolated else (domains, "verify", here)))
    return pool


@pytest.mark.parametrize("isolated", [False, True])
def test_r18_through_grpo_one_row_of_eight_is_left_out_and_counted(
    mesh, isolated, caplog, monkeypatch
):
    plain = by_grpo(mesh, rewards.Pool())
    right = plain.groups[0].advantage_BR[:, 0] > 0
    group = next(p for p in range(8) if 1 < right[8 * p : 8 * p + 8].sum() < 7)
    lost = 8 * group + int(np.argmax(right[8 * group : 8 * group + 8]))
    with caplog.at_level("WARNING", logger="absl"):
        batch = by_grpo(mesh, failing_at(lost, isolated, monkeypatch))
    assert batch.facts["verifier_errors"] == 1
    assert "KeyError: 'x'" in caplog.text
    advantage_B = np.asarray(batch.groups[0].advantage_BR[:, 0])
    assert advantage_B[lost] == pytest.approx(0, abs=1e-6)
    # Its siblings are compared among themselves; all other groups are as they were.
    rows = np.arange(8 * group, 8 * group + 8)
    siblings = np.asarray(right, np.float32)[rows[rows != lost]]
    want = siblings - siblings.mean()
    scale = advantage_B[rows[rows != lost]] / want
    np.testing.assert_allclose(scale, scale[0], rtol=1e-4)
    others = np.setdiff1d(np.arange(64), rows)
    np.testing.assert_array_equal(
        advantage_B[others], np.asarray(plain.groups[0].advantage_BR[:, 0])[others]
    )
    assert np.asarray(plain.groups[0].advantage_BR[lost, 0]) > 0.1  # Control.


def test_r18_through_grpo_a_verifier_that_always_raises_stops_the_run_in_that_step(mesh, pool):
    """In real workers: a gold answer that loading would have refused."""
    broken = [
        dataclasses.replace(p, verifier="python", answer="{") for p in test_algorithms.problems()
    ]
    with pytest.raises(rewards.VerifierError, match=r"(?s)failed on all 64 .*Error: .*answer"):
        by_grpo(mesh, pool, broken)


def test_r18_a_verifier_of_ones_own_that_raises_here_costs_its_row(monkeypatch):
    """Those that are not isolated promise not to raise; training does not believe it."""

    def verify(answer, completion):
        return int(completion) == int(answer)

    monkeypatch.setitem(domains.VERIFIERS, "integer", Verifier(verify, lambda answer: None))
    found = rewards.Pool().submit([INTEGER], ["5", "five", "6"]).result()
    np.testing.assert_array_equal(found.right_B, [1, 0, 0])
    np.testing.assert_array_equal(found.valid_B, [True, False, True])
    assert found.counts == {"verifier_timeouts": 0, "verifier_errors": 1}
    with pytest.raises(rewards.VerifierError, match=r"(?s)all 2 completions:.*ValueError: invalid"):
        rewards.Pool().submit([INTEGER], ["five", "six"]).result()


# Gold answers, when problems are loaded.


def jsonl(tmp_path, *answers):
    """A file whose first two lines are good, the second of them empty."""
    rows = [{"prompt": f"p{i}", "answer": a, "verifier": "math"} for i, a in enumerate(answers)]
    lines = [
        json.dumps({"prompt": "p", "answer": "1", "verifier": "math"}),
        "",
        *map(json.dumps, rows),
    ]
    (path := tmp_path / "mine.jsonl").write_text("\n".join(lines))
    return path


HANGS = r"\binom{1000000}{500000}"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (HANGS, r"math answer .*binom.* cannot be marked against, limit: CPU time \(verifiers.sec"),
        (r"\frac{1}{", "cannot be parsed"),
        ("", "is empty"),
    ],
)
def test_r15_r18_a_gold_answer_that_hangs_or_cannot_be_parsed_names_file_and_line(
    pool, tmp_path, answer, message
):
    path = jsonl(tmp_path, "2", answer, "3")
    with pytest.raises(ValueError, match=rf"^{path}, line 4: .*{message}"):
        domains.load(f"jsonl:{path}", "train", [1], "", verifiers=pool.for_loading())


def test_r15_a_solution_that_hangs_names_file_and_line(pool, tmp_path):
    path, row = jsonl(tmp_path), {"prompt": "q", "answer": r"2\sqrt{2}", "verifier": "math"}
    row["solutions"] = {"terse": TOWER}
    path.write_text(path.read_text() + "\n" + json.dumps(row))
    with pytest.raises(ValueError, match=rf"^{path}, line 3: .*limit: "):
        domains.load(f"jsonl:{path}", "train", [1], "", verifiers=pool.for_loading())


def test_good_answers_load_as_they_do_without_limits(pool, tmp_path):
    path = jsonl(tmp_path, *map(str, range(30)), r"\sqrt{2}")
    for split in domains.SPLITS:
        guarded, plain = (
            jsonl_domain.load("m", str(path), table)
            for table in (pool.for_loading(), domains.VERIFIERS)
        )
        assert guarded[split] == plain[split]
    assert pool.for_loading()["integer"] is domains.VERIFIERS["integer"]


def test_r14_r18_a_row_that_nobody_could_mark_has_no_advantage():
    reward, valid = np.array([[1, 0, 7, 1], [7, 7, 7, 7]]), np.array([[1, 1, 0, 1], [0] * 4], bool)
    got = neutral(reward, valid)
    np.testing.assert_allclose(got, [[1, 0, 2 / 3, 1], [0, 0, 0, 0]], rtol=1e-6)
    assert got[0].mean() == pytest.approx(2 / 3)
    assert np.isfinite(neutral(np.full((1, 2), np.inf), np.zeros((1, 2), bool))).all()


# Terms.


def test_r30_soft_overlong_penalty():
    got = overlong_penalty(np.array([0, 80, 85, 90, 100, 101]), 100, 20)
    np.testing.assert_allclose(got, [0, 0, -0.25, -0.5, -1, -1])


def test_the_bare_verifier_is_the_default():
    got, terms = combine(RewardSettings(), np.array([1, 0]), ["a", "b"], np.array([3, 4]), 4)
    np.testing.assert_array_equal(got, [1, 0])
    assert terms == {}


def test_every_term_is_returned_by_itself():
    settings = RewardSettings(format=r"<answer>.*</answer>", format_factor=0.5, length_weight=0.2,
                              overlong_buffer=5)  # fmt: skip
    texts = ["<answer>\n5</answer>", "5", "<answer>5</answer>"]
    got, terms = combine(settings, np.array([1, 1, 0]), texts, np.array([5, 10, 8]), 10)
    np.testing.assert_allclose(terms["reward_format"], [1, 0.5, 1])
    np.testing.assert_allclose(terms["reward_length"], [0.9, 0.8, 0.84])
    np.testing.assert_allclose(terms["reward_overlong"], [0, -1, -0.6], rtol=1e-6)
    np.testing.assert_allclose(terms["reward_verifier"], [1, 1, 0])
    np.testing.assert_allclose(got, [0.9, 0.4 - 1, -0.6], rtol=1e-6)


@pytest.mark.parametrize(("fields", "message"), [
    ({"format": "("}, r"reward.format='\('"),
    ({"format_factor": 2}, "reward.format_factor=2"),
    ({"length_weight": -1}, "reward.length_weight=-1"),
    ({"overlong_buffer": -1}, "reward.overlong_buffer=-1"),
])  # fmt: skip
def test_settings_out_of_range_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        RewardSettings(**fields)
    with pytest.raises(ValueError, match=r"verifiers.seconds=0"):
        VerifierSettings(seconds=0)


def stage(algorithm="grpo", **fields):
    sampling = Sampling(2, 10)
    return Stage(algorithm, "scratch", {"a": 1.0}, {}, sampling=sampling, **fields)


def test_terms_belong_to_grpo_and_fit_the_completions():
    stage(reward=RewardSettings(overlong_buffer=10))
    with pytest.raises(ValueError, match="overlong_buffer=11: must be at most"):
        stage(reward=RewardSettings(overlong_buffer=11))
    with pytest.raises(ValueError, match="opd does not train on a reward"):
        stage("opd", reward=RewardSettings(length_weight=0.1))


# In training.


def test_grpo_trains_on_the_terms_and_logs_each(mesh):
    plain, _ = test_algorithms.prepare(test_algorithms.context(mesh))
    settings = RewardSettings(length_weight=0.5, overlong_buffer=2)
    batch, _ = test_algorithms.prepare(test_algorithms.context(mesh, reward=settings))
    right = test_algorithms.rights(batch.groups[0].rollout)
    length = batch.length_B
    overlong = overlong_penalty(length, 4, 2)
    want = right * (1 - 0.5 * length / 4) + overlong
    assert batch.facts["reward"] == pytest.approx(want.mean())
    assert batch.facts["reward_verifier"] == pytest.approx(right.mean()) == plain.facts["reward"]
    assert batch.facts["reward_overlong/a"] == pytest.approx(overlong[:8].mean())
    centred = want.reshape(8, 2) - want.reshape(8, 2).mean(1, keepdims=True)
    signs = np.sign(np.asarray(batch.groups[0].advantage_BR[:, 0]))
    np.testing.assert_array_equal(signs, np.sign(np.round(centred, 6).reshape(-1)))
    assert "reward_length" not in plain.facts  # Control.


def test_r33_zero_variance_is_equal_rewards_not_a_mean_of_one_half(mesh):
    same = np.array([[0.5] * 4, [0.4, 0.6] * 2], np.float32)
    _, constant = group_advantages(sharding.put(mesh, same), scale="std")
    np.testing.assert_array_equal(constant, [True, False])


def test_r32_batches_without_any_signal_do_not_loop(mesh, monkeypatch):
    """Groups without variance are left out, not sampled again: the batch shrinks by its weights
    and keeps its shape, so that shards stay equal."""
    monkeypatch.setattr(domains, "verify", lambda problem, text: False)
    context = test_algorithms.context(mesh, grpo=GrpoSettings(drop_zero_variance=True))
    batch, book = test_algorithms.prepare(context)
    (group,) = batch.groups
    assert group.rollout.tokens_BR.shape[0] == 16
    assert np.asarray(group.weight_BR).sum() == 0
    assert np.isfinite(np.asarray(group.advantage_BR)).all()
    assert book.flops["discarded"] > 0


def test_opd_waits_for_its_reward_only_when_it_is_looked_at(mesh):
    waited = []

    class Later:
        def submit(self, problems, texts):
            marks = rewards.Pool().submit(problems, texts)
            inner = marks.result
            marks.result = lambda: waited.append(1) or inner()
            return marks

    teachers = {name: test_algorithms.teacher(mesh, None) for name in ("a", "b")}
    context = test_algorithms.context(mesh, "opd", teachers)
    context = algorithms.Context(**{**vars(context), "verifiers": Later()})
    params, placed = tiny.params(mesh, batches.CONFIG), sharding.put(mesh, test_algorithms.prompt())
    batch = algorithms.opd(context, params, test_algorithms.problems(), placed, 5, ledger.Ledger())
    assert waited == []
    assert 0 < batch.facts["reward"] < 1
    assert waited == [1]


def test_verifier_of_a_jsonl_line_by_name(tmp_path):
    lines = [
        {"prompt": "1/2?", "answer": r"\frac{1}{2}", "verifier": "math", "split": "train",
         "solutions": {"terse": r"\boxed{0.5}"}},
        {"prompt": "add", "answer": json.loads(ADD), "verifier": "python", "split": "train",
         "solutions": {"terse": GOOD}},
    ]  # fmt: skip
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    found = domains.load(f"jsonl:{path}", "train", [1], "unused")
    assert [domains.is_isolated(p) for p in found] == [True, True]
    path.write_text(json.dumps(lines[0] | {"answer": "???"}))
    with pytest.raises(ValueError, match="line 1: math answer"):
        domains.load(f"jsonl:{path}", "train", [1], "unused")
