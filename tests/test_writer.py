"""Records on disk: valid JSON, equal after resume, clear errors; the progress line."""

import errno
import io
import json
import os

import numpy as np
import pytest
from tensorboardX import proto

from opd_jax.infra import distributed, writer
from opd_jax.infra.writer import Progress, RunWriter, human_flops, require_writable


def record(step, **metrics):
    return {
        "step": step,
        "seconds": 0.5 * step,
        "flops": {"decode": 1e9 * step},
        "flops_total": 1e9 * step,
        "metrics": metrics or {"loss": 1.0 / step},
    }


def evaluation(step, greedy=False):
    return {
        "step": step,
        "split": "validation",
        "domain": "arithmetic",
        "greedy": greedy,
        "correct": [[1, 0], [1, 1]],
    }


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def scalars(directory):
    """Every (tag, step, value) in the event files: records of length, crc, data, crc."""
    found = []
    for path in sorted(directory.glob("events*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = proto.event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            at += size + 16
    return found


def test_records_reach_both_files_and_tensorboard(tmp_path):
    with RunWriter(tmp_path / "stage") as w:
        w.step(record(1, reward=0.25))
        assert lines(tmp_path / "stage" / "metrics.jsonl") == [record(1, reward=0.25)]  # Flushed.
        w.evaluation([evaluation(1), evaluation(1, greedy=True)])
    assert lines(tmp_path / "stage" / "evals.jsonl") == [evaluation(1), evaluation(1, True)]
    assert scalars(tmp_path / "stage" / "tb") == [
        ("reward", 1, 0.25),
        ("flops/decode", 1, 1e9),
        ("flops_total", 1, 1e9),
        ("eval/validation/arithmetic", 1, 0.75),
        ("eval_greedy/validation/arithmetic", 1, 0.75),
    ]


def test_numbers_that_json_lacks(tmp_path):
    with RunWriter(tmp_path) as w:
        w.step(record(1, loss=float("nan"), kl=-np.float32("inf"), ok=np.float32(0.5)))
        w.evaluation([{**evaluation(1), "length": np.array([[1.0, np.inf]])}])
    text = (tmp_path / "metrics.jsonl").read_text() + (tmp_path / "evals.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    (got,) = lines(tmp_path / "metrics.jsonl")
    assert got["metrics"] == {"loss": None, "kl": None, "ok": 0.5}
    assert got["nonfinite"] == {"metrics/loss": "nan", "metrics/kl": "-inf"}
    (got,) = lines(tmp_path / "evals.jsonl")
    assert (got["length"], got["nonfinite"]) == ([[1.0, None]], {"length/0/1": "inf"})
    with pytest.raises(TypeError):
        RunWriter(tmp_path).step({**record(2), "bad": object()})


def test_resumed_files_equal_uninterrupted_ones(tmp_path):
    with RunWriter(tmp_path / "whole") as w:
        for step in range(1, 7):
            w.step(record(step))
            w.evaluation([evaluation(step)])
    with RunWriter(tmp_path / "resumed") as w:
        w.truncate(0)
        for step in range(1, 6):  # Two more than the checkpoint that is restored.
            w.step(record(step))
            w.evaluation([evaluation(step)])
    with (tmp_path / "resumed" / "metrics.jsonl").open("a") as f:
        f.write('{"step": 6, "seco')  # Killed in the middle of a line.
    with RunWriter(tmp_path / "resumed") as w:
        w.truncate(3)
        for step in range(4, 7):
            w.step(record(step))
            w.evaluation([evaluation(step)])
    for name in ("metrics.jsonl", "evals.jsonl"):
        whole, resumed = (tmp_path / d / name for d in ("whole", "resumed"))
        assert resumed.read_bytes() == whole.read_bytes()
    assert sorted(p.name for p in (tmp_path / "resumed").iterdir()) == [
        "evals.jsonl",
        "metrics.jsonl",
        "tb",
    ]


def test_truncate_names_a_broken_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl line 2 is not JSON.*remove that line"):
        RunWriter(tmp_path).truncate(3)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_unwritable_directory_is_one_clear_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    for call in (require_writable, RunWriter):
        with pytest.raises(OSError, match=rf"cannot write {blocked}.*another workdir"):
            call(blocked / "stage")


def test_c10_full_disk_is_one_clear_error(tmp_path, monkeypatch):
    w = RunWriter(tmp_path)
    w.step(record(1))
    before = (tmp_path / "metrics.jsonl").read_text()

    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(type(w._dir), "open", lambda *a, **k: Full())
    with pytest.raises(OSError, match=r"metrics.jsonl: No space left.*free some space") as error:
        w.step(record(2))
    assert error.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "is_writer", lambda: False)
    stream = io.StringIO()
    with RunWriter(tmp_path / "stage") as w:
        w.truncate(0)
        w.step(record(1))
        w.evaluation([evaluation(1)])
    Progress("s", 1, stream=stream).show(1, values={}, tokens=1, flops=1.0)
    assert not (tmp_path / "stage").exists()
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("flops", "text"),
    [
        (0, "0.00 FLOP"),
        (999.4, "999 FLOP"),
        (999.6, "1.00 kFLOP"),
        (1.234e12, "1.23 TFLOP"),
        (12.34e12, "12.3 TFLOP"),
        (99.96e12, "100 TFLOP"),
        (999.7e12, "1.00 PFLOP"),
        (9.996e9, "10.0 GFLOP"),
        (1e30, "1000000 YFLOP"),
        (float("inf"), "inf FLOP"),
    ],
)
def test_human_flops(flops, text):
    assert human_flops(flops) == text


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(writer.time, "monotonic", lambda: now[0])
    return now


def test_progress_into_a_file(clock):
    stream = io.StringIO()
    p = Progress("expert", 100, stream=stream)
    for step in range(10, 15):  # Resumed at 9; 4 s a step: lines at 0, 12 s.
        p.show(step, values={"reward": 0.5}, tokens=1000 * step, flops=2e12, accuracy=0.25)
        clock[0] += 4.0
    p.close()
    rest = "reward 0.5  accuracy 0.250"
    assert stream.getvalue().splitlines() == [
        f"expert 10/100  {rest}  2.00 TFLOP  ETA ?",
        f"expert 13/100  {rest}  250 tok/s  2.00 TFLOP  ETA 5:48",
    ]
    p.show(100, values={"kl": 0.1}, tokens=90_000, flops=3e12)  # The last is always shown.
    assert "expert 100/100  kl 0.1" in stream.getvalue()
    assert stream.getvalue().endswith("ETA 0:00\n")


def test_progress_on_a_terminal_is_one_line(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    p = Progress("a" * 50, 10, stream=stream)
    p.show(1, values={"reward": 0.123456}, tokens=1, flops=1.0)
    clock[0] += 5000.0
    p.show(2, values={}, tokens=1, flops=1.0)
    p.close()
    p.close()
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert all(len(part.rstrip("\n")) <= 59 for part in text.split("\r"))
    monkeypatch.setenv("COLUMNS", "200")
    p.show(3, values={}, tokens=1, flops=1.0)
    assert "ETA" not in text
    clock[0] += 1.0
    p.show(4, values={}, tokens=1, flops=1.0)
    assert "ETA 2:46:42" in stream.getvalue().replace("\r", "")
