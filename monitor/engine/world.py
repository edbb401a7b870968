"""The frozen world of one tick: what plans may depend on, drawn from the newest rows, the card and the receipts."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from runwatch.checks import Phase, Signals
from runwatch.rules import Checkpoint, PlannedRun, PlanState, Receipt, Throughput

SUSTAINED_BLOCKS = 8
_T95 = 2.36  # Student's t for 7 degrees of freedom, two-sided 95 %


def plan_in_force(planned: PlannedRun, receipts: Iterable[Receipt]) -> PlanState:
    """The plan after the newest directive that was applied, or as the card declares it."""
    applied = [receipt for receipt in receipts if receipt.status == "applied"]
    return max(applied, key=lambda receipt: receipt.time).after if applied else planned.plan_state()


def checkpoints(signals: Signals, keep: int | None = None) -> tuple[Checkpoint, ...]:
    """Complete, finite checkpoints by step, of the newest `keep` that were written (None: of all).

    Those of a tail that a later attempt superseded are left out: of steps at or after the first one that it trained.
    """
    train = np.flatnonzero(_trained(signals))
    begins = train[np.unique(signals.attempt[train], return_index=True)[1]]
    rows = signals.observed("checkpoint/step")
    rows = rows[np.isfinite(signals.columns["checkpoint/step"].values[rows])] if len(rows) else rows
    rows = rows if keep is None else rows[-keep:]
    found: dict[int, Checkpoint] = {}
    for row in np.union1d(begins, rows):
        if row in begins:
            found = {step: point for step, point in found.items() if step < signals.step[row]}
        if row in rows:
            step = int(signals.columns["checkpoint/step"].values[row])
            found[step] = Checkpoint(step, float(signals.tokens[row]), float(signals.time[row]))
    resumed = signals.step[-1] if len(signals) else 0
    return tuple(found[step] for step in sorted(found) if step <= resumed)


def _trained(signals: Signals) -> NDArray[np.bool_]:
    return (signals.phase == Phase.TRAIN) & ~signals.tick


def sustained(signals: Signals) -> Throughput | None:
    """Tokens per second of the newest attempt, pauses for evaluations and saves included, with the 95 % interval.

    Over the rows at hand since a person last paused the run: the mean, and its interval from the means of eight blocks
    of about equal time. None while fewer than 16 train rows tell tokens and time, or a block has no length.
    """
    if not len(signals):
        return None
    told = _trained(signals) & np.isfinite(signals.tokens) & np.isfinite(signals.time)
    told &= signals.attempt == signals.attempt[-1]
    held = np.flatnonzero((signals.phase == Phase.PAUSED) & (signals.attempt == signals.attempt[-1]))
    rows = np.flatnonzero(told)
    rows = rows[rows > held[-1]] if len(held) else rows
    if len(rows) < 2 * SUSTAINED_BLOCKS:
        return None
    time = signals.time[rows]
    edges = rows[np.searchsorted(time, np.linspace(time[0], time[-1], SUSTAINED_BLOCKS + 1))]
    tokens, seconds = np.diff(signals.tokens[edges]), np.diff(signals.time[edges])
    if np.any(seconds <= 0) or np.any(tokens < 0):
        return None
    mean = float(tokens.sum() / seconds.sum())
    spread = _T95 * float(np.std(tokens / seconds, ddof=1)) / np.sqrt(SUSTAINED_BLOCKS)
    return Throughput(mean, max(0.0, mean - spread), mean + spread)
