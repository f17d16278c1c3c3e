"""Signals: the flag, the second signal, and that neither waits for the main thread."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from opd_jax.infra.preemption import StopSignal

REPOSITORY = pathlib.Path(__file__).parent.parent


def wait_for(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_sets_the_flag_and_handlers_come_back(number):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        assert not stop.requested
        assert not stop.agreed(3)
        os.kill(os.getpid(), number)
        assert stop.requested  # Nothing to wait for: Python ran the handler.
        assert stop.agreed(3)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not [t for t in threading.enumerate() if t.name == "stop-signal"]


def test_other_signals_are_not_counted():
    seen = []
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with StopSignal() as stop:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGUSR1)
            assert wait_for(lambda: seen)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_request_and_reentry():
    with StopSignal() as stop:
        stop.request()
        assert stop.requested
    with StopSignal() as stop:
        assert not stop.requested


def test_outside_the_main_thread_nothing_is_installed():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def run():
        with StopSignal() as stop:
            seen.append((signal.getsignal(signal.SIGTERM), stop.requested))
            stop.request()
            seen.append(stop.requested)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(before, False), True]


def test_c18_signal_during_compilation_is_seen_right_after():
    def slow_to_compile(x):
        for i in range(20):
            x = jnp.sin(x @ x) + i
        return x

    lowered = jax.jit(slow_to_compile).lower(jnp.ones((8, 8)))
    with StopSignal() as stop:
        timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        lowered.compile()
        timer.join()
        assert wait_for(lambda: stop.requested)


# Key stretching is one call into C that neither ends nor looks at signals, as a compilation is.
BUSY = "import hashlib; print('busy', flush=True); hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"
ORDERLY = f"from opd_jax.infra.preemption import StopSignal\nwith StopSignal():\n    {BUSY}"
NAIVE = (
    "import os, signal\nseen = []\n"
    "def handle(n, f):\n    seen.append(n) if not seen else os._exit(128 + n)\n"
    f"signal.signal(signal.SIGTERM, handle)\n{BUSY}"
)


def _start(code):
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "busy\n"
    time.sleep(0.1)
    return process


def test_c18_second_signal_ends_a_busy_process_at_once():
    orderly, naive = _start(ORDERLY), _start(NAIVE)
    try:
        for process in (orderly, naive):
            process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        # A launcher that signals the process and then its group asks once, not twice.
        orderly.send_signal(signal.SIGTERM)
        time.sleep(1.2)
        assert orderly.poll() is None
        for process in (orderly, naive):
            process.send_signal(signal.SIGTERM)
        assert orderly.wait(timeout=5) == 128 + signal.SIGTERM
        assert "SIGTERM: stopping" in (text := orderly.stderr.read())
        assert "SIGTERM again" in text
        # The control: an ordinary handler never gets to run.
        with pytest.raises(subprocess.TimeoutExpired):
            naive.wait(timeout=0.3)
    finally:
        for process in (orderly, naive):
            process.kill()
            process.communicate()
