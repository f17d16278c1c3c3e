"""Ten thousand verifier calls, math and code mixed, one in twenty hostile: speed, leaks, verdicts.

    python -m tools.bench_verifiers --calls=10000 --workers=2 --json=verifiers.json

The right verdict of every call is known. Exit code 1 if one is wrong, or if a process, a temporary
file or more than `--memory_mb` of memory is left behind. Limits are short, so that hostile calls do
not hide the others; what a hang costs is its limit.
"""

import json
import os
import pathlib
import random
import shutil
import sys
import tempfile
import time

from absl import app, flags

from opd_jax import rewards
from opd_jax.data.problem import Problem
from opd_jax.domains import sandbox
from opd_jax.domains.answers import VerifierSettings

_CALLS = flags.DEFINE_integer("calls", 10_000, "Completions to mark.")
_WORKERS = flags.DEFINE_integer("workers", 2, "Worker processes.")
_SECONDS = flags.DEFINE_float("seconds", 1.0, "CPU limit of a call.")
_MEMORY = flags.DEFINE_float("memory_mb", 50, "Growth after the first tenth that is no leak.")
_JSON = flags.DEFINE_string("json", "", "Where to write the figures; none if empty.")

# (gold, right answer, wrong answer)
MATH = [
    (r"\frac{1}{2}", "0.5", "2"), (r"2\sqrt{2}", r"\sqrt{8}", r"\sqrt{2}"),
    ("(1,2)", "(1, 2)", "(2,1)"), (r"\{1,2\}", "2, 1", "1"), ("1000", "1,000", "100"),
    ("x^2+2x+1", "(x+1)^2", "x^2+1"), (r"28\%", "28 percent", "2.8"), ("10 cm", "10", "10 m"),
    (r"\text{E}", "E: because", "A"), ("0<x<12", "(0,12)", "[0,12]"),
    (r"\frac{\sqrt{3}}{2}", "sqrt(3)/2", r"\sqrt{3}"), ("y=2x+1", "2x+1", "2x"),
]  # fmt: skip
HOSTILE_MATH = ["9^{9^{9^{9}}}", "(10^{10})!", "(" * 2000 + "1" + ")" * 2000, "10^{10^{10}}"]
# (answer, right program, wrong program)
CODE = [
    ({"kind": "functions", "entry_point": "add", "tests": [{"args": [1, 2], "expected": 3}]},
     "def add(a, b):\n    return a + b", "def add(a, b):\n    return a - b"),
    ({"kind": "stdio", "tests": [{"input": "3 4\n", "output": "7\n"}]},
     "print(sum(map(int, input().split())))", "print(34)"),
    ({"kind": "asserts", "tests": ["assert rev('abc') == 'cba'", "assert rev('') == ''"]},
     "def rev(s): return s[::-1]", "def rev(s): return s"),
]  # fmt: skip
HOSTILE_CODE = [
    "import os\nwhile True: os.fork()", "x = bytearray(10**10)", "while True: print('x' * 10**6)",
    "import os\nos._exit(0)", "open('reward.txt', 'w').write('1.0')\nprint('ALL_TESTS_PASSED')",
    "import os\nprint(open('/proc/%d/environ' % os.getppid()).read())",
    "import socket\nsocket.create_connection(('127.0.0.1', 80))",
    "import os\nos.kill(os.getppid(), 9)", "import subprocess\nsubprocess.Popen(['sleep', '600'])",
    "x = 10**(10**9)", "import re\nre.match('(a+)+$', 'a' * 50 + 'b')",
    "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
    "import sys\nprint(sys._getframe(1).f_locals)", "import time\ntime.sleep(600)",
    "import builtins\nbuiltins.AssertionError = builtins.all = None", "while True: pass",
]  # fmt: skip


def calls(count: int) -> list[tuple[Problem, str, float]]:
    """(problem, completion, right verdict) in a fixed random order, half math and half code."""
    rng, found = random.Random(0), []
    for i in range(count):
        is_math, hostile, right = i % 2 == 0, i % 20 in (4, 9), rng.random() < 0.5
        gold, good, bad = rng.choice(MATH if is_math else CODE)
        if hostile and i % 40 < 20:  # One in twenty over all.
            text, right = rng.choice(HOSTILE_MATH if is_math else HOSTILE_CODE), False
        else:
            text = good if right else bad
        if is_math:
            found.append((Problem("d", i, 1, "p", gold, {}, "math"), rf"\boxed{{{text}}}", right))
        else:
            found.append((Problem("d", i, 1, "p", json.dumps(gold), {}, "python"), text, right))
    return found


def below(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += below(int(child))
    return found


def resident_mb(pids: list[int]) -> float:
    """Memory that processes have for themselves or share among them, in MiB."""
    total = 0.0
    for pid in pids:
        for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) / 1024
    return total


def main(argv: list[str]) -> None:
    """Runs the calls in batches, as training does, and prints the figures."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument(s): {' '.join(argv[1:])}")
    todo, n = calls(_CALLS.value), max(1, _CALLS.value // 20)
    settings = VerifierSettings(seconds=_SECONDS.value, code_seconds=_SECONDS.value)
    tempfile.tempdir = tempfile.mkdtemp(prefix="bench_verifiers_")  # Where only we write.
    wrong, timeouts, errors, memory = [], 0.0, 0.0, []
    start = time.monotonic()
    with rewards.Pool(settings, workers=_WORKERS.value) as pool:
        print(sandbox.probe().describe(), flush=True)
        for first in range(0, len(todo), n):
            part = todo[first : first + n]
            verdicts = pool.submit([p for p, _, _ in part], [t for _, t, _ in part]).result()
            wrong += [
                (p.answer, text)
                for (p, text, right), got in zip(part, verdicts.right_B, strict=True)
                if right != got
            ]
            timeouts += verdicts.counts["verifier_timeouts"]
            errors += verdicts.counts["verifier_errors"]
            memory.append(resident_mb(below(os.getpid())))
            print(f"{first + len(part)} calls, {time.monotonic() - start:.0f} s, "
                  f"{len(wrong)} wrong, {memory[-1]:.0f} MiB", flush=True)  # fmt: skip
    seconds = time.monotonic() - start
    figures = {
        "calls": len(todo),
        "seconds": round(seconds, 1),
        "calls_per_second": round(len(todo) / seconds, 1),
        "wrong": wrong[:10],
        "verifier_timeouts": timeouts,
        "verifier_errors": errors,
        "memory_mb_first_last": [round(memory[1 if len(memory) > 1 else 0]), round(memory[-1])],
        "processes_left": len(below(os.getpid())) - 1,
        "temporary_files_left": len(os.listdir(tempfile.gettempdir())),
    }
    shutil.rmtree(tempfile.gettempdir())
    print(json.dumps(figures, indent=1))
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(figures, indent=1))
    first, last = figures["memory_mb_first_last"]
    leaks = figures["processes_left"] > 0 or figures["temporary_files_left"] > 0
    sys.exit(int(bool(wrong) or leaks or last - first > _MEMORY.value))


if __name__ == "__main__":
    app.run(main)
