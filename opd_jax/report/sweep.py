"""One table over the points of a sweep, mean and interval over seeds, from their results.json."""

import csv
import dataclasses
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from opd_jax.report import markup, statistics, tabular
from opd_jax.report.tabular import Table

# Column of the csv (mean, low, high each) and how the table writes one value of it.
QUANTITIES = {
    "accuracy": tabular.percent,
    "flops": tabular.flops,
    "saving": lambda value: tabular.percent(value, signed=True),
    "recovery": tabular.percent,
    "distill_share": tabular.percent,
    "length": tabular.number,
    "overlap_start": tabular.percent,
    "overlap_end": tabular.percent,
}
DEFINITIONS = {
    "interval": "Mean over seeds with its 95% interval by Student's t; one seed has no interval.",
    "route": "The way to the final model; without routes, the last finished stage.",
    "accuracy": "Held-out test accuracy of the route's last stage, mean over domains.",
    "flops": "Training FLOPs of all the route's stages.",
    "length": "Completion tokens on the test split, mean over domains.",
    "overlap": "Overlap ratio of student and teacher, mean over teachers, in the first and in the "
    "last tenth of the updates of the route's last stage.",
    "recovery": "Accuracy of the merged model / that of its experts.",
    "distill_share": "FLOPs of the opd stages / FLOPs of the stages that teach them.",
    "saving": "Of FLOPs at equal accuracy, over the reference route of the same run.",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One route of one sweep point, over its seeds."""

    name: str
    route: str
    seeds: int
    estimates: Mapping[str, statistics.Estimate]


def write_sweep(points: Sequence[Mapping[str, Any]], out_dir: str) -> str:
    """Writes sweep.csv and sweep.html into a folder, made if it is not there.

    Args:
        points: {name, seed, workdir, status, error} each, status "done" or "failed"; points of one
            name are the seeds of one row. A done point without a readable results.json counts as
            failed.
        out_dir: where to write; may be a remote path.

    Returns:
        The table for the console, and below it what failed.
    """
    measured, failures = _read(points)
    names = dict.fromkeys(point["name"] for point in points)
    rows = [row for name in names for row in _rows(name, measured.get(name, []))]
    table = _table(rows, [name for name in names if name not in measured])
    notes = [f"{label} failed: {error}" for label, error in failures]
    root = epath.Path(out_dir)
    root.mkdir(parents=True, exist_ok=True)
    (root / "sweep.csv").write_text(_csv(rows))
    page = markup.render(
        title="Sweep",
        subtitle=f"{len(names)} points, {len(points) - len(failures)} of {len(points)} runs done",
        notes=notes,
        tables=[table],
        definitions=DEFINITIONS,
    )
    (root / "sweep.html").write_text(page)
    return "\n".join([table.text(), *notes])


def _read(
    points: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, list[dict[str, Any]]], list[tuple[str, str]]]:
    """Results by point name, and (point, error) of the runs that have none."""
    measured: dict[str, list[dict[str, Any]]] = {}
    failures = []
    for point in points:
        label = f"{point['name']}, seed {point['seed']}"
        if point["status"] != "done":
            failures.append((label, str(point["error"])))
            continue
        path = epath.Path(point["workdir"]) / "results.json"
        try:
            measured.setdefault(point["name"], []).append(json.loads(path.read_text()))
        except (OSError, json.JSONDecodeError) as error:
            failures.append((label, f"{path} cannot be read ({error})"))
    return {name: found for name, found in measured.items() if found}, failures


def _rows(name: str, runs: Sequence[Mapping[str, Any]]) -> list[Row]:
    values: dict[str, list[dict[str, float | None]]] = {}
    for run in runs:
        for route, quantities in _quantities(run).items():
            values.setdefault(route, []).append(quantities)
    rows = []
    for route, seeds in values.items():
        known = {q: [seed[q] for seed in seeds if seed[q] is not None] for q in QUANTITIES}
        estimates = {q: statistics.over_seeds(of_seeds) for q, of_seeds in known.items()}
        rows.append(Row(name, route, len(seeds), estimates))
    return rows


def _quantities(run: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """What the table shows of one run, by route."""
    finished = {name: route for name, route in run["routes"].items() if route["finished"]}
    found = {name: _of_route(run, name, route) for name, route in finished.items()}
    if found or not run["stages"]:
        return found
    last = list(run["stages"])[-1]
    stage = run["stages"][last]
    quantities = _of_stage(stage)
    quantities["flops"] = stage["flops_total"]
    if stage["accuracy_mean"] is not None:
        quantities["accuracy"] = stage["accuracy_mean"]["mean"]
    return {last: quantities}


def _of_route(
    run: Mapping[str, Any], name: str, route: Mapping[str, Any]
) -> dict[str, float | None]:
    quantities = _of_stage(run["stages"][route["stages"][-1]])
    quantities |= {"flops": route["flops_total"], "distill_share": route["distill_share"]}
    for key in ("accuracy", "recovery"):
        quantities[key] = None if route[key] is None else route[key]["mean"]
    if run["comparison"]["routes"][:1] == [name]:
        quantities["saving"] = run["comparison"]["saving"]
    return quantities


def _of_stage(stage: Mapping[str, Any]) -> dict[str, float | None]:
    quantities: dict[str, float | None] = dict.fromkeys(QUANTITIES)
    quantities["length"] = _mean(stage["length"].values())
    overlaps = stage["overlap"].values() if "overlap" in stage else []
    for end in ("start", "end"):
        quantities[f"overlap_{end}"] = _mean(overlap[end] for overlap in overlaps)
    return quantities


def _mean(values) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _table(rows: Sequence[Row], empty: Sequence[str]) -> Table:
    shown = [q for q in QUANTITIES if any(not math.isnan(r.estimates[q].value) for r in rows)]
    lines = [
        [row.name, row.route, str(row.seeds), *(_cell(q, row.estimates[q]) for q in shown)]
        for row in rows
    ]
    lines += [[name, tabular.NONE, "0", *[tabular.NONE] * len(shown)] for name in empty]
    return Table(
        "Sweep",
        "Mean over seeds, with its 95% interval after ±.",
        ["point", "route", "seeds", *(q.replace("_", " ") for q in shown)],
        lines,
        text_columns=2,
    )


def _cell(quantity: str, found: statistics.Estimate) -> str:
    show = QUANTITIES[quantity]
    if math.isnan(found.value):
        return tabular.NONE
    half = (found.high - found.low) / 2
    if math.isnan(half) or half < 1e-4 * abs(found.value):
        return show(found.value)
    return f"{show(found.value)} ±{show(half).removeprefix('+')}"


def _csv(rows: Sequence[Row]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    bounds = ("mean", "low", "high")
    writer.writerow(["name", "route", "seeds", *(f"{q}_{b}" for q in QUANTITIES for b in bounds)])
    for row in rows:
        cells = [
            "" if math.isnan(number) else repr(float(number))
            for quantity in QUANTITIES
            for number in dataclasses.astuple(row.estimates[quantity])
        ]
        writer.writerow([row.name, row.route, row.seeds, *cells])
    return stream.getvalue()
