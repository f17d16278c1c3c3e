"""Checkpoints of a stage. The only file that knows Orbax.

A directory holds one folder per saved step, named by its number; a folder appears in one rename
when it is complete:

    120/state/...        every array of the training state, sharded as it was
    120/meta/data.json   {"metric": 0.62, "meta": {iterator, ledger, config, teachers, ...}}

While a step is written it is called `N.orbax-checkpoint-tmp`. On the CPU a save holds on to the
arrays themselves instead of copies; donating them is safe, and costs one copy then.

Other names are never touched, with three exceptions that this file made itself: what a failed
save of this process left behind, `N.deleting` (an old checkpoint on its way out), and
`N.unreadable` (one that could not be restored, moved aside when step N is reached again, and kept).
"""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, Literal

import jax
import numpy as np
from absl import logging
from etils import epath
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from opd_jax.core.types import Params
from opd_jax.infra import distributed

PathLike = str | os.PathLike[str]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. Says which, why, and what can be done."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """What came back: the step, the arrays, and everything that is not an array."""

    step: int  # Updates done when it was saved.
    state: Any  # The training state, or the parameters alone (`load_params`).
    meta: dict[str, Any]  # JSON values: tuples have become lists.


class Checkpointer:
    """Saves and restores the checkpoints of one directory; a context manager.

    All processes of a run make the same calls in the same order.
    """

    def __init__(self, directory: PathLike, *, keep_newest: int, keep_steps: Sequence[int] = ()):
        """Looks at what is there; writes nothing.

        Args:
          directory: where the checkpoints are; any path that epath takes. Need not exist.
          keep_newest: how many of the newest to keep, at least 1. The best by metric is kept too.
          keep_steps: steps that are never deleted, e.g. because they serve as teachers.
        """
        if keep_newest < 1:
            raise ValueError(f"keep_newest={keep_newest}: at least the newest must be kept")
        self._directory = _absolute(directory)
        self._keep_newest, self._keep_steps = keep_newest, frozenset(keep_steps)
        # Complete checkpoints with their metrics. Replaced, never changed: the worker writes it.
        self._metrics, self._unreadable = _scan(self._directory)
        self._worker = futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, futures.Future[None]] | None = None

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, ascending; a save under way is not among them."""
        return sorted(self._metrics)

    def latest(self) -> int | None:
        """The newest complete step, None if there is none."""
        return max(self._metrics, default=None)

    def best(self) -> int | None:
        """The step with the highest metric (the earliest of equals), None if none has one."""
        return _best(self._metrics)

    def save(
        self, step: int, state: Any, meta: Mapping[str, Any], *, metric: float | None = None
    ) -> bool:
        """Starts saving and returns as soon as the arrays are copied, so they may be donated.

        Waits for the save before it, if that one is still being written.

        Args:
          step: updates done. A step's state is written once, because equal steps of a run are
            equal bit for bit; saving it again can only add the metric that it lacked.
          state: tree of arrays; typed PRNG keys and optax's named tuples included.
          meta: JSON values only; copied here, so the caller may go on changing it. Written with
            the state, and again with a metric that is added.
          metric: what "best" means, higher is better; None or NaN never is the best.

        Returns:
          False if this step is already there, and nothing was done.

        Raises:
          CheckpointError: this save could not start, or the one before it failed. After the
            latter nothing has been started; calling again tries again.
          TypeError: meta holds something that JSON cannot.
        """
        self.wait()
        metric = None if metric is None or not math.isfinite(metric) else metric
        try:
            document = json.loads(json.dumps({"metric": metric, "meta": meta}))
        except TypeError as error:
            raise TypeError(f"meta of the checkpoint at step {step}: {error}") from error
        if step in self._metrics:
            return self._add_metric(step, document)
        try:
            self._set_aside(step)
            with _context():
                response = ocp.save_checkpointables_async(
                    self._path(step), {"state": state, "meta": document}
                )
        except Exception as error:
            raise self._failure(step, error) from error
        self._pending = step, self._worker.submit(self._finish, step, metric, response)
        return True

    def wait(self) -> None:
        """Returns when nothing is being written any more.

        Raises:
          CheckpointError: the save under way failed.
        """
        if self._pending is None:
            return
        step, future = self._pending
        try:
            future.result()
        except Exception as error:
            raise self._failure(step, error) from error
        finally:
            if future.done():
                self._pending = None

    def close(self) -> None:
        """Waits for the save under way and raises if it failed. The object is of no use after."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()

    def restore(self, abstract_state: Any, step: int | None = None) -> Restored | None:
        """Reads a checkpoint, by default the newest that can be read, onto the layout asked for.

        Args:
          abstract_state: tree of `jax.ShapeDtypeStruct` with shardings (or of arrays), on any mesh;
            `jax.eval_shape` of the function that makes the state gives it.
          step: exactly this one. None: the newest, passing over unreadable ones with a warning.

        Returns:
          None only if the directory holds no checkpoint whatever: a run may then start afresh.

        Raises:
          CheckpointError: there are checkpoints, and none (or not the one asked for) can be read.
          ValueError: shapes, dtypes or structure differ; lists every leaf, saved and wanted.
        """
        self.wait()
        wanted = jax.tree_util.tree_map_with_path(_placed, abstract_state)
        known = sorted({*self._metrics, *self._unreadable}, reverse=True)
        if step is not None:
            if step not in known:
                raise CheckpointError(f"no step {step} in {self._directory}; there are {known}")
            return _load(self._path(step), {"state": wanted})
        for candidate in known:
            try:
                restored = _load(self._path(candidate), {"state": wanted})
            except CheckpointError as error:
                restored = None
                logging.warning("%s; passing over to the next older one", error)
            if distributed.all_agree(restored is not None):
                return restored
            self._metrics = {s: m for s, m in self._metrics.items() if s != candidate}
            self._unreadable = self._unreadable | {candidate}
        if known:
            raise CheckpointError(
                f"none of the checkpoints in {self._directory} can be read (steps {known}; the "
                "reasons are logged above); put an intact copy there, or start anew in another "
                "workdir"
            )
        return None

    def _path(self, step: int) -> epath.Path:
        return self._directory / str(step)

    def _finish(self, step: int, metric: float | None, response: ocp.AsyncResponse[None]) -> None:
        """In the worker: waits until the step is complete, then deletes what is not to be kept."""
        response.result()
        metrics = {**self._metrics, step: metric}
        kept = {*sorted(metrics)[-self._keep_newest :], _best(metrics), *self._keep_steps}
        self._metrics = {s: m for s, m in metrics.items() if s in kept}
        if not distributed.is_writer():
            return
        try:
            for leftover in self._directory.glob("*.deleting"):
                if leftover.stem.isdecimal():
                    leftover.rmtree()
            for old in metrics.keys() - kept:
                # The rename first: a deletion cut short must not look like a checkpoint.
                self._path(old).rename(self._directory / f"{old}.deleting").rmtree()
        except OSError as error:
            logging.warning("cannot delete old checkpoints in %s: %s", self._directory, error)

    def _add_metric(self, step: int, document: dict[str, Any]) -> bool:
        """Gives a saved step the metric it lacks, measured after a save that could not wait."""
        if document["metric"] is None or self._metrics[step] is not None:
            logging.info("step %d is already saved in %s", step, self._directory)
            return False
        if distributed.is_writer():
            path = _document_path(self._path(step))
            partial = path.parent / "data.json.partial"
            try:
                partial.write_text(json.dumps(document))
                partial.replace(path)
            except OSError as error:
                raise self._failure(step, error) from error
        self._metrics = {**self._metrics, step: document["metric"]}
        return True

    def _set_aside(self, step: int) -> None:
        """Moves a checkpoint that could not be read out of the way of a new one, and keeps it."""
        if step not in self._unreadable:
            return
        if distributed.is_writer():
            names = [f"{step}.unreadable", *(f"{step}.unreadable-{i}" for i in range(2, 1000))]
            target = next(p for n in names if not (p := self._directory / n).exists())
            self._path(step).rename(target)
            logging.warning("moved the unreadable checkpoint of step %d to %s", step, target)
        distributed.barrier(f"set_aside_{step}")
        self._unreadable = self._unreadable - {step}

    def _failure(self, step: int, error: Exception) -> CheckpointError:
        """The error to raise after a failed save; frees the space that the attempt has taken."""
        if distributed.is_writer():
            with contextlib.suppress(OSError):  # The disk may be what is broken.
                for leftover in self._directory.glob(f"{step}.orbax-checkpoint-tmp*"):
                    leftover.rmtree()
        intact = (
            f"complete checkpoints there: {self.steps()}" if self._metrics else "none there yet"
        )
        return CheckpointError(
            f"saving step {step} to {self._directory} failed: {_cause(error)}. "
            f"{_remedy(error)}; {intact}"
        )


def load_params(
    directory: PathLike,
    step: int | Literal["best"] | None = None,
    abstract_params: Params | None = None,
) -> Restored:
    """Reads the parameters of a checkpoint alone, whatever optimizer it was trained with.

    Args:
      directory: a Checkpointer's directory, or a copy of one.
      step: a number, "best" by metric, or None for the newest.
      abstract_params: shapes, dtypes and shardings wanted. None: numpy arrays as they were saved.

    Returns:
      The step, the parameters as `state`, and the meta.

    Raises:
      CheckpointError: it is not there or cannot be read; no other one is taken instead.
      ValueError: it does not fit `abstract_params`.
    """
    path = _find(_absolute(directory), step)
    if abstract_params is not None:
        wanted = jax.tree_util.tree_map_with_path(_placed, abstract_params)
    else:
        with _reading(path):
            saved = _saved(path)["params"]
        # A numpy array as template asks for one; this takes no memory.
        wanted = jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), saved)
    restored = _load(path, {"state": {"params": wanted}}, part="params")
    return dataclasses.replace(restored, state=restored.state["params"])


def load_meta(directory: PathLike, step: int | Literal["best"] | None = None) -> dict[str, Any]:
    """Reads what a checkpoint says besides its arrays; arguments and errors as `load_params`."""
    return _read_document(_find(_absolute(directory), step))["meta"]


def _find(directory: epath.Path, step: int | Literal["best"] | None) -> epath.Path:
    """The folder of one step: a number, "best", or None for the newest, readable or not."""
    metrics, unreadable = _scan(directory)
    known = sorted({*metrics, *unreadable})
    if not known:
        raise CheckpointError(f"no checkpoint in {directory}")
    chosen = {"best": _best(metrics), None: known[-1]}.get(step, step)
    if chosen not in known:
        raise CheckpointError(f"no {step!r} in {directory}; steps {known}, metrics {metrics}")
    return directory / str(chosen)


def _document_path(path: epath.Path) -> epath.Path:
    return path / "meta" / "data.json"


def _read_document(path: epath.Path) -> dict[str, Any]:
    with _reading(path):
        document = json.loads(_document_path(path).read_text())
        return {"metric": document["metric"], "meta": document["meta"]}


def _absolute(directory: PathLike) -> epath.Path:
    """A path that Orbax takes: local ones must be absolute, remote ones stay as they are."""
    text = os.fspath(directory)
    local = "://" not in text
    return epath.Path(os.path.abspath(os.path.expanduser(text)) if local else text)


def _scan(directory: epath.Path) -> tuple[dict[int, float | None], frozenset[int]]:
    """Metrics of the checkpoints whose meta can be read, and the steps of those where it cannot.

    What process 0 sees, in every process: they must not disagree about where to go on.
    """
    metrics, unreadable = distributed.from_writer(
        lambda: [list(x) for x in _scan_here(directory)], f"checkpoints in {directory}"
    )
    return dict(metrics), frozenset(unreadable)


def _scan_here(directory: epath.Path) -> tuple[list[tuple[int, float | None]], list[int]]:
    """The same as pairs and steps, as this process sees it."""
    found = directory.iterdir() if directory.exists() else ()
    steps = [int(p.name) for p in found if p.name.isdecimal() and p.is_dir()]
    metrics: dict[int, float | None] = {}
    for step in steps:
        try:
            metrics[step] = _read_document(directory / str(step))["metric"]
        except CheckpointError as error:
            logging.warning("%s", error)
    return list(metrics.items()), [step for step in steps if step not in metrics]


def _best(metrics: Mapping[int, float | None]) -> int | None:
    measured = {step: metric for step, metric in metrics.items() if metric is not None}
    return min(measured, key=lambda step: (-measured[step], step), default=None)


def _context(*, partial: bool = False) -> ocp.Context:
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name="meta")
    context = ocp.Context()
    context.checkpointables.registry = registry
    context.pytree.loading.partial_load = partial
    # Made in the background, a directory that cannot be made leaves threads waiting for it.
    context.asynchronous.create_directories_asynchronously = False
    return context


@contextlib.contextmanager
def _reading(path: epath.Path) -> Iterator[None]:
    """Whatever goes wrong in here means that the checkpoint is incomplete or corrupt."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {_cause(error)}") from error


def _load(path: epath.Path, wanted: dict[str, Any], part: str | None = None) -> Restored:
    """Reads one checkpoint after comparing every leaf, because Orbax casts in silence."""
    with _reading(path):
        tree = _saved(path)
        saved = _described(tree if part is None else {part: tree[part]})
    asked = _described(wanted["state"])
    differing = [
        f"{name}: saved {saved.get(name, 'nothing')}, wanted {asked.get(name, 'nothing')}"
        for name in sorted({*saved, *asked})
        if saved.get(name) != asked.get(name)
    ]
    if differing:
        raise ValueError(
            f"checkpoint {path} does not fit, {len(differing)} leaves differ; use the "
            "configuration it was saved with, or another workdir\n  " + "\n  ".join(differing)
        )
    with _reading(path), _context(partial=part is not None):
        state = ocp.load_checkpointables(path, wanted)["state"]
    return Restored(int(path.name), state, _read_document(path)["meta"])


def _saved(path: epath.Path) -> Any:
    """The tree that was saved: dicts and lists, with shape and dtype for leaves."""
    with _context():
        tree = ocp.metadata(path, checkpointable_name="state").metadata
    if tree is None:  # So says Orbax when it cannot parse the description.
        raise ValueError("the description of its arrays is damaged or missing")
    return tree


def _described(tree: Any) -> dict[str, str]:
    """Shape and dtype of every leaf by its path, which a saved tree and a live one have alike."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found[name] = f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
    return found


def _placed(path: tuple[Any, ...], leaf: Any) -> jax.ShapeDtypeStruct:
    """The leaf with a sharding on real devices; the mesh in context stands in where none is named.

    `jax.eval_shape` names an abstract mesh, and none at all for scalars, which are replicated.
    """
    sharding = leaf.sharding
    if sharding is not None and not isinstance(sharding, NamedSharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    if sharding is None or isinstance(sharding.mesh, AbstractMesh):
        mesh = jax.sharding.get_mesh()
    else:
        mesh = sharding.mesh
    if mesh.empty:
        raise ValueError(
            f"abstract state {jax.tree_util.keystr(path)} has no sharding on real devices, and no "
            "mesh is in context; call this under jax.set_mesh"
        )
    # A key array reports the layout of its data, which has one more axis.
    spec = PartitionSpec() if sharding is None else PartitionSpec(*sharding.spec[: leaf.ndim])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def _cause(error: BaseException) -> str:
    """First line of what was at the bottom of it."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:400] if text else ''}"


def _remedy(error: BaseException) -> str:
    text = str(error) + _cause(error)
    if any(sign in text for sign in ("ENOSPC", "No space left", "EDQUOT", "quota exceeded")):
        return "The disk is full: free some space there, or choose another workdir"
    return "Make sure that the directory can be written to"
