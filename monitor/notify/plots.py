"""The picture of an incident: the signal with its limit and the flagged range, as PNG."""

import io
import logging
import math
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, cast

from runwatch.monitor.notify import Series

LOG = logging.getLogger(__name__)


def plot(payload: Mapping[str, Any]) -> bytes | None:
    """A PNG of 900 x 360 pixels; None where the incident has no series or matplotlib (extra `plots`) is missing."""
    series = cast("Series | None", payload.get("series"))
    if series is None or not series["steps"] or not _can_plot():
        return None
    return draw(series, title=f"{payload['run']}: {payload['check']}")


def draw(series: Series, title: str) -> bytes:
    """`series` as PNG; gaps where a value is missing or not finite, marked at the bottom."""
    from matplotlib.figure import Figure  # noqa: PLC0415  matplotlib costs 60 MB, and only incidents need it

    figure = Figure(figsize=(9, 3.6), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    axes.axvspan(*series["flagged"], color="tab:red", alpha=0.12, label="flagged")
    values = [_number(value) for value in series["values"]]
    axes.plot(series["steps"], values, color="tab:blue", linewidth=1.2, label=series["signal"])
    axes.plot(series["steps"], [_number(limit) for limit in series["limit"]], "--", color="tab:red", label="limit")
    missing = [step for step, value in zip(series["steps"], values, strict=True) if math.isnan(value)]
    if missing:
        axes.plot(missing, [0.02] * len(missing), "x", color="tab:red", transform=axes.get_xaxis_transform())
    axes.set(title=title, xlabel="step", ylabel=f"{series['signal']} ({series['unit']})")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="upper left", fontsize="small")
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def _number(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else math.nan


@cache
def _can_plot() -> bool:
    if find_spec("matplotlib") is None:
        LOG.warning("matplotlib is not installed (extra `plots`): incidents are sent without pictures")
        return False
    return True
