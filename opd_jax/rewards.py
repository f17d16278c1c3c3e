"""What completions earn: verifiers in a pool of worker processes, and the terms around them.

    reward = verifier x format x length + overlong

The verifier says 1 or 0. A format factor below 1 takes from right answers without the wanted form,
a length factor favours short right ones, and the overlong term (DAPO, 2503.14476 eq. 13) goes from
0 to -1 towards the token limit. Each is logged by itself; the held-out metric is the bare verifier.

Verifiers that are fast and safe run right here. Isolated ones (math, code) run in `Pool`, one
completion per worker and CPU, while this process does other things: `submit` returns at once and
`Marks.result` waits. What a verdict is does not depend on the order or on the load: limits are CPU
seconds, with twice as many by the clock behind them. On several hosts each marks the rows that it
holds and all get all marks, so that no limit can make hosts disagree.
"""

import concurrent.futures
import dataclasses
import functools
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence

import numpy as np
from absl import logging

from opd_jax import domains
from opd_jax.core import hosts
from opd_jax.data.problem import Problem
from opd_jax.domains import sandbox
from opd_jax.domains.answers import Verifier, VerifierSettings

STATUSES = ("wrong", "right", "limit", "crash", "error")
_PATIENCE = 5.0  # Seconds that a worker has to end by itself.
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class VerifierError(RuntimeError):
    """A verifier raised on every row of a batch: it is broken, not the completions."""


@dataclasses.dataclass(frozen=True)
class RewardSettings:
    """What a completion earns besides being right. The defaults leave the bare verifier."""

    format: str = ""  # Regular expression that the completion must contain; "": any will do.
    format_factor: float = 0.0  # What a right answer without it is multiplied by.
    length_weight: float = 0.0  # w: a right answer of the token limit's length earns 1 - w.
    overlong_buffer: int = 0  # Tokens before the limit over which -1 builds up; 0: no such term.

    def __post_init__(self):
        for name in ("format_factor", "length_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"reward.{name}={getattr(self, name)}: must be in [0, 1]")
        if self.overlong_buffer < 0:
            raise ValueError(f"reward.overlong_buffer={self.overlong_buffer}: must be at least 0")
        try:
            re.compile(self.format)
        except re.error as error:
            raise ValueError(f"reward.format={self.format!r}: {error}") from None


@dataclasses.dataclass(frozen=True)
class Verdicts:
    """What verifiers said of the rows of a batch."""

    right_B: np.ndarray  # fp32, 1 or 0; 0 also where a limit ran out or the verifier failed.
    valid_B: np.ndarray  # bool, False where the verifier itself raised: nobody knows.
    counts: dict[str, float]  # For the metrics; empty if no verifier was isolated and none failed.


class Marks:
    """Verdicts that are on their way."""

    def __init__(
        self,
        inline: np.ndarray,
        pending: dict[int, concurrent.futures.Future],
        own_B: np.ndarray,
        isolated: bool,
    ):
        """What is known so far.

        Args:
          inline: statuses `[B]`.
          pending: those still to come, by row.
          own_B: rows that this process marks.
          isolated: whether any row, of whichever process, needs a worker.
        """
        self._status_B, self._pending, self._own_B = inline, pending, own_B
        self._isolated = isolated
        self._verdicts: Verdicts | None = None

    def result(self) -> Verdicts:
        """Waits for all rows; the same verdicts every time.

        On several hosts a collective: every process calls it at the same point of the same step.

        Raises:
          VerifierError: the verifier raised on every row that it was given.
          sandbox.SandboxError: a worker cannot be started.
        """
        if self._verdicts is None:
            self._verdicts = self._wait()
        return self._verdicts

    def _wait(self) -> Verdicts:
        status_B, first = self._status_B, ""
        for row, future in self._pending.items():
            reply = future.result()
            status_B[row] = STATUSES.index(reply["status"])
            if reply["status"] in ("crash", "error"):
                first = first or reply["text"]
        status_B = hosts.merge_rows(status_B, self._own_B, "marks")
        error_B = status_B == STATUSES.index("error")
        if error_B.all() and len(status_B):
            raise VerifierError(f"the verifier failed on all {len(status_B)} completions:\n{first}")
        if first:
            logging.warning("a verifier failed on a completion, which is left out: %s", first)
        failed_B = error_B | (status_B == STATUSES.index("crash"))
        counts = {
            "verifier_timeouts": float(np.sum(status_B == STATUSES.index("limit"))),
            "verifier_errors": float(np.sum(failed_B)),
        }
        right_B = (status_B == STATUSES.index("right")).astype(np.float32)
        counted = self._isolated or failed_B.any()
        return Verdicts(right_B, ~error_B, counts if counted else {})


class Pool:
    """Worker processes for isolated verifiers; they start with the first row that needs one."""

    def __init__(
        self,
        settings: VerifierSettings | None = None,
        *,
        workers: int = 0,
        allow_unsandboxed: bool = False,
    ):
        """A pool without processes yet.

        Args:
          settings: limits, and where answers stand; None: the usual ones.
          workers: processes at most; 0: one for every CPU.
          allow_unsandboxed: run programs also where the host offers no isolation.
        """
        self.settings = VerifierSettings() if settings is None else settings
        self.allow_unsandboxed = allow_unsandboxed
        self.size = workers or _cpus()
        self._verifiers = domains.verifiers(self.settings, allow_unsandboxed)
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._closed = False

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, problems: Sequence[Problem], text_B: Sequence[str | None]) -> Marks:
        """Starts to mark completions; rows are prompt-major, all of one problem side by side.

        A text that is None is another process's to mark, which submits it as a text.

        Rows of fast verifiers are marked before this returns.

        Raises:
          ValueError: the pool was closed.
        """
        if self._closed:
            raise ValueError("the pool of verifiers was closed")
        n = len(text_B) // len(problems)
        status_B, pending = np.zeros(len(text_B), np.int32), {}
        own_B = np.array([text is not None for text in text_B], bool)
        for row in np.flatnonzero(own_B).tolist():
            problem, text = problems[row // n], text_B[row]
            if domains.is_isolated(problem):
                pending[row] = self._send(problem, text)
                continue
            try:
                status_B[row] = domains.verify(problem, text)  # STATUSES: wrong, right.
            except Exception:  # It promised not to; this row alone is lost, and counted.
                pending[row] = _failed(traceback.format_exc(limit=-6))
        return Marks(status_B, pending, own_B, any(map(domains.is_isolated, problems)))

    def check(self, problems: Sequence[Problem]) -> None:
        """Looks, before anything is trained, whether what the problems need is there.

        Says in the log which isolation was found, if programs are to be run.

        Raises:
          sandbox.SandboxError: programs cannot be isolated here, and must not run without.
          ValueError: a verifier's package is not installed.
        """
        names = {domains.verifier_name(p) for p in problems if domains.is_isolated(p)}
        for name in sorted(names):
            if name != "python":
                self._verifiers[name].prepare()
                continue
            found = sandbox.probe()
            sandbox.require(found, self.allow_unsandboxed)
            level = logging.INFO if found.enough else logging.WARNING
            logging.log(level, "%s", found.describe())

    def for_loading(self) -> dict[str, Verifier]:
        """domains.VERIFIERS to load problems with: isolated ones check answers in a worker.

        A gold answer can hang what parses it. Then its `check`, or the `verify` of its solution,
        raises the ValueError to which loading adds file and line, as it does for a broken one.
        """
        guarded = {
            name: verifier._replace(
                check=functools.partial(self._check, name),
                verify=functools.partial(self._verify, name),
            )
            for name, verifier in self._verifiers.items()
            if verifier.isolated
        }
        return {**domains.VERIFIERS, **guarded}

    def close(self) -> None:
        """Ends all workers and what they run; rows that are not marked yet never will be."""
        self._closed = True
        with concurrent.futures.ThreadPoolExecutor(max(1, len(self._workers))) as ends:
            list(ends.map(_Worker.end, self._workers))
        for _ in self._workers:
            self._tasks.put(None)
        for worker in self._workers:
            worker.thread.join()
        self._workers = []

    def _check(self, name: str, answer: str) -> None:
        if not self._verify(name, answer, None):
            self._verifiers[name].check(answer)  # It raises at once, and its error says it best.

    def _verify(self, name: str, answer: str, completion: str | None) -> bool:
        self._verifiers[name].prepare()
        reply = self._submit(_Task(name, answer, completion)).result()
        if reply["status"] in ("right", "wrong"):
            return reply["status"] == "right"
        last = reply["text"].strip().rpartition("\n")[2]
        raise ValueError(
            f"{name} answer {answer[:80]!r} cannot be marked against, {reply['status']}: {last} "
            f"(verifiers.seconds={self.settings.seconds}, memory_mb={self.settings.memory_mb})"
        )

    def _send(self, problem: Problem, text: str) -> concurrent.futures.Future:
        return self._submit(_Task(domains.verifier_name(problem), problem.answer, text))

    def _submit(self, task: "_Task") -> concurrent.futures.Future:
        if len(self._workers) < self.size:
            self._workers.append(_Worker(self))
        self._tasks.put(task)
        return task.future


@dataclasses.dataclass(frozen=True)
class _Task:
    verifier: str
    answer: str
    completion: str | None  # None: only check the answer.
    future: concurrent.futures.Future = dataclasses.field(default_factory=concurrent.futures.Future)

    def line(self) -> bytes:
        fields = {"verifier": self.verifier, "answer": self.answer, "completion": self.completion}
        return json.dumps(fields).encode() + b"\n"


def _failed(text: str) -> concurrent.futures.Future:
    """The reply for a row whose verifier raised."""
    future: concurrent.futures.Future = concurrent.futures.Future()
    future.set_result({"status": "error", "text": text})
    return future


class _Worker:
    """A thread that feeds one worker process, and starts another if it dies.

    The thread is a daemon and the process ends with its standard input, so neither can keep the
    interpreter from ending, however it ends.
    """

    def __init__(self, pool: Pool):
        self._pool, self._tasks = pool, pool._tasks
        self._process: subprocess.Popen | None = None
        self._lock, self._ended = threading.Lock(), False
        self.thread = threading.Thread(target=self._run, name="verifier", daemon=True)
        self.thread.start()

    def end(self) -> None:
        """Ends the process; whatever it was doing is not finished."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                _stop(self._process)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task.future.set_result(self._ask(task))
            except Exception as error:
                task.future.set_exception(error)

    def _ask(self, task: _Task) -> dict[str, str]:
        process = self._started()
        try:
            process.stdin.write(task.line())
            reply = process.stdout.readline()
        except OSError:
            reply = b""
        if reply:
            return json.loads(reply)
        with self._lock:
            code = _stop(process)
            self._process = None
        if self._ended:
            return {"status": "error", "text": "the pool was closed"}
        # Nothing that a completion does reaches this far; count it and go on.
        return {"status": "crash", "text": f"a worker process ended with {code}"}

    def _started(self) -> subprocess.Popen:
        with self._lock:
            if self._ended:
                raise ValueError("the pool of verifiers was closed")
            if self._process is None:
                self._process = _start(self._pool.settings, self._pool.allow_unsandboxed)
            return self._process


def _cpus() -> int:
    """CPUs that this process may use, which in a container can be fewer than there are."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _start(settings: VerifierSettings, allow_unsandboxed: bool) -> subprocess.Popen:
    """A worker process: no fork of this one's memory, none of its files, little environment."""
    environment = sandbox.environment() | {
        "PYTHONPATH": os.pathsep.join([_ROOT, *_extra_paths()]),
        "TMPDIR": tempfile.gettempdir(),
        # One thread: it forks.
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    arguments = [json.dumps(dataclasses.asdict(settings)), str(allow_unsandboxed)]
    return subprocess.Popen(
        [sys.executable, "-P", "-s", "-m", "opd_jax.domains.worker", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, close_fds=True, cwd="/",
        env=environment, start_new_session=True,
    )  # fmt: skip


def _extra_paths() -> list[str]:
    return os.environ["PYTHONPATH"].split(os.pathsep) if "PYTHONPATH" in os.environ else []


def _stop(process: subprocess.Popen) -> int:
    """Ends a worker by the end of its input, or by force; its exit code."""
    process.stdin.close()
    try:
        code = process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    process.stdout.close()
    return code


# Terms.


def overlong_penalty(length_B: np.ndarray, limit: int, buffer: int) -> np.ndarray:
    """DAPO's soft penalty: 0 up to `limit - buffer` tokens, then linear, -1 from `limit` on.

    Example: limit 100, buffer 20: lengths 80, 85, 90, 100 -> 0, -0.25, -0.5, -1.
    """
    over_B = (np.asarray(length_B, np.float32) - (limit - buffer)) / buffer
    return -np.clip(over_B, 0, 1).astype(np.float32)


def combine(
    settings: RewardSettings,
    right_B: np.ndarray,
    text_B: Sequence[str | None],
    length_B: np.ndarray,
    limit: int,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Rewards `[B]` and the terms they are made of.

    Args:
      settings: of the stage.
      right_B: fp32, the verifier's.
      text_B: completions; None where they are another process's, which knows them.
      length_B: tokens, the stop token included.
      limit: tokens that a completion may have.

    Returns:
      fp32 rewards, and by name the terms `[B]`; none if the reward is the bare verifier's.
    """
    terms = {}
    if settings.format:
        pattern = re.compile(settings.format, re.DOTALL)
        own_B = np.array([text is not None for text in text_B], bool)
        fits_B = np.array([text is not None and bool(pattern.search(text)) for text in text_B])
        fits_B = hosts.merge_rows(fits_B, own_B, "reward format")
        terms["reward_format"] = np.where(fits_B, 1, settings.format_factor).astype(np.float32)
    if settings.length_weight:
        share_B = np.asarray(length_B, np.float32) / limit
        terms["reward_length"] = (1 - settings.length_weight * share_B).astype(np.float32)
    reward_B = np.asarray(right_B, np.float32)
    for factor_B in terms.values():
        reward_B = reward_B * factor_B
    if settings.overlong_buffer:
        terms["reward_overlong"] = overlong_penalty(length_B, limit, settings.overlong_buffer)
        reward_B = reward_B + terms["reward_overlong"]
    if terms:
        terms["reward_verifier"] = np.asarray(right_B, np.float32)
    return reward_B, terms


def neutral(reward_Pn: np.ndarray, valid_Pn: np.ndarray) -> np.ndarray:
    """Gives rows that nobody could mark the mean of their valid siblings: advantage 0.

    A group without a valid row gets 0 throughout, so that it has no variance and no gradient.
    """
    count_P1 = valid_Pn.sum(axis=1, keepdims=True)
    sum_P1 = np.where(valid_Pn, reward_Pn, 0).sum(axis=1, keepdims=True)
    mean_P1 = sum_P1 / np.maximum(count_P1, 1)
    return np.where(valid_Pn, reward_Pn, mean_P1).astype(np.float32)
