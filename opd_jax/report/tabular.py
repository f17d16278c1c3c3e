"""Tables and numbers as people read them: units, intervals, plain text and Markdown."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

NONE = "–"

_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


@dataclasses.dataclass(frozen=True)
class Table:
    """A titled table of strings; the first `text_columns` columns are words, the rest numbers."""

    title: str
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1

    def text(self) -> str:
        """Aligned plain text for a console."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        rendered = [
            "  ".join(
                cell.ljust(width) if column < self.text_columns else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([rendered[0], "─" * max(map(len, rendered)), *rendered[1:]])

    def markdown(self) -> str:
        """A heading, the caption and a Markdown table."""
        rule = [":--" if c < self.text_columns else "--:" for c in range(len(self.header))]
        lines = [self.header, rule, *self.rows]
        body = "\n".join(
            "| " + " | ".join(_escaped(cell) for cell in line) + " |" for line in lines
        )
        return f"### {self.title}\n\n{self.caption}\n\n{body}"


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def flops_unit(flops: float) -> tuple[float, str]:
    """The unit that shows `flops` as a number from 1 to 999: (its size, its name)."""
    for size, prefix in _PREFIXES:
        if flops >= size:
            return size, f"{prefix}FLOP"
    return 1.0, "FLOP"


def flops(value: float | None) -> str:
    """Three digits and a unit: 0.312e12 is '312 GFLOP'."""
    if value is None:
        return NONE
    size, unit = flops_unit(value)
    if value / size >= 999.5 and size < _PREFIXES[0][0]:
        size, unit = flops_unit(size * 1e3)
    shown = value / size
    return f"{shown:.{2 if shown < 9.995 else 1 if shown < 99.95 else 0}f} {unit}"


def percent(value: float | None, *, signed: bool = False) -> str:
    """One decimal: 0.8312 is '83.1%'; with its sign if asked."""
    if value is None:
        return NONE
    return f"{value:{'+' if signed else ''}.1%}".replace("-", "−")


def interval(entry: Mapping[str, Any] | None, *, signed: bool = False) -> str:
    """A {mean, ci95} as '83.1% [80.2, 86.0]'; an open bound is ∞."""
    if entry is None or entry["mean"] is None:
        return NONE
    return f"{percent(entry['mean'], signed=signed)} {bounds(entry['ci95'], signed=signed)}"


def spoken(ci95: Sequence[float | None], *, signed: bool = False) -> str:
    """A 95% interval in words, '80.2% to 86.0%'; an open bound is ∞."""
    low, high = (percent(bound, signed=signed) for bound in ci95)
    return f"{low.replace(NONE, '−∞')} to {high.replace(NONE, '∞')}"


def bounds(ci95: Sequence[float | None], *, signed: bool = False) -> str:
    """A 95% interval in percent, '[80.2, 86.0]'."""
    low, high = (percent(bound, signed=signed).removesuffix("%") for bound in ci95)
    return f"[{low.replace(NONE, '−∞')}, {high.replace(NONE, '∞')}]"


def number(value: float | None, digits: int = 1) -> str:
    """A plain number."""
    return NONE if value is None else f"{value:.{digits}f}"


def domains_of(results: Mapping[str, Any]) -> list[str]:
    """Every domain that some finished stage was tested on, in order of appearance."""
    return list(dict.fromkeys(d for s in results["stages"].values() for d in s["accuracy"]))


def stages_table(results: Mapping[str, Any]) -> Table:
    """What each stage did and cost."""
    rows = [
        [
            name,
            stage["algorithm"],
            str(stage["steps"]),
            str(stage["selected_step"]),
            stage["stopped_by"],
            flops(stage["flops_total"]),
            f"{stage['seconds']:.0f}",
        ]
        for name, stage in results["stages"].items()
    ]
    return Table(
        "Stages",
        "Training FLOPs of all updates done, also those after the selected one.",
        ["stage", "algorithm", "updates", "selected", "stopped by", "FLOPs", "seconds"],
        rows,
        text_columns=2,
    )


def accuracy_table(results: Mapping[str, Any]) -> Table:
    """Held-out accuracy of each stage's selected model, by domain."""
    domains = domains_of(results)
    rows = [
        [
            name,
            *(interval(_of(stage["accuracy"], domain)) for domain in domains),
            interval(stage["accuracy_mean"]),
        ]
        for name, stage in results["stages"].items()
    ]
    return Table(
        "Accuracy",
        f"Test split, {measure(results)}, with 95% intervals over problems.",
        ["stage", *domains, "mean"],
        rows,
    )


def gain_table(results: Mapping[str, Any]) -> Table:
    """What each stage gained over the baseline, paired by problem."""
    domains = domains_of(results)
    rows = [
        [name] + [interval(_of(stage["gain"], domain), signed=True) for domain in domains]
        for name, stage in results["stages"].items()
        if stage["gain"]
    ]
    return Table(
        "Gain over the base model",
        "Difference in accuracy on the same problems, in percentage points; an interval without 0 "
        "is a clear change.",
        ["stage", *domains],
        rows,
    )


def pass_table(results: Mapping[str, Any]) -> Table:
    """Unbiased pass@k of each stage, one row a domain; none where pass@1, the accuracy, is all."""
    ks = sorted(
        {int(k) for s in results["stages"].values() for d in s["pass_at_k"].values() for k in d}
    )
    rows = [
        [name, domain] + [interval(_of(passed, str(k))) for k in ks]
        for name, stage in results["stages"].items()
        for domain, passed in stage["pass_at_k"].items()
        if ks != [1]
    ]
    return Table(
        "pass@k",
        "Chance that at least one of k samples is right (unbiased estimate).",
        ["stage", "domain", *(f"pass@{k}" for k in ks)],
        rows,
        text_columns=2,
    )


def length_table(results: Mapping[str, Any]) -> Table:
    """Completion length and truncation of each stage, by domain."""
    domains = domains_of(results)
    rows = [
        [name]
        + [
            f"{number(_of(stage['length'], d))} ({percent(_of(stage['truncated'], d))})"
            for d in domains
        ]
        for name, stage in results["stages"].items()
    ]
    return Table(
        "Completion length",
        "Mean tokens per answer on the test split and, in brackets, the share cut off.",
        ["stage", *domains],
        rows,
    )


def routes_table(results: Mapping[str, Any]) -> Table:
    """Whole cost and final accuracy of each route."""
    rows = [
        [
            name,
            " + ".join(route["stages"]),
            flops(route["flops_total"]),
            interval(route["accuracy"]),
        ]
        for name, route in results["routes"].items()
    ]
    return Table(
        "Routes",
        "Training FLOPs of all its stages, and the accuracy of the last one (mean over domains).",
        ["route", "stages", "FLOPs", "accuracy"],
        rows,
        text_columns=2,
    )


def problems_table(results: Mapping[str, Any]) -> Table:
    """Sizes of each domain's splits, and how far held-out problems were among the training ones."""
    rows = []
    for name, domain in results["problems"].items():
        shared = domain["shared"]
        rows.append(
            [
                name,
                *(str(domain["problems"][split]) for split in ("train", "validation", "test")),
                str(sum(domain["contaminated"].values())),
                f"{domain['removed']['exact']} + {domain['removed']['near']}",
                percent(shared["test"]["grams"]) if shared else NONE,
            ]
        )
    return Table(
        "Problems",
        "Held-out problems that stood among the training ones, exactly or nearly, are contaminated;"
        " those training problems were removed (exact + near). Left in common: the share of the"
        " test problems' 8-grams that some training problem has too.",
        ["domain", "train", "validation", "test", "contaminated", "removed", "left in common"],
        rows,
    )


def phases_table(results: Mapping[str, Any]) -> Table:
    """FLOPs of each stage by phase."""
    stages = results["stages"].values()
    phases = list(dict.fromkeys(p for s in stages for p, spent in s["flops"].items() if spent))
    rows = [
        [name, *(flops(_of(stage["flops"], phase)) for phase in phases)]
        for name, stage in results["stages"].items()
    ]
    return Table(
        "FLOPs by phase",
        "Evaluation and remat are reported aside: no total holds them.",
        ["stage", *(phase.replace("_", " ") for phase in phases)],
        rows,
    )


def measure(results: Mapping[str, Any]) -> str:
    """How accuracy was measured, in words."""
    if results["measure"]["greedy"]:
        return "greedy answers"
    return f"avg@{results['measure']['samples']}"


def _of(entries: Mapping[str, Any], key: str) -> Any:
    return entries.get(key)
