"""Routes: what each way to a final model cost and reached, and how two of them compare."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from opd_jax.report import curves, statistics
from opd_jax.report.logs import Evaluation, Records

REFERENCE_ROUTE = "joint"

_SHARES = ("distill_share", "recovery", "gap_recovery")


def route(
    records: Records, members: Sequence[str], bootstrap: statistics.ProblemBootstrap
) -> dict[str, Any]:
    """One entry of `routes` in results.json; what its unfinished stages leave open is None.

    Args:
        records: the run.
        members: names of the route's stages; the last one makes the final model.
        bootstrap: over all test problems of the run.
    """
    total = _sum_if_known([records.flops_total(name) for name in members])
    before = _sum_if_known([records.flops_total(name) for name in members[:-1]])
    held_out = records.stages[members[-1]].held_out(greedy=records.greedy)
    domains = curves.common_domains(held_out)
    chosen = records.at_selected(members[-1])
    entry: dict[str, Any] = {
        "stages": list(members),
        "finished": total is not None,
        "flops_total": total,
        "flops_before_last": before,
        "domains": domains,
        "accuracy": None,
        "curve": [],
    }
    if total is not None and chosen and domains:
        mean_W = curves.mean_over_domains(chosen, domains, bootstrap)
        problems = sum(chosen[domain].id_P.size for domain in domains)
        entry["accuracy"] = statistics.as_json(mean_W, problems)
    if before is not None and domains:
        entry["curve"] = _curve_points(held_out, domains, bootstrap, before)
    return entry | _distillation(records, members, bootstrap)


def _sum_if_known(flops: Sequence[float | None]) -> float | None:
    return None if None in flops else float(sum(flops))


def _curve_points(
    held_out: Mapping[int, Mapping[str, Evaluation]],
    domains: Sequence[str],
    bootstrap: statistics.ProblemBootstrap,
    before: float,
) -> list[dict[str, Any]]:
    whole = curves.curve(held_out, domains, bootstrap, before)
    alone = {d: curves.curve(held_out, [d], bootstrap, before) for d in domains}
    return [
        {"step": step, "flops": whole.flops_T[t]}
        | statistics.as_json(whole.accuracy_WT[:, t])
        | {"domains": {d: statistics.as_json(alone[d].accuracy_WT[:, t]) for d in domains}}
        for t, step in enumerate(whole.step_T)
    ]


def _distillation(
    records: Records, members: Sequence[str], bootstrap: statistics.ProblemBootstrap
) -> dict[str, Any]:
    """What merging cost and what it kept, for a route whose opd stages other stages teach."""
    merges = [name for name in members if records.stages[name].algorithm == "opd"]
    specs = {d: spec for name in merges for d, spec in records.stages[name].teachers.items()}
    experts = {d: records.teacher_stage(spec) for d, spec in specs.items()}
    entry = {"experts": {d: name for d, name in experts.items() if name is not None}}
    entry |= dict.fromkeys(_SHARES)
    if not experts or None in experts.values():
        return entry
    merging = _sum_if_known([records.flops_total(name) for name in merges])
    teaching = _sum_if_known([records.flops_total(name) for name in sorted(set(experts.values()))])
    if merging is not None and teaching:
        entry["distill_share"] = merging / teaching
    taught = _teachers_at_their_step(records, specs)
    return entry | _recovery(records, records.at_selected(members[-1]), taught, bootstrap)


def _teachers_at_their_step(records: Records, specs: Mapping[str, str]) -> dict[str, Evaluation]:
    """Each domain's teacher on that domain, at the step that taught; {} if any is not known."""
    taught = {}
    for domain, spec in specs.items():
        step = records.teacher_step(spec)
        if step is None or domain not in records.at_step(records.teacher_stage(spec), step):
            return {}
        taught[domain] = records.at_step(records.teacher_stage(spec), step)[domain]
    return taught


def _recovery(
    records: Records,
    merged: Mapping[str, Evaluation],
    taught: Mapping[str, Evaluation],
    bootstrap: statistics.ProblemBootstrap,
) -> dict[str, Any]:
    domains = list(taught)
    if not domains or not set(domains) <= set(merged):
        return {}
    merged_W = curves.mean_over_domains(merged, domains, bootstrap)
    taught_W = curves.mean_over_domains(taught, domains, bootstrap)
    base = records.at_selected(records.plan["baseline"])
    entry = {"recovery": _ratio(merged_W, taught_W)}
    if set(domains) <= set(base):
        base_W = curves.mean_over_domains(base, domains, bootstrap)
        entry["gap_recovery"] = _ratio(merged_W - base_W, taught_W - base_W)
    return entry


def _ratio(over_W: np.ndarray, under_W: np.ndarray) -> dict[str, Any] | None:
    """{mean, ci95} of a ratio; None if what it is measured by is 0."""
    if under_W[0] == 0:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        return statistics.as_json(over_W / under_W)


def compare(
    records: Records,
    routes: Mapping[str, Any],
    bootstrap: statistics.ProblemBootstrap,
    target: float | None,
) -> dict[str, Any]:
    """`comparison` of results.json: joint training is the reference, the first other route is not.

    Whatever cannot be stated is None, and `notes` say why in a sentence.

    Args:
        records: the run.
        routes: its entries as made by `route`.
        bootstrap: over all test problems of the run.
        target: the accuracy to match; None for the lower of the two routes' best ones.
    """
    entry: dict[str, Any] = {"routes": [], "domains": [], "flops": {}, "notes": []}
    entry |= dict.fromkeys(("target_accuracy", "saving", "saving_ci95", "saving_whole_run"))
    if len(routes) < 2:
        shares = [route[key] for route in routes.values() for key in _SHARES] or [None] * 3
        entry["notes"].append("There are no two routes to compare.")
        return entry | dict(zip(_SHARES, shares, strict=True))
    names = _candidate_and_reference(list(routes))
    candidate, reference = (routes[name] for name in names)
    entry |= {"routes": names, "flops": dict.fromkeys(names)}
    entry |= {key: candidate[key] for key in _SHARES}
    waiting = [name for name in names if not routes[name]["finished"]]
    if waiting:
        entry["notes"].append(f"No comparison yet: {' and '.join(waiting)} not finished.")
        return entry
    entry["saving_whole_run"] = 1 - candidate["flops_total"] / reference["flops_total"]
    entry["domains"] = [d for d in candidate["domains"] if d in reference["domains"]]
    if not entry["domains"]:
        entry["notes"].append("The two routes were never tested on a common domain.")
        return entry
    drawn = {
        name: curves.curve(
            records.stages[routes[name]["stages"][-1]].held_out(greedy=records.greedy),
            entry["domains"],
            bootstrap,
            routes[name]["flops_before_last"],
        )
        for name in names
    }
    return entry | _at_matched_accuracy(drawn, target)


def _candidate_and_reference(names: Sequence[str]) -> list[str]:
    reference = REFERENCE_ROUTE if REFERENCE_ROUTE in names else names[-1]
    return [next(name for name in names if name != reference), reference]


def _at_matched_accuracy(drawn: Mapping[str, curves.Curve], target: float | None) -> dict[str, Any]:
    found = curves.saving(*drawn.values(), target)
    flops = dict(zip(drawn, (found.candidate_flops_W[0], found.reference_flops_W[0]), strict=True))
    reference = list(drawn)[1]
    notes = [
        f"{name} never reaches the target of {found.target_W[0]:.1%} (its best is "
        f"{drawn[name].accuracy_WT[0].max():.1%}), so no saving can be stated."
        for name in drawn
        if not math.isfinite(flops[name])
    ]
    if flops[reference] == 0:
        notes.append(
            f"{reference} is at the target before its first update, so no saving can be stated: "
            "one of the routes never improved on its start."
        )
    interval = statistics.estimate(found.saving_W)
    return {
        "target_accuracy": found.target_W[0],
        "flops": flops,
        "saving": None if notes else interval.value,
        "saving_ci95": None if notes else [interval.low, interval.high],
        "notes": notes,
    }
