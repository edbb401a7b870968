"""The rows that stay at hand of a run of any length: those that plans go by, and those that checks look back to."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from runwatch.checks import Change, Check, Phase, Settings, Signals

Rows = NDArray[np.intp]
"""Numbers of rows, ascending."""

RECENT_ROWS = 512
"""Newest rows, ticks included, and newest train rows, that stay whatever they carry."""
CHECKPOINTS = 1024
"""Newest complete checkpoints that are known: six weeks of hourly ones."""
RECENT_CHECKPOINTS = 32
AFTER_CHECKPOINT = 16
"""Rows after each of these that stay: a plan goes by the losses right after the checkpoint that it goes back to."""


def checkpoint_rows(signals: Signals) -> Rows:
    """Rows that tell of a complete, finite checkpoint, the newest `CHECKPOINTS` of them."""
    rows = signals.observed("checkpoint/step")
    return rows[np.isfinite(signals.values("checkpoint/step"))][-CHECKPOINTS:]


def attempt_begins(signals: Signals) -> Rows:
    """The first train row of each attempt: what later ones supersede is known by it."""
    rows = np.flatnonzero(signals.trained)
    return np.sort(rows[np.unique(signals.attempt[rows], return_index=True)[1]])


def recent_rows(signals: Signals) -> Rows:
    """The rows that a world holds: the same ones whether `signals` are the whole run or what `needed_rows` left of it."""
    stop = len(signals)
    kept = [np.arange(max(0, stop - RECENT_ROWS), stop), np.flatnonzero(signals.trained)[-RECENT_ROWS:]]
    kept += [
        np.arange(row, min(row + 1 + AFTER_CHECKPOINT, stop)) for row in checkpoint_rows(signals)[-RECENT_CHECKPOINTS:]
    ]
    kept.append(np.flatnonzero(signals.phase == Phase.PAUSED)[-1:])
    return np.unique(np.concatenate(kept))


def needed_rows(
    signals: Signals, checks: Mapping[str, Check], settings: Mapping[str, Settings], changes: Sequence[Change]
) -> Rows:
    """Rows that the verdict of a later row, or the world at it, may still depend on.

    The row with the highest step stays too: a later attempt that begins below it goes back.
    """
    rows = np.flatnonzero(signals.trained)
    kept = [recent_rows(signals), checkpoint_rows(signals), attempt_begins(signals)]
    kept += [signals.observed(name)[-1:] for name in signals.columns]
    kept.append(rows[[np.argmax(signals.step[rows])]] if len(rows) else rows)
    for name, check in checks.items():
        moved = tuple(sorted(change.step for change in changes if change.touches(check.signals)))
        piece = list(signals.pieces(moved))[-1]
        kept.append(piece.context(signals, len(signals), check.lookback(settings[name]), check.signals))
    return np.unique(np.concatenate(kept))
