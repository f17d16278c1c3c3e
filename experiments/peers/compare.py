"""Times GRPO and OPD steps of opd_jax and of other libraries on the same work, in turn.

    python -m experiments.peers.compare --work=peer_tiny --rounds=3 \\
        --trl_python=$HOME/trl/bin/python --tunix_python=$HOME/tunix/bin/python

Each library runs in a process of its own, in its own environment (`pip install torch trl`;
`pip install google-tunix`), round after round, so that a busy spell of the machine hits all. The
work is that of tools/bench: random weights, completions that no token ends, fp32, made-up rewards.
The first two steps of a process are not counted. The table goes to stdout, the figures to --json.
"""

import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from tools import bench

HERE = pathlib.Path(__file__).parent
ALGORITHMS = ("grpo", "opd")


def ours(preset: str, repeats: int) -> dict[str, Any]:
    """Steps of both algorithms by tools/bench."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "tools.bench", f"--preset={preset}",
                   f"--repeats={repeats}", f"--json={file.name}"]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = json.loads(pathlib.Path(file.name).read_text())
    return {
        "library": f"opd_jax, jax {found['jax']}",
        "peak_bytes": found["peak_rss_bytes"],
        "gflops": found["matmul_gflops"],
        **{name: [found[f"{name}_step_s"]] for name in ALGORITHMS},
    }


def theirs(python: str, script: str, work: dict[str, Any], steps: int) -> dict[str, Any]:
    """Steps of both algorithms by a script of another environment; None where it has none."""
    found: dict[str, Any] = {"peak_bytes": 0}
    for name in ALGORITHMS:
        command = [python, str(HERE / script), json.dumps(work), name, str(steps)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        said = json.loads(done.stdout.splitlines()[-1])
        found["library"] = said["library"]
        found[name] = said["step_s"] and said["step_s"][1:]
        found["peak_bytes"] = max(found["peak_bytes"], said["peak_bytes"])
    return found


def table(rounds: dict[str, list[dict[str, Any]]]) -> str:
    """A row per library: median seconds with their range, and how many times ours they are."""
    lines = ["| library | GRPO step | OPD step | peak memory |", "|---|---|---|---|"]
    median: dict[tuple[str, str], float] = {}
    for library, found in rounds.items():
        cells = []
        for name in ALGORITHMS:
            seconds = [s for once in found for s in once[name] or []]
            if not seconds:
                cells.append("none")
                continue
            median[library, name] = statistics.median(seconds)
            ratio = median[library, name] / median["opd_jax", name]
            cells.append(f"{median[library, name]:.2f} s ({min(seconds):.2f} to "
                         f"{max(seconds):.2f}), {ratio:.2f}x")  # fmt: skip
        peak = max(once["peak_bytes"] for once in found) / 2**30
        lines.append(f"| {found[0]['library']} | {' | '.join(cells)} | {peak:.2f} GiB |")
    peaks = [once["gflops"] for once in rounds["opd_jax"]]
    return "\n".join([*lines, "", f"matmul peak {min(peaks):.0f} to {max(peaks):.0f} GFLOP/s"])


def main(argv: Sequence[str]) -> None:
    """Measures as the flags say."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; see --help")
    f = flags.FLAGS
    w = bench.WORKLOADS[f.work]
    work = dataclasses.asdict(w) | {"pieces": f.pieces}
    others = {"trl": (f.trl_python, "trl_step.py"), "tunix": (f.tunix_python, "tunix_step.py")}
    rounds: dict[str, list[dict[str, Any]]] = {"opd_jax": []}
    for turn in range(f.rounds):
        rounds["opd_jax"].append(ours(f.work, f.steps))
        for library, (python, script) in others.items():
            if python:
                rounds.setdefault(library, []).append(theirs(python, script, work, f.steps + 2))
        print(f"round {turn + 1} of {f.rounds} done", file=sys.stderr)
    print(f"{w.prompts} prompts x {w.samples}, {w.prompt_tokens} + {w.new_tokens} tokens\n")
    print(table(rounds))
    if f.json:
        pathlib.Path(f.json).write_text(json.dumps(rounds, indent=1) + "\n")


if __name__ == "__main__":
    flags.DEFINE_enum("work", "peer_tiny", sorted(bench.WORKLOADS), "What to time.")
    flags.DEFINE_integer("rounds", 3, "Processes of each library.", lower_bound=1)
    flags.DEFINE_integer("steps", 3, "Steps of each process that count.", lower_bound=1)
    flags.DEFINE_integer("pieces", 1, "Micro-batches of the others; ours are the preset's.")
    flags.DEFINE_string("trl_python", "", "Interpreter that has trl; empty: left out.")
    flags.DEFINE_string("tunix_python", "", "Interpreter that has tunix; empty: left out.")
    flags.DEFINE_string("json", None, "File to write the figures to.")
    app.run(main)
