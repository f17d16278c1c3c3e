"""Times the phases of a GRPO and of an OPD step, apart and together, on whatever device is there.

    python -m tools.bench --preset=peer_tiny --repeats=5 --json=bench.json

Weights are random and no completion ever stops, so every row has exactly the same length; rewards
are made up, since a verifier's time is not the model's. Every program is compiled and run once
before the clock starts; then all phases are timed in turn, in alternating order, and the medians
and extremes of the repeats are shown. FLOPs are the ledger's; the matmul peak that they are
compared with is measured in the same turns, at the precision that the steps compute in.
"""

import dataclasses
import functools
import json
import os
import pathlib
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from opd_jax import ledger, steps
from opd_jax.algorithms import loss_settings
from opd_jax.config import Stage
from opd_jax.core import rng, sharding
from opd_jax.core.types import PromptBatch, Rollout
from opd_jax.models import transformer
from opd_jax.models.config import ModelConfig, preset
from opd_jax.rollout import Sampling


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and the sizes of its steps; OPD has a teacher of the student's shape."""

    model: ModelConfig
    prompts: int  # P
    samples: int  # n
    prompt_tokens: int  # Real tokens of every prompt; there is no padding.
    new_tokens: int  # Of every completion, at least 2.
    micro_batches: int = 1


WORKLOADS = {
    # Sixteen pieces keep what an update touches inside the cache of a CPU.
    "peer_tiny": Workload(preset("peer_tiny", 512), 64, 8, 16, 32, micro_batches=16),
    "smollm2_135m": Workload(
        ModelConfig(
            vocab_size=49_152, embed_dim=576, num_layers=30, num_heads=9, num_kv_heads=3,
            head_dim=64, mlp_dim=1536, max_length=8192, rope_theta=100_000.0,
        ),
        4, 8, 64, 64, micro_batches=2,
    ),
}  # fmt: skip


def peak_side() -> int:
    """Side of the square matrices that measure the peak: 17 GFLOP on a CPU, a TFLOP elsewhere."""
    return 2048 if jax.default_backend() == "cpu" else 8192


@dataclasses.dataclass(frozen=True)
class Phase:
    """Something to time: `run` returns arrays, which are waited for."""

    run: Callable[[], Any]
    flops: float


class Programs:
    """The compiled steps of a workload, and what compiling them took and will use."""

    def __init__(self) -> None:
        self.compile_s: dict[str, float] = {}
        self.bytes: dict[str, dict[str, int]] = {}

    def compile(self, name: str, step: Callable[..., Any], *args: Any) -> Callable[..., Any]:
        """Compiles a jitted step for these arguments, runs nothing."""
        start = time.perf_counter()
        compiled = step.lower(*args).compile()
        self.compile_s[name] = time.perf_counter() - start
        m = compiled.memory_analysis()
        self.bytes[name] = {
            "arguments": m.argument_size_in_bytes,
            "outputs": m.output_size_in_bytes - m.alias_size_in_bytes,
            "temporary": m.temp_size_in_bytes,
        }
        return compiled


class Bench:
    """A workload on a mesh: its arrays, its programs, its phases."""

    def __init__(self, workload: Workload, mesh: jax.sharding.Mesh):
        """Makes weights and prompts and compiles everything; the mesh is in context."""
        self.w, self.mesh, self.programs = workload, mesh, Programs()
        w, c, compile_ = workload, workload.model, self.programs.compile
        grpo, opd = stage("grpo", w), stage("opd", w)
        init = steps.make_init(c, mesh)
        self.teacher = init(rng.stream(0, "control"))
        self.key = rng.stream(0, "rollout")
        self.state = steps.make_state(grpo.optimizer, grpo.steps)(init(rng.stream(0, "init")))
        self.prompt = sharding.put(mesh, prompts(w))
        sampler = functools.partial(steps.make_rollout_step, c)
        start = self.state.params, self.prompt, self.key
        self.first = compile_("prefill", sampler(Sampling(w.samples, 1)), *start)
        self.sample = compile_("rollout", sampler(Sampling(w.samples, w.new_tokens)), *start)
        rollout, _ = self.sample(*start)
        teach = self.teacher, rollout
        self.score = compile_("score", steps.make_score_step(c, 1.0, opd.opd.top_k), *teach)
        self.hidden = compile_("teacher", steps.make_hidden_step(c), *teach)
        weighing = "token-mean", None, False
        self.weigh = compile_("weigh", steps.make_weigh_step(*weighing), rollout, None)
        signal = steps.make_grpo_step(grpo.grpo, *weighing)
        self.signal = compile_("advantage", signal, rollout, self.rewards(rollout), None)
        self.rollout = rollout
        self.groups = {"grpo": self.grpo_group(rollout), "opd": self.opd_group(rollout)}
        self.update = {
            s.algorithm: compile_(f"update_{s.algorithm}", updater(s, w), self.state,
                                  [self.groups[s.algorithm]])
            for s in (grpo, opd)
        }  # fmt: skip

    def phases(self) -> dict[str, Phase]:
        """All that is timed, with the ledger's FLOPs."""
        w, c = self.w, self.w.model
        prompt_P = np.full(w.prompts, w.prompt_tokens)
        length_B = np.full(w.prompts * w.samples, w.new_tokens)
        prefill = ledger.prefill(c, prompt_P)
        rollout = prefill + ledger.decode(c, np.repeat(prompt_P, w.samples), length_B)
        score, update = ledger.score(c, prompt_P, length_B), ledger.update(c, prompt_P, length_B)
        # Of an exact divergence's teacher, the last layer is left to the update.
        head = float(length_B.sum()) * ledger.head_per_token(c)
        side, peak = self.matmul()

        def sampled(program):
            return lambda: program(self.state.params, self.prompt, self.key)

        return {
            "matmul": Phase(peak, 2 * side**3 * batch_shards()),
            "prefill": Phase(sampled(self.first), prefill),
            "rollout": Phase(sampled(self.sample), rollout),
            "score": Phase(lambda: self.score(self.teacher, self.rollout), score),
            "update_grpo": Phase(lambda: self.learn("grpo", self.groups["grpo"]), update),
            "update_opd": Phase(lambda: self.learn("opd", self.groups["opd"]), update + head),
            "grpo_step": Phase(lambda: self.step("grpo", self.grpo_group), rollout + update),
            "opd_step": Phase(lambda: self.step("opd", self.opd_group), rollout + score + update),
        }

    def step(self, algorithm: str, prepare: Callable[[Rollout], Any]) -> Any:
        """A whole training step but for the verifier."""
        rollout, _ = self.sample(self.state.params, self.prompt, self.key)
        return self.learn(algorithm, prepare(rollout))

    def learn(self, algorithm: str, group: Any) -> Any:
        """An update; the old state is donated, so the new one takes its place."""
        self.state, metrics = self.update[algorithm](self.state, [group])
        return self.state, metrics

    def grpo_group(self, rollout: Rollout) -> Any:
        """Rows with advantages."""
        return self.signal(rollout, self.rewards(rollout), None)[0]

    def opd_group(self, rollout: Rollout) -> Any:
        """Rows with the teacher's hidden states, for the exact reverse KL."""
        return self.weigh(rollout, None).replace(
            teacher_hidden_BRD=self.hidden(self.teacher, rollout),
            teacher_table_VD=transformer.unembedding(self.teacher),
        )

    def rewards(self, rollout: Rollout) -> jax.Array:
        """A made-up 0 or 1 per row, from tokens that were fetched as a verifier needs them."""
        tokens_BR = np.asarray(rollout.tokens_BR)
        reward_Pn = (tokens_BR[:, 0] % 2).reshape(self.w.prompts, self.w.samples)
        return sharding.put(self.mesh, reward_Pn.astype(np.float32))

    def matmul(self) -> tuple[int, Callable[[], jax.Array]]:
        """A matmul that every device does its share of: rows `side` each, times a square."""
        side, dtype = peak_side(), self.w.model.dtype
        a = sharding.put(self.mesh, np.ones((side * batch_shards(), side), np.float32))
        a, b = a.astype(dtype), jnp.ones((side, side), dtype)
        return side, lambda: a @ b


def stage(algorithm: str, w: Workload) -> Stage:
    """A stage whose settings are the defaults."""
    return Stage(
        algorithm=algorithm, init="scratch", domains={"bench": 1.0}, teachers={},
        prompts=w.prompts, sampling=Sampling(w.samples, w.new_tokens),
        micro_batches=w.micro_batches,
    )  # fmt: skip


def updater(s: Stage, w: Workload) -> Callable[..., Any]:
    """The stage's jitted update."""
    return steps.make_update_step(w.model, s.optimizer, s.steps, loss_settings(s), s.micro_batches)


def prompts(w: Workload) -> PromptBatch:
    """Random prompts without padding whose completions no token ends."""
    draw = np.random.default_rng(0)
    return PromptBatch(
        tokens_PL=draw.integers(0, w.model.vocab_size, (w.prompts, w.prompt_tokens), np.int32),
        length_P=np.full(w.prompts, w.prompt_tokens, np.int32),
        domain_P=np.zeros(w.prompts, np.int32),
        id_P=np.arange(w.prompts, dtype=np.uint32),
        stop_PS=np.full((w.prompts, 1), -1, np.int32),
    )


def batch_shards() -> int:
    """Devices that share a batch."""
    return sharding.axis_size(sharding.BATCH)


def seconds(phases: dict[str, Phase], repeats: int) -> dict[str, np.ndarray]:
    """Seconds of each phase, `[repeats]`; one run of each comes before and is not counted."""
    for phase in phases.values():
        jax.block_until_ready(phase.run())
    taken: dict[str, list[float]] = {name: [] for name in phases}
    for repeat in range(repeats):
        order = list(phases) if repeat % 2 == 0 else list(phases)[::-1]
        for name in order:
            start = time.perf_counter()
            jax.block_until_ready(phases[name].run())
            taken[name].append(time.perf_counter() - start)
    return {name: np.array(values) for name, values in taken.items()}


def measure(workload: Workload, mesh: jax.sharding.Mesh, repeats: int) -> dict[str, Any]:
    """Everything about a workload, as JSON values.

    Args:
      workload: what to time.
      mesh: in context; its batch axes divide the prompts.
      repeats: timed runs of each phase.

    Returns:
      "phases": seconds, GFLOP, GFLOP/s and share of the peak by phase; "compile_s" and "bytes" by
      program; and at the top level the figures that comparisons use. `decode` is the rollout less
      the prefill, repeat by repeat. `peak_bytes` is the accelerator's own count, or on a CPU that
      of the whole process.
    """
    bench = Bench(workload, mesh)
    phases = bench.phases()
    taken = seconds(phases, repeats)
    flops = {name: phase.flops for name, phase in phases.items()}
    taken["decode"] = taken["rollout"] - taken["prefill"]
    flops["decode"] = flops["rollout"] - flops["prefill"]
    peak = flops["matmul"] / taken["matmul"].min()
    median = {name: float(np.median(values)) for name, values in taken.items()}
    rows = workload.prompts * workload.samples
    device = jax.devices()[0]
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    # A CPU keeps no count of its own.
    own = device.memory_stats() or {"peak_bytes_in_use": peak_rss}
    return {
        "device": f"{jax.device_count()} x {device.device_kind} ({device.platform})",
        "cpus": os.cpu_count(),
        "jax": jax.__version__,
        "workload": dataclasses.asdict(workload),
        "repeats": repeats,
        "phases": {
            name: {
                "median_s": median[name],
                "min_s": float(taken[name].min()),
                "max_s": float(taken[name].max()),
                "gflop": flops[name] / 1e9,
                "gflops": flops[name] / median[name] / 1e9,
                "of_peak": flops[name] / median[name] / peak,
            }
            for name in (*phases, "decode")
        },
        "compile_s": bench.programs.compile_s,
        "bytes": bench.programs.bytes,
        "grpo_step_s": median["grpo_step"],
        "opd_step_s": median["opd_step"],
        "rollout_tokens_per_s": rows * workload.new_tokens / median["rollout"],
        "decode_tokens_per_s": rows * (workload.new_tokens - 1) / median["decode"],
        "matmul_gflops": peak / 1e9,
        "peak_bytes": own["peak_bytes_in_use"],
        "peak_rss_bytes": peak_rss,
    }


def table(found: dict[str, Any]) -> str:
    """What `measure` found, for people."""
    w, gib = found["workload"], 2**30
    sizes = f"{w['prompts']} prompts x {w['samples']} samples, {w['prompt_tokens']} + "
    sizes += f"{w['new_tokens']} tokens, {found['repeats']} repeats"
    lines = [
        f"{found['device']}, {found['cpus']} CPUs, jax {found['jax']}, {w['model']['dtype']}",
        sizes,
        "",
        f"{'phase':12} {'median s':>9} {'min':>9} {'max':>9} {'GFLOP':>9} {'GFLOP/s':>9}  of peak",
    ]
    lines += [
        f"{name:12} {p['median_s']:9.4f} {p['min_s']:9.4f} {p['max_s']:9.4f} {p['gflop']:9.2f} "
        f"{p['gflops']:9.1f} {p['of_peak']:8.1%}"
        for name, p in found["phases"].items()
    ]
    lines += ["", f"{'program':12} {'compile s':>9}   arguments     outputs   temporary"]
    lines += [
        f"{name:12} {found['compile_s'][name]:9.1f} "
        + " ".join(f"{size / 2**20:7.1f} MiB" for size in sizes.values())
        for name, sizes in found["bytes"].items()
    ]
    lines += [
        "",
        f"sampling: {found['rollout_tokens_per_s']:,.0f} new tokens/s",
        f"decoding: {found['decode_tokens_per_s']:,.0f} new tokens/s",
        f"matmul peak: {found['matmul_gflops']:,.0f} GFLOP/s",
        f"peak memory: {found['peak_bytes'] / gib:.2f} GiB",
        f"peak memory of the process: {found['peak_rss_bytes'] / gib:.2f} GiB",
    ]
    return "\n".join(lines)


def define_flags() -> None:
    """Not at import: tools share absl's one table of flags."""
    flags.DEFINE_enum("preset", "peer_tiny", sorted(WORKLOADS), "What to time.")
    flags.DEFINE_integer("repeats", 5, "Timed runs of each phase.", lower_bound=1)
    flags.DEFINE_string("json", None, "File to write the figures to.")


def main(argv: Sequence[str]) -> None:
    """Measures as the flags say; prints a table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; see --help")
    f = flags.FLAGS
    mesh = sharding.make_mesh()
    workload = WORKLOADS[f.preset]
    with jax.set_mesh(mesh):
        if workload.prompts % batch_shards():
            sys.exit(f"error: {workload.prompts} prompts, {batch_shards()} devices: no equal share")
        found = {"preset": f.preset} | measure(workload, mesh, f.repeats)
    print(table(found))
    if f.json:
        pathlib.Path(f.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    define_flags()
    app.run(main)
