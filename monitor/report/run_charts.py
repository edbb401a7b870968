"""Pictures of a run and of a plan, in the reader's own light or dark. Needs matplotlib (extra `plots`).

A chart is drawn in stand-in colours. In a page each becomes a CSS variable of `templates/report.html`; in a PNG it stays.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from runwatch.checks import Level, Signals
from runwatch.checks.planned import registered_loss
from runwatch.checks.windows import rolling_median
from runwatch.monitor.report.figures import COLOURS, strips_picture, svg, thinned
from runwatch.monitor.report.recorded_run import RecordedRun
from runwatch.monitor.store.incident import Incident
from runwatch.rules import Curve, Execution
from runwatch.rules.schedule import curve_in_force

Floats = NDArray[np.float64]

INK, DIM, RULE = "#1c2431", "#5b6676", "#d8dee7"
LOSS, TREND, REGISTERED, BAND = "#a9b6c7", "#14459d", "#b3541f", "#e8a879"
GOOD, WARNING, CRITICAL = "#1b7a37", "#8a5a01", "#b3261f"
VARIABLES = {
    INK: "ink",
    DIM: "dim",
    RULE: "rule",
    LOSS: "loss",
    TREND: "trend",
    REGISTERED: "registered",
    BAND: "band",
    GOOD: "good",
    WARNING: "warning",
    CRITICAL: "critical",
    COLOURS[Level.UNKNOWN]: "rule",
    COLOURS[Level.OK]: "quiet-level",
}
"""The stand-in colours and the variables that take their places."""
STYLE: Mapping[Any, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.edgecolor": RULE,
    "axes.labelcolor": DIM,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": DIM,
    "ytick.color": DIM,
    "font.size": 9.5,
    "font.family": "sans-serif",
    "legend.frameon": False,
}
TREND_RECORDS = 64


def themed(draw: Callable[[], str]) -> str:
    """An SVG whose colours are those of the page that it stands in."""
    with mpl.rc_context(dict(STYLE)):
        picture = draw()
    for colour, name in VARIABLES.items():
        picture = picture.replace(colour, f"var(--{name})")
    return picture


@dataclass(frozen=True)
class Mark:
    """Something that happened along a run: from and to (tokens or steps), its colour and its name."""

    begin: float
    end: float
    colour: str
    name: str = ""


def run_pictures(recorded: RecordedRun) -> dict[str, str]:
    """The pictures of a run's page: the course of its loss, and the level of each check along it."""
    planned = recorded.rulebook.planned
    marks = [
        *_incident_marks(recorded.signals, recorded.incidents),
        *_plan_marks(recorded.signals, recorded.executions),
    ]
    return {
        "course": course_picture(recorded.signals, planned.curve if planned else None, marks, _plan_curve(recorded)),
        "levels": themed(lambda: strips_picture(recorded.signals, recorded.verdicts)),
    }


def _plan_curve(recorded: RecordedRun) -> Curve | None:
    """The curve of the plan in force, where a directive has changed what the registered one was made for."""
    world = recorded.world
    return curve_in_force(world.planned, world.plan) if world else None


def _incident_marks(signals: Signals, incidents: Sequence[Incident]) -> list[Mark]:
    by_tokens = along(signals)[1] == "tokens"
    ends = [(one.since.tokens, one.last.tokens) if by_tokens else (one.since.step, one.last.step) for one in incidents]
    colours = [CRITICAL if one.severity == "critical" else WARNING for one in incidents]
    return [Mark(*span, colour) for span, colour in zip(ends, colours, strict=True) if np.isfinite(span).all()]


def _plan_marks(signals: Signals, executions: Sequence[Execution]) -> list[Mark]:
    """Where the trainer applied a plan."""
    by_tokens = along(signals)[1] == "tokens"
    found: list[Mark] = []
    for one in executions:
        if one.receipt is not None and one.receipt.status == "applied":
            at = float(one.receipt.tokens if by_tokens else one.receipt.step)
            found.append(Mark(at, at, INK, one.plan))
    return found


def along(signals: Signals) -> tuple[Floats, str]:
    """Where rows lie from left to right: at their tokens, or at their steps where the source tells none."""
    if np.isfinite(signals.tokens).any():
        return signals.tokens, "tokens"
    return signals.step.astype(np.float64), "step"


def course_picture(signals: Signals, curve: Curve | None, marks: Sequence[Mark], in_force: Curve | None = None) -> str:
    """The run's loss and its trend (median of 64 records) on the registered curve with its band, and on the plan in force."""
    return themed(lambda: svg(_course_figure(signals, curve, marks, in_force)))


def _course_figure(signals: Signals, curve: Curve | None, marks: Sequence[Mark], in_force: Curve | None) -> Figure:
    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    axes: Any = figure.add_subplot()
    x, label = along(signals)
    x, loss = x[signals.observed("train/loss")], signals.values("train/loss")
    axes.plot(*thinned(x, loss), color=LOSS, linewidth=0.6, label="loss of each record")
    if curve is not None and label == "tokens":
        registered(axes, curve)
    if in_force is not None and label == "tokens":
        _plan_in_force(axes, in_force)
    trend = rolling_median(loss, TREND_RECORDS, 1)[TREND_RECORDS // 2 :]
    axes.plot(*thinned(x[: len(trend)], trend), color=TREND, linewidth=1.8, label="the run (median of 64 records)")
    x, loss = along(signals)[0][signals.observed("eval/loss")], signals.values("eval/loss")
    if len(loss):
        axes.plot(x, loss, linestyle="none", marker="o", markersize=3.5, color=INK, label="held-out loss")
    _mark(axes, marks)
    _zoom(axes, trend, curve)
    axes.set(xlabel=label, ylabel="loss (nats)")
    axes.xaxis.set_major_formatter(amount)
    axes.legend(loc="upper right")
    return figure


def _plan_in_force(axes: Any, curve: Curve) -> None:
    """The decay of the plan in force to its predicted end, with the interval there."""
    tokens, loss = np.array(curve.tokens[-2:]), np.array(curve.loss[-2:])
    between = np.geomspace(tokens[0], tokens[1], 50)
    axes.plot(
        between,
        registered_loss(curve, between)[0],
        color=REGISTERED,
        linewidth=1.4,
        linestyle="--",
        label="plan in force",
    )
    bounds = [[loss[1] - curve.low[-1]], [curve.high[-1] - loss[1]]]
    axes.errorbar(tokens[1:], loss[1:], yerr=bounds, color=REGISTERED, capsize=3, linewidth=1.2)


def registered(axes: Any, curve: Curve) -> None:
    """Draw the registered curve with its 95 % band."""
    tokens = np.unique(np.append(np.geomspace(max(curve.tokens[0], 1.0), curve.tokens[-1], 300), curve.tokens))
    loss, low, high = registered_loss(curve, tokens)
    axes.fill_between(tokens, low, high, color=BAND, alpha=0.45, linewidth=0, label="registered 95 % band")
    axes.plot(tokens, loss, color=REGISTERED, linewidth=1.4, label="registered curve")


def _mark(axes: Any, marks: Sequence[Mark]) -> None:
    for mark in marks:
        if mark.name:
            axes.axvline(mark.begin, color=mark.colour, linewidth=1.2, linestyle=(0, (4, 3)))
            place = {"xycoords": ("data", "axes fraction"), "rotation": 90, "va": "bottom", "ha": "right"}
            axes.annotate(mark.name, (mark.begin, 0.02), color=mark.colour, fontsize=8.5, **place)
        else:
            axes.axvspan(mark.begin, mark.end, color=mark.colour, alpha=0.07, linewidth=0)
            axes.axvspan(mark.begin, mark.end, ymax=0.02, color=mark.colour, alpha=0.8, linewidth=0)


def _zoom(axes: Any, trend: Floats, curve: Curve | None) -> None:
    """Heights that show the trend and the curve; single records may lie outside."""
    finite = trend[np.isfinite(trend)]
    known = [float(np.quantile(finite, 0.95)), float(finite.min())] if len(finite) else []
    if curve is not None:
        shown = np.maximum(np.array([0.03, 1.0]) * curve.tokens[-1], curve.tokens[0])
        known += registered_loss(curve, shown)[1:].ravel().tolist()
    if known and min(known) < max(known):
        room = 0.05 * (max(known) - min(known))
        axes.set_ylim(min(known) - 2 * room, max(known) + room)


def amount(value: float, _position: object = None) -> str:
    """A number of tokens with its SI prefix: 1.5M, 18T."""
    for size, prefix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{prefix}"
    return f"{value:.3g}"
