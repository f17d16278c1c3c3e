"""Runs the points of a sweep and tabulates them.

    python -m opd_jax.sweep --sweep=configs/sweeps/teacher_types.py --workdir=runs/teacher_types

A sweep file has a function `get_sweep` that returns Points (see points.py); it may take what
stands after a colon in --sweep, e.g. `--sweep=configs/sweeps/teacher_types.py:smoke`. Every point
is run by `opd_jax.main` in a process of its own: one that fails does not end the sweep. Finished
points are skipped, half-done ones resumed; SIGTERM stops the one under way, which saves first.

Points often begin alike, e.g. with the same base model and experts. A stage's numbers are a
function of its settings, its seed and the stages it starts from, so points that agree in these
share a folder, WORKDIR/stages/NAME-HASH, to which their own folders link: the first one trains it.
Each point still counts the stage's FLOPs in full, as if it had been alone. Remote workdirs know no
links, and the commands of --print_commands nothing of each other: there every point trains all.
"""

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from absl import app, flags, logging
from etils import epath

from opd_jax import pipeline, points
from opd_jax.config import Experiment
from opd_jax.infra.preemption import StopSignal
from opd_jax.infra.writer import require_writable
from opd_jax.points import Point
from opd_jax.report.sweep import write_sweep

_SWEEP = flags.DEFINE_string("sweep", None, "Path of a sweep file, and its argument after a colon.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory for everything that the sweep writes.")
_PRINT = flags.DEFINE_bool("print_commands", False, "Print one command per point; run nothing.")

_STOPPED = "stopped before it finished; start again with the same --workdir to go on"


def share_stages(x: Experiment, workdir: str, folder: str) -> None:
    """Makes the stage folders of a point links into the sweep's own, unless it has begun already.

    Args:
      x: the point's experiment.
      workdir: the sweep's directory; nothing is done if it is a remote one.
      folder: the point's folder in it.
    """
    point = pathlib.Path(workdir, folder)
    if "://" in workdir or (point / "plan.json").exists():
        return
    point.mkdir(parents=True, exist_ok=True)
    for name, shared in points.stage_folders(x).items():
        pathlib.Path(workdir, "stages", shared).mkdir(parents=True, exist_ok=True)
        (point / name).unlink(missing_ok=True)
        (point / name).symlink_to(pathlib.Path("..", "stages", shared), target_is_directory=True)


def is_finished(x: Experiment, directory: str) -> bool:
    """Whether a workdir holds the results of all stages of this very experiment."""
    try:
        results = json.loads((epath.Path(directory) / "results.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    mine = json.loads(json.dumps(dataclasses.asdict(x)))
    return not (results["unfinished"] or pipeline.config_differences(results["config"], mine))


def run_process(flags_of_point: Sequence[str], stop: StopSignal) -> str:
    """Runs opd_jax.main, its output passed through; a request to stop is passed on to it.

    Returns:
      "" if it ended well, which may also be because it was stopped; else its error.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "opd_jax.main", *flags_of_point],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches it once, from here, and not twice.
    )
    last: collections.deque[str] = collections.deque(maxlen=50)

    def copy_output() -> None:
        for line in process.stdout:
            last.append(line.rstrip())
            print(line, end="", flush=True)

    reader = threading.Thread(target=copy_output, daemon=True)
    reader.start()
    told = False
    while process.poll() is None:
        if stop.requested and not told:
            process.terminate()
            told = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
    reader.join()
    if process.returncode == 0:
        return ""
    lines = [line for line in last if line.strip()] or ["no output"]
    # What main says itself, or an exception by its name; JAX ends a traceback with a hint.
    said = [line for line in lines if re.match(r"error: |[\w.]+(Error|Exception): ", line)] or lines
    return f"{said[-1]} (exit status {process.returncode})"


def run(
    wanted: Sequence[Point],
    workdir: str,
    runner: Callable[[Sequence[str], StopSignal], str] = run_process,
) -> tuple[str, list[str]]:
    """Runs the points that are not finished; writes sweep.csv, sweep.html and sweep.json.

    Args:
      wanted: what to run, in order.
      workdir: the sweep's directory; each point has a folder in it.
      runner: runs opd_jax.main with some flags and returns its error, or "".

    Returns:
      The table, and the folders of the points that failed; stopped ones are not among them.

    Raises:
      ValueError: a point's config is wrong; nothing has been run then.
      OSError: the workdir cannot be written.
    """
    experiments = points.check(wanted)
    require_writable(workdir)
    records, failed = [], []
    with StopSignal() as stop:
        for point, x in zip(wanted, experiments, strict=True):
            directory = os.path.join(workdir, point.folder)
            error = run_point(point, x, workdir, runner, stop)
            facts = {"name": point.name, "seed": point.seed, "workdir": directory}
            records.append(facts | {"status": "failed" if error else "done", "error": error})
            if error and error != _STOPPED:
                failed.append(point.folder)
    (epath.Path(workdir) / "sweep.json").write_text(json.dumps(records, indent=1))
    return write_sweep(records, workdir), failed


def run_point(point: Point, x: Experiment, workdir: str, runner: Callable, stop: StopSignal) -> str:
    """Runs a point unless it is finished or the sweep is to stop; returns its error, or ""."""
    directory = os.path.join(workdir, point.folder)
    if is_finished(x, directory):
        logging.info("%s is finished: skipped", point.folder)
        return ""
    if stop.requested:
        return _STOPPED
    logging.info("%s begins", point.folder)
    share_stages(x, workdir, point.folder)
    error = runner(points.arguments(point, workdir), stop)
    if is_finished(x, directory):
        return ""
    error = _STOPPED if stop.requested else error or "it ended before it was finished"
    logging.error("%s: %s", point.folder, error)
    return error


def main(argv: list[str]) -> None:
    """Loads the sweep and runs it, or prints its commands."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument(s): {' '.join(argv[1:])}")
    try:
        wanted = points.load(_SWEEP.value, "get_sweep")
        if _PRINT.value:
            points.check(wanted)
            for point in wanted:
                arguments = points.arguments(point, _WORKDIR.value)
                print(shlex.join(["python", "-m", "opd_jax.main", *arguments]))
            return
        table, failed = run(wanted, _WORKDIR.value)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(table)
    if failed:
        sys.exit(f"error: these points failed, see the table: {', '.join(failed)}")


def cli() -> None:
    """Entry point."""
    flags.mark_flags_as_required(["sweep", "workdir"])
    app.run(main)


if __name__ == "__main__":
    cli()
