"""The frozen world of one tick: what plans may depend on, drawn from the newest rows, the card and the receipts."""

from collections.abc import Iterable

import numpy as np

from runwatch.checks import Phase, Signals
from runwatch.rules import Checkpoint, PlannedRun, PlanState, Receipt, Throughput

SUSTAINED_BLOCKS = 8
_T95 = 2.36  # Student's t for 7 degrees of freedom, two-sided 95 %


def plan_in_force(planned: PlannedRun, receipts: Iterable[Receipt]) -> PlanState:
    """The plan after the newest directive that was applied, or as the card declares it."""
    applied = [receipt for receipt in receipts if receipt.status == "applied"]
    return max(applied, key=lambda receipt: receipt.time).after if applied else planned.plan_state()


def checkpoints(signals: Signals) -> tuple[Checkpoint, ...]:
    """Complete, finite checkpoints by step, without those of a tail that a later attempt superseded."""
    found: dict[int, Checkpoint] = {}
    rows = signals.observed("checkpoint/step")
    attempt = None
    for row, step in zip(rows, signals.values("checkpoint/step"), strict=True):
        if not np.isfinite(step):
            continue
        if attempt is not None and signals.attempt[row] != attempt:
            found = {kept: point for kept, point in found.items() if kept < step}
        attempt = signals.attempt[row]
        found[int(step)] = Checkpoint(int(step), float(signals.tokens[row]), float(signals.time[row]))
    resumed = signals.step[-1] if len(signals) else 0
    return tuple(found[step] for step in sorted(found) if step <= resumed)


def sustained(signals: Signals) -> Throughput | None:
    """Tokens per second over the newest rows, pauses included, with the 95 % interval of eight blocks' means.

    None while fewer than 16 train rows tell tokens and time, or a block has no length.
    """
    train = (signals.phase == Phase.TRAIN) & ~signals.tick & np.isfinite(signals.tokens) & np.isfinite(signals.time)
    same = train & (signals.attempt == (signals.attempt[-1] if len(signals) else 0))
    rows = np.flatnonzero(same)
    if len(rows) < 2 * SUSTAINED_BLOCKS:
        return None
    edges = rows[np.linspace(0, len(rows) - 1, SUSTAINED_BLOCKS + 1).astype(int)]
    tokens, seconds = np.diff(signals.tokens[edges]), np.diff(signals.time[edges])
    if np.any(seconds <= 0) or np.any(tokens < 0):
        return None
    mean = float(tokens.sum() / seconds.sum())
    spread = _T95 * float(np.std(tokens / seconds, ddof=1)) / np.sqrt(SUSTAINED_BLOCKS)
    return Throughput(mean, max(0.0, mean - spread), mean + spread)
