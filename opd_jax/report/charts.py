"""The figures of a report, drawn from logged records and the numbers computed from them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from opd_jax import ledger
from opd_jax.report import drawing, tabular, training
from opd_jax.report.drawing import Plot
from opd_jax.report.logs import Records

PHASE_COLOURS = {
    "update": drawing.BLUE,
    "decode": drawing.SKY,
    "prefill": "#B9DDF3",
    "teacher_score": drawing.GREEN,
    "reference_score": drawing.PURPLE,
    "old_logprob": drawing.ORANGE,
    "generation": drawing.VERMILLION,
    "discarded": "#C8C8C8",
    "evaluation": "#9A9A9A",
    "remat": "#D9D9D9",
}


def draw(records: Records, results: Mapping[str, Any]) -> list[Plot]:
    """Every figure for which something was logged, in the order of the report."""
    colours = drawing.stage_colours(records)
    with mpl.rc_context(drawing.STYLE):
        return [
            *_accuracy_against_flops(results, colours),
            *_domains_against_flops(results, colours),
            *_levels(records, results, colours),
            *_phases(results),
            *training.draw(records, colours),
        ]


def _routes_unit(results: Mapping[str, Any]) -> tuple[float, str]:
    spent = [point["flops"] for route in results["routes"].values() for point in route["curve"]]
    return tabular.flops_unit(max(spent, default=1.0))


def _frame(axes: Axes) -> None:
    """Limits that no accuracy leaves, and that do not blow up the noise of a flat curve."""
    low, high = axes.get_ylim()
    low = max(low, -0.01)
    axes.set_ylim(low, min(max(high, low + 0.1), 1.02))
    axes.set_xlim(left=0)
    drawing.percent_axis(axes.yaxis)


def _route_line(
    axes: Axes,
    route: Mapping[str, Any],
    pick: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    unit: float,
    colour: str,
    label: str,
    floor: float,
) -> None:
    """A route's curve with its interval; what earlier stages cost is a dashed line up to it.

    The line lies at `floor`: where routes begin, and not where a student begins that starts with
    what its experts learnt.
    """
    flops_T = np.array([point["flops"] for point in route["curve"]]) / unit
    picked = [pick(point) for point in route["curve"]]
    mean_T = np.array([entry["mean"] for entry in picked])
    low_T, high_T = np.array([entry["ci95"] for entry in picked], np.float64).T
    axes.fill_between(flops_T, low_T, high_T, color=colour, alpha=0.16, linewidth=0)
    axes.plot(flops_T, mean_T, color=colour, marker="o", markersize=3.5, label=label)
    if route["flops_before_last"]:
        axes.plot(
            [0, flops_T[0], flops_T[0]], [floor, floor, mean_T[0]],
            color=colour, linestyle=(0, (4, 2)), linewidth=1.5,
        )  # fmt: skip


def _expert_marks(
    axes: Axes, results: Mapping[str, Any], route: Mapping[str, Any], unit: float, height: float
) -> None:
    """A tick on the dashed line where each earlier stage of the route is paid for."""
    spent = 0.0
    for name in route["stages"][:-1]:
        middle = spent + results["stages"][name]["flops_total"] / 2
        spent += results["stages"][name]["flops_total"]
        axes.plot(spent / unit, height, marker="|", markersize=11, color="#333333")
        axes.annotate(
            name, (middle / unit, height), (0, -5), textcoords="offset points",
            ha="center", va="top", fontsize=8, color="#555555", rotation=0,
        )  # fmt: skip


def _accuracy_against_flops(
    results: Mapping[str, Any], colours: Mapping[str, str]
) -> Iterator[Plot]:
    drawn = {name: route for name, route in results["routes"].items() if route["curve"]}
    if not drawn:
        return
    unit, unit_name = _routes_unit(results)
    figure, (axes,) = drawing.grid(1, 1, 4.6)
    floor = min(route["curve"][0]["mean"] for route in drawn.values())
    for name, route in drawn.items():
        colour = colours[route["stages"][-1]]
        _route_line(axes, route, lambda point: point, unit, colour, name, floor)
        _expert_marks(axes, results, route, unit, floor)
    _frame(axes)
    _mark_target(axes, results, colours, unit)
    axes.set_xlabel(f"cumulative training compute ({unit_name})")
    axes.set_ylabel("held-out accuracy, mean over domains")
    drawing.legend_below(figure, [axes])
    yield drawing.render(
        figure,
        _saving_title(results),
        "Higher and further left is better; bands are 95% intervals over problems, the dashed part "
        "is what the experts cost before there is anything to merge.",
    )


def _saving_title(results: Mapping[str, Any]) -> str:
    comparison = results["comparison"]
    if comparison["saving"] is None:
        return "Accuracy against training compute"
    candidate, reference = comparison["routes"]
    word = "less" if comparison["saving"] >= 0 else "more"
    return (
        f"For {comparison['target_accuracy']:.1%}, {candidate} needs "
        f"{abs(comparison['saving']):.0%} {word} compute than {reference} "
        f"(saving {tabular.spoken(comparison['saving_ci95'], signed=True)})"
    )


def _mark_target(
    axes: Axes, results: Mapping[str, Any], colours: Mapping[str, str], unit: float
) -> None:
    comparison = results["comparison"]
    target = comparison["target_accuracy"]
    if target is None:
        return
    axes.axhline(target, color="#333333", linewidth=1, linestyle=":")
    axes.annotate(
        f"target {target:.1%}", (0, target), (4, 4), textcoords="offset points", fontsize=8.5
    )
    bottom = axes.get_ylim()[0]
    cheapest = min(
        (spent for spent in comparison["flops"].values() if spent is not None), default=0
    )
    for name, spent in comparison["flops"].items():
        if spent is not None:
            # Each on its own side of the pair of lines, which may stand close together.
            side = {"ha": "right"} if spent == cheapest else {"ha": "left"}
            offset = (-5, 6) if spent == cheapest else (5, 6)
            colour = colours[results["routes"][name]["stages"][-1]]
            axes.plot([spent / unit] * 2, [bottom, target], color=colour, linewidth=1, alpha=0.7)
            axes.plot(spent / unit, target, marker="D", color=colour, markersize=7, zorder=5)
            axes.annotate(
                tabular.flops(spent), (spent / unit, bottom), offset, **side,
                textcoords="offset points", color=colour, fontsize=9, fontweight="bold",
            )  # fmt: skip
    axes.set_ylim(bottom=bottom)


def _domains_against_flops(
    results: Mapping[str, Any], colours: Mapping[str, str]
) -> Iterator[Plot]:
    drawn = {name: route for name, route in results["routes"].items() if route["curve"]}
    domains = list(dict.fromkeys(d for route in drawn.values() for d in route["domains"]))
    if not domains:
        return
    unit, unit_name = _routes_unit(results)
    figure, panels = drawing.grid(len(domains), min(len(domains), 2), 3.3)
    for axes, domain in zip(panels, domains, strict=True):
        shown = {name: route for name, route in drawn.items() if domain in route["domains"]}
        floor = min(route["curve"][0]["domains"][domain]["mean"] for route in shown.values())
        for name, route in shown.items():
            colour = colours[route["stages"][-1]]
            _route_line(axes, route, lambda p, d=domain: p["domains"][d], unit, colour, name, floor)
            _expert_level(axes, results, route, domain, colours)
        axes.set_title(domain)
        _frame(axes)
        axes.set_xlabel(f"cumulative training compute ({unit_name})")
    for axes in panels[:: min(len(domains), 2)]:
        axes.set_ylabel("held-out accuracy")
    drawing.legend_below(figure, panels, order=list(drawn))
    yield drawing.render(
        figure,
        "Each domain alone: does the merged model come up to its experts?",
        "The dash-dotted line is the domain's own expert; a flat joint curve on one domain while "
        "another still climbs is compute spent on what was already learnt.",
    )


def _expert_level(
    axes: Axes,
    results: Mapping[str, Any],
    route: Mapping[str, Any],
    domain: str,
    colours: Mapping[str, str],
) -> None:
    expert = route["experts"].get(domain)
    if expert in results["stages"] and domain in results["stages"][expert]["accuracy"]:
        level = results["stages"][expert]["accuracy"][domain]["mean"]
        axes.axhline(level, color=colours[expert], linestyle="-.", linewidth=1.3, label=expert)


def _levels(
    records: Records, results: Mapping[str, Any], colours: Mapping[str, str]
) -> Iterator[Plot]:
    domains = tabular.domains_of(results)
    if not domains:
        return
    figure, panels = drawing.grid(len(domains), min(len(domains), 2), 3.1, sharey=True)
    for axes, domain in zip(panels, domains, strict=True):
        names = _models_of(records, results, domain)
        levels = sorted({level for n in names for level in _by_level(results, n, domain)}, key=_key)
        width = 0.8 / max(len(names), 1)
        for place, name in enumerate(names):
            bars = [_by_level(results, name, domain)[level] for level in levels]
            x_X = np.arange(len(levels)) + (place - (len(names) - 1) / 2) * width
            mean_X = np.array([bar["mean"] for bar in bars])
            low_X, high_X = np.array([bar["ci95"] for bar in bars]).T
            axes.bar(x_X, mean_X, width * 0.92, color=colours[name], label=name)
            axes.errorbar(
                x_X, mean_X, [mean_X - low_X, high_X - mean_X],
                fmt="none", ecolor="#333333", elinewidth=1, capsize=2,
            )  # fmt: skip
        axes.set_title(domain)
        axes.set_xticks(np.arange(len(levels)), [f"level {level}" for level in levels])
        axes.grid(visible=False, axis="x")
        axes.set_ylim(0, 1.04)
        drawing.percent_axis(axes.yaxis)
    for axes in panels[:: min(len(domains), 2)]:
        axes.set_ylabel("held-out accuracy")
    drawing.legend_below(figure, panels, order=list(results["stages"]))
    yield drawing.render(
        figure,
        "Accuracy by difficulty: on which levels does each model gain?",
        "Bars are the selected models on the test split, whiskers 95% intervals over problems.",
    )


def _models_of(records: Records, results: Mapping[str, Any], domain: str) -> list[str]:
    """Stages to show on a domain: the baseline, its experts, then the ends of the routes."""
    routes = results["routes"].values()
    experts = [route["experts"][domain] for route in routes if domain in route["experts"]]
    ends = [route["stages"][-1] for route in routes]
    wanted = [records.plan["baseline"], *experts, *ends] if ends else list(records.stages)
    return [
        name
        for name in dict.fromkeys(wanted)
        if name in results["stages"] and _by_level(results, name, domain)
    ]


def _by_level(results: Mapping[str, Any], name: str, domain: str) -> Mapping[str, Any]:
    return results["stages"][name]["by_level"].get(domain, {})


def _key(level: str) -> tuple[float, str]:
    return (float(level) if level.lstrip("-").isdecimal() else math.inf, level)


def _phases(results: Mapping[str, Any]) -> Iterator[Plot]:
    stages = results["stages"]
    if not stages:
        return
    figure = Figure(figsize=(drawing.WIDTH, 1.3 + 0.42 * len(stages)), layout="constrained")
    counted, aside = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1])
    phases = dict.fromkeys(phase for stage in stages.values() for phase in stage["flops"])
    _stack(counted, stages, [p for p in phases if p not in ledger.ASIDE], room=1.15)
    _stack(aside, stages, [p for p in phases if p in ledger.ASIDE], room=1.55)
    counted.set_title("counted as training")
    aside.set_title("aside")
    counted.set_yticks(np.arange(len(stages)), list(stages))
    counted.invert_yaxis()
    drawing.legend_below(figure, [counted, aside])
    yield drawing.render(
        figure,
        "Where the compute goes: each stage by phase, the merge beside its experts",
        "Training FLOPs of each stage by phase; evaluation and recomputation (remat) stand aside "
        "because they depend on how one chooses to run, not on the recipe.",
    )


def _stack(axes: Axes, stages: Mapping[str, Any], phases: Sequence[str], room: float) -> None:
    """Bars of stacked phases, with `room` times the longest one's length for the totals."""
    totals = [sum(s["flops"][p] for p in phases if p in s["flops"]) for s in stages.values()]
    unit, unit_name = tabular.flops_unit(max(totals))
    left = np.zeros(len(stages))
    for phase in phases:
        spent = np.array([s["flops"].get(phase, 0.0) for s in stages.values()]) / unit
        if spent.any():
            colour = PHASE_COLOURS.get(phase, drawing.GREY)
            axes.barh(
                np.arange(len(stages)), spent, left=left, height=0.64, color=colour,
                edgecolor="white", linewidth=0.6, label=phase.replace("_", " "),
            )  # fmt: skip
        left += spent
    for row, total in enumerate(totals):
        axes.annotate(
            tabular.flops(total), (total / unit, row), (4, 0),
            textcoords="offset points", va="center", fontsize=8.5,
        )  # fmt: skip
    axes.set_xlabel(unit_name)
    axes.set_xlim(0, max(max(totals) / unit, 1e-9) * room)
    axes.grid(visible=False, axis="y")
