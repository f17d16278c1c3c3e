"""Several hosts: whose row is which, and small facts that all of them must know.

Every host runs the same program on the same list of prompts. Device arrays are spread over all of
them, and Python sees two kinds of things: a host's own rows (their texts, which its verifiers mark)
and small facts by which all decide alike (marks, lengths after a stop text, requests to stop). Such
facts go through JAX's coordination service over the ordinary network: no device queue is waited
for, there is a time limit, and the error names the host that did not come.

A wait for a device has no time limit. So a process exchanges something between dispatching a
computation that spans hosts and waiting for it: whoever waits then knows that all have dispatched.
"""

import dataclasses
import itertools
import json
import socket
from collections.abc import Iterator

import jax
import numpy as np

# The one way to the coordination service, which Orbax takes too: there is no public name for it.
from jax._src import distributed as jax_distributed

_LAST_WORDS = 60.0  # Seconds that a failed process waits to tell the others why.


class HostError(RuntimeError):
    """The processes cannot go on together, and all of them know it: one has failed, or strayed."""


class HostLostError(HostError):
    """Another process is gone or stuck, so that no orderly end is possible."""


@dataclasses.dataclass
class _Link:
    """This process's end of the connection that jax.distributed made, one per process as that."""

    patience: float = 1800.0  # Seconds that processes wait for one another.
    numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    names: list[str] = dataclasses.field(default_factory=list)  # By process.
    last: str = "start-up"  # The last phase that all reached.


_link = _Link()


def join(patience: float) -> None:
    """Meets all processes for the first time and learns their hosts' names.

    Args:
      patience: seconds that processes wait for one another from now on.
    """
    _link.patience = patience
    _link.names = exchange(socket.gethostname(), "start-up")


def name(process: int) -> str:
    """A process as errors call it, e.g. "process 1 (host-b)"."""
    known = process < len(_link.names)
    return f"process {process} ({_link.names[process]})" if known else f"process {process}"


def exchange(text: str, phase: str) -> list[str]:
    """The texts of all processes, in their order. Collective; one process gets its own back.

    Args:
      text: this process's.
      phase: where in the program this is, for errors; the same in every process.

    Raises:
      HostError: another process has failed, and why; or one is at another phase.
      HostLostError: one is gone or has not come in time.
    """
    if jax.process_count() == 1:
        return [text]
    found = [json.loads(x) for x in _meet({"phase": phase, "text": text}, phase, _link.patience)]
    failed = [f"{name(i)} failed: {x['failure']}" for i, x in enumerate(found) if "failure" in x]
    if failed:
        raise HostError("; ".join(failed))
    phases = [x["phase"] for x in found]
    if len(set(phases)) > 1:
        at = ", ".join(f"{name(i)} at {p!r}" for i, p in enumerate(phases))
        raise HostError(f"processes are at different places: {at}; end all and start again")
    _link.last = phase
    return [x["text"] for x in found]


def tell_failure(reason: str) -> bool:
    """Lets the others' next exchange fail with this process's reason.

    Returns:
      Whether they heard it, so that all can end in order; True if there are no others.
    """
    if jax.process_count() == 1:
        return True
    try:
        _meet({"failure": reason}, "the end", min(_link.patience, _LAST_WORDS))
    except HostLostError:
        return False
    return True


def merge_rows(x_B: np.ndarray, own_B: np.ndarray, phase: str) -> np.ndarray:
    """An array `[B, ...]` of which every process knows its own rows, whole. Collective.

    Args:
      x_B: numbers; rows that are not this process's are ignored.
      own_B: bool; each row is exactly one process's (see `own_rows`).
      phase: as for `exchange`.
    """
    if jax.process_count() == 1:
        return x_B
    rows = np.flatnonzero(own_B)
    parts = exchange(json.dumps([rows.tolist(), x_B[rows].tolist()]), phase)
    merged, told_B = np.zeros_like(x_B), np.zeros(len(x_B), np.int32)
    for part in parts:
        rows, values = json.loads(part)
        merged[rows] = np.asarray(values, x_B.dtype).reshape(len(rows), *x_B.shape[1:])
        told_B[rows] += 1
    if (told_B != 1).any():
        raise HostError(f"{phase}: rows {np.flatnonzero(told_B != 1)} are not one process's")
    return merged


def owners(layout: jax.sharding.Sharding, shape: tuple[int, ...]) -> np.ndarray:
    """The process, int32 `[B]`, that reads each row of an array laid out so.

    Rows that several processes hold (a tensor axis that spans hosts) are dealt out among them.
    Example: 8 rows over 2 processes: 0 0 0 0 1 1 1 1; on both whole: 0 1 0 1 0 1 0 1.
    """
    holders: dict[tuple[int, int], set[int]] = {}
    for device, index in layout.devices_indices_map(shape).items():
        start, stop, _ = index[0].indices(shape[0])
        holders.setdefault((start, stop), set()).add(device.process_index)
    owner_B = np.zeros(shape[0], np.int32)
    for (start, stop), processes in holders.items():
        owner_B[start:stop] = np.resize(sorted(processes), stop - start)
    return owner_B


def own_rows(x: jax.Array | np.ndarray) -> np.ndarray:
    """bool `[B]`: the rows that this process decodes and marks; all if it holds the whole array."""
    if isinstance(x, np.ndarray) or x.is_fully_addressable:
        return np.ones(x.shape[0], bool)
    return owners(x.sharding, x.shape) == jax.process_index()


def local(x: jax.Array | np.ndarray) -> np.ndarray:
    """An array as far as this process holds it; 0 elsewhere. Nothing moves between hosts."""
    if isinstance(x, np.ndarray) or x.is_fully_addressable:
        return np.asarray(x)
    held = np.zeros(x.shape, x.dtype)
    for shard in x.addressable_shards:
        held[shard.index] = shard.data
    return held


def _meet(message: dict[str, str], phase: str, patience: float) -> list[str]:
    """Every process's message as JSON, once all have come."""
    client = jax_distributed.global_state.client
    if client is None:
        raise HostLostError(
            f"there are {jax.process_count()} processes, and jax.distributed was not started in "
            "this one; set runtime.multihost=True"
        )
    number = next(_link.numbers)
    folder = f"opd_jax/{number}"
    try:
        client.key_value_set(f"{folder}/{jax.process_index()}", json.dumps(message))
        client.wait_at_barrier(folder, timeout_in_ms=max(1, int(patience * 1000)))
        found = dict(client.key_value_dir_get(folder))
        if jax.process_index() == 0 and number:
            # Who has come here has read what was said before.
            client.key_value_delete(f"opd_jax/{number - 1}")
    except jax.errors.JaxRuntimeError as error:
        raise HostLostError(_lost(client, folder, phase, patience, error)) from error
    by_process = {int(key.rpartition("/")[2]): value for key, value in found.items()}
    return [by_process[i] for i in range(jax.process_count())]


def _lost(client, folder: str, phase: str, patience: float, error: Exception) -> str:
    """What to say of processes that did not come."""
    if "DEADLINE_EXCEEDED" not in str(error):
        return (
            f"another process is gone, at {phase!r}; all were last together at {_link.last!r}. "
            f"Look at its own log, then start all again with the same --workdir. {error}"
        )
    came = {int(key.rpartition("/")[2]) for key, _ in client.key_value_dir_get(folder)}
    missing = [name(i) for i in range(jax.process_count()) if i not in came]
    return (
        f"{', '.join(missing)} did not come to {phase!r} within {patience:g} s; all were last "
        f"together at {_link.last!r}. Look at what it is doing (py-spy dump), end all processes "
        "and start them again with the same --workdir; if it is only slow, raise "
        "runtime.host_timeout"
    )
