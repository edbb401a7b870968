"""Parsed records to arrays: lines of telemetry go in, `Signals` come out, and whatever is wrong is told, never raised.

Records of one shape (the same keys in the same order) are kept as tuples side by side and become columns at once, so
that a record of 40 signals costs a few microseconds.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from runwatch.checks.signals import FAMILIES, VOCABULARY, Column, Phase, Signals

LINE_LIMIT = 1 << 20
"""Bytes of the longest line that is read as a record; a record of 40 signals has about 2,000."""

COLUMN_LIMIT = 512
"""Most signals that one run may carry (each `data/mixture/<source>` is one); more are left out and told."""

_KEPT_PROBLEMS = 100
_KEPT_LAYOUTS = 64
_CHUNK = 1024
_INTEGER_LIMIT = 1 << 53
_HEAD = frozenset({"attempt", "step", "tokens", "time", "phase"})
_PHASES = {phase.name.lower(): int(phase) for phase in Phase}
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NUMBERS = frozenset({float, int})

_Head = tuple[int, int, float, float, int, bool]
"""Attempt, step, tokens, time, phase, and whether it is a tick."""

FIRST_TICK = 10.0
"""Seconds of silence before the first tick row, and the shortest gap between two."""

TICK_GROWTH = 0.1
"""Each further gap is at least this share of the silence so far, so that a silent month costs some 130 rows."""

_MOST_TICKS = 512


def tick_times(last_time: float, now: float) -> list[float]:
    """When tick rows are due in the silence that began at `last_time`, up to and without `now` (Unix seconds).

    At +10 s, then after max(10 s, 10 % of the silence so far) each. The times depend on `last_time` only, so a
    backtest and a live daemon, restarted or not, put in the same rows.
    """
    times: list[float] = []
    silence = FIRST_TICK
    while last_time + silence < now and len(times) < _MOST_TICKS:
        times.append(last_time + silence)
        silence += max(FIRST_TICK, TICK_GROWTH * silence)
    return times


@dataclass(frozen=True)
class Problem:
    """Something wrong in a source: where, why, and what to do about it. `line` counts from 1; 0 is the whole file."""

    file: str
    line: int
    reason: str
    remedy: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.reason}. {self.remedy}."


class MalformedError(ValueError):
    """A line or record that cannot be used at all."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}. {remedy}.")
        self.reason = reason
        self.remedy = remedy


def parse(line: bytes | str) -> dict[str, Any]:
    """The JSON object on one line; bare NaN and Infinity are taken too.

    Raises:
        MalformedError: it is too long, is not JSON, or is not an object.
    """
    if len(line) > LINE_LIMIT:
        raise MalformedError(f"the line has {len(line):,} bytes", f"Keep a record under {LINE_LIMIT:,} bytes")
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        found = _parse_leniently(line)
    if not isinstance(found, dict):
        raise MalformedError("the line is not a JSON object", 'Write one object {"step": ..., ...} a line')
    return found


def _parse_leniently(line: bytes | str) -> Any:
    try:
        return json.loads(line, parse_int=_bounded_int)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:120]
        raise MalformedError(
            f"the line is not JSON ({why})", "Write one flat object a line, UTF-8, ended by \\n"
        ) from error


def _bounded_int(digits: str) -> float | int:
    return int(digits) if len(digits) < 19 else float(digits)


@dataclass(frozen=True)
class Target:
    """Which signal a foreign name means, the factor to our unit, and its rank among the names of that signal."""

    signal: str
    factor: float = 1.0
    rank: int = 0


@cache
def known_targets() -> Mapping[str, Target]:
    """Every canonical name and every alias of the vocabulary."""
    targets = {
        alias: Target(signal.name, factor, rank)
        for signal in VOCABULARY.values()
        for rank, (alias, factor) in enumerate(signal.aliases.items(), start=1)
    }
    return targets | {name: Target(name) for name in VOCABULARY}


def resolve(name: str) -> Target | None:
    """The signal that `name` means, if any: a canonical name, a member of a family, or an alias."""
    group, _, member = name.rpartition("/")
    return Target(name) if group in FAMILIES and member else known_targets().get(name)


@dataclass
class _Layout:
    """Records with the same keys: which values they hold, for which signals."""

    keys: tuple[str, ...]
    targets: tuple[Target, ...]
    pick: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    rows: list[int] = field(default_factory=list[int])
    values: list[tuple[float, ...]] = field(default_factory=list[tuple[float, ...]])
    packed: list[NDArray[np.float64]] = field(default_factory=list[NDArray[np.float64]])

    def pack(self) -> None:
        """Turn the values kept so far into a matrix: a tenth of the memory, and nothing for the collector to visit."""
        if self.values:
            self.packed.append(np.array(self.values, np.float64))
            self.values = []


def _picker(keys: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    if len(keys) > 1:
        return itemgetter(*keys)
    return lambda record: tuple(record[key] for key in keys)


class Rows:
    """Collects records and hands them out as `Signals`.

    `attempts` holds the attempts' names in order of appearance, `problems` the first hundred things that were wrong,
    `malformed` the number of lines and records left out, `shadowed` the names given up for a better one of the same
    signal. `now` never comes from a clock: `pass_time` is told it.
    """

    def __init__(
        self, *, ticks: bool = True, resolver: Callable[[str], Target | None] = resolve, file: str = ""
    ) -> None:
        self.file = file
        self.attempts: list[str] = []
        self.problems: list[Problem] = []
        self.malformed = 0
        self.shadowed: dict[str, str] = {}
        self._ticks = ticks
        self._resolve = resolver
        self._columns: set[str] = set()
        self._head: list[_Head] = []
        self._packed: list[NDArray[np.float64]] = []
        self._length = 0
        self._layouts: dict[tuple[str, ...], _Layout] = {}
        self._last: _Head = (0, 0, math.nan, math.nan, int(Phase.INIT), False)
        self._attempt: object = object()
        self._last_time = math.nan
        self._ticked = 0

    def __len__(self) -> int:
        """Rows since the last `drain`."""
        return self._length

    def read_line(self, line: bytes | str, number: int = 0) -> None:
        """Append the record on a line (number `number` of `self.file`); what is malformed is counted and told."""
        try:
            record = parse(line)
        except MalformedError as error:
            self.reject(number, error)
        else:
            self.append(record, number)

    def append(self, record: Mapping[str, Any], number: int = 0) -> None:
        """Append one parsed record, after the tick rows of the silence before it."""
        try:
            row = self._read_head(record, number)
        except MalformedError as error:
            self.reject(number, error)
            return
        time = row[3]
        if time - self._last_time > FIRST_TICK:
            self.pass_time(time)
        if time == time:  # noqa: PLR0124 - not NaN, at a tenth of the price of a call
            self._last_time = time
            self._ticked = 0
        self._last = row
        self._append_row(row)
        self._append_metrics(record, number)

    def pass_time(self, now: float) -> None:
        """Add the tick rows that are due by `now` (Unix seconds) since the last record."""
        if not self._ticks or math.isnan(self._last_time):
            return
        due = tick_times(self._last_time, now)
        attempt, step, tokens, _, phase, _ = self._last
        for time in due[self._ticked :]:
            self._append_row((attempt, step, tokens, time, phase, True))
        self._ticked = max(self._ticked, len(due))

    def _append_row(self, row: _Head) -> None:
        self._head.append(row)
        self._length += 1
        if len(self._head) == _CHUNK:
            self._packed.append(np.array(self._head, np.float64))
            self._head = []

    def reject(self, number: int, error: MalformedError) -> None:
        """Count and tell a line that is left out."""
        self.malformed += 1
        self._tell(number, error.reason, f"{error.remedy}; the line is skipped")

    def drain(self) -> Signals:
        """All rows since the last call as arrays."""
        length = len(self)
        head = np.concatenate([*self._packed, np.array(self._head, np.float64).reshape(-1, 6)])
        attempt, step, tokens, time, phase, tick = head.T.copy()
        signals = Signals(
            attempt.astype(np.int32),
            step.astype(np.int64),
            tokens,
            time,
            phase.astype(np.int8),
            tick.astype(np.bool_),
            self._drain_columns(length),
        )
        self._head, self._packed, self._length = [], [], 0
        return signals

    def _drain_columns(self, length: int) -> Mapping[str, Column]:
        columns: dict[str, Column] = {}
        for layout in self._layouts.values():
            layout.pack()
            if not layout.packed:
                continue
            rows = np.array(layout.rows)
            matrix = np.concatenate(layout.packed)
            for target, values in zip(layout.targets, matrix.T, strict=True):
                if target.signal not in columns:
                    columns[target.signal] = Column(np.full(length, np.nan), np.zeros(length, np.bool_))
                columns[target.signal].values[rows] = values if target.factor == 1 else values * target.factor
                columns[target.signal].present[rows] = True
            layout.rows, layout.packed = [], []
        if len(self._layouts) > _KEPT_LAYOUTS:
            self._layouts.clear()
        return columns

    def _append_metrics(self, record: Mapping[str, Any], number: int) -> None:
        keys = tuple(record)
        layout = self._layouts.get(keys) or self._new_layout(keys, number)
        if not layout.keys:
            return
        values = layout.pick(record)
        if _NUMBERS.issuperset(map(type, values)):
            layout.rows.append(self._length - 1)
            layout.values.append(values)
            if len(layout.values) == _CHUNK:
                layout.pack()
        else:
            self._append_metrics(self._repair(dict(zip(layout.keys, values, strict=True)), number), number)

    def _repair(self, metrics: Mapping[str, Any], number: int) -> dict[str, float]:
        """Only the numbers among `metrics`, with the non-finite ones out of their strings."""
        numbers: dict[str, float] = {}
        for key, value in metrics.items():
            if type(value) in _NUMBERS:
                numbers[key] = value
            elif isinstance(value, str) and value in _NON_FINITE:
                numbers[key] = _NON_FINITE[value]
            else:
                remedy = 'Write a number, or "NaN", "Infinity", "-Infinity"; the value counts as missing'
                self._tell(number, f"{_short(key)} is {_short(value)}", remedy)
        return numbers

    def _new_layout(self, keys: tuple[str, ...], number: int) -> _Layout:
        chosen: dict[str, tuple[str, Target]] = {}
        for key in keys:
            target = None if key in _HEAD else self._resolve(key)
            if target is None or not self._has_room(target.signal, number):
                continue
            key_before, before = chosen.get(target.signal, ("", target))
            if key_before and before.rank <= target.rank:
                self.shadowed[key] = key_before
                continue
            if key_before:
                self.shadowed[key_before] = key
            chosen[target.signal] = (key, target)
        wanted = tuple(key for key, _ in chosen.values())
        layout = _Layout(wanted, tuple(target for _, target in chosen.values()), _picker(wanted))
        self._layouts[keys] = layout
        return layout

    def _has_room(self, signal: str, number: int) -> bool:
        if signal not in self._columns and len(self._columns) >= COLUMN_LIMIT:
            self._tell(number, f"{_short(signal)} is one signal too many", f"Keep a run under {COLUMN_LIMIT} signals")
            return False
        self._columns.add(signal)
        return True

    def _read_head(self, record: Mapping[str, Any], number: int) -> _Head:
        get = record.get
        step = get("step")
        if type(step) is not int or not 0 <= step < _INTEGER_LIMIT:
            step = _whole(step)
        name = get("phase", "train")
        phase = _PHASES.get(name) if isinstance(name, str) else None
        if phase is None:
            raise MalformedError(f"phase is {_short(name)}", f"Write one of {', '.join(_PHASES)}")
        attempt = get("attempt")
        attempt = self._last[0] if attempt == self._attempt else self._number_of(attempt)
        tokens, time = self._read("tokens", get("tokens"), number), self._read("time", get("time"), number)
        return attempt, step, tokens, time, phase, False

    def _number_of(self, attempt: Any) -> int:
        """The attempt's number; a record that names none belongs to the last one."""
        if attempt is None and self.attempts:
            return self._last[0]
        name = "" if attempt is None else attempt
        if not isinstance(name, str):
            raise MalformedError(f"attempt is {_short(attempt)}", "Write a string, a new one at each process start")
        if name not in self.attempts:
            self.attempts.append(name)
        self._attempt = name
        return self.attempts.index(name)

    def _read(self, key: str, value: Any, number: int) -> float:
        """A number of the head; missing or unusable is NaN."""
        if type(value) in _NUMBERS and 0 <= value < _INTEGER_LIMIT:
            return float(value)
        if value is not None:
            self._tell(number, f"{key} is {_short(value)}", "Write a number of 0 or more; it counts as missing")
        return math.nan

    def _tell(self, number: int, reason: str, remedy: str) -> None:
        if len(self.problems) < _KEPT_PROBLEMS:
            self.problems.append(Problem(self.file, number, reason, remedy))


def _whole(step: Any) -> int:
    """A step written as a float without fraction.

    Raises:
        MalformedError: it is anything else.
    """
    if type(step) is float and step.is_integer() and 0 <= step < _INTEGER_LIMIT:
        return int(step)
    reason = "step is missing" if step is None else f"step is {_short(step)}"
    raise MalformedError(reason, "Write the whole number of the step just finished, from 0")


def _short(value: Any) -> str:
    """A value for a message: short, and never walked into."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = value if isinstance(value, str) else "null" if value is None else str(value).lower()
    return text if len(text) <= 60 else f"{text[:57]}..."
