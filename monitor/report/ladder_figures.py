"""The ladder as a picture: rungs with their fit, the registered curve and the live run, grad norm and drop rate over scale."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from numpy.typing import NDArray

from runwatch.monitor.card.ladder_fit import FittedRung, LadderFit
from runwatch.monitor.card.ladder_section import active_parameters
from runwatch.monitor.card.run_card import LadderCurve, load_card
from runwatch.monitor.read.sources import load
from runwatch.monitor.report.figures import INK, TREND, svg, thinned
from runwatch.monitor.report.page import Picture, Section, Verbatim, html

Floats = NDArray[np.float64]
LABELS = {"grad_norm": "grad norm", "drop_rate": "drop rate"}
SIGNALS = {"grad_norm": "optim/grad_norm", "drop_rate": "moe/drop_rate"}


@dataclass(frozen=True)
class LiveRun:
    """What is drawn of a run: tokens and loss per train record, its size, its curve, and its mean of each trend."""

    name: str
    tokens: Floats
    loss: Floats
    parameters: int
    curve: LadderCurve | None
    trends: dict[str, float]


def live_run(run_dir: Path) -> LiveRun:
    """A run directory.

    Raises:
        CardError: its card has mistakes.
        SourceError: its telemetry cannot be read.
    """
    card = load_card(run_dir / "run.yaml")
    signals = load(run_dir).signals
    rows = signals.observed("train/loss")
    trends = {trend: _late_mean(signals.values(signal)) for trend, signal in SIGNALS.items()}
    curve = None if card.ladder is None else card.ladder.curve
    tokens, loss = signals.tokens[rows].astype(np.float64), signals.values("train/loss")
    return LiveRun(card.run.name, tokens, loss, active_parameters(card.model), curve, trends)


def _late_mean(values: Floats) -> float:
    """Over the second half; NaN where there is none."""
    finite = values[len(values) // 2 :]
    finite = finite[np.isfinite(finite)]
    return float(finite.mean()) if len(finite) else float("nan")


def picture(fitted: LadderFit, live: LiveRun | None = None) -> Figure:
    """Loss over tokens on the left; on the right what the trends do with scale."""
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    left, *right = figure.subplot_mosaic([["loss", "grad_norm"], ["loss", "drop_rate"]], width_ratios=(2.2, 1)).values()
    _losses(left, fitted, live)
    for axes, trend in zip(right, LABELS, strict=True):
        _trend(axes, fitted.rungs, live, trend)
    return figure


def _losses(axes: Any, fitted: LadderFit, live: LiveRun | None) -> None:
    colours = colormaps["viridis"](np.linspace(0.1, 0.85, len(fitted.rungs)))
    for rung, colour in zip(sorted(fitted.rungs, key=lambda one: one.parameters * one.tokens), colours, strict=True):
        axes.plot(*zip(*rung.course, strict=True), ".", color=colour, markersize=4)
        name = f"{rung.name}, {_short(rung.parameters)}"
        axes.plot(*zip(*rung.fitted_course, strict=True), color=colour, linewidth=1.1, label=name)
    if live is not None:
        _live(axes, live)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="loss (nats)", title="Rungs (dots), fit (lines)")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.legend(frameon=False, fontsize=8)


def _live(axes: Any, live: LiveRun) -> None:
    settled = live.tokens >= (live.curve.tokens[0] if live.curve else 0)
    axes.plot(*thinned(live.tokens[settled], live.loss[settled]), color=INK, linewidth=0.6, zorder=0, label=live.name)
    if live.curve:
        axes.fill_between(live.curve.tokens, live.curve.low, live.curve.high, color=TREND, alpha=0.15, linewidth=0)
        axes.plot(live.curve.tokens, live.curve.loss, color=TREND, linewidth=1.6, label="registered, 95 % band")


def _trend(axes: Any, rungs: Sequence[FittedRung], live: LiveRun | None, trend: str) -> None:
    """Mean over the second half of each rung's stable phase, over its size; the live run's over what it has trained."""
    sizes = np.array([rung.parameters for rung in rungs])
    axes.plot(sizes, [rung.trends.get(trend, float("nan")) for rung in rungs], "o", color=TREND, label="rungs")
    if live is not None:
        axes.plot([live.parameters], [live.trends[trend]], "D", color="#c62828", label=live.name)
    axes.set(xscale="log", xlabel="active parameters", ylabel=LABELS[trend])
    axes.set_ylim(bottom=0)
    axes.set_xticks(np.unique(sizes), [_short(size) for size in np.unique(sizes)])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)


def _short(parameters: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if parameters >= size:
            return f"{parameters / size:.3g}{unit}"
    return f"{parameters:.0f}"


def page(figure: Figure, lines: Sequence[str]) -> str:
    """One page with everything in it: the picture and the fit in words. Opens offline."""
    shown = Picture(svg(figure), "Rungs, their fit, and trends over scale.")
    return html(
        "The scaling ladder",
        [Section("Rungs and fit", [shown, Verbatim("The fit in numbers", "\n".join(lines), unfolded=True)])],
    )
