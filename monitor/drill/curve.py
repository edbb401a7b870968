"""The curve that a drill registers for its own run: a power law through what was trained before the fault."""

from datetime import UTC, datetime
from typing import Any

import numpy as np

from runwatch.checks import Signals

FROM_SHARE = 0.4
"""Share of the records left out at the beginning: a warm-up follows no power law."""
BAND = 0.04
"""Half of the band's width, relative to the loss."""
POINTS = 60


def registered(rows: Signals, token_budget: int) -> dict[str, Any]:
    """The card's `ladder` section: log loss linear in log tokens, from where it was fitted to the budget's end."""
    at = rows.observed("train/loss")
    tokens, loss = rows.tokens[at], rows.values("train/loss")
    kept = slice(int(FROM_SHARE * len(at)), None)
    slope, level = np.polyfit(np.log(tokens[kept]), np.log(loss[kept]), 1)
    points = np.geomspace(tokens[kept][0], token_budget, POINTS).round()
    curve = np.exp(level + slope * np.log(points))
    return {
        "registered": datetime.now(UTC),
        "hash": "drill",
        "curve": {
            "tokens": points.tolist(),
            "loss": curve.round(5).tolist(),
            "low": (curve * (1 - BAND)).round(5).tolist(),
            "high": (curve * (1 + BAND)).round(5).tolist(),
        },
    }
