"""The frozen world of one tick: what plans may depend on. The daemon, `plan preview` and `report` all have it from here."""

from collections.abc import Iterable

import numpy as np

from runwatch.checks import Phase, Signals
from runwatch.monitor.engine.context import RECENT_ROWS, attempt_begins, checkpoint_rows, recent_rows
from runwatch.monitor.engine.tick import Tick
from runwatch.rules import Checkpoint, PlannedRun, PlanState, Receipt, Throughput, World

SUSTAINED_BLOCKS = 8
SUSTAINED_CHECKPOINTS = 4
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36)  # Student's t for 1 to 7 degrees of freedom, two-sided 95 %


def world_of(tick: Tick) -> World | None:
    """The world at the newest row; None without a card or before the first record that tells its tokens.

    `tick.rows` may be the whole run or what a daemon has kept of it (`needed_rows`): the world is the same.
    """
    planned, rows = tick.rulebook.planned, tick.rows
    known = np.flatnonzero(np.isfinite(rows.tokens))
    if planned is None or not len(known):
        return None
    recent = rows.take(recent_rows(rows))
    return World(
        run=tick.run,
        now=tick.now,
        attempt=tick.attempts[int(rows.attempt[-1])],
        phase=Phase(int(rows.phase[-1])),
        records=tick.records,
        step=int(rows.step[-1]),
        tokens=float(rows.tokens[known[-1]]),
        time=float(rows.time[-1]),
        planned=planned,
        plan=plan_in_force(planned, tick.receipts.values()),
        recent=recent,
        settings=tick.rulebook.nodes,
        alerts=tick.state.alerts,
        executions=tick.state.executions,
        checkpoints=checkpoints(rows, planned.checkpoint_keep),
        throughput=sustained(recent),
        plans_enabled=tick.state.plans_enabled,
        taken=tick.taken,
    )


def plan_in_force(planned: PlannedRun, receipts: Iterable[Receipt]) -> PlanState:
    """The plan after the newest directive that was applied, or as the card declares it."""
    applied = [receipt for receipt in receipts if receipt.status == "applied"]
    return max(applied, key=lambda receipt: receipt.time).after if applied else planned.plan_state()


def checkpoints(signals: Signals, keep: int | None = None) -> tuple[Checkpoint, ...]:
    """Complete, finite checkpoints by step, of the newest `keep` that were written (None: of all).

    Those of a tail that a later attempt superseded are left out: of steps at or after the first one that it trained.
    """
    begins, rows = attempt_begins(signals), checkpoint_rows(signals)
    rows = rows if keep is None else rows[-keep:]
    if not len(rows):
        return ()
    steps = signals.columns["checkpoint/step"].values[rows].astype(np.int64)
    later = np.append(signals.step[begins], np.iinfo(np.int64).max)
    lowest = np.minimum.accumulate(later[::-1])[::-1][np.searchsorted(begins, rows, side="right")]
    standing = (steps < lowest) & (steps <= signals.step[-1])
    found = {
        step: Checkpoint(step, float(signals.tokens[row]), float(signals.time[row]))
        for step, row in zip(steps[standing].tolist(), rows[standing], strict=True)
    }
    return tuple(found[step] for step in sorted(found))


def sustained(signals: Signals) -> Throughput | None:
    """Tokens per second of the newest attempt, pauses for evaluations and saves included, with the 95 % interval.

    Over the newest `RECENT_ROWS` train rows, or since the oldest of the newest `SUSTAINED_CHECKPOINTS` saves where that
    is longer, in either case since a person last paused the run: the mean, and its interval from the means of eight
    blocks of about equal time, weighted by their length (of fewer, where rows lie far apart). None while fewer than 16
    train rows tell tokens and time, or all but one block are empty.
    """
    newest = signals.attempt == signals.attempt[-1:]
    rows = np.flatnonzero(signals.trained & newest & np.isfinite(signals.tokens) & np.isfinite(signals.time))
    saves = checkpoint_rows(signals)[-SUSTAINED_CHECKPOINTS:][:1]
    rows = rows[min([max(0, len(rows) - RECENT_ROWS), *np.searchsorted(rows, saves)]) :]
    held = np.flatnonzero((signals.phase == Phase.PAUSED) & newest)[-1:]
    rows = rows[np.searchsorted(rows, held[0]) :] if len(held) else rows
    if len(rows) < 2 * SUSTAINED_BLOCKS:
        return None
    time = signals.time[rows]
    edges = rows[np.unique(np.searchsorted(time, np.linspace(time[0], time[-1], SUSTAINED_BLOCKS + 1)))]
    tokens, seconds = np.diff(signals.tokens[edges]), np.diff(signals.time[edges])
    if len(seconds) < 2 or np.any(seconds <= 0) or np.any(tokens < 0):
        return None
    mean = float(tokens.sum() / seconds.sum())
    freedom = len(seconds) - 1
    variance = np.average((tokens / seconds - mean) ** 2, weights=seconds) / freedom
    spread = _T95[freedom - 1] * float(np.sqrt(variance))
    return Throughput(mean, max(0.0, mean - spread), mean + spread)
