"""Times the sampler against itself without one of the things it does, on whatever device is there.

    python -m tools.bench_rollout --case=long_tail --repeats=5 --json=long_tail.json

    long_tail      lengths that fall off exponentially: rows that have stopped leave the batch,
                   against a batch of all rows to the end
    shared_prompt  eight samples of one prompt that is prefilled once, against eight prompts

Both draw the same tokens from the same noise, which is checked; programs are compiled and run once
before the clock starts, then timed in turn, in alternating order.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from absl import app, flags

from opd_jax import rollout
from opd_jax.core import rng, sharding
from opd_jax.core.types import PromptBatch
from opd_jax.models import transformer
from opd_jax.rollout import Sampling
from tools import bench


@dataclasses.dataclass(frozen=True)
class Case:
    """Prompts and samples of a model. The slower way keeps stopped rows in the batch."""

    work: bench.Workload
    stops: int = 0  # Tokens that end a completion; random weights draw each as often as another.
    repeated: bool = False  # Whether the slower way prefills a prompt for each of its samples.


CASES = {
    # Four tokens of 512 stop: after 128 in the mean, a quarter of the limit.
    "long_tail": Case(dataclasses.replace(bench.WORKLOADS["peer_tiny"], new_tokens=512), stops=4),
    "shared_prompt": Case(
        dataclasses.replace(
            bench.WORKLOADS["smollm2_135m"], prompts=1, samples=8, prompt_tokens=256, new_tokens=64
        ),
        repeated=True,
    ),
}


def batch(case: Case) -> tuple[PromptBatch, PromptBatch]:
    """The prompts, and the same for the slower way."""
    work = case.work
    prompts = bench.prompts(work)  # Which no token ends.
    if case.stops:
        stop_S = np.arange(case.stops, dtype=np.int32)
        prompts = prompts.replace(stop_PS=np.tile(stop_S, (work.prompts, 1)))
    if not case.repeated:
        return prompts, prompts
    return prompts, jax.tree.map(lambda x: np.repeat(x, work.samples, axis=0), prompts)


def program(case: Case, params: Any, prompts: PromptBatch, slower: bool) -> Callable[[], Any]:
    """The compiled rollout, to be called without arguments."""
    work, sizes = case.work, rollout.phases
    sampling = Sampling(1 if slower and case.repeated else work.samples, work.new_tokens)

    def whole_batches(rows: int, *rest: int) -> list[tuple[int, int]]:
        return [size for size in sizes(rows, *rest) if size[0] == rows]

    def draw(params, prompt, key):
        with mock.patch.object(rollout, "phases", whole_batches if slower else sizes):
            return rollout.sample(params, work.model, prompt, key, sampling)

    args = params, prompts, rng.stream(0, "rollout")
    return functools.partial(jax.jit(draw).lower(*args).compile(), *args)


def measure(case: Case, mesh: jax.sharding.Mesh, repeats: int) -> dict[str, Any]:
    """Seconds of both ways, their ratio repeat by repeat, and the lengths that were drawn.

    Raises:
      RuntimeError: they drew different tokens from the same noise.
    """
    params = jax.jit(functools.partial(transformer.init, case.work.model))(rng.stream(0, "init"))
    faster, slower = (sharding.put(mesh, prompts) for prompts in batch(case))
    ways = {
        "here": program(case, params, faster, slower=False),
        "other": program(case, params, slower, slower=True),
    }
    here, other = (jax.device_get(run()[0]) for run in ways.values())
    rows = 1 if case.repeated else None  # Noise is of problem and sample; the others are no pairs.
    same = float(np.mean(here.tokens_BR[:rows] == other.tokens_BR[:rows]))
    if same < 0.99:  # Another order of sums may tip a token, and with it the rest of its row.
        raise RuntimeError(f"both ways drew the same token in {same:.1%} of all places only")
    taken = bench.seconds({name: bench.Phase(run, 0.0) for name, run in ways.items()}, repeats)
    ratio = taken["other"] / taken["here"]
    return {
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "workload": dataclasses.asdict(case.work),
        "repeats": repeats,
        "same_tokens": same,
        "mean_length": float(here.length_B.mean()),
        "seconds": {
            name: {"median": float(np.median(s)), "min": float(s.min()), "max": float(s.max())}
            for name, s in taken.items()
        },
        "speedup": float(np.median(ratio)),
        "speedup_min": float(ratio.min()),
        "speedup_max": float(ratio.max()),
    }


def main(argv: Sequence[str]) -> None:
    """Measures as the flags say; prints a line per way and their ratio."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; see --help")
    f = flags.FLAGS
    mesh = sharding.make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        found = {"case": f.case} | measure(CASES[f.case], mesh, f.repeats)
    work = found["workload"]
    print(f"{found['device']}, jax {found['jax']}: {work['prompts']} prompts x {work['samples']}, "
          f"{work['prompt_tokens']} + up to {work['new_tokens']} tokens, "
          f"{found['mean_length']:.0f} in the mean; "
          f"{found['same_tokens']:.2%} the same")  # fmt: skip
    for name, s in found["seconds"].items():
        print(f"{name:6} {s['median']:8.3f} s  [{s['min']:.3f}, {s['max']:.3f}]")
    print(f"{found['speedup']:.2f} times as fast "
          f"[{found['speedup_min']:.2f}, {found['speedup_max']:.2f}]")  # fmt: skip
    if f.json:
        pathlib.Path(f.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    flags.DEFINE_enum("case", "long_tail", sorted(CASES), "What to time.")
    flags.DEFINE_integer("repeats", 5, "Timed runs of each way.", lower_bound=1)
    flags.DEFINE_string("json", None, "File to write the figures to.")
    app.run(main)
