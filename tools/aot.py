"""Compiles a config's steps for TPUs that are not there, and says whether and how they would run.

    pip install -e '.[aot]'
    python -m tools.aot --config=configs/qwen3_1p7b_math_code.py --topology=v5e:8x8

Needs no accelerator and no weights: the TPU compiler runs on the CPU, in an environment of its own
(with libtpu installed, other jax programs on the same machine would look for TPUs). For each step:
whether it fits, FLOPs beside the ledger's, traffic, what is exchanged between chips, the largest
arrays, and a time that no run can beat. Exits with 1 if a step does not compile or fit.
docs/tpu_pods.md says how to read it.
"""

import collections
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

# Before jax is imported: no TPU is looked for, and several compilers may run side by side.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import jax
from absl import app, flags
from etils import epath
from jax.experimental import topologies
from ml_collections import config_flags

from opd_jax import config, guards
from opd_jax.core import sharding
from tools import hlo, hlo_cost, programs, published

GIB = 2**30
LARGEST = 6  # Arrays and exchanges that are listed.

_CONFIG = config_flags.DEFINE_config_file("config", None, "The experiment.", lock_config=True)
_TOPOLOGY = flags.DEFINE_string("topology", None, "Chips and how they are wired, e.g. v5e:16x16.")
_JSON = flags.DEFINE_string("json", "", "File for all figures; none by default.")
_HLO = flags.DEFINE_string("hlo", "", "Folder for the compiled programs' text; none by default.")
_ONLY = flags.DEFINE_string("only", "", "Steps whose title matches this pattern; empty: all.")


@dataclasses.dataclass(frozen=True)
class Loop:
    """A computation that runs a number of times: the whole program, or the body of a loop."""

    name: str
    times: int
    flops: float  # All times together, like the next two.
    hbm_bytes: float
    wire_bytes: float
    busy_seconds: (
        float  # Each instruction at the rate of matmuls or of memory, whichever is slower.
    )
    wire_seconds: float

    @property
    def seconds(self) -> float:
        """At best: what is exchanged hides behind what is computed, or the other way round."""
        return max(self.busy_seconds, self.wire_seconds)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the compiler made of a program; bytes, FLOPs and times of one device."""

    title: str
    stages: tuple[str, ...]
    error: str  # Empty if it compiled.
    compile_seconds: float
    limit_bytes: int
    argument_bytes: int = 0
    temporary_bytes: int = 0
    output_bytes: int = 0  # Beyond those that take an argument's place.
    held_bytes: int = 0
    flops: float = 0.0
    ledger_flops: float = 0.0
    remat_flops: float = 0.0
    hbm_bytes: float = 0.0
    wire_bytes: float = 0.0
    seconds: float = 0.0
    seconds_unhidden: float = 0.0  # The same where no exchange is hidden.
    mfu: float = 0.0  # At `seconds`, of the ledger's FLOPs.
    loops: tuple[Loop, ...] = ()
    unbounded_loops: tuple[str, ...] = ()
    collectives: tuple[dict[str, Any], ...] = ()
    largest: tuple[dict[str, Any], ...] = ()

    @property
    def total_bytes(self) -> int:
        """What the device must hold while the program runs."""
        return self.argument_bytes + self.temporary_bytes + self.output_bytes + self.held_bytes

    @property
    def fits(self) -> bool:
        """Whether it compiled and the device can hold it."""
        return not self.error and self.total_bytes <= self.limit_bytes


def topology_mesh(topology: str, settings: config.MeshSettings) -> jax.sharding.Mesh:
    """The config's mesh over the devices of a topology.

    Raises:
      ValueError: the topology is unknown, or the mesh does not fill it.
    """
    published.chip_of(topology)
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:
        raise ValueError(
            f"topology={topology!r}: {str(error).splitlines()[0]}; write e.g. v5e:8x8 or "
            "v5p:4x4x4, with libtpu installed (pip install -e '.[aot]')"
        ) from None
    return sharding.make_mesh(**dataclasses.asdict(settings), devices=devices)


def lower(program: programs.Program) -> jax.stages.Lowered:
    """A program for the mesh in context, not compiled yet; without it the errors of tracing."""
    return program.step.lower(*program.arguments)


def outcome_of(
    program: programs.Program, chip: published.Chip, lowered: jax.stages.Lowered
) -> tuple[Outcome, str]:
    """Compiles a lowered program; what became of it, and its text."""
    devices = jax.sharding.get_abstract_mesh().size
    fixed = {
        "title": program.title,
        "stages": program.stages,
        "limit_bytes": int(chip.hbm_gib * GIB),
        "held_bytes": program.held_bytes,
        "ledger_flops": program.flops / devices,
        "remat_flops": program.remat_flops / devices,
    }
    started = time.monotonic()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        seconds = time.monotonic() - started
        return Outcome(error=_first_lines(str(error)), compile_seconds=seconds, **fixed), ""
    seconds = time.monotonic() - started
    memory, text = compiled.memory_analysis(), compiled.as_text()
    figures = analyse(hlo.parse(text), chip.per_device())
    best = figures["seconds"]
    return Outcome(
        error="",
        compile_seconds=seconds,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        mfu=fixed["ledger_flops"] / (best * chip.per_device().flops) if best else 0.0,
        **fixed,
        **figures,
    ), text


def analyse(module: hlo.Module, chip: published.Chip) -> dict[str, Any]:
    """The figures of an Outcome that come from the program's text.

    Args:
      module: the compiled program.
      chip: the rates of one device.
    """
    exchanges = hlo_cost.collectives(module)
    loops = tuple(_loops(module, exchanges, chip))
    return {
        "flops": sum(loop.flops for loop in loops),
        "hbm_bytes": sum(loop.hbm_bytes for loop in loops),
        "wire_bytes": sum(loop.wire_bytes for loop in loops),
        "seconds": sum(loop.seconds for loop in loops),
        "seconds_unhidden": sum(loop.busy_seconds + loop.wire_seconds for loop in loops),
        "loops": tuple(sorted(loops, key=lambda loop: -loop.seconds)),
        "unbounded_loops": tuple(hlo_cost.unbounded_loops(module)),
        "collectives": tuple(_merged(exchanges)),
        "largest": tuple(_largest(module)),
    }


def _loops(module, exchanges, chip) -> Iterator[Loop]:
    found: dict[tuple[str, int], list] = collections.defaultdict(list)
    for e in hlo_cost.executed(module):
        found[e.computation, e.times].append(e.instruction)
    wire = collections.Counter()
    for exchange in exchanges:
        wire[exchange.computation, exchange.times] += exchange.wire_bytes
    for (name, times), instructions in found.items():
        work = [
            (hlo_cost.flops(module, name, i), hlo_cost.traffic(module, name, i))
            for i in instructions
        ]
        busy = sum(max(f / chip.flops, b / chip.hbm_bandwidth) for f, b in work)
        loop = Loop(
            name=name,
            times=times,
            flops=times * sum(f for f, _ in work),
            hbm_bytes=times * sum(b for _, b in work),
            wire_bytes=wire[name, times],
            busy_seconds=times * busy,
            wire_seconds=wire[name, times] / chip.link_bandwidth,
        )
        if loop.seconds:
            yield loop


def _merged(exchanges: list[hlo_cost.Collective]) -> Iterator[dict[str, Any]]:
    """Exchanges alike in kind, shape and origin as one entry, the largest first."""
    count, wire = collections.Counter(), collections.Counter()
    for e in exchanges:
        key = e.kind, " ".join(map(str, e.arrays)), e.group, _short(e.op_name)
        count[key] += e.times
        wire[key] += e.wire_bytes
    for key, size in wire.most_common():
        kind, shape, group, origin = key
        yield {"kind": kind, "shape": shape, "group": group, "times": count[key],
               "wire_bytes": size, "origin": origin}  # fmt: skip


def _largest(module: hlo.Module) -> Iterator[dict[str, Any]]:
    """The largest arrays in main memory that some instruction makes, parameters included."""
    seen: dict[tuple[str, str], int] = {}
    for e in hlo_cost.executed(module):
        i = e.instruction
        if i.opcode in ("tuple", "get-tuple-element", "while", "bitcast", "conditional"):
            continue
        if i.opcode == "parameter" and e.computation != module.entry:
            continue
        for array in i.arrays:
            seen[str(array), _short(i.op_name) or i.opcode] = array.main_bytes
    ranked = sorted(seen.items(), key=lambda item: -item[1])
    for (shape, origin), size in ranked[:LARGEST]:
        yield {"shape": shape, "bytes": size, "origin": origin}


def _short(op_name: str) -> str:
    """The end of an operation's path: what it is, without the scan that it is in."""
    return "/".join(op_name.split("/")[-3:])


def _first_lines(message: str) -> str:
    return " ".join(line.strip() for line in message.strip().splitlines()[:3])[:600]


def report(outcome: Outcome) -> str:
    """An outcome as text."""
    o = outcome
    head = f"{o.title}  [{', '.join(o.stages)}]"
    if o.error:
        return f"{head}\n  DOES NOT COMPILE  {o.error}\n"
    verdict = "fits" if o.fits else "DOES NOT FIT"
    parts = (f"{_gib(o.argument_bytes)} arguments, {_gib(o.temporary_bytes)} temporary, "
             f"{_gib(o.output_bytes)} results, {_gib(o.held_bytes)} held besides")  # fmt: skip
    recomputed = f" + {_si(o.remat_flops)} recomputed" if o.remat_flops else ""
    kinds = collections.Counter()
    for c in o.collectives:
        kinds[c["kind"]] += c["wire_bytes"]
    exchanged = ", ".join(f"{kind} {_si(size)}B" for kind, size in kinds.most_common())
    ratio = f"{o.flops / o.ledger_flops:.2f}x the ledger's" if o.ledger_flops else "ledger: none"
    unhidden = f"{o.seconds_unhidden:.3g} s if no exchange is hidden"
    lines = [
        head,
        f"  {verdict:13}{_gib(o.total_bytes)} of {_gib(o.limit_bytes)} GiB: {parts}",
        f"  FLOPs        {_si(o.flops)}, {ratio} {_si(o.ledger_flops)}{recomputed}",
        f"  traffic      {_si(o.hbm_bytes)}B of main memory; sent: {exchanged or 'nothing'}",
        f"  time         {o.seconds:.3g} s at least (MFU {o.mfu:.0%}), {unhidden}",
    ]
    lines += [
        f"    {loop.times:6} x    {loop.seconds:.3g} s: {_si(loop.flops)} FLOPs, "
        f"{_si(loop.hbm_bytes)}B memory, {_si(loop.wire_bytes)}B sent  ({loop.name[:40]})"
        for loop in o.loops[:3]
    ]
    lines += [
        f"  exchange     {_si(c['wire_bytes'])}B: {c['times']} x {c['kind']} of {c['shape'][:48]} "
        f"over {c['group']}  ({c['origin']})"
        for c in o.collectives[:LARGEST]
    ]
    lines += [
        f"  array        {_si(a['bytes'])}B: {a['shape']}  ({a['origin']})" for a in o.largest
    ]
    lines += [f"  WARNING      loop of unknown length counted once: {n}" for n in o.unbounded_loops]
    return "\n".join(lines) + "\n"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def _si(x: float) -> str:
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= unit:
            return f"{x / unit:.3g} {name}"
    return f"{x:.3g} "


def as_json(outcome: Outcome) -> dict[str, Any]:
    """An outcome's figures, the derived ones too."""
    return dataclasses.asdict(outcome) | {
        "fits": outcome.fits,
        "total_bytes": outcome.total_bytes,
    }


def check(
    experiment: config.Experiment, topology: str, only: str = ""
) -> Iterator[tuple[Outcome, str]]:
    """Compiles the programs of an experiment, one after the other; equal ones once.

    Args:
      experiment: the parsed config.
      topology: e.g. v5e:8x8.
      only: pattern of the titles and stages wanted.

    Yields:
      What became of each program, and its text.

    Raises:
      ValueError: the config is wrong, or does not divide over the topology.
    """
    chip, mesh = published.chip_of(topology), topology_mesh(topology, experiment.mesh)
    known: dict[str, tuple[Outcome, str]] = {}
    with jax.set_mesh(mesh):
        guards.check_experiment(experiment, guards.batch_shards(mesh))
        for program in programs.of_experiment(experiment, mesh):
            if not re.search(only, f"{program.title} {' '.join(program.stages)}"):
                continue
            lowered = lower(program)
            digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()
            if digest not in known:
                known[digest] = outcome_of(program, chip, lowered)
            outcome, text = known[digest]
            yield (
                dataclasses.replace(
                    outcome,
                    title=program.title,
                    stages=program.stages,
                    held_bytes=program.held_bytes,
                ),
                text,
            )


def main(_) -> None:
    jax.config.update("jax_numpy_rank_promotion", "raise")
    experiment = config.parse(_CONFIG.value)
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    print(f"{experiment.name} on {_TOPOLOGY.value}, mesh {dataclasses.asdict(experiment.mesh)}, "
          f"{versions}; figures are of one device\n", flush=True)  # fmt: skip
    outcomes = []
    for outcome, text in check(experiment, _TOPOLOGY.value, _ONLY.value):
        print(report(outcome), flush=True)
        outcomes.append(outcome)
        if _HLO.value:
            folder = epath.Path(_HLO.value)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{len(outcomes)}.{outcome.title.partition(':')[0]}.txt").write_text(text)
    bad = [o for o in outcomes if not o.fits]
    print(f"{len(outcomes)} programs, {len(bad)} of which do not compile or fit")
    if _JSON.value:
        record = {"config": experiment.name, "topology": _TOPOLOGY.value, "versions": versions,
                  "programs": [as_json(o) for o in outcomes]}  # fmt: skip
        epath.Path(_JSON.value).write_text(json.dumps(record, indent=1))
    if bad:
        sys.exit(1)


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "topology"])
    app.run(main)
