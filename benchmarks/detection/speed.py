"""How fast: all twelve checks on arrays, from JSONL to verdicts, one live record, and the state that a run needs.

CPU seconds of this process, the better of two; the rivals run on the same arrays in the same process.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from injections import KINDS, inject
from judging import runwatch_levels, settings_of
from rivals import RIVALS
from runs import healthy, records

from runwatch.checks import Signals, all_checks
from runwatch.monitor.engine.context import needed_rows
from runwatch.monitor.engine.evaluate import LiveJudge
from runwatch.monitor.read.records import Rows

ARRAY_RECORDS = 406_000
"""A hundred days at 21 s a step."""
LINES = 50_000
SIGNALS = 40
TICKS = 200


@dataclass(frozen=True)
class Figure:
    """One measured figure with its goal."""

    what: str
    value: float
    unit: str
    goal: str = ""


def measure(*, quick: bool, progress: Callable[[str, int, int], None]) -> list[Figure]:
    """All figures."""
    count = ARRAY_RECORDS // (8 if quick else 1)
    progress("speed: arrays", 0, 4)
    run = healthy(1, records=count, first=1000, crashes=range(7000, count, 7000))
    signals, _ = run.signals()
    figures = [_on_arrays("runwatch, all twelve checks", runwatch_levels, signals, run.card, count, "≥ 500,000")]
    for rival in RIVALS:
        judge = rival.judge
        figures.append(_on_arrays(rival.name, lambda s, _, judge=judge: judge(s), signals, run.card, count))
    del run, signals
    progress("speed: JSONL", 1, 4)
    figures.append(_from_jsonl(LINES // (5 if quick else 1)))
    progress("speed: live", 2, 4)
    return figures + _live()


Judge = Callable[[Signals, Mapping[str, Any]], object]


def _on_arrays(
    name: str, judge: Judge, signals: Signals, card: Mapping[str, Any], count: int, goal: str = ""
) -> Figure:
    seconds = min(_seconds(lambda: judge(_fresh(signals), card)) for _ in range(2))
    return Figure(f"arrays, {count:,} records: {name}", count / seconds, "records/s", goal)


def _fresh(signals: Signals) -> Signals:
    """The same arrays without what an earlier judge has cached."""
    return signals.take(slice(None))


def _seconds(action: Callable[[], object]) -> float:
    begin = time.process_time()
    action()
    return time.process_time() - begin


def _from_jsonl(count: int) -> Figure:
    run = healthy(2, records=count, first=50_000)
    padding = {f"debug/metric_{number:02d}": 0.5 + number for number in range(SIGNALS - len(run.columns))}
    lines = [orjson.dumps(record | padding) for record in records(run.signals(ticks=False)[0])]

    def read_and_judge() -> None:
        rows = Rows()
        for number, line in enumerate(lines, start=1):
            rows.read_line(line, number)
        runwatch_levels(rows.drain(), run.card)

    return Figure(
        f"JSONL, {SIGNALS} signals, to verdicts", len(lines) / _seconds(read_and_judge), "records/s", "≥ 50,000"
    )


def _live() -> list[Figure]:
    case = inject(KINDS[4], 0)
    settings, changes = settings_of(case.run.card)
    signals, checks = case.signals, all_checks()
    begin = len(signals) - TICKS
    past = signals.take(slice(0, begin))
    context = past.take(needed_rows(past, checks, settings, changes))
    live = LiveJudge(checks, context, lambda: signals)
    spent: list[float] = []
    for row in range(begin, len(signals)):
        block = signals.take(slice(row, row + 1))
        spent.append(_seconds(lambda block=block: live.judge(block, settings, changes)))
        live.accept(block, settings, changes)
    state = context.take(needed_rows(context, checks, settings, changes))
    return [
        Figure("live, one new record: median", 1e3 * float(np.median(spent)), "ms", "≤ 5"),
        Figure("live, one new record: p95", 1e3 * float(np.percentile(spent, 95)), "ms"),
        Figure(
            f"hot state of a run ({len(state):,} rows, {len(state.columns)} signals)",
            _size(state) / 1024,
            "KiB",
            "≤ 256",
        ),
    ]


def _size(signals: Signals) -> int:
    """Bytes of the arrays."""
    head = (signals.attempt, signals.step, signals.tokens, signals.time, signals.phase, signals.tick)
    columns = [array for column in signals.columns.values() for array in (column.values, column.present)]
    return sum(array.nbytes for array in (*head, *columns))
