"""The newest complete checkpoint is too old.

What it does: compares the age of the newest checkpoint, in steps and in seconds, with the interval at which they
should come: `interval_steps` from the card, or the run's own cadence once three have been seen. Seconds count training
and the silence since the last record, not pauses. `checkpoint/step` is written only once a checkpoint is complete on
disk and finite, so a failed one does not count. Each new one must be neither older than the one before nor ahead of
the run.

Why it matters: the age of the newest checkpoint is what the next fault costs. An attempt of Marin's hero run that
died 54 minutes after its restore, just before its first hourly save, left nothing: the next one replayed all of its
steps, 55 minutes of them (marin#8506).

Warns and turns critical when:

- Warns at `warn_intervals`, critical at `critical_intervals`, in steps or in seconds.
- With an interval from the card but no checkpoint so far: warns at 2 intervals, critical at 3.
- Critical at a checkpoint that goes back or is ahead of the run, until the next one.

Defaults:

| setting              | default | source |
| -------------------- | ------- | --- |
| `interval_steps`     | none    | from the card; without it the cadence is the median of the last five intervals |
| `warn_intervals`     | 1.5     | one save is late by half |
| `critical_intervals` | 3       | two saves are lost; nvrx-watch gives up after three cycles without a new checkpoint |
| `grace_seconds`      | 900 s   | a quarter of an hour is not worth a page, and evaluations and compilations stretch short intervals |

Does not see: whether a checkpoint can be restored; a cadence that slows down gradually, without a card; that no
checkpoint was ever written, where the card declares no interval, or where the interval is longer than 64 records and
the run has no evaluations either.

What to do:

- Meaning: saving has failed or stalled.
- Impact: a fault now loses all steps since the last checkpoint.
- Diagnosis: disk space and quota, the trainer's log around the last save, non-finite parameters (`finite`).
- Mitigation: free the disk, then request a checkpoint (`checkpoint_now`); do not restart before one is complete.
"""

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from runwatch.checks.check import Check, Level, Settings, Verdicts, graded
from runwatch.checks.progress import step_seconds
from runwatch.checks.signals import Phase, Signals
from runwatch.checks.windows import Floats, growth, lagged, rolling_max, rolling_median

Rows = NDArray[np.intp]
NAME, EVALUATIONS = "checkpoint/step", "eval/loss"
CADENCE = 5
PRESENT = 32
REACH = 128
"""Rows and evaluations that are searched for the beginning of a run without checkpoints."""


class CheckpointSettings(Settings):
    """The planned interval, and how many of them are too many."""

    interval_steps: float | None = Field(default=None, gt=0)
    """Steps; from the card. None: learned."""
    warn_intervals: float = Field(default=1.5, gt=1)
    """Intervals without a new checkpoint."""
    critical_intervals: float = Field(default=3.0, gt=1)
    """Intervals without a new checkpoint."""
    grace_seconds: float = Field(default=900.0, ge=0)
    """Ages below it are not judged in seconds."""


def evaluate(signals: Signals, settings: CheckpointSettings) -> Verdicts:
    """The worst of age in steps, age in seconds and order; UNKNOWN while no interval is known (T records)."""
    values = signals.values(NAME)
    finite = np.isfinite(values)
    rows, saved = signals.observed(NAME)[finite], values[finite]
    if not len(rows):
        return _none_yet(signals, settings)
    last = np.repeat(np.arange(-1, len(rows)), np.diff(rows, prepend=0, append=len(signals)))
    parts = [
        _age_in_steps(signals, saved, last, settings),
        _age_in_seconds(signals, rows, saved, last, settings),
        _order(signals, rows, saved),
    ]
    first = int(rows[0])
    judged = Verdicts.worst(parts)
    if not first:
        return judged
    early = _none_yet(signals.take(slice(0, first), (EVALUATIONS,)), settings)
    return Verdicts.concatenate([early, judged.take(slice(first, None))])


def _age_in_steps(signals: Signals, saved: Floats, last: Rows, settings: CheckpointSettings) -> Verdicts:
    interval = np.full(len(saved), settings.interval_steps or np.nan)
    if settings.interval_steps is None:
        interval = _cadence(saved)
    newest = np.maximum(last, 0)
    return _judged(signals.step - saved[newest], interval[newest], 0.0, 0, settings)


def _age_in_seconds(signals: Signals, rows: Rows, saved: Floats, last: Rows, settings: CheckpointSettings) -> Verdicts:
    """Age on the clock, less pauses and evaluations: the steps since, at their present length, and the silence now."""
    newest = np.maximum(last, 0)
    clock = signals.time - signals.time[rows][newest]
    trained = (signals.step - saved[newest]) * _seconds_per_step(signals) + _silence(signals)
    idle = (signals.phase == Phase.PAUSED) | (signals.phase == Phase.FINISHED)
    age = np.where(idle, np.nan, np.minimum(clock, trained))
    return _judged(age, _cadence(signals.time[rows])[newest], settings.grace_seconds, 1, settings)


def _seconds_per_step(signals: Signals) -> Floats:
    """Median over the last rows, from train record to train record."""
    rows = np.flatnonzero(~signals.tick)
    steps = np.full(len(signals), np.nan)
    steps[rows] = growth(signals.step[rows])
    return rolling_median(step_seconds(signals) / np.where(steps > 0, steps, np.nan), PRESENT, 1)


def _silence(signals: Signals) -> Floats:
    """Seconds since the last record that is no tick, at most `REACH` rows ago."""
    at = np.arange(len(signals))
    heard = np.maximum.accumulate(np.where(signals.tick, 0, at))
    return signals.time - signals.time[np.maximum(heard, at - REACH)]


def _cadence(marks: Floats) -> Floats:
    """The usual distance of checkpoints, at each of them; NaN before the third."""
    distance = growth(marks)
    return rolling_median(np.where(distance > 0, distance, np.nan), CADENCE, 2)


def _judged(age: Floats, interval: Floats, grace: float, reason: int, settings: CheckpointSettings) -> Verdicts:
    warn = np.maximum(settings.warn_intervals * interval, grace)
    critical = np.maximum(settings.critical_intervals * interval, grace)
    far = age > critical
    level = graded(far, age > warn, ~(np.isnan(age) | np.isnan(interval)))
    return Verdicts(level, age, np.where(far, critical, warn), np.full(len(age), reason, np.int8))


def _order(signals: Signals, rows: Rows, saved: Floats) -> Verdicts:
    """Critical while the newest checkpoint is older than the one before it or ahead of the record that tells of it."""
    before = lagged(rolling_max(saved, CADENCE), 1)
    back = saved < before
    ahead = saved > signals.step[rows]
    level = np.where(back | ahead, Level.CRITICAL, Level.UNKNOWN).astype(np.int8)
    limit = np.where(back, before, signals.step[rows])
    return Verdicts.held(Verdicts(level, saved, limit, np.where(back, 3, 4).astype(np.int8)), rows, len(signals))


def _none_yet(signals: Signals, settings: CheckpointSettings) -> Verdicts:
    """Steps since the earliest record in sight, where no checkpoint was ever seen."""
    size = len(signals)
    if settings.interval_steps is None:
        return Verdicts.unknown(size)
    at = np.arange(size)
    first = np.maximum(at - REACH, 0)
    evaluations = signals.observed(EVALUATIONS)
    if len(evaluations):
        seen = np.searchsorted(evaluations, at, side="right")
        oldest = evaluations[np.clip(seen - REACH, 0, len(evaluations) - 1)]
        first = np.where(seen > 0, np.minimum(first, oldest), first)
    age = (signals.step - signals.step[first]).astype(np.float64)
    late = settings.model_copy(update={"warn_intervals": min(2.0, settings.critical_intervals)})
    return _judged(age, np.full(size, settings.interval_steps), 0.0, 2, late)


CHECK = Check(
    name="checkpoint",
    evaluate=evaluate,
    settings=CheckpointSettings,
    required=(),
    optional=(NAME, EVALUATIONS),
    lookback=lambda _: REACH,
    messages=(
        "The newest checkpoint is {value:.0f} steps old; the limit is {limit:.0f}.",
        "The newest checkpoint is {value:.0f} s old; the limit is {limit:.0f} s.",
        "No checkpoint in {value:.0f} steps; the limit is {limit:.0f}.",
        "The newest checkpoint is from step {value:.0f}, older than the previous one from step {limit:.0f}.",
        "The newest checkpoint is from step {value:.0f}; the run is only at step {limit:.0f}.",
    ),
)
