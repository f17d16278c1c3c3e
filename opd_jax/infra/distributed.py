"""Hosts and devices: start-up, agreement between processes, the platform, the compilation cache."""

import hashlib
import os
import pathlib
import socket
from collections.abc import Sequence

import jax
import numpy as np
from absl import logging
from etils import epath
from jax.experimental import multihost_utils

# What an accelerator's owner holds open; libtpu also guards the chips by a lock file.
_DEVICE_FILES = {
    "tpu": ("/dev/accel", "/dev/vfio", "/tmp/libtpu_lockfile"),
    "gpu": ("/dev/nvidia", "/dev/kfd"),
}


def start(multihost: bool) -> None:
    """Joins the other processes if the run has several; does nothing otherwise.

    Call it before anything touches a device. A failure is never swallowed: a host that trains
    alone by mistake would write over the others' work.

    Args:
      multihost: whether this run is one of several processes, e.g. on a TPU pod or under Slurm.

    Raises:
      RuntimeError: the environment does not say who the other processes are, or they could not be
        reached.
    """
    if not multihost:
        return
    try:
        jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        raise RuntimeError(
            f"multihost was asked for and the other processes cannot be joined ({error}); on a "
            "single host leave it out, otherwise start every process under a launcher that JAX "
            "detects (TPU pod, Slurm, MPI, Kubernetes)"
        ) from error


def is_writer() -> bool:
    """Whether this process is the one that writes logs and deletes files."""
    return jax.process_index() == 0


def all_agree(ok: bool) -> bool:
    """Whether `ok` holds in every process. Collective: all processes must call it."""
    if jax.process_count() == 1:
        return ok
    return bool(np.all(multihost_utils.process_allgather(np.int32(ok))))


def from_first(steps: Sequence[int], most: int = 64) -> list[int]:
    """The first `most` numbers of process 0's list, the same in every process. Collective.

    Hosts may see a shared directory at slightly different times; what they do next must not differ.
    """
    if jax.process_count() == 1:
        return list(steps)
    padded = np.full((most,), -1, np.int32)
    padded[: len(steps[:most])] = steps[:most]
    return [int(x) for x in multihost_utils.broadcast_one_to_all(padded) if x >= 0]


def barrier(name: str) -> None:
    """Waits until every process has come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def check_same_config(config_hash: str) -> None:
    """Raises in every process if any of them runs another configuration. Collective.

    Args:
      config_hash: any text that is equal exactly when the configurations are.

    Raises:
      ValueError: names each process, with its host, that differs from process 0.
    """
    if jax.process_count() == 1:
        return
    digest = hashlib.sha256(config_hash.encode()).digest()
    host = socket.gethostname().encode()[:64].ljust(64)
    row = np.frombuffer(digest + host, np.uint8)
    rows = [bytes(r) for r in np.asarray(multihost_utils.process_allgather(row))]
    differing = [
        f"process {i} ({r[32:].decode(errors='replace').strip()})"
        for i, r in enumerate(rows)
        if r[:32] != rows[0][:32]
    ]
    if differing:
        raise ValueError(
            f"{', '.join(differing)} run another configuration than process 0 "
            f"({rows[0][32:].decode(errors='replace').strip()}); "
            "start every host with the same --config and overrides"
        )


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
