"""Pictures of a run as inline SVG. Needs matplotlib (extra `plots`)."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from runwatch.checks import Level, Signals, Verdicts
from runwatch.checks.windows import rolling_median
from runwatch.monitor.engine.backtest import Result, level_of

Floats = NDArray[np.float64]

COLOURS = {Level.UNKNOWN: "#e0e0e0", Level.OK: "#a5d6a7", Level.WARN: "#fbc02d", Level.CRITICAL: "#c62828"}
INK, TREND = "#90a4ae", "#0d47a1"
MOST_POINTS = 1500
"""Bins along the width of a picture; each is drawn with its smallest and its largest value."""
LEAST_WIDTH = 1 / 400
"""Share of the width that even a single record gets."""
TREND_RECORDS = 64


@dataclass(frozen=True)
class Axis:
    """Where rows lie from left to right: at their steps, or at their numbers where steps go back."""

    x: Floats
    label: str

    @staticmethod
    def of(signals: Signals) -> "Axis":
        """The axis of a run."""
        if (np.diff(signals.step) >= 0).all():
            return Axis(signals.step.astype(np.float64), "step")
        return Axis(np.arange(len(signals), dtype=np.float64), "record (steps go back in this run)")

    @property
    def width(self) -> float:
        """From the first row to the last."""
        return float(self.x[-1] - self.x[0]) or 1.0 if len(self.x) else 1.0

    def span(self, first: int, last: int) -> tuple[float, float]:
        """Left end and width of rows `first` to `last`, wide enough to be seen."""
        return float(self.x[first]), max(float(self.x[last] - self.x[first]), LEAST_WIDTH * self.width)


def thinned(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """At most 2 x `MOST_POINTS` points that look the same: the extremes of each stretch, in their order."""
    finite = np.flatnonzero(np.isfinite(y))
    if len(finite) <= 2 * MOST_POINTS:
        return x[finite], y[finite]
    ends = np.array_split(finite, MOST_POINTS)
    kept = np.unique([row for part in ends for row in (part[np.argmin(y[part])], part[np.argmax(y[part])])])
    return x[kept], y[kept]


def loss_picture(result: Result) -> str:
    """The loss with its trend (median of 64 records) and the incidents' ranges, as SVG."""
    signals = result.loaded.signals
    axis = Axis.of(signals)
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.add_subplot()
    name = "train/loss" if signals.has("train/loss") else "eval/loss"
    x, loss = axis.x[signals.observed(name)], signals.values(name)
    axes.plot(*thinned(x, loss), color=INK, linewidth=0.7, label=name)
    trend = rolling_median(loss, TREND_RECORDS, 1)[TREND_RECORDS // 2 :]
    axes.plot(*thinned(x[: len(trend)], trend), color=TREND, linewidth=1.2, label="trend")
    for incident in sorted(result.incidents, key=level_of):
        left, width = axis.span(*result.rows_of(incident))
        axes.axvspan(left, left + width, color=COLOURS[level_of(incident)], alpha=0.35, linewidth=0)
    _scale(axes, loss)
    axes.set(xlabel=axis.label, ylabel="loss (nats)", xlim=_limits(axis))
    axes.legend(loc="upper right", frameon=False)
    return svg(figure)


def _scale(axes: Any, loss: Floats) -> None:
    """Logarithmic where the loss allows, cut above so that one wild record does not flatten the rest."""
    finite = loss[np.isfinite(loss)]
    if not len(finite):
        return
    if finite.min() > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    low, high = float(finite.min()), float(np.quantile(finite, 0.999))
    if low < high:
        axes.set_ylim(low - 0.02 * abs(low), high + 0.1 * abs(high))


def strips_picture(signals: Signals, verdicts: Mapping[str, Verdicts]) -> str:
    """One strip per check, coloured by its level along the run, as SVG."""
    axis = Axis.of(signals)
    figure = Figure(figsize=(11, 0.32 * len(verdicts) + 0.7), layout="constrained")
    axes = figure.add_subplot()
    for height, found in enumerate(verdicts.values()):
        for level, colour in COLOURS.items():
            spans = [axis.span(first, last) for first, last in _stretches(found.level == level)]
            axes.broken_barh(spans, (height - 0.4, 0.8), color=colour, linewidth=0)
    axes.set(xlabel=axis.label, xlim=_limits(axis), ylim=(len(verdicts) - 0.5, -0.5))
    axes.set_yticks(range(len(verdicts)), list(verdicts))
    return svg(figure)


def _stretches(flags: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """First row of each stretch and the row after its last (or the last row of all)."""
    edges = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=0))
    ends = np.minimum(edges[1::2], len(flags) - 1)
    return list(zip(edges[::2].tolist(), ends.tolist(), strict=True))


def _limits(axis: Axis) -> tuple[float, float]:
    return (float(axis.x[0]), float(axis.x[0]) + axis.width * (1 + LEAST_WIDTH)) if len(axis.x) else (0.0, 1.0)


def svg(figure: Figure) -> str:
    """A figure as an SVG element; the same figure gives the same text."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "runwatch"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
