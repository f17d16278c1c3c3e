"""The report of a run, made from its logged records only: results.json, report.html, report.md."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from opd_jax.report import charts, logs, markup, results, tabular
from opd_jax.report.tabular import Table

DEFINITIONS = {
    "accuracy": "Share of right answers to held-out test problems, as judged by each domain's "
    "verifier. With several samples per problem it is avg@k: their mean. The mean over domains "
    "counts every domain once.",
    "interval": "95% percentile interval of a bootstrap over problems (1000 resamples, fixed seed, "
    "each domain resampled on its own). It shows how much the choice of test problems matters, "
    "not the spread between training seeds. Differences and ratios are paired by problem.",
    "FLOPs": "Floating-point operations of training by exact formulas per phase, one multiply-add "
    "being two. Evaluation and recomputation of activations (remat) are reported aside. What both "
    "routes start from (the base model) is counted in neither.",
    "curve of a route": "Test accuracy, mean over domains, against the route's cumulative training "
    "FLOPs. For a route of several stages it is the last stage's curve, moved right by the FLOPs "
    "of all earlier stages: experts must be paid for, in full, before there is anything to merge.",
    "target accuracy": "The lower of the two routes' best accuracies on their curves, so that both "
    "reach it (unless a fixed target was asked for). The best of several noisy evaluations is a "
    "little optimistic, for both routes.",
    "FLOPs at target": "Where the running maximum of the curve first meets the target, linear "
    "between evaluation points.",
    "saving": "1 − FLOPs at target of the divided route / FLOPs at target of the joint one. A "
    "negative saving is a loss. Its interval recomputes both curves, the target and the saving on "
    "every resample.",
    "whole-run saving": "The same ratio of all training FLOPs of the two routes, wherever their "
    "accuracies ended.",
    "distillation share": "FLOPs of a route's opd stages / FLOPs of the stages that teach them.",
    "recovery": "Mean accuracy of the merged model / mean accuracy of the experts, each expert on "
    "its own domain at the step that taught.",
    "gap recovery": "(merged − base) / (experts − base), in mean accuracy.",
    "overlap ratio": "Share of the student's k likeliest next tokens that are also among the "
    "teacher's k likeliest, mean over the student's own samples (arXiv 2604.13016, eq. 6).",
    "overlap-token advantage": "On the shared tokens, with both models renormalised on them: "
    "mean of p (log q − log p) for student p and teacher q; 0 when they agree, negative otherwise "
    "(eq. 7). To be read beside the overlap mass, the probability each model puts on those tokens.",
    "pass@k": "Chance that at least one of k samples is right, by the unbiased estimator "
    "1 − C(n−c, k) / C(n, k) (arXiv 2107.03374).",
}


def write(workdir: str, *, target_accuracy: float | None = None) -> str:
    """Writes results.json, report.html and report.md into a workdir.

    Works on any state of a run: what is not finished or not logged is left out and said so.

    Args:
        workdir: the folder of plan.json and the stages' records; may be a remote path.
        target_accuracy: the accuracy at which to compare two routes, 0 to 1; by default the lower
            of their best ones, so that both reach it.

    Returns:
        The summary for the console: a table of the stages, and the comparison in words.
    """
    records = logs.read(workdir)
    found = results.summarise(records, target_accuracy=target_accuracy)
    plots = charts.draw(records, found)
    tables = _tables(found)
    root = epath.Path(workdir)
    text = json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False)
    (root / "results.json").write_text(text + "\n")
    page = markup.render(
        title=found["name"],
        subtitle=_subtitle(found),
        cards=cards(found),
        summary=summary(found),
        notes=_notes(found),
        tables=tables,
        plots=plots,
        definitions=DEFINITIONS,
        details={"Configuration": found["config"], "Versions": found["versions"]},
    )
    (root / "report.html").write_text(page)
    (root / "report.md").write_text(_markdown(found, tables))
    return _console(found)


def summary(found: Mapping[str, Any]) -> list[str]:
    """The findings in plain sentences, as far as there are any.

    Args:
        found: a results dictionary, as `results.collect` makes it.
    """
    comparison = found["comparison"]
    sentences = []
    if comparison["saving"] is not None:
        sentences.append(_saving_sentence(comparison))
    if comparison["distill_share"] is not None:
        sentences.append(
            f"Merging the experts by distillation cost {percent(comparison['distill_share'])} of "
            "what training them had cost."
        )
    if comparison["recovery"] is not None:
        sentences.append(
            f"The merged model has {tabular.interval(comparison['recovery'])} of its "
            "experts' mean accuracy, each expert measured on its own domain."
        )
    if comparison["saving_whole_run"] is not None:
        candidate, reference = comparison["routes"]
        costs = (
            f"{name} {flops(found['routes'][name]['flops_total'])} for "
            f"{tabular.interval(found['routes'][name]['accuracy'])}"
            for name in (candidate, reference)
        )
        sentences.append(f"Whole runs, to the end of every stage: {', '.join(costs)}.")
    return sentences or [_stage_sentence(name, stage) for name, stage in found["stages"].items()]


def _stage_sentence(name: str, stage: Mapping[str, Any]) -> str:
    return (
        f"{name} ({stage['algorithm']}) took {stage['steps']} updates and "
        f"{flops(stage['flops_total'])}; its held-out accuracy is "
        f"{tabular.interval(stage['accuracy_mean'])}."
    )


def _saving_sentence(comparison: Mapping[str, Any]) -> str:
    candidate, reference = comparison["routes"]
    saving, (low, high) = comparison["saving"], comparison["saving_ci95"]
    effect = f"saves {percent(saving)}" if saving >= 0 else f"costs {percent(-saving)} more"
    unclear = (low is None or low <= 0) and (high is None or high >= 0)
    verdict = " The interval includes 0: this run does not tell which is cheaper." * unclear
    return (
        f"To reach {percent(comparison['target_accuracy'])} mean held-out accuracy on "
        f"{_listed(comparison['domains'])}, {candidate} needs "
        f"{flops(comparison['flops'][candidate])} of training and {reference} needs "
        f"{flops(comparison['flops'][reference])}: {candidate} {effect} "
        f"(95% interval of the saving {tabular.spoken((low, high), signed=True)}).{verdict}"
    )


def cards(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """The headline numbers, each {label, value, detail}; those that are not known are left out."""
    comparison = found["comparison"]
    shown = []

    def show(label: str, value: str, detail: str) -> None:
        if value != tabular.NONE:
            shown.append({"label": label, "value": value, "detail": detail})

    if comparison["saving"] is not None:
        interval = tabular.spoken(comparison["saving_ci95"], signed=True)
        show("saving at equal accuracy", percent(comparison["saving"], signed=True), interval)
        show("target accuracy", percent(comparison["target_accuracy"]), "reached by both routes")
        for name, spent in comparison["flops"].items():
            show("compute to get there", flops(spent), name)
    show("distillation share", percent(comparison["distill_share"]), "of the experts' compute")
    if comparison["recovery"] is not None:
        interval = tabular.spoken(comparison["recovery"]["ci95"])
        show("recovery of the experts", percent(comparison["recovery"]["mean"]), interval)
    return shown


flops, percent = tabular.flops, tabular.percent


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _subtitle(found: Mapping[str, Any]) -> str:
    parts = [f"seed {found['seed']}"]
    if found["measure"]["samples"] is not None:
        parts.append(f"accuracy is {tabular.measure(found)} on the test split")
    return " · ".join(parts)


def _notes(found: Mapping[str, Any]) -> list[str]:
    notes = [*found["comparison"]["notes"], *found["notes"]]
    if found["unfinished"]:
        notes.append(f"Not finished: {_listed(found['unfinished'])}.")
    return notes


def _tables(found: Mapping[str, Any]) -> list[Table]:
    made = [
        tabular.routes_table(found),
        tabular.accuracy_table(found),
        tabular.gain_table(found),
        tabular.pass_table(found),
        tabular.length_table(found),
        tabular.stages_table(found),
        tabular.phases_table(found),
        tabular.problems_table(found),
    ]
    return [table for table in made if table.rows]


def _markdown(found: Mapping[str, Any], tables: Sequence[Table]) -> str:
    parts = [f"# {found['name']}", _subtitle(found), "## Summary", *summary(found)]
    parts += [f"> {note}" for note in _notes(found)]
    parts += ["## Numbers"] * bool(tables) + [table.markdown() for table in tables]
    parts += ["Plots are in `report.html`, all numbers in `results.json`.", "## Definitions"]
    parts.append("\n".join(f"- **{term}**: {text}" for term, text in DEFINITIONS.items()))
    return "\n\n".join(parts) + "\n"


def _console(found: Mapping[str, Any]) -> str:
    parts = [f"{found['name']} · {_subtitle(found)}"]
    if found["stages"]:
        parts.append(_console_table(found).text())
    parts += [table.text() for table in [tabular.routes_table(found)] if table.rows]
    return "\n\n".join([*parts, "\n".join([*summary(found), *_notes(found)])]).rstrip()


def _console_table(found: Mapping[str, Any]) -> Table:
    domains = tabular.domains_of(found)
    rows = []
    for name, stage in found["stages"].items():
        means = [
            percent(stage["accuracy"][d]["mean"] if d in stage["accuracy"] else None)
            for d in domains
        ]
        lengths = list(stage["length"].values())
        length = tabular.number(sum(lengths) / len(lengths) if lengths else None)
        cost = [stage["algorithm"], str(stage["steps"]), flops(stage["flops_total"])]
        rows.append([name, *cost, *means, tabular.interval(stage["accuracy_mean"]), length])
    header = ["stage", "algorithm", "updates", "FLOPs", *domains, "mean [95%]", "length"]
    return Table("Stages", "", header, rows, text_columns=2)
