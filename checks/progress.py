"""The run has stopped making progress.

What it does: follows the clock of the records and of the tick rows that pass when no record arrives. Each phase has a
budget of seconds from the moment it is entered; in training the budget runs from one step to the next and is
max(`slow_factor` times the usual longest step, `train_seconds`). It also counts attempts that left nothing behind,
and records that the telemetry writer dropped (`telemetry/dropped_records`, optional). It needs no metric, only a
clock.

Why it matters: on 5 September Marin's hero run finished step 65,069 and then stood for 15 minutes with every rank
blocked before one of them died (marin#8934). Five days later an attempt died 54 minutes after its restore, before its
first hourly save, and the next one began at the same step: a cadence longer than the time between faults trains
nothing (marin#8506). A run that dies in the first step after a checkpoint looks like one that still writes it, so the
record that carries the result of a phase ends the phase.

Warns and turns critical when:

- Training: warns at the tick at which a step exceeds its budget and turns critical `grace_seconds` later.
- Any other phase: critical when it exceeds its budget; ok again with the next step or phase. `finished` and `paused`
  never fire. A record with `eval/loss` or `checkpoint/step` (optional) ends its phase: from then on the budget is that
  of a step.
- A source that neither announces phases nor carries `plan/token_budget` (optional) gets `unannounced_factor` times the
  budget of a step: a silence may be an evaluation. A job that is down between two attempts is a stall of its last
  phase.
- Restarts: warns at one fewer than `restarts` within 256 surviving rows, critical at `restarts`.
- Dropped records: warns for 20 observations after a record was dropped.

Defaults:

| setting              | default | source |
| -------------------- | ------- | --- |
| `slow_factor`        | 3       | recording `gpt2-124m-shared-cluster-clean`: see below |
| `train_seconds`      | 60 s    | nvidia-resiliency-ext, the best in-process watchdog, finds a hang after 61 s: see below |
| `grace_seconds`      | 240 s   | a requeued job writes its first record within minutes: five minutes page, a third of Marin's limit |
| `unannounced_factor` | 5       | evaluations of `llama31-405b-clean` and `wmt-transformer-spike-55` take 3 to 4 of their rows |
| `unknown_seconds`    | 900 s   | Marin's limit, while no step has been timed |
| `init_seconds`       | 2700 s  | Marin allows 45 minutes to initialise |
| `compile_seconds`    | 2700 s  | as `init_seconds` |
| `restore_seconds`    | 2700 s  | as `init_seconds` |
| `eval_seconds`       | 1800 s  | a guess, above the half hour between saves |
| `checkpoint_seconds` | 1800 s  | the same guess |
| `restarts`           | 3       | Marin's budget of three failures (marin#7929); nvrx-watch stops after three cycles without a save |

Marin waits 15 minutes for a hung step, DLRover 10. The recording shows why no warning comes earlier: single steps of
a shared node reach half of the budget. The usual longest step is the median over 192 rows of the maximum over 64
rows, which for 64 steps is their 98.9th percentile.

Does not see: a source without a clock (unknown); a hang shorter than its budget; slow steps (`throughput`); a trainer
that writes steps and learns nothing; whether the process still runs (the daemon's own health).

What to do:

- Meaning: nothing has been trained since the last record.
- Impact: every minute costs a minute of the whole machine.
- Diagnosis: the phase and the last step (`runwatch status RUN_DIR`), then the scheduler: is the job down, or up and
  silent? Take the stacks of all ranks before any restart. For restarts: the end of each attempt's log, and the age of
  the newest checkpoint.
- Mitigation: restart from the newest checkpoint, without the node that failed first; save more often than the faults
  come.
"""

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from runwatch.checks.check import Check, Level, Settings, Verdicts, graded
from runwatch.checks.signals import Phase, Signals
from runwatch.checks.windows import Flags, Floats, growth, lagged, rolling_max, rolling_median

DROPPED = "telemetry/dropped_records"
OWN = "plan/token_budget"
"""A signal of our own contract: a source that has it announces its phases."""
RESULTS = {Phase.EVAL: "eval/loss", Phase.CHECKPOINT: "checkpoint/step"}
"""What the last record of a phase carries."""
BLOCK, BLOCKS = 64, 192
RESTART_ROWS = 256
REACH = 512
"""Rows that are searched for the last progress."""
DROPPED_FOR = 20


class ProgressSettings(Settings):
    """Budgets in seconds, by phase."""

    slow_factor: float = Field(default=3.0, ge=1)
    """Raise it for steps of very uneven length."""
    train_seconds: float = Field(default=60.0, gt=0)
    """Lower bound of the budget of a step."""
    grace_seconds: float = Field(default=240.0, ge=0)
    """How much longer than its budget a step may take before it is critical. Lower it where restarts take less."""
    unannounced_factor: float = Field(default=5.0, ge=1)
    """Patience with sources that do not tell an evaluation from a step."""
    unknown_seconds: float = Field(default=900.0, gt=0)
    """Budget of a step while none has been timed."""
    init_seconds: float = Field(default=2700.0, gt=0)
    compile_seconds: float = Field(default=2700.0, gt=0)
    restore_seconds: float = Field(default=2700.0, gt=0)
    eval_seconds: float = Field(default=1800.0, gt=0)
    checkpoint_seconds: float = Field(default=1800.0, gt=0)
    restarts: int = Field(default=3, ge=2)
    """Restarts without lasting progress that are critical; one fewer warns."""


def evaluate(signals: Signals, settings: ProgressSettings) -> Verdicts:
    """The worst of stall, restart loop and lost records; a stall is UNKNOWN where the clock is not told (T records)."""
    return Verdicts.worst([_stall(signals, settings), _restarts(signals, settings), _dropped(signals)])


def _stall(signals: Signals, settings: ProgressSettings) -> Verdicts:
    announced = _announced(signals)
    phase = np.where(_ended(signals) & announced, Phase.TRAIN, signals.phase)
    age = signals.time - signals.time[_last_progress(signals, phase)]
    budget = _budget(signals, phase, announced, settings)
    training = phase == Phase.TRAIN
    critical = budget + np.where(training, settings.grace_seconds, 0.0)
    level = graded(age > critical, age > budget, ~np.isnan(age))
    reason = np.where(training, 0, 1).astype(np.int8)
    return Verdicts(level, age, np.where(age > critical, critical, budget), reason)


def _ended(signals: Signals) -> Flags:
    """Whether the last record told its phase's result, so that the next step is what is waited for."""
    told = np.zeros(len(signals), np.bool_)
    for phase, result in RESULTS.items():
        rows = signals.observed(result)
        told[rows] = signals.phase[rows] == phase
    rows = np.arange(len(signals))
    last = np.maximum.accumulate(np.where(signals.tick, 0, rows))
    return told[last] & (rows - last <= REACH)


def _last_progress(signals: Signals, phase: NDArray[np.int8]) -> NDArray[np.intp]:
    """For each row the last one at which a step ended or a phase or attempt began, at most `REACH` rows ago."""
    rows = np.arange(len(signals))
    real = np.flatnonzero(~signals.tick)
    entered = (np.diff(phase[real], prepend=-1) != 0) | (np.diff(signals.attempt[real], prepend=-1) != 0)
    progress = np.zeros(len(signals), np.bool_)
    progress[real] = entered | (signals.phase[real] == Phase.TRAIN)
    return np.maximum(np.maximum.accumulate(np.where(progress, rows, 0)), rows - REACH)


def _budget(signals: Signals, phase: NDArray[np.int8], announced: Flags, settings: ProgressSettings) -> Floats:
    longest = rolling_median(rolling_max(step_seconds(signals), BLOCK), BLOCKS, 1)
    patience = np.where(announced, 1.0, settings.unannounced_factor)
    train = patience * np.maximum(settings.slow_factor * longest, settings.train_seconds)
    by_phase = np.full(len(Phase), np.inf)
    by_phase[Phase.INIT], by_phase[Phase.COMPILE] = settings.init_seconds, settings.compile_seconds
    by_phase[Phase.RESTORE], by_phase[Phase.EVAL] = settings.restore_seconds, settings.eval_seconds
    by_phase[Phase.CHECKPOINT] = settings.checkpoint_seconds
    train = np.where(np.isnan(longest), settings.unknown_seconds, train)
    return np.where(phase == Phase.TRAIN, train, by_phase[phase])


def _announced(signals: Signals) -> Flags:
    """Whether the last rows show that the source would say so if it were not training."""
    told = (signals.phase != Phase.TRAIN) & (signals.phase != Phase.EVAL)
    told[signals.observed(OWN)] = True
    return rolling_max(told.astype(np.float64), REACH) > 0


def step_seconds(signals: Signals) -> Floats:
    """Seconds from one train record to the next with no other record between them; NaN elsewhere."""
    real = np.flatnonzero(~signals.tick)
    seconds = growth(signals.time[real])
    trains = (signals.phase[real] == Phase.TRAIN).astype(np.float64)
    same = growth(signals.attempt[real]) == 0
    timed = same & (trains > 0) & (lagged(trains, 1) > 0) & (seconds >= 0)
    result = np.full(len(signals), np.nan)
    result[real] = np.where(timed, seconds, np.nan)
    return result


def _restarts(signals: Signals, settings: ProgressSettings) -> Verdicts:
    """Attempts begun within the last rows that survive: what a restart superseded is gone from them."""
    attempt = signals.attempt.astype(np.float64)
    restarts = attempt + rolling_max(-attempt, RESTART_ROWS)
    critical = restarts >= settings.restarts
    level = graded(critical, restarts >= settings.restarts - 1)
    limit = np.where(critical, settings.restarts, settings.restarts - 1).astype(np.float64)
    return Verdicts(level, restarts, limit, np.full(len(signals), 2, np.int8))


def _dropped(signals: Signals) -> Verdicts:
    rows, total = signals.observed(DROPPED), signals.values(DROPPED)
    more = growth(total)
    lost: Flags = rolling_max(np.where(more > 0, 1.0, 0.0), DROPPED_FOR) > 0
    level = np.where(lost, Level.WARN, Level.OK).astype(np.int8)
    observed = Verdicts(level, total, np.zeros(len(rows)), np.full(len(rows), 3, np.int8))
    return Verdicts.held(observed, rows, len(signals))


CHECK = Check(
    name="progress",
    evaluate=evaluate,
    settings=ProgressSettings,
    required=(),
    optional=(DROPPED,),
    marks=(OWN, *RESULTS.values()),
    lookback=lambda _: REACH,
    messages=(
        "No step has completed for {value:.0f} s; the budget is {limit:.0f} s.",
        "The phase has lasted for {value:.0f} s; its budget is {limit:.0f} s.",
        "The run was restarted {value:.0f} times without lasting progress; the limit is {limit:.0f}.",
        "The telemetry writer has dropped {value:.0f} records so far.",
    ),
)
