"""From verdicts to incidents, and from incidents to recall, precision, delay and false alarms.

The rules are explained in `benchmarks/README.md`; they are the same for runwatch and for every rival.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from injections import Labelled
from numpy.typing import NDArray

from runwatch.checks import Level, Signals

MERGE = 20
"""Alarms with fewer OK observations than this between them are one incident."""

Levels = Mapping[str, NDArray[np.int8]]
"""The level of each row by check (or by a rival's rule)."""


@dataclass(frozen=True)
class Found:
    """One incident that was raised: the rule, its rows, and the worst level."""

    rule: str
    first: int
    last: int
    level: Level


def incidents(levels: Levels, signals: Signals) -> list[Found]:
    """Every maximal run of WARN or CRITICAL, merged over gaps of fewer than `MERGE` OK records."""
    found: list[Found] = []
    for rule, level in levels.items():
        calm = np.cumsum((level == Level.OK) & ~signals.tick)
        loud = np.flatnonzero(level >= Level.WARN)
        if not len(loud):
            continue
        starts = np.flatnonzero(np.diff(calm[loud], prepend=-MERGE) >= MERGE)
        stops = np.append(starts[1:], len(loud))
        for start, stop in zip(starts, stops, strict=True):
            worst = Level(int(level[loud[start:stop]].max()))
            found.append(Found(rule, int(loud[start]), int(loud[stop - 1]), worst))
    return found


@dataclass(frozen=True)
class Outcome:
    """What one judge made of one injected incident."""

    kind: str
    seed: int
    delay: float | None
    """From the onset to the first alarm of an expected rule, in the kind's unit; None: there was none."""
    in_time: bool
    """Whether it came within the kind's horizon."""
    true: int
    false: int
    false_rules: tuple[str, ...]


def outcome(labelled: Labelled, levels: Levels, answers: Mapping[str, tuple[str, ...]]) -> Outcome:
    """Score one run with an incident; `answers` says for which checks each rule speaks (a check for itself)."""
    signals, kind = labelled.signals, labelled.kind
    found = incidents(levels, signals)
    inside = [one for one in found if labelled.first <= one.first <= labelled.known]
    outside = [one for one in found if not labelled.first <= one.first <= labelled.known]
    wanted = [one.first for one in inside if set(answers.get(one.rule, (one.rule,))) & set(kind.checks)]
    delay = _delay(labelled, min(wanted)) if wanted else None
    return Outcome(
        kind.name,
        labelled.seed,
        delay,
        delay is not None and delay <= kind.horizon,
        len(inside),
        len(outside),
        tuple(f"{one.rule} {one.level.name} row {one.first}" for one in outside),
    )


def _delay(labelled: Labelled, alarm: int) -> float:
    signals, first = labelled.signals, labelled.first
    if labelled.kind.unit == "seconds":
        return float(signals.time[alarm] - signals.time[first])
    return float(np.count_nonzero(signals.trained[first + 1 : alarm + 1]))


def trained_records(signals: Signals) -> int:
    """Train records: what delays and rates are counted in."""
    return int(np.count_nonzero(signals.trained))


@dataclass
class Clean:
    """Alarms on records in which nothing is wrong, by rule."""

    records: int = 0
    warnings: dict[str, int] = field(default_factory=dict[str, int])
    criticals: dict[str, int] = field(default_factory=dict[str, int])
    where: list[str] = field(default_factory=list[str])

    def add(self, name: str, signals: Signals, levels: Levels) -> None:
        """Count the incidents of one clean run."""
        self.records += trained_records(signals)
        for one in incidents(levels, signals):
            counts = self.criticals if one.level == Level.CRITICAL else self.warnings
            counts[one.rule] = counts.get(one.rule, 0) + 1
            self.where.append(f"{one.rule} {one.level.name} {name} rows {one.first}-{one.last}")

    def rate(self) -> float:
        """Incidents of either level per 10,000 records."""
        return 1e4 * (sum(self.warnings.values()) + sum(self.criticals.values())) / max(self.records, 1)

    def critical_rate(self) -> float:
        """Critical incidents per 10,000 records."""
        return 1e4 * sum(self.criticals.values()) / max(self.records, 1)
