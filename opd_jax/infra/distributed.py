"""Hosts and devices: start-up, agreement between processes, the platform, the compilation cache."""

import contextlib
import hashlib
import json
import os
import pathlib
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from absl import logging
from etils import epath

from opd_jax.core import hosts

# JAX's own: seconds without a sign of life after which a process counts as dead, and all end.
_HEARTBEAT = 100
_VISIBLE_SECONDS = 30.0  # Until another host must see a new file: network file systems cache.

# What an accelerator's owner holds open; libtpu also guards the chips by a lock file.
_DEVICE_FILES = {
    "tpu": ("/dev/accel", "/dev/vfio", "/tmp/libtpu_lockfile"),
    "gpu": ("/dev/nvidia", "/dev/kfd"),
}


def start(
    multihost: bool,
    *,
    coordinator: str = "",
    processes: int = 0,
    process: int = -1,
    patience: float = 1800.0,
) -> None:
    """Joins the other processes if the run has several; does nothing otherwise.

    Call it before anything touches a device. A failure is never swallowed: a host that trains
    alone by mistake would write over the others' work.

    Args:
      multihost: whether this run is one of several processes, e.g. on a TPU pod or under Slurm.
      coordinator: host:port of process 0, where JAX cannot find it by itself; with the two below.
      processes: how many there are; 0: found by JAX.
      process: this one's number, from 0; -1: found by JAX.
      patience: seconds that processes wait for one another, for a dead one 100 at most.

    Raises:
      RuntimeError: the environment does not say who the other processes are, or they could not be
        reached.
    """
    if not multihost:
        return
    # Its handler of SIGTERM would take the place of the usual one; ours is infra/preemption.py.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator or None,
            processes or None,
            None if process < 0 else process,
            heartbeat_timeout_seconds=max(1, min(_HEARTBEAT, int(patience))),
        )
    except (ValueError, RuntimeError) as error:
        raise RuntimeError(
            f"multihost was asked for and the other processes cannot be joined ({error}); on a "
            "single host leave it out, otherwise start every process under a launcher that JAX "
            "detects (TPU pod, Slurm, MPI, Kubernetes), or give all of runtime.coordinator, "
            "runtime.processes and runtime.process"
        ) from error
    hosts.join(patience)
    logging.info("%s of %d", hosts.name(jax.process_index()), jax.process_count())


def leave(error: Exception) -> None:
    """Called when this process fails: the others end with its reason, instead of waiting for it.

    Returns if all can end in order. Otherwise says so and ends the process at once, because JAX
    would wait for the others, five minutes long, before it lets the interpreter end.
    """
    if isinstance(error, hosts.HostLostError):
        told = False
    else:
        told = isinstance(error, hosts.HostError) or hosts.tell_failure(str(error))
    if not told:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def is_writer() -> bool:
    """Whether this process is the one that writes logs and deletes files."""
    return jax.process_index() == 0


def all_agree(ok: bool) -> bool:
    """Whether `ok` holds in every process. Collective: all processes must call it."""
    return all(json.loads(x) for x in hosts.exchange(json.dumps(bool(ok)), "agreement"))


def from_writer(find: Callable[[], Any], what: str) -> Any:
    """What process 0 finds, the same in every process. Collective; `find` runs in process 0 alone.

    Hosts may see a shared directory at slightly different times; what they do next must not differ.

    Args:
      find: returns anything that JSON holds.
      what: for errors.
    """
    mine = json.dumps(find() if is_writer() else None)
    return json.loads(hosts.exchange(mine, what)[0])


def barrier(name: str) -> None:
    """Waits until every process has come here."""
    hosts.exchange("", name)


@contextlib.contextmanager
def writer_first(what: str) -> Iterator[None]:
    """Process 0 goes through the block first, then all others at once.

    For what is made once, on first use, in a directory that the processes may share.
    """
    if not is_writer():
        barrier(what)
    yield
    if is_writer():
        barrier(what)


def check_same(what: str, text: str, remedy: str) -> None:
    """Raises in every process if `text` is not the same in all of them. Collective.

    Args:
      what: the text's name, e.g. "configuration".
      text: anything that is equal exactly when runs are.
      remedy: what to do about a difference.

    Raises:
      ValueError: names each process, with its host, that differs from process 0.
    """
    digests = hosts.exchange(hashlib.sha256(text.encode()).hexdigest(), f"the same {what}")
    differing = [hosts.name(i) for i, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise ValueError(f"{', '.join(differing)}: another {what} than {hosts.name(0)}'s; {remedy}")


def require_shared(directory: str | os.PathLike[str]) -> None:
    """Makes sure that all processes see the same directory, before compute is spent. Collective.

    Raises:
      ValueError: names the processes that do not see what process 0 writes there.
    """
    if jax.process_count() == 1:
        return
    path = epath.Path(directory)
    probe = from_writer(lambda: _leave_probe(path), "the workdir's probe")
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not (seen := (path / probe).exists()) and time.monotonic() < deadline:
        time.sleep(0.5)
    blind = [
        i for i, x in enumerate(hosts.exchange(json.dumps(seen), "the workdir")) if x != "true"
    ]
    if is_writer():
        (path / probe).unlink()
    if blind:
        raise ValueError(
            f"{', '.join(map(hosts.name, blind))} cannot see what {hosts.name(0)} writes to "
            f"{path}; on several hosts the workdir must be one that all share: gs://BUCKET/DIR, or "
            "a network file system"
        )


def _leave_probe(path: epath.Path) -> str:
    name = f".probe-{socket.gethostname()}-{os.getpid()}-shared"
    (path / name).write_text("")
    return name


def require_platform(name: str | None) -> None:
    """Makes sure that the run is on the platform asked for, and not on the CPU by default.

    Args:
      name: "cpu", "gpu" or "tpu"; None takes whatever JAX finds.

    Raises:
      RuntimeError: JAX came up on something else. Names who holds the device, if that can be seen.
    """
    if name is None:
        return
    try:
        found = jax.default_backend()
    except RuntimeError as error:
        raise RuntimeError(_unavailable(name, f"JAX says: {error}")) from error
    if found != name:
        raise RuntimeError(_unavailable(name, f"JAX came up on {found!r}"))


def enable_compilation_cache(directory: str | os.PathLike[str] | None) -> bool:
    """Keeps compiled programs in `directory` for the next start; None leaves the cache off.

    A cache is a convenience: one that cannot be used is a warning. Whoever can write there can run
    code in this process, so the directory should belong to one user.

    Returns:
      Whether the cache is in use.
    """
    if directory is None:
        return False
    path = epath.Path(directory)
    probe = path / f".probe-{socket.gethostname()}-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        logging.warning("compilation cache %s cannot be used, going on without: %s", path, error)
        return False
    jax.config.update("jax_compilation_cache_dir", os.fspath(path))
    return True


def _unavailable(name: str, reason: str) -> str:
    remedy = (
        "Set JAX_PLATFORMS=cpu"
        if name == "cpu"
        else f"End that process or wait for it, check that jax is installed with its {name} extra "
        "and that JAX_PLATFORMS does not exclude it"
    )
    holders = _holders(name)
    seen = f"held open by {', '.join(holders)}" if holders else "no process seen holding it"
    return (
        f"platform {name!r} was asked for and not obtained ({reason}; {seen}). "
        f"{remedy}, or ask for another platform"
    )


def _holders(name: str) -> list[str]:
    """Other processes with one of the platform's device files open, as "pid 12 (/dev/accel0)"."""
    prefixes = _DEVICE_FILES.get(name, ())
    found = {}
    for link in pathlib.Path("/proc").glob("[0-9]*/fd/*") if prefixes else ():
        try:
            target = os.readlink(link)
        except OSError:  # The process ended, or belongs to somebody else.
            continue
        if target.startswith(prefixes) and int(link.parts[2]) != os.getpid():
            found[int(link.parts[2])] = target
    return [f"pid {pid} ({target})" for pid, target in sorted(found.items())]
