"""Figures of what happened while training: reward, KL, lengths, and student beside teacher."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes

from opd_jax.report import drawing
from opd_jax.report.drawing import Plot
from opd_jax.report.logs import Records, StageRecords

MOST_POINTS = 400
LOG_BEYOND = 4  # A stage this many times longer than another puts updates on a log axis.

STUDENT, TEACHER = "-", (0, (3, 1.5))
TEACHER_COLOURS = (
    drawing.BLUE,
    drawing.VERMILLION,
    drawing.GREEN,
    drawing.PURPLE,
    drawing.ORANGE,
    drawing.SKY,
)
# Panel title, y label, and the metrics in it with their line styles.
OPD_PANELS = (
    ("overlap ratio: should rise", "share of top-k", (("overlap_ratio", STUDENT),)),
    ("overlap-token advantage: toward 0", "nats", (("overlap_advantage", STUDENT),)),
    (
        "overlap mass: near 100%",
        "probability",
        (("overlap_mass_student", STUDENT), ("overlap_mass_teacher", TEACHER)),
    ),
    (
        "entropy (dashed: teacher)",
        "nats",
        (("entropy_student", STUDENT), ("entropy_teacher", TEACHER)),
    ),
    ("entropy gap: should close", "nats", (("entropy_gap", STUDENT),)),
)


def draw(records: Records, colours: Mapping[str, str]) -> Iterator[Plot]:
    """The figures over updates; call it within the report's style.

    Args:
        records: the run.
        colours: one colour per stage.
    """
    policies = [stage for stage in records.stages.values() if stage.algorithm != "sft"]
    yield from _rewards(policies, colours)
    yield from _lengths(policies, colours)
    for stage in policies:
        if stage.algorithm == "opd":
            yield from _overlaps(stage, colours)


def _rewards(policies: Sequence[StageRecords], colours: Mapping[str, str]) -> Iterator[Plot]:
    panels = {"reward": "mean reward", "kl": "nats per token", "entropy": "nats per token"}
    titles = {"reward": "reward: should rise", "kl": "KL", "entropy": "entropy of the policy"}
    logged = [m for m in panels if any(stage.series(m)[0].size for stage in policies)]
    if not logged:
        return
    figure, axes = drawing.grid(len(logged), len(logged), 3.1)
    for panel, metric in zip(axes, logged, strict=True):
        for stage in policies:
            _line(panel, *stage.series(metric), color=colours[stage.name], label=stage.name)
        panel.set_title(titles[metric])
        panel.set_ylabel(panels[metric])
        _updates_axis(panel, policies)
    drawing.legend_below(figure, axes)
    yield drawing.render(
        figure,
        "Reward and KL over training: a curve still rising at its end was stopped too early",
        "Thin: every update; thick: running mean. KL is to the reference under GRPO and to the "
        "teacher under OPD, where it should fall.",
    )


def _lengths(policies: Sequence[StageRecords], colours: Mapping[str, str]) -> Iterator[Plot]:
    domains = list(dict.fromkeys(d for s in policies for d in s.teacher_names("length")))
    if not domains:
        return
    rows = (
        ("length", "tokens per answer"),
        ("truncated", "share of answers cut off"),
        ("repeated", "share of repeated 4-grams"),
    )
    figure, axes = drawing.grid(len(rows) * len(domains), len(domains), 2.5, sharey="row")
    for place, panel in enumerate(axes):
        metric, label = rows[place // len(domains)]
        domain = domains[place % len(domains)]
        for stage in policies:
            series = stage.series(f"{metric}/{domain}")
            _line(panel, *series, color=colours[stage.name], label=stage.name)
        _updates_axis(panel, policies)
        if place // len(domains) < len(rows) - 1:
            panel.set_xlabel("")
        if metric == "length":
            panel.set_title(domain)
        else:
            drawing.percent_axis(panel.yaxis)
        if place % len(domains) == 0:
            panel.set_ylabel(label)
    drawing.legend_below(figure, axes)
    yield drawing.render(
        figure,
        "Answer length, truncation, repetition: growth without more reward is padding",
        "Completion tokens, the stop token included; the share of answers that hit the limit; the "
        "share of an answer's runs of four tokens that it had said before; thin: every update, "
        "thick: running mean.",
    )


def _overlaps(stage: StageRecords, colours: Mapping[str, str]) -> Iterator[Plot]:
    teachers = stage.teacher_names("overlap_ratio")
    if not teachers:
        return
    figure, axes = drawing.grid(len(OPD_PANELS) + 1, 3, 2.7)
    for panel, (title, label, metrics) in zip(axes[:-1], OPD_PANELS, strict=True):
        for place, teacher in enumerate(teachers):
            spare = TEACHER_COLOURS[place % len(TEACHER_COLOURS)]
            spec = stage.teachers.get(teacher, teacher)
            colour = colours.get(spec.removeprefix("stage:").partition("@")[0], spare)
            for metric, style in metrics:
                name = teacher if style is STUDENT else None
                series = stage.series(f"{metric}/{teacher}")
                _line(panel, *series, color=colour, linestyle=style, label=name)
        panel.set_title(title, fontsize=9.5)
        panel.set_ylabel(label)
    _line(axes[-1], *stage.series("grad_norm"), color=drawing.GREY, label=None)
    axes[-1].set_title("gradient norm", fontsize=9.5)
    axes[-1].set_ylabel("L2 norm")
    for panel in (axes[0], axes[2]):
        drawing.percent_axis(panel.yaxis)
    for panel in axes:
        _updates_axis(panel, [stage])
    drawing.legend_below(figure, axes)
    yield drawing.render(
        figure,
        f"{stage.name}: is the student taking over its teachers' ways?",
        "One colour per teacher, on the student's own samples; solid is the student, dashed the "
        "teacher. An advantage near 0 means agreement only if overlap and mass are high too.",
    )


def _line(axes: Axes, step_T: np.ndarray, value_T: np.ndarray, **style: Any) -> None:
    """A logged series: every update thin, its running mean thick."""
    known_T = np.isfinite(value_T)
    if not known_T.any():
        return
    step_T, value_T = step_T[known_T], value_T[known_T]
    stride = -(-step_T.size // MOST_POINTS)
    thin = {key: value for key, value in style.items() if key != "label"}
    smooth_T = running_mean(value_T, step_T.size // 12)
    axes.plot(step_T[::stride], value_T[::stride], alpha=0.28, linewidth=0.8, **thin)
    axes.plot(step_T[::stride], smooth_T[::stride], **style)


def running_mean(value_T: np.ndarray, half: int) -> np.ndarray:
    """Mean over `half` neighbours on each side, over fewer at the ends."""
    total_T = np.concatenate([[0.0], np.cumsum(value_T)])
    index_T = np.arange(value_T.size)
    low_T = np.maximum(index_T - half, 0)
    high_T = np.minimum(index_T + half + 1, value_T.size)
    return (total_T[high_T] - total_T[low_T]) / (high_T - low_T)


def _updates_axis(axes: Axes, stages: Sequence[StageRecords]) -> None:
    axes.set_xlabel("updates")
    lengths = [len(stage.metrics) for stage in stages if stage.metrics]
    if lengths and max(lengths) > LOG_BEYOND * min(lengths):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    else:
        axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
