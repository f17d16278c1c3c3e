"""A worker process of the pool in rewards.py: marks completions, one at a time, within limits.

Three processes, so that nothing a completion makes happen can stop the chain:

    pool (the training process) -> this one: only waits -> solver: a fork of it that does the work

A solver that takes too long, too much memory, or crashes costs one completion; the next one is
forked in milliseconds, with everything already imported. `Verifier.verify` runs in the solver. The
end of standard input, also by the death of the training process, ends all three, and whatever a
program left behind: on Linux this process inherits every orphan below it, and kills it.

Lines of JSON in, {"verifier", "answer", "completion"}, and out, {"status", "text"}; statuses:

- "right", "wrong": what the verifier said; with no completion, whether the answer can be used.
- "limit": time, output or memory ran out: the completion's fault, worth 0.
- "crash": the solver died of it: worth 0, counted as an error.
- "error": the verifier raised: nobody's answer; text is the traceback.
"""

import ctypes
import gc
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Mapping

from opd_jax import domains
from opd_jax.domains.answers import Verifier, VerifierSettings

WALL_FACTOR = 3  # Wall seconds allowed for each CPU second, so that a busy machine changes nothing.
TASKS_PER_SOLVER = 500  # Then a fresh one: caches of the libraries do not grow for ever.
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(settings: VerifierSettings, allow_unsandboxed: bool) -> None:
    """Serves standard input until it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process.
    table = domains.verifiers(settings, allow_unsandboxed)
    solver: Solver | None = None
    prepared: set[str] = set()
    buffer = b""
    while True:
        while b"\n" not in buffer:
            data = os.read(0, 1 << 16)
            if not data:
                _end(solver)
                return
            buffer += data
        line, _, buffer = buffer.partition(b"\n")
        name = json.loads(line)["verifier"]
        if solver is None or solver.done >= TASKS_PER_SOLVER or name not in prepared:
            _end(solver)
            table[name].prepare()  # Before the fork, so that no solver waits for an import again.
            prepared.add(name)
            solver = Solver(table, settings)
        reply = solver.solve(line)
        if solver.dead:
            solver = None
        kill_children(keep=solver.pid if solver else 0)
        os.write(1, json.dumps(reply).encode() + b"\n")


class Solver:
    """A fork of this process that runs verifiers."""

    def __init__(self, table: Mapping[str, Verifier], settings: VerifierSettings):
        """Args: table: verifiers by name. settings: the limits."""
        self.settings, self.table, self.done, self.dead = settings, table, 0, False
        down, up = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(down[1])
            os.close(up[0])
            self._serve(down[0], up[1])
        os.close(down[0])
        os.close(up[1])
        self.inward, self.outward = up[0], down[1]

    def solve(self, line: bytes) -> dict[str, str]:
        """The reply to one task. Ends the process if the pool goes away meanwhile."""
        verifier = self.table[json.loads(line)["verifier"]]
        self.done += 1
        _write(self.outward, line + b"\n")
        deadline, reply = time.monotonic() + wall_seconds(verifier, self.settings), b""
        while not reply.endswith(b"\n"):
            left = deadline - time.monotonic()
            # The pool sends one task at a time: what can be read here now is its end.
            ready, _, _ = select.select([self.inward, 0], [], [], max(left, 0))
            if 0 in ready:
                _end(self)
                os._exit(0)
            if left <= 0:
                self.kill()
                return {"status": "limit", "text": "time by the clock"}
            data = os.read(self.inward, 1 << 16)
            if not data:
                return self._explain(self.kill())
            reply += data
        return json.loads(reply)

    def kill(self) -> int:
        """Ends the solver; its wait status."""
        self.dead = True
        os.close(self.inward)
        os.close(self.outward)
        os.kill(self.pid, signal.SIGKILL)
        return os.waitpid(self.pid, 0)[1]

    def _explain(self, status: int) -> dict[str, str]:
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGPROF:
            return {"status": "limit", "text": "CPU time"}
        return {"status": "crash", "text": f"the solver ended with {code}"}

    def _serve(self, inward: int, outward: int) -> None:
        """The solver's whole life; never returns."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        gc.freeze()
        # Address space, not memory: what is there already, and as much again as one may use.
        memory = _address_space() + (self.settings.memory_mb << 20)
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with os.fdopen(inward, "rb") as lines:
            for line in lines:
                task = json.loads(line)
                # The timer's signal has no handler, so it also ends what never returns to Python.
                signal.setitimer(signal.ITIMER_PROF, self.settings.seconds)
                reply = mark(self.table[task["verifier"]], task["answer"], task["completion"])
                signal.setitimer(signal.ITIMER_PROF, 0)
                _write(outward, json.dumps(reply).encode() + b"\n")
        os._exit(0)


def mark(verifier: Verifier, answer: str, completion: str | None) -> dict[str, str]:
    """What a verifier says, as a reply; without a completion, of the answer itself."""
    try:
        right = (
            _checks(verifier, answer) if completion is None else verifier.verify(answer, completion)
        )
    except (TimeoutError, MemoryError) as error:
        return {"status": "limit", "text": str(error) or "memory"}
    except Exception:
        return {"status": "error", "text": traceback.format_exc(limit=-6)}
    return {"status": "right" if right else "wrong", "text": ""}


def _checks(verifier: Verifier, answer: str) -> bool:
    """Whether an answer is one that can be marked against."""
    try:
        verifier.check(answer)
    except ValueError:
        return False
    return True


def wall_seconds(verifier: Verifier, settings: VerifierSettings) -> float:
    """When a solver is given up by the clock; after a verifier's own limits, if it has any."""
    return WALL_FACTOR * max(settings.seconds, verifier.seconds) + 2


def kill_children(keep: int = 0) -> None:
    """Kills and reaps all children but one: what a program started and left."""
    while found := [pid for pid in _children() if pid != keep]:
        for pid in found:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _children() -> list[int]:
    pid = os.getpid()
    path = f"/proc/{pid}/task/{pid}/children"
    if not os.path.exists(path):  # Another system, or a kernel without it.
        return []
    with open(path) as file:
        return [int(x) for x in file.read().split()]


def _end(solver: Solver | None) -> None:
    if solver is not None and not solver.dead:
        solver.kill()
    kill_children()


def _address_space() -> int:
    if sys.platform != "linux":
        return 1 << 40
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _write(fd: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(fd, data) :]
    except BrokenPipeError:
        pass  # The solver is dead, which the reading finds.


if __name__ == "__main__":
    _settings = json.loads(sys.argv[1])
    _settings["math_extract"] = tuple(_settings["math_extract"])
    main(VerifierSettings(**_settings), allow_unsandboxed=sys.argv[2] == "True")
    os._exit(0)  # Nothing is left to tidy, and the pool waits.
