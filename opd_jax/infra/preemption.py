"""Signals: the first asks for an orderly stop, the second ends the process at once.

A machine that is taken away sends SIGTERM and then waits a short while. Python runs a signal's
handler only between two of its own instructions, so neither a long compilation nor a long
generation would notice. The operating system does write the signal's number to a pipe at once, and
a small thread reads it there; the second signal therefore works even while the main thread is deep
inside XLA. The first only sets a flag: the loop looks at it between the phases of a step (prompts,
rollout, verification, scoring, evaluation batches), gives up the step under way, whose update has
not happened, and saves the state of the last finished one.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType

from absl import logging

from opd_jax.core import hosts

# Launchers such as GNU timeout signal a process and then its group: one request, two signals.
ECHO_SECONDS = 1.0


class StopSignal:
    """Context manager that turns SIGTERM and SIGINT into a flag, and a second one into an exit.

    Outside the main thread Python allows no signal handlers; there only `request` sets the flag.
    """

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)):
        """Args: signals: the ones to turn into a request to stop."""
        self._signals = tuple(signals)
        self._requested = threading.Event()
        self._previous: dict[signal.Signals, object] = {}
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is not threading.main_thread():
            logging.info("not in the main thread: signals keep their usual meaning")
            return self
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._previous = {s: signal.signal(s, self._on_signal) for s in self._signals}
        self._watcher = threading.Thread(target=self._watch, name="stop-signal", daemon=True)
        self._watcher.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._watcher is None:
            return
        for number, handler in self._previous.items():
            # None stands for a handler that Python did not install and cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._writer.close()
        self._watcher.join()
        self._reader.close()
        self._watcher = None

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self._requested.is_set()

    def request(self) -> None:
        """Asks for a stop as a first signal would, e.g. when a time limit is near."""
        self._requested.set()

    def agreed(self, step: int, phase: str = "") -> bool:
        """Whether any process was asked to stop; the same answer in all of them.

        With several processes this is a collective: every one calls it at the same point of the
        same step, because a process that stops alone leaves the others waiting for ever.

        Args:
          step: updates done, compared between the processes.
          phase: what is done next, compared too.

        Raises:
          hosts.HostError: a process has failed, is at another place, or did not come in time.
        """
        mine = "stop" if self.requested else "go on"
        return "stop" in hosts.exchange(mine, f"step {step}{phase and f': {phase}'}")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._requested.set()  # Seen by the main thread's very next look; counting is `_watch`'s.

    def _watch(self) -> None:
        first = None
        while data := self._reader.recv(64):
            now = time.monotonic()
            for number in (n for n in data if n in self._signals):
                self._requested.set()
                name = signal.Signals(number).name
                if first is not None and now - first < ECHO_SECONDS:
                    continue
                if first is not None:
                    os.write(2, f"\n{name} again: leaving at once\n".encode())
                    os._exit(128 + number)
                first = now
                os.write(2, f"\n{name}: stopping and saving; again to leave at once\n".encode())
