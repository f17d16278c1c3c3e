"""What all figures of a report share: palette, style, layout, and the way onto the page."""

import base64
import dataclasses
import io
import math
from collections.abc import Sequence
from typing import Any

from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

from opd_jax.report.logs import Records

# Okabe and Ito's palette: told apart by colour-blind readers, and (with the dashes) in grey print.
BLUE, VERMILLION, GREEN = "#0072B2", "#D55E00", "#009E73"
PURPLE, ORANGE, SKY, GREY = "#CC79A7", "#E69F00", "#56B4E9", "#8A8A8A"
STYLE = {
    "axes.edgecolor": "#666666",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelcolor": "#333333",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.1,
    "font.size": 9.5,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "lines.linewidth": 1.9,
    "svg.hashsalt": "opd_jax",
    "text.color": "#222222",
    "xtick.color": "#666666",
    "ytick.color": "#666666",
}
WIDTH = 9.6


@dataclasses.dataclass(frozen=True)
class Plot:
    """A figure as the page shows it: SVG text, a title and one sentence on how to read it."""

    title: str
    caption: str
    svg: str

    @property
    def data_uri(self) -> str:
        """The image inside an address, so that a page needs no second file."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg.encode()).decode()


def stage_colours(records: Records) -> dict[str, str]:
    """One colour per stage in all figures: the ends of the routes first, the baseline in grey."""
    ends = [members[-1] for members in records.plan["routes"].values()]
    baseline = records.plan["baseline"]
    order = dict.fromkeys(name for name in [*ends, *records.stages] if name != baseline)
    palette = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
    colours = {name: palette[place % len(palette)] for place, name in enumerate(order)}
    return {name: colours.get(name, GREY) for name in records.stages}


def render(figure: Figure, title: str, caption: str) -> Plot:
    """The figure as it goes onto the page; the same bytes for the same records."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    return Plot(title, caption, stream.getvalue())


def grid(panels: int, columns: int, height: float, **kwargs: Any) -> tuple[Figure, list[Axes]]:
    """A figure of `panels` axes in rows of `columns`, each row `height` inches high."""
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(WIDTH, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **kwargs).flatten().tolist()
    for spare in axes[panels:]:
        spare.remove()
    return figure, axes[:panels]


def legend_below(figure: Figure, axes: Sequence[Axes], order: Sequence[str] = ()) -> None:
    """One legend for all panels, each label once; labels in `order` stand first, in that order."""
    handles: dict[str, Any] = {}
    for panel in axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    labels = [label for label in order if label in handles]
    labels += [label for label in handles if label not in order]
    if labels:
        figure.legend(
            [handles[label] for label in labels],
            labels,
            loc="outside lower center",
            ncols=len(labels) if len(labels) <= 5 else math.ceil(len(labels) / 2),
        )


def percent_axis(axis: Axis) -> None:
    """Shows shares as percentages, with no more digits than they need."""
    axis.set_major_formatter(ticker.FuncFormatter(lambda share, _: f"{100 * share:.4g}%"))
