"""What a check is: a frozen record around one pure function from signals to verdicts.

Three laws, held for every check by `tests/checks/test_laws.py`:

1. causal: the verdict at record t does not change when later records arrive;
2. bounded: the verdict at t depends only on the `lookback` observations of each signal (and rows) up to t;
3. scoped: windows never mix two attempts' overlapping steps: a resume cuts the superseded tail.

A check does not see to the third law itself: `judge` hands it one piece of the run at a time, with the surviving rows
before it as context. So live (new rows plus context) and backtest (the whole run) are the same code with the same
verdicts.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from runwatch.checks.signals import Signals


class Level(IntEnum):
    """The verdict of a check on one record. UNKNOWN is neither healthy nor an alert."""

    UNKNOWN = -1
    OK = 0
    WARN = 1
    CRITICAL = 2


class Settings(BaseModel):
    """A check's settings; every field has a default with its source in the check's docstring."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Change:
    """A planned change: from `step` on, checks that read one of `signals` judge by records since then only.

    A name matches itself and everything under it (`data/mixture` matches `data/mixture/code`).
    """

    step: int
    signals: tuple[str, ...]
    reason: str = ""

    def touches(self, names: Iterable[str]) -> bool:
        """Whether one of `names` is a signal that this change moves."""
        return any(name == moved or name.startswith(f"{moved}/") for name in names for moved in self.signals)


@dataclass(frozen=True)
class Verdicts:
    """One verdict per row (shape T): level, the value judged, the limit it was held against, and which message says so."""

    level: NDArray[np.int8]
    value: NDArray[np.float64]
    limit: NDArray[np.float64]
    reason: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.level)

    def take(self, rows: NDArray[np.intp] | slice) -> "Verdicts":
        """The verdicts of `rows` only."""
        return Verdicts(self.level[rows], self.value[rows], self.limit[rows], self.reason[rows])

    @staticmethod
    def unknown(length: int) -> "Verdicts":
        """Nothing is known of any of `length` rows."""
        nothing = np.full(length, np.nan)
        return Verdicts(np.full(length, Level.UNKNOWN, np.int8), nothing, nothing, np.zeros(length, np.int8))

    @staticmethod
    def concatenate(parts: Sequence["Verdicts"]) -> "Verdicts":
        """The verdicts of consecutive pieces as one."""
        if not parts:
            return Verdicts.unknown(0)
        return Verdicts(
            np.concatenate([part.level for part in parts]),
            np.concatenate([part.value for part in parts]),
            np.concatenate([part.limit for part in parts]),
            np.concatenate([part.reason for part in parts]),
        )

    @staticmethod
    def worst(parts: Sequence["Verdicts"]) -> "Verdicts":
        """Row by row the part with the highest level; the first of equals."""
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        level, value, limit, reason = first.level.copy(), first.value.copy(), first.limit.copy(), first.reason.copy()
        for part in parts[1:]:
            worse = part.level > level
            if worse.any():
                np.copyto(level, part.level, where=worse)
                np.copyto(value, part.value, where=worse)
                np.copyto(limit, part.limit, where=worse)
                np.copyto(reason, part.reason, where=worse)
        return Verdicts(level, value, limit, reason)

    @staticmethod
    def worst_held(parts: Sequence[tuple["Verdicts", NDArray[np.intp]]], length: int) -> "Verdicts":
        """`worst` of what each part (verdicts of its observations, their rows) holds over all `length` rows.

        It compares at the rows where any part was observed and spreads once.
        """
        rows = parts[0][1]
        if any(not np.array_equal(rows, others) for _, others in parts[1:]):
            seen = np.zeros(length, np.bool_)
            for _, others in parts:
                seen[others] = True
            rows = np.flatnonzero(seen)
        size = len(rows)
        along = [
            Verdicts.held(part, np.searchsorted(rows, own), size) if len(own) < size else part for part, own in parts
        ]
        return Verdicts.held(Verdicts.worst(along), rows, length)

    @staticmethod
    def held(observed: "Verdicts", rows: NDArray[np.intp], length: int) -> "Verdicts":
        """Spread verdicts of the observations at `rows` (ascending) over all `length` rows.

        A row without an observation keeps the verdict of the last one: missing data neither raises nor resolves
        anything. Rows before the first observation are UNKNOWN.
        """
        if not len(rows):
            return Verdicts.unknown(length)
        if len(rows) == length:
            return observed
        early, counts = int(rows[0]), np.append(rows[1:], length) - rows
        return Verdicts(
            _spread(observed.level, early, counts, Level.UNKNOWN),
            _spread(observed.value, early, counts, np.nan),
            _spread(observed.limit, early, counts, np.nan),
            _spread(observed.reason, early, counts, 0),
        )


def graded(
    critical: NDArray[np.bool_], warn: NDArray[np.bool_], known: NDArray[np.bool_] | None = None
) -> NDArray[np.int8]:
    """The level of each observation (shape T): UNKNOWN where not `known`, else the worst that is set."""
    level = np.where(critical, np.int8(Level.CRITICAL), warn.view(np.int8) * np.int8(Level.WARN))
    return level if known is None else np.where(known, level, np.int8(Level.UNKNOWN))


def _spread(values: NDArray[Any], early: int, counts: NDArray[np.intp], before: float) -> NDArray[Any]:
    """`before` for the first `early` rows, then each value for its count of rows."""
    spread = np.repeat(values, counts)
    return np.concatenate([np.full(early, before, spread.dtype), spread]) if early else spread


@dataclass(frozen=True)
class Check:
    """One health check.

    With none of the `required` signals in a run every verdict is UNKNOWN; `optional` ones sharpen it. `messages` are
    sentences with `{value}` and `{limit}`; `Verdicts.reason` is the index of the one that holds.

    `marks` are signals that only tell what a record is: they are read on the last `lookback` rows, however few carry
    them, and a change of them moves nothing that the check judges.
    """

    name: str
    evaluate: Callable[[Signals, Any], Verdicts]
    settings: type[Settings]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    lookback: Callable[[Any], int]
    messages: tuple[str, ...]
    marks: tuple[str, ...] = ()

    @property
    def docs(self) -> str:
        """The docstring of its file: page, runbook and alert summary."""
        return inspect.getdoc(sys.modules[self.evaluate.__module__]) or ""

    @property
    def signals(self) -> tuple[str, ...]:
        """Every signal that it judges by."""
        return self.required + self.optional

    def message(self, verdicts: Verdicts, row: int) -> str:
        """The sentence for one row's verdict."""
        template = self.messages[int(verdicts.reason[row])]
        return template.format(value=float(verdicts.value[row]), limit=float(verdicts.limit[row]))


def judge(
    check: Check, signals: Signals, settings: Settings, changes: Sequence[Change] = (), known: int = 0
) -> Verdicts:
    """Verdicts of rows `known` and later (earlier rows are context already judged), shape T - known.

    The run is cut where an attempt resumes from an earlier step (the superseded tail is left out of what follows) and
    where a declared change touches a signal of the check (what follows is judged without what came before).
    """
    names = check.signals
    moved = tuple(sorted(change.step for change in changes if change.touches(names)))
    lookback = check.lookback(settings)
    parts: list[Verdicts] = []
    for piece in signals.pieces(moved):
        if piece.stop <= known:
            continue
        start = max(piece.start, known)
        context = piece.context(signals, start, lookback, names)
        parts.append(_judge_piece(check, signals, settings, context, start, piece.stop))
    return Verdicts.concatenate(parts)


def _judge_piece(
    check: Check, signals: Signals, settings: Settings, context: NDArray[np.intp], start: int, stop: int
) -> Verdicts:
    count = len(context)
    adjoins = not count or int(context[0]) == start - count
    rows = slice(start - count, stop) if adjoins else np.concatenate([context, np.arange(start, stop)])
    seen = signals.take(rows, check.signals + check.marks)
    if check.required and not any(seen.has(name) for name in check.required):
        return Verdicts.unknown(stop - start)
    return check.evaluate(seen, settings).take(slice(count, None))
