"""What a stage writes while it runs: metrics.jsonl, evals.jsonl, TensorBoard, a progress line.

Every line of a JSONL file is valid JSON. A number that JSON cannot hold becomes null, and its name
and value are noted in the same record: {"metrics": {"loss": null}, "nonfinite": {"metrics/loss":
"nan"}}.
"""

import json
import math
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

import numpy as np
from etils import epath
from tensorboardX import SummaryWriter

from opd_jax.infra import distributed

PathLike = str | os.PathLike[str]
_UNITS = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")


def require_writable(directory: PathLike) -> None:
    """Makes the directory and proves that a file can be written there, before compute is spent.

    Raises:
      OSError: names the path, the reason and the remedy.
    """
    path = epath.Path(directory)
    probe = path / f".probe-{socket.gethostname()}-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_text("x" * 4096)
        probe.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


class RunWriter:
    """Writes the records of one stage; in every process but the first it does nothing."""

    def __init__(self, stage_dir: PathLike):
        """Args: stage_dir: made if it is not there. Raises OSError if it cannot be written to."""
        self._dir = epath.Path(stage_dir)
        self._active = distributed.is_writer()
        self._purge_step: int | None = None
        self._board: SummaryWriter | None = None
        if self._active:
            require_writable(self._dir)

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, record: Mapping[str, Any]) -> None:
        """Appends one line to metrics.jsonl and its numbers to TensorBoard.

        Args:
          record: "step" (updates done), "flops" by phase, "flops_total", "metrics" by name, and
            whatever else is JSON. numpy values are taken as numbers.

        Raises:
          OSError: the file cannot be written; names it and the remedy.
        """
        if not self._active:
            return
        self._append("metrics.jsonl", [record])
        flops = {f"flops/{phase}": value for phase, value in record["flops"].items()}
        scalars = {**record["metrics"], **flops, "flops_total": record["flops_total"]}
        self._scalars(record["step"], scalars)

    def evaluation(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Appends the lines of one evaluation to evals.jsonl in one write, and mean accuracies.

        Args:
          records: each with "step", "split", "domain", "greedy" and "correct" [problems][samples].
        """
        if not self._active:
            return
        self._append("evals.jsonl", records)
        for r in records:
            kind = "eval_greedy" if r["greedy"] else "eval"
            mean = float(np.mean([np.mean(row) for row in r["correct"]]))
            self._scalars(r["step"], {f"{kind}/{r['split']}/{r['domain']}": mean})

    def truncate(self, step: int) -> None:
        """Forgets every record after `step`, so that a resumed run's files equal a whole run's.

        Call it before the first record, with the restored step (0 for a fresh start). A last line
        that a kill cut in two goes too.

        Raises:
          ValueError: a line in the middle is not a record; names file and line.
        """
        if not self._active:
            return
        self._purge_step = step + 1
        for name in ("metrics.jsonl", "evals.jsonl"):
            path = self._dir / name
            if not path.exists():
                continue
            kept = "".join(line for line, r in _records(path) if r["step"] <= step)
            partial = self._dir / f".{name}.partial"
            try:
                partial.write_text(kept)
                partial.replace(path)
            except OSError as error:
                raise _unwritable(path, error) from error

    def close(self) -> None:
        """Flushes TensorBoard."""
        if self._board is not None:
            self._board.close()
            self._board = None

    def _append(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(_line(r) for r in records)
        try:
            with (self._dir / name).open("a") as f:
                f.write(text)
        except OSError as error:
            raise _unwritable(self._dir / name, error) from error

    def _scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        try:
            if self._board is None:
                self._board = SummaryWriter(
                    os.fspath(self._dir / "tb"), purge_step=self._purge_step, flush_secs=10
                )
            for tag, value in scalars.items():
                self._board.add_scalar(tag, float(value), step)
        except OSError as error:
            raise _unwritable(self._dir / "tb", error) from error


class Progress:
    """One live line: rewritten in place on a terminal, printed now and then into a file."""

    def __init__(
        self,
        stage: str,
        total: int,
        *,
        stream: TextIO | None = None,
        every_seconds: float = 10.0,
    ):
        """Starts the clock.

        Args:
          stage: its name.
          total: updates at which the stage ends at the latest.
          stream: where to print; None is standard error.
          every_seconds: time between two lines where the stream is no terminal.
        """
        self._stage, self._total = stage, total
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._pause = 0.1 if self._live else every_seconds
        self._shown_at = -math.inf
        self._text = ""
        # (step, tokens, time) of the first call and of the last line. The first update compiles,
        # so the clock of the estimate starts after it.
        self._first: tuple[int, int, float] | None = None
        self._last: tuple[int, int, float] | None = None
        self._rate = 0.0

    def show(
        self,
        step: int,
        *,
        values: Mapping[str, float],
        tokens: int,
        flops: float,
        accuracy: float | None = None,
    ) -> None:
        """Shows where the stage is.

        Args:
          step: updates done.
          values: what to watch, in order, e.g. {"reward": 0.5} or {"kl": 0.1}.
          tokens: trained tokens so far, from which tokens per second follow.
          flops: training FLOPs so far.
          accuracy: the last one measured on the validation split.
        """
        if not distributed.is_writer():
            return
        now = time.monotonic()
        self._first = self._first or (step, tokens, now)
        if now - self._shown_at < self._pause and step < self._total:
            return
        step0, tokens0, time0 = self._last or self._first
        if step > step0 and now > time0:
            self._rate = (tokens - tokens0) / (now - time0)
        self._last, self._shown_at = (step, tokens, now), now
        parts = [f"{self._stage} {step}/{self._total}"]
        parts += [f"{name} {value:.4g}" for name, value in values.items()]
        parts += [] if accuracy is None else [f"accuracy {accuracy:.3f}"]
        parts += [f"{_scaled(self._rate)}tok/s"] if self._rate else []
        parts += [human_flops(flops), f"ETA {self._eta(step, now)}"]
        self._print("  ".join(parts))

    def close(self) -> None:
        """Ends the live line, so that what comes next starts on a new one."""
        if self._live and self._text:
            print(file=self._stream, flush=True)
            self._text = ""

    def _eta(self, step: int, now: float) -> str:
        step0, _, time0 = self._first
        if step <= step0:
            return "?"
        left = round((now - time0) / (step - step0) * max(self._total - step, 0))
        hours, minutes, seconds = left // 3600, left // 60 % 60, left % 60
        return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"

    def _print(self, text: str) -> None:
        if not self._live:
            print(text, file=self._stream, flush=True)
            return
        text = text[: shutil.get_terminal_size().columns - 1]
        print("\r" + text.ljust(len(self._text)), end="", file=self._stream, flush=True)
        self._text = text


def human_flops(flops: float) -> str:
    """Three significant digits with a unit: 1.23e12 is "1.23 TFLOP"."""
    return f"{_scaled(flops)}FLOP"


def _scaled(value: float) -> str:
    """Three significant digits, a space and an SI prefix: 1234.0 is "1.23 k"."""
    if not math.isfinite(value):
        return f"{value} "
    power = 0
    while power < len(_UNITS) - 1 and abs(value) >= 999.5:
        value, power = value / 1000, power + 1
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {_UNITS[power]}"


def _line(record: Mapping[str, Any]) -> str:
    nonfinite: dict[str, str] = {}
    plain = _plain(record, "", nonfinite)
    if nonfinite:
        plain["nonfinite"] = nonfinite
    return json.dumps(plain, allow_nan=False) + "\n"


def _plain(value: Any, name: str, nonfinite: dict[str, str]) -> Any:
    """`value` as JSON has it; NaN and infinities become None and go into `nonfinite` by name."""
    if isinstance(value, Mapping):
        return {k: _plain(v, f"{name}/{k}" if name else k, nonfinite) for k, v in value.items()}
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{name}/{i}", nonfinite) for i, v in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite[name] = str(value)
        return None
    return value


def _records(path: epath.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each whole line of a JSONL file with its record; a last line without its end is left out."""
    lines = path.read_text().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            return
        try:
            yield line, json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path} line {number} is not JSON ({error}); remove that line, or start anew in "
                "another workdir"
            ) from error


def _unwritable(path: epath.Path, error: OSError) -> OSError:
    return OSError(
        error.errno,
        f"cannot write {path}: {error.strerror or error}; free some space there, make it "
        "writable, or choose another workdir",
    )
