"""From the records of a run to the numbers of its `results.json`.

Keys of the dictionary that `collect` returns:

    name, seed, config, versions   as in plan.json
    measure       {greedy, samples}: how accuracy was measured, sampled (avg@samples) or greedy
    stages        finished stages by name: algorithm, steps, selected_step, stopped_by, seconds,
                  flops {phase}, flops_total, and on the test split at selected_step, by domain:
                  accuracy {mean, ci95, n}, pass_at_k {k: ...}, by_level {level: ...}, length
                  (tokens), truncated (share), gain (over the baseline, paired);
                  accuracy_mean over domains; greedy by domain if measured beside sampled ones;
                  overlap {teacher: {start, end}} for opd, teachers named as logged
    unfinished    names of the other stages
    routes        by name: stages, finished, flops_total, accuracy (of the last stage, mean over
                  `domains`), flops_before_last, curve, experts {domain: stage}, distill_share,
                  recovery, gap_recovery
    comparison    routes [candidate, reference], domains, target_accuracy, flops {route}, saving,
                  saving_ci95, saving_whole_run, distill_share, recovery, notes
    problems      by domain: sizes of its splits; training problems removed because they are held
                  out, exactly or nearly; held-out problems that were contaminated so; and what
                  n-grams are still shared
    notes         sentences about what could not be read or computed

    flops         training FLOPs; `flops_total` leaves `evaluation` and `remat` out
    distill_share FLOPs of a route's opd stages / FLOPs of the stages that teach them
    recovery      accuracy of the merged model / that of its experts, each on its own domain
    gap_recovery  (merged - baseline) / (experts - baseline), on the same domains

Intervals are 95% percentile intervals of a bootstrap over problems (1000 resamples, fixed seed).
What does not exist is null; no number is NaN or infinite.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from opd_jax import ledger
from opd_jax.report import curves, logs, routing, statistics
from opd_jax.report.logs import Evaluation, Records, StageRecords

_RUN_KEYS = ("algorithm", "steps", "selected_step", "stopped_by", "seconds")
_COST_KEYS = ("flops", "flops_total")


def collect(workdir: str, *, target_accuracy: float | None = None) -> dict[str, Any]:
    """Reads a workdir's records and computes every number of `results.json`.

    Args:
        workdir: the folder that holds plan.json; may be a remote path.
        target_accuracy: the accuracy at which to compare two routes, 0 to 1; by default the lower
            of their best ones, so that both reach it.
    """
    return summarise(logs.read(workdir), target_accuracy=target_accuracy)


def summarise(records: Records, *, target_accuracy: float | None = None) -> dict[str, Any]:
    """`collect`, for records that were read already."""
    bootstrap = statistics.ProblemBootstrap.over(_problem_ids(records))
    notes = list(records.notes)
    finished = {n: s for n, s in records.stages.items() if s.result is not None}
    stages = {n: _stage(records, s, bootstrap, notes) for n, s in finished.items()}
    routes = {
        name: routing.route(records, members, bootstrap)
        for name, members in records.plan["routes"].items()
    }
    plan = {key: records.plan[key] for key in ("name", "seed", "config", "versions")}
    return finite(
        plan
        | {
            "measure": _measure(records),
            "stages": stages,
            "unfinished": [name for name in records.stages if name not in finished],
            "routes": routes,
            "comparison": routing.compare(records, routes, bootstrap, target_accuracy),
            "problems": records.problems,
            "notes": notes,
        }
    )


def finite(value: Any) -> Any:
    """The same nested value as plain JSON types, with null for NaN and infinities."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [finite(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _problem_ids(records: Records) -> dict[str, np.ndarray]:
    ids: dict[str, list[np.ndarray]] = {}
    for stage in records.stages.values():
        for evaluation in stage.evaluations:
            if evaluation.split == "test":
                ids.setdefault(evaluation.domain, []).append(evaluation.id_P)
    return {domain: np.concatenate(parts) for domain, parts in ids.items()}


def _measure(records: Records) -> dict[str, Any]:
    samples = {
        evaluation.correct_Pn.shape[1]
        for stage in records.stages.values()
        for evaluation in stage.evaluations
        if evaluation.split == "test" and evaluation.greedy == records.greedy
    }
    return {"greedy": records.greedy, "samples": max(samples, default=None)}


def _stage(
    records: Records,
    stage: StageRecords,
    bootstrap: statistics.ProblemBootstrap,
    notes: list[str],
) -> dict[str, Any]:
    result = stage.result
    chosen = records.at_step(stage.name, result["selected_step"])
    if not chosen:
        notes.append(
            f"Stage {stage.name}: no test evaluation at its selected step "
            f"{result['selected_step']}, so it has no accuracy here."
        )
    counted = sum(v for phase, v in result["flops"].items() if phase not in ledger.ASIDE)
    if not math.isclose(counted, result["flops_total"], rel_tol=1e-6):
        notes.append(
            f"Stage {stage.name}: its phases add up to {counted:.6g} FLOPs, "
            f"its total says {result['flops_total']:.6g}."
        )
    entry = {key: result[key] for key in _RUN_KEYS + _COST_KEYS}
    entry |= _held_out(chosen, bootstrap)
    base = records.at_selected(records.plan["baseline"])
    entry["gain"] = {
        domain: statistics.as_json(
            curves.accuracy(evaluation, bootstrap) - curves.accuracy(base[domain], bootstrap)
        )
        for domain, evaluation in chosen.items()
        if domain in base and stage.name != records.plan["baseline"]
    }
    if not records.greedy:
        greedy = stage.held_out(greedy=True).get(result["selected_step"], {})
        entry["greedy"] = _accuracies(greedy, bootstrap)
    if stage.algorithm == "opd":
        entry["overlap"] = _overlap(stage)
    return entry


def _held_out(
    chosen: Mapping[str, Evaluation], bootstrap: statistics.ProblemBootstrap
) -> dict[str, Any]:
    domains = list(chosen)
    mean = None
    if domains:
        mean_W = curves.mean_over_domains(chosen, domains, bootstrap)
        mean = statistics.as_json(mean_W, sum(e.id_P.size for e in chosen.values()))
    return {
        "accuracy": _accuracies(chosen, bootstrap),
        "accuracy_mean": mean,
        "pass_at_k": {d: _pass_at_k(e, bootstrap) for d, e in chosen.items()},
        "by_level": {d: _by_level(e, bootstrap) for d, e in chosen.items()},
        "length": {d: e.length_Pn.mean() for d, e in chosen.items()},
        "truncated": {d: e.truncated_Pn.mean() for d, e in chosen.items()},
    }


def _accuracies(
    chosen: Mapping[str, Evaluation], bootstrap: statistics.ProblemBootstrap
) -> dict[str, Any]:
    return {
        domain: statistics.as_json(curves.accuracy(evaluation, bootstrap), evaluation.id_P.size)
        for domain, evaluation in chosen.items()
    }


def _pass_at_k(e: Evaluation, bootstrap: statistics.ProblemBootstrap) -> dict[str, Any]:
    """pass@k for k = 1, 2, 4, ... and n itself."""
    n = e.correct_Pn.shape[1]
    ks = sorted({2**power for power in range(n.bit_length()) if 2**power <= n} | {n})
    passed = {k: statistics.pass_at_k(e.correct_Pn, k) for k in ks}
    return {
        str(k): statistics.as_json(bootstrap.means(e.domain, e.id_P, passed_P), e.id_P.size)
        for k, passed_P in passed.items()
    }


def _by_level(e: Evaluation, bootstrap: statistics.ProblemBootstrap) -> dict[str, Any]:
    values_P = statistics.avg_at_k(e.correct_Pn)
    levels = {}
    for level in np.unique(e.level_P):
        of_level_P = e.level_P == level
        draws_W = bootstrap.means(e.domain, e.id_P[of_level_P], values_P[of_level_P])
        levels[str(level)] = statistics.as_json(draws_W, int(of_level_P.sum()))
    return levels


def _overlap(stage: StageRecords) -> dict[str, Any]:
    """Overlap ratio with each teacher, mean of the first and of the last tenth of the updates."""
    found = {}
    for teacher in stage.teacher_names("overlap_ratio"):
        _, ratio_T = stage.series(f"overlap_ratio/{teacher}")
        tenth = math.ceil(ratio_T.size / 10)
        found[teacher] = {"start": ratio_T[:tenth].mean(), "end": ratio_T[-tenth:].mean()}
    return found
