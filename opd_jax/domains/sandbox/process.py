"""The sandbox's processes: which isolation the host offers, and talking to what runs in it."""

import dataclasses
import functools
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from opd_jax.domains.sandbox.isolation import WALLS

WALL_FACTOR = 3  # Wall seconds allowed for each CPU second: a busy machine changes no verdict.
_PATIENCE = 5.0  # Seconds that the guard of a namespace has to end it.
_CHILD = os.path.join(os.path.dirname(__file__), "child.py")


class SandboxError(RuntimeError):
    """The host offers no isolation, or what it offered a moment ago failed."""


class OutOfLimits(TimeoutError):
    """The program used up its time or its output."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one completion may use."""

    seconds: float = 10.0  # CPU seconds over all tests; WALL_FACTOR times as many by the clock.
    memory_mb: int = 1024  # Address space of each process.
    output_kb: int = 1024  # Of one test's output, or of one returned value.


@dataclasses.dataclass(frozen=True)
class Isolation:
    """Which walls the host offers."""

    walls: tuple[str, ...]

    @property
    def enough(self) -> bool:
        """Whether untrusted code may run: files, network and other processes are out of reach."""
        return "seccomp" in self.walls and len(self.walls) > 1

    def describe(self) -> str:
        """For the log."""
        found = ", ".join(self.walls) if self.walls else "none"
        missing = [wall for wall in WALLS if wall not in self.walls]
        return f"isolation of untrusted code: {found}" + (
            f" (not on this host: {', '.join(missing)})" if missing else ""
        )


@functools.cache
def probe() -> Isolation:
    """Tries every wall in a process of its own, then all that held together."""
    if sys.platform != "linux":
        return Isolation(())
    held = tuple(wall for wall in WALLS if _holds((wall,)))
    return Isolation(held if _holds(held) else ())


def require(isolation: Isolation, allow_unsandboxed: bool) -> None:
    """Refuses to go on where untrusted code would not be shut in.

    Raises:
      SandboxError: there is not enough isolation and it was not allowed to do without.
    """
    if not isolation.enough and not allow_unsandboxed:
        raise SandboxError(
            f"{isolation.describe()}. Programs written by a model could read and delete files here "
            "and use the network: run on Linux where user namespaces or landlock, and seccomp, are "
            "allowed (in a container: a seccomp profile that permits them), or set "
            "runtime.allow_unsandboxed=True on a machine that may be lost"
        )


class Budget:
    """What is left for one completion, and the processes started from it."""

    def __init__(self, limits: Limits, isolation: Isolation):
        self.limits, self.isolation = limits, isolation
        self.deadline = time.monotonic() + WALL_FACTOR * limits.seconds
        self.seconds, self.killed = limits.seconds, False

    def start(self, role: str, *, site_packages: bool = False, **header: Any) -> "Run":
        if self.seconds <= 0:
            raise OutOfLimits("CPU time")
        return Run(self, role, {"site_packages": site_packages, **header})


class Run:
    """One process of the sandbox: talked to through its standard input and output."""

    def __init__(self, budget: Budget, role: str, header: Mapping[str, Any]):
        self.budget, self.cap = budget, budget.limits.output_kb * 1024
        walls = budget.isolation.walls
        # Behind namespaces the folder is inside, in memory, and goes with them.
        self.folder = "" if "namespaces" in walls else tempfile.mkdtemp(prefix="opd_sandbox_")
        flags = ["-P", "-s", "-B"] + ([] if header["site_packages"] else ["-S"])
        try:
            self.process = subprocess.Popen(
                [sys.executable, *flags, _CHILD],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                cwd="/", env=environment(), close_fds=True, start_new_session=True, bufsize=0,
            )  # fmt: skip
        except OSError as error:
            self._remove_folder()
            raise SandboxError(f"cannot start a process: {error}") from error
        for pipe in (self.process.stdin, self.process.stdout):
            os.set_blocking(pipe.fileno(), False)
        self.buffer, self.received, self.ended = b"", 0, False
        limits = {
            "cpu_seconds": max(1, math.ceil(budget.seconds)),
            "memory_bytes": budget.limits.memory_mb << 20,
            "file_bytes": 16 << 20,
            "folder_bytes": 64 << 20,
        }
        whole = {**header, "role": role, "walls": walls, "limits": limits, "folder": self.folder,
                 "supervisor": os.getpid()}  # fmt: skip
        raw = json.dumps(whole).encode()
        self.waiting = f"{len(raw):08x}".encode() + raw

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, line: bytes) -> bytes:
        """Sends a line and waits for one; b"" if the process has ended instead."""
        self.write(line)
        return self.read_line()

    def write(self, data: bytes) -> None:
        """Sends with the next reading, so that neither side can block the other."""
        self.waiting += data

    def read_line(self) -> bytes:
        """The next line with its end; b"" if the output ends before."""
        self.received = len(self.buffer)
        while b"\n" not in self.buffer and not self.ended:
            self._exchange()
        line, end, self.buffer = self.buffer.partition(b"\n")
        return line + end if end else b""

    def finish(self, data: bytes) -> bytes:
        """Sends the last input and reads all output to its end."""
        self.write(data)
        while not self.ended:
            self._exchange(close_input=True)
        return self.buffer

    def _exchange(self, close_input: bool = False) -> None:
        """Moves bytes in whichever direction is ready."""
        out, into = self.process.stdout, self.process.stdin
        writes = [into] if self.waiting else []
        left = self.budget.deadline - time.monotonic()
        ready, writable, _ = select.select([out], writes, [], max(0, left))
        if left <= 0:
            raise OutOfLimits("time by the clock")
        if writable:
            try:
                self.waiting = self.waiting[os.write(into.fileno(), self.waiting[: 1 << 16]) :]
            except BrokenPipeError:
                self.waiting = b""
        if close_input and not self.waiting and not into.closed:
            into.close()
        if ready:
            data = os.read(out.fileno(), 1 << 16)
            self.ended = not data
            self.buffer += data
            self.received += len(data)
            if self.received > self.cap:
                raise OutOfLimits("output")

    def close(self) -> None:
        """Ends the whole group, waits for it, and books its CPU time."""
        guarded = "namespaces" in self.budget.isolation.walls
        if self.ended:
            self._let_end(0.2)
        by_kernel = self.ended and self._has_ended()
        if guarded and not self._has_ended():
            self.process.send_signal(signal.SIGTERM)  # It ends what it guards, then itself.
            self._let_end(_PATIENCE)
        os.killpg(self.process.pid, signal.SIGKILL)  # Not waited for yet, so the id is its own.
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()
        self._remove_folder()
        self.budget.seconds -= usage.ru_utime + usage.ru_stime
        # Nobody but the kernel can have done that: for its CPU time, or for want of memory.
        killed = (-signal.SIGKILL, 128 + signal.SIGKILL)
        self.budget.killed |= by_kernel and self.process.returncode in killed

    def _let_end(self, seconds: float) -> None:
        """Waits for a process that ends by itself, whose CPU time is then known."""
        until = time.monotonic() + seconds
        while not self._has_ended() and time.monotonic() < until:
            time.sleep(0.001)

    def _has_ended(self) -> bool:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, flags) is not None

    def _remove_folder(self) -> None:
        if not self.folder:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        if os.path.exists(self.folder):  # Folders without rights, or too deep for Python.
            for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
                subprocess.run([*command, self.folder], stderr=subprocess.DEVNULL, check=False)


def environment() -> dict[str, str]:
    """All that a process of the sandbox knows of its surroundings."""
    fixed = {
        "PATH": "/usr/bin:/bin",
        "LC_ALL": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # A set has the same order in every run.
        "MALLOC_ARENA_MAX": "1",  # Or each thread would reserve 64 MiB of the address space.
    }
    needed = ("LD_LIBRARY_PATH",)  # Some interpreters find their own library only by it.
    return fixed | {name: os.environ[name] for name in needed if name in os.environ}


def _holds(walls: Sequence[str]) -> bool:
    budget = Budget(Limits(seconds=10), Isolation(tuple(walls)))
    try:
        with budget.start("probe") as run:
            return run.read_line() == b"ready\n"
    except OutOfLimits:
        return False
