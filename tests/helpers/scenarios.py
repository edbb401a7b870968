"""Scenario tables: a seeded healthy run, an injection, and the verdicts expected, as intervals of records.

`healthy(records)` gives a `Run` in which row number and step agree; its methods return a changed copy. A `Scenario`
names the intervals in which a check must speak; it must be silent (OK or UNKNOWN) everywhere else.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from runwatch.checks import Change, Check, Column, Level, Phase, Signals, Verdicts, judge

OK, WARN, CRITICAL, UNKNOWN = Level.OK, Level.WARN, Level.CRITICAL, Level.UNKNOWN
START = 1.79e9
STEP_SECONDS = 18.0
TOKENS_PER_STEP = 4_194_304.0


@dataclass(frozen=True)
class Run:
    """A run under construction. Rows are counted from 0, `first` and `last` are both included."""

    signals: Signals

    def put(self, name: str, first: int, last: int, value: ArrayLike | Callable[[Any], Any]) -> "Run":
        """Give rows `first` to `last` a value, one value each, or a function of the old ones (NaN where missing)."""
        old = self.signals.columns.get(name) or self._nothing()
        values, present = old.values.copy(), old.present.copy()
        rows = slice(first, last + 1)
        values[rows] = value(values[rows]) if callable(value) else value
        present[rows] = True
        return self.with_column(name, values, present)

    def add(self, name: str, first: int, last: int, amount: ArrayLike) -> "Run":
        """Add `amount` to rows `first` to `last`."""
        return self.put(name, first, last, lambda old: old + amount)

    def scale(self, name: str, first: int, last: int, factor: ArrayLike) -> "Run":
        """Multiply rows `first` to `last` by `factor`."""
        return self.put(name, first, last, lambda old: old * factor)

    def lose(self, name: str, first: int = 0, last: int | None = None) -> "Run":
        """Leave the signal out of rows `first` to `last` (to the end by default)."""
        old = self.signals.columns[name]
        present = old.present.copy()
        present[first : len(self.signals) if last is None else last + 1] = False
        return self.with_column(name, np.where(present, old.values, np.nan), present)

    def keep_every(self, name: str, rows: int) -> "Run":
        """Leave the signal in every `rows`-th row only."""
        old = self.signals.columns[name]
        present = old.present & (np.arange(len(self.signals)) % rows == 0)
        return self.with_column(name, np.where(present, old.values, np.nan), present)

    def only(self, *names: str) -> "Run":
        """A run that carries these signals and no others."""
        columns = {name: column for name, column in self.signals.columns.items() if name in names}
        return Run(replace(self.signals, columns=columns))

    def pause(self, before: int, seconds: float, ticks: int = 0) -> "Run":
        """Delay rows `before` and later, with that many tick rows, evenly spread, in the gap (later rows move on)."""
        time = self.signals.time.copy()
        start = time[before - 1]
        time[before:] += seconds
        gap = time[before] - start
        signals = replace(self.signals, time=time)
        idle = [_tick(signals, before - 1, start + gap * (i + 1) / (ticks + 1)) for i in range(ticks)]
        return Run(Signals.concatenate([signals.take(slice(0, before)), *idle, signals.take(slice(before, None))]))

    def insert(self, before: int, phase: Phase, **metrics: float) -> "Run":
        """Put one record of `phase` before row `before`; metric names use `__` for the slash (`eval__loss=3.0`)."""
        record = replace(self.signals.take(slice(before - 1, before)), phase=np.array([phase], np.int8))
        present = np.ones(1, np.bool_)
        columns = {k.replace("__", "/"): Column(np.array([v]), present) for k, v in metrics.items()}
        head, tail = self.signals.take(slice(0, before)), self.signals.take(slice(before, None))
        return Run(Signals.concatenate([head, replace(record, columns=columns), tail]))

    def in_phase(self, phase: Phase, first: int, last: int) -> "Run":
        """Rows `first` to `last` are of that phase."""
        phases = self.signals.phase.copy()
        phases[first : last + 1] = phase
        return Run(replace(self.signals, phase=phases))

    def resume(self, row: int, step: int) -> "Run":
        """Rows `row` and later belong to a new attempt that goes on from `step`: what was there is superseded."""
        attempt, steps, tokens = (
            column.copy() for column in (self.signals.attempt, self.signals.step, self.signals.tokens)
        )
        back = steps[row] - step
        attempt[row:] += 1
        steps[row:] -= back
        tokens[row:] -= back * TOKENS_PER_STEP
        return Run(replace(self.signals, attempt=attempt, step=steps, tokens=tokens))

    def with_column(self, name: str, values: NDArray[np.float64], present: NDArray[np.bool_]) -> "Run":
        """The run with one whole column replaced."""
        return Run(replace(self.signals, columns={**self.signals.columns, name: Column(values, present)}))

    def _nothing(self) -> Column:
        return Column(np.full(len(self.signals), np.nan), np.zeros(len(self.signals), np.bool_))


def _tick(signals: Signals, after: int, time: float) -> Signals:
    row = signals.take(slice(after, after + 1))
    return replace(row, time=np.array([time]), tick=np.ones(1, np.bool_), columns={})


def clock(steps: int, first: int = 0) -> Signals:
    """Train rows of one attempt, one per step, without metrics."""
    step = np.arange(first, first + steps, dtype=np.int64)
    return Signals(
        np.zeros(steps, np.int32),
        step,
        (step + 1) * TOKENS_PER_STEP,
        START + step * STEP_SECONDS,
        np.full(steps, Phase.TRAIN, np.int8),
        np.zeros(steps, np.bool_),
        {},
    )


def healthy(records: int = 1000, seed: int = 0, tail: float = 0.0, correlation: float = 0.3, first: int = 5000) -> Run:
    """A run of a large mixture of experts in mid-training, one row per step from step `first` on.

    Loss noise is AR(1) of sigma 0.02 nats; `tail` > 0 makes its innovations Student-t of that many degrees of
    freedom. The gradient norm is log-normal. Every signal that a check reads is there, except those of evaluations
    and checkpoints (`insert`).
    """
    rng = np.random.default_rng(seed)
    signals = clock(records, first)
    step = signals.step.astype(np.float64)
    level = np.clip(step / 2000.0, 0.05, 1.0)
    columns = {
        "train/loss": 1.6 + 9.0 * (step + 20.0) ** -0.32 + 0.02 * _noise(rng, records, tail, correlation),
        "train/z_loss": 120.0 * np.exp(0.02 * rng.standard_normal(records)),
        "optim/grad_norm": 0.3 * np.exp(0.12 * rng.standard_normal(records)),
        "optim/skipped_step": np.zeros(records),
        "optim/learning_rate": 3e-4 * level,
        "params/norm": 900.0 + 1e-3 * step,
        "moe/drop_rate": 0.03 * np.exp(0.1 * rng.standard_normal(records)),
        "moe/load_max_vio": 0.6 * np.exp(0.1 * rng.standard_normal(records)),
        "moe/load_entropy": 0.995 - 0.001 * np.abs(rng.standard_normal(records)),
        "moe/dead_experts": np.zeros(records),
        "moe/router_bias_max": 1.5 + 0.05 * rng.standard_normal(records),
        "throughput/step_time": STEP_SECONDS * np.exp(0.01 * rng.standard_normal(records)),
        "throughput/mfu": 0.225 * np.exp(0.01 * rng.standard_normal(records)),
        "data/sample_fingerprint": rng.integers(1, 2**52, records).astype(np.float64),
        "data/position": (step + 1) * 512,
        "data/mixture/code": np.full(records, 0.3),
        "data/mixture/web": np.full(records, 0.7),
        "plan/token_budget": np.full(records, TOKENS_PER_STEP * 100_000),
        "plan/decay_start_tokens": np.full(records, TOKENS_PER_STEP * 80_000),
        "plan/lr_scale": np.ones(records),
    }
    columns["throughput/tokens_per_second"] = TOKENS_PER_STEP / columns["throughput/step_time"]
    present = np.ones(records, np.bool_)
    return Run(replace(signals, columns={name: Column(values, present) for name, values in columns.items()}))


def _noise(rng: np.random.Generator, records: int, tail: float, correlation: float) -> NDArray[np.float64]:
    innovations = rng.standard_t(tail, records) if tail else rng.standard_normal(records)
    noise = innovations * np.sqrt(1.0 - correlation**2)
    for row in range(1, records):
        noise[row] += correlation * noise[row - 1]
    return noise


@dataclass(frozen=True)
class Scenario:
    """One row of a table: `expected` lists (level, first row, last row); silence everywhere else."""

    name: str
    run: Run
    expected: Sequence[tuple[Level, int, int]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    changes: Sequence[Change] = ()

    def __str__(self) -> str:
        """The name, for pytest's listing."""
        return self.name


def verdicts(check: Check, scenario: Scenario) -> Verdicts:
    """What the check says of the scenario's run."""
    return judge(check, scenario.run.signals, check.settings(**scenario.settings), scenario.changes)


def assert_as_expected(check: Check, scenario: Scenario) -> None:
    """Hold a check to a scenario; on failure both sides are shown as runs of equal levels."""
    found = verdicts(check, scenario)
    wanted = np.full(len(found), OK, np.int8)
    silent = np.ones(len(found), np.bool_)
    for level, first, last in scenario.expected:
        wanted[first : last + 1] = level
        silent[first : last + 1] = False
    actual = np.where(silent & (found.level == UNKNOWN), np.int8(OK), found.level)
    assert np.array_equal(actual, wanted), (
        f"{check.name}: {scenario.name}\n  expected {intervals(wanted)}\n  actual   {intervals(found.level)}"
        f"\n  said     {messages(check, found)}"
    )


def intervals(level: NDArray[np.int8]) -> str:
    """Levels as runs of equal ones: `OK 0-411, WARN 412-413`."""
    runs, row = list[str](), 0
    for value, group in groupby(level.tolist()):
        length = len(list(group))
        runs.append(f"{Level(value).name} {row}-{row + length - 1}")
        row += length
    return ", ".join(runs)


def messages(check: Check, found: Verdicts) -> str:
    """The first message of each stretch of alarms."""
    loud = found.level >= WARN
    starts = np.flatnonzero(loud & ~np.concatenate([[False], loud[:-1]]))
    return "; ".join(f"{row}: {check.message(found, int(row))}" for row in starts[:8])


def incidents(level: NDArray[np.int8], at_least: Level, gap: int = 20) -> list[tuple[int, int]]:
    """Stretches at or above a level, merged over gaps of fewer than `gap` rows, as (first, last)."""
    found = list[tuple[int, int]]()
    for row in np.flatnonzero(level >= at_least).tolist():
        if found and row - found[-1][1] <= gap:
            found[-1] = (found[-1][0], row)
        else:
            found.append((row, row))
    return found
