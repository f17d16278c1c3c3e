"""Writes a workdir as a run would leave it, from a made-up model of learning."""

import json
import pathlib
import zlib
from collections.abc import Sequence

import numpy as np

DOMAINS = ("arithmetic", "program")
PHASE_FLOPS = {
    "sft": {"update": 8e8, "remat": 2e8},
    "grpo": {"prefill": 2e8, "decode": 1.2e9, "update": 2.4e9, "discarded": 2e8, "remat": 8e8},
    "opd": {"prefill": 1e8, "decode": 4e8, "teacher_score": 2.5e8, "update": 8e8, "remat": 2.5e8},
}


def write(
    workdir,
    *,
    domains: Sequence[str] = DOMAINS,
    seed: int = 0,
    problems: int = 120,
    samples: int = 4,
    unfinished: Sequence[str] = (),
    merge_skill: float = 2.0,
) -> pathlib.Path:
    """base → one expert per domain → merge, beside joint; deterministic in its arguments."""
    root = pathlib.Path(workdir)
    root.mkdir(parents=True, exist_ok=True)
    experts = [f"expert_{domain}" for domain in domains]
    stages = [stage("base", "sft", "scratch", domains)]
    stages += [stage(e, "grpo", "base", [d]) for e, d in zip(experts, domains, strict=True)]
    teachers = {d: f"stage:{e}" for e, d in zip(experts, domains, strict=True)}
    stages.append(stage("merge", "opd", "base", domains, teachers))
    stages.append(stage("joint", "grpo", "base", domains))
    routes = {"divide_and_merge": [*experts, "merge"], "joint": ["joint"]}
    write_plan(root, stages, routes, "base", seed)
    skills = {
        "base": (dict.fromkeys(domains, -3.0), 0.4, 60),
        "merge": (dict.fromkeys(domains, 0.0), merge_skill, 24),
        "joint": (dict.fromkeys(domains, 0.0), 2.1, 100 * len(domains)),
    }
    for expert, domain in zip(experts, domains, strict=True):
        skills[expert] = (dict.fromkeys(domains, 0.0), 2.2 if domain == domains[0] else 2.4, 60)
    for index, spec in enumerate(stages):
        start, end, steps = skills[spec["name"]]
        own = set(spec["domains"])
        finals = {d: end if d in own else start[d] - 0.2 for d in domains}
        generator = np.random.default_rng([seed, index])
        write_metrics(root, spec, steps, finals, generator)
        write_evals(root, spec, steps, start, finals, generator, problems, samples)
        if spec["name"] not in unfinished:
            write_result(root, spec, steps)
    return root


def stage(name, algorithm, init, domains, teachers=None):
    """A stage of plan.json with equal weights."""
    weights = {domain: 1 / len(domains) for domain in domains}
    keys = ("name", "algorithm", "init", "domains", "teachers")
    return dict(zip(keys, (name, algorithm, init, weights, teachers or {}), strict=True))


def write_plan(root, stages, routes, baseline, seed=0):
    plan = {
        "name": "quickstart",
        "seed": seed,
        "config": {"model": {"preset": "nano"}, "learning_rate": 3e-4},
        "versions": {"opd_jax": "0.1.0", "jax": "0.10.2", "python": "3.11.7"},
        "stages": stages,
        "routes": routes,
        "baseline": baseline,
    }
    (root / "plan.json").write_text(json.dumps(plan))


def flops_after(algorithm, updates):
    """Cumulative FLOPs by phase, and the training total."""
    flops = {phase: per_update * updates for phase, per_update in PHASE_FLOPS[algorithm].items()}
    flops["evaluation"] = 5e8 * (1 + updates // 10)
    return flops, sum(v for phase, v in flops.items() if phase not in ("remat", "evaluation"))


def write_result(root, spec, steps, selected=None):
    flops, total = flops_after(spec["algorithm"], steps)
    result = {
        "name": spec["name"],
        "algorithm": spec["algorithm"],
        "steps": steps,
        "selected_step": steps if selected is None else selected,
        "flops": flops,
        "flops_total": total,
        "stopped_by": "plateau",
        "seconds": 0.3 * steps,
    }
    (root / spec["name"] / "result.json").write_text(json.dumps(result))


def write_eval(root, name, step, domain, flops, correct, *, split="test", greedy=False, level=None):
    """One line of evals.jsonl from the 0/1 answers [problems][samples]."""
    correct = np.asarray(correct, int)
    count = len(correct)
    level = np.arange(count) % 3 + 1 if level is None else np.asarray(level)
    length = np.where(correct == 1, 9, 13) + level[:, None]
    row = {
        "step": step,
        "split": split,
        "domain": domain,
        "flops_total": flops,
        "greedy": greedy,
        "id": list(range(7, 7 + count)),
        "level": level.tolist(),
        "correct": correct.tolist(),
        "length": length.tolist(),
        "truncated": (length > 15).astype(int).tolist(),
    }
    (root / name).mkdir(exist_ok=True)
    with (root / name / "evals.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def write_evals(root, spec, steps, start, finals, generator, problems, samples):
    """Skill moves from `start` to its final value; a problem is solved if skill beats hardness."""
    for step in np.linspace(0, steps, 9, dtype=int).tolist():
        share = 1 - np.exp(-4 * step / steps)
        _, flops = flops_after(spec["algorithm"], step)
        for domain, final in finals.items():
            skill = start[domain] + share * (final - start[domain])
            hardness = np.random.default_rng(zlib.crc32(domain.encode())).normal(size=problems)
            hardness += np.arange(problems) % 3 - 1
            right = 1 / (1 + np.exp(1.7 * (hardness - skill)))
            for split in ("validation", "test"):
                correct = generator.random((problems, samples)) < right[:, None]
                write_eval(root, spec["name"], step, domain, flops, correct, split=split)


def write_metrics(root, spec, steps, finals, generator):
    (root / spec["name"]).mkdir(exist_ok=True)
    with (root / spec["name"] / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            flops, total = flops_after(spec["algorithm"], step)
            row = {"step": step, "seconds": 0.3 * step, "flops": flops, "flops_total": total}
            row["metrics"] = metrics_at(spec, step / steps, finals, generator)
            file.write(json.dumps(row) + "\n")


def metrics_at(spec, progress, finals, generator):
    """The metrics of one update, `progress` of the way through a stage."""

    def noisy(value, scale=0.02):
        return float(value + scale * generator.normal())

    learnt = 1 - np.exp(-4 * progress)
    metrics = {"loss": noisy(2 - 1.5 * learnt), "grad_norm": noisy(0.5), "entropy": noisy(0.4)}
    if spec["algorithm"] == "sft":
        return metrics
    metrics["reward"] = noisy(0.5 + 0.35 * learnt)
    metrics["kl"] = abs(
        noisy(0.03 * learnt if spec["algorithm"] == "grpo" else 0.4 - 0.35 * learnt)
    )
    for domain in spec["domains"]:
        metrics[f"reward/{domain}"] = noisy(0.5 + 0.15 * finals[domain] * learnt)
        metrics[f"length/{domain}"] = noisy(12 + 3 * learnt, 0.5)
        metrics[f"truncated/{domain}"] = abs(noisy(0.05 - 0.03 * learnt, 0.01))
    for place, name in enumerate(spec["teachers"]):
        student, wise = 0.6 - 0.2 * learnt, 0.35 + 0.03 * place
        metrics[f"overlap_ratio/{name}"] = noisy(0.62 + 0.25 * learnt - 0.04 * place, 0.01)
        metrics[f"overlap_advantage/{name}"] = -abs(noisy(0.02 - 0.017 * learnt, 0.001))
        metrics[f"overlap_mass_student/{name}"] = min(noisy(0.97 + 0.02 * learnt, 0.003), 1)
        metrics[f"overlap_mass_teacher/{name}"] = min(noisy(0.95 + 0.03 * learnt, 0.003), 1)
        metrics[f"entropy_student/{name}"] = noisy(student, 0.01)
        metrics[f"entropy_teacher/{name}"] = noisy(wise, 0.01)
        metrics[f"entropy_gap/{name}"] = abs(noisy(student - wise, 0.01))
    return metrics
