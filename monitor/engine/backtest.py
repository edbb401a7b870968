"""A run judged as a whole by the checks of the live daemon, and its incidents."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runwatch.checks import Change, Check, Level, Settings, Signals, Verdicts, all_checks, judge
from runwatch.monitor.read.sources import Loaded
from runwatch.rules.alert import Alert, AlertPolicy, Reason, advance

INCIDENT = AlertPolicy(for_records=1, keep_firing_records=20, flap_records=0)
"""Warnings and criticals with fewer than 20 OK observations between them are one incident, whatever the check."""


@dataclass(frozen=True)
class Incident:
    """Alarms of one check that belong together.

    `first` and `last` are rows; `value`, `limit` and `message` are of the first row at the worst level.
    """

    check: str
    level: Level
    first: int
    last: int
    first_step: int
    last_step: int
    first_critical_step: int | None
    value: float
    limit: float
    message: str

    def as_json(self) -> dict[str, Any]:
        """The object of `--json`; what is not finite is a string, as in telemetry."""
        return {
            "check": self.check,
            "level": self.level.name.lower(),
            "first_step": self.first_step,
            "last_step": self.last_step,
            "first_critical_step": self.first_critical_step,
            "value": _plain(self.value),
            "limit": _plain(self.limit),
            "message": self.message,
        }


@dataclass(frozen=True)
class Result:
    """What the checks say of a run: verdicts by check (shape T each) and incidents in the order of their beginning."""

    loaded: Loaded
    verdicts: Mapping[str, Verdicts]
    incidents: tuple[Incident, ...]

    @property
    def unknown_checks(self) -> tuple[str, ...]:
        """Checks that never had what they need."""
        silent = (name for name, found in self.verdicts.items() if (found.level == Level.UNKNOWN).all())
        return tuple(sorted(silent))

    @property
    def worst(self) -> Level:
        """The worst level of any incident."""
        return max((incident.level for incident in self.incidents), default=Level.OK)

    def as_json(self) -> dict[str, Any]:
        """The object of `--json`."""
        return {
            "records": self.loaded.records,
            "attempts": len(self.loaded.attempts),
            "unknown_checks": list(self.unknown_checks),
            "incidents": [incident.as_json() for incident in self.incidents],
        }


def backtest(
    loaded: Loaded,
    settings: Mapping[str, Settings] | None = None,
    changes: Sequence[Change] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Result:
    """Judge a run with `settings` (defaults where a check is not named) and the planned `changes`."""
    given = settings or {}
    verdicts: dict[str, Verdicts] = {}
    for name, check in all_checks().items():
        progress(name)
        chosen = given.get(name) or check.settings()
        verdicts[name] = Verdicts.concatenate([judge(check, run, chosen, changes) for run in _runs(loaded)])
    found = [
        incident
        for name, check in all_checks().items()
        for incident in incidents_of(check, verdicts[name], loaded.signals)
    ]
    return Result(loaded, verdicts, tuple(sorted(found, key=lambda incident: (incident.first, incident.check))))


def _runs(loaded: Loaded) -> list[Signals]:
    """The rows of each run in the source."""
    ends = [*loaded.starts, len(loaded.signals)]
    return [loaded.signals.take(slice(start, end)) for start, end in zip([0, *loaded.starts], ends, strict=True)]


def incidents_of(check: Check, verdicts: Verdicts, signals: Signals) -> tuple[Incident, ...]:
    """The incidents of one check over a whole run: the lives of its alert under the policy `INCIDENT`.

    An attempt that starts again at or below an incident's first step has taken its records back: its own are another incident.
    """
    _, transitions = advance(Alert(check=check.name), check, verdicts, signals, INCIDENT)
    opened = [transition.row for transition in transitions if transition.reason is Reason.FIRED]
    closed = [transition.row for transition in transitions if transition.reason is Reason.RESOLVED]
    closed += [len(signals)] * (len(opened) - len(closed))
    return tuple(
        _incident(check, verdicts, signals, loud)
        for start, stop in zip(opened, closed, strict=True)
        for loud in _untaken(start + np.flatnonzero(verdicts.level[start:stop] >= Level.WARN), signals)
    )


def _untaken(loud: NDArray[np.intp], signals: Signals) -> list[NDArray[np.intp]]:
    """Rows of one alert's life, cut where an attempt begins at or below the first step of what came before."""
    parts: list[NDArray[np.intp]] = []
    begin = 0
    for at in np.flatnonzero(np.diff(signals.attempt[loud])) + 1:
        if signals.step[loud[at]] <= signals.step[loud[begin]]:
            parts.append(loud[begin:at])
            begin = int(at)
    return [*parts, loud[begin:]]


def _incident(check: Check, verdicts: Verdicts, signals: Signals, loud: NDArray[np.intp]) -> Incident:
    levels = verdicts.level[loud]
    worst = int(loud[np.argmax(levels)])
    critical = loud[levels == Level.CRITICAL]
    return Incident(
        check=check.name,
        level=Level(int(levels.max())),
        first=int(loud[0]),
        last=int(loud[-1]),
        first_step=int(signals.step[loud[0]]),
        last_step=int(signals.step[loud[-1]]),
        first_critical_step=int(signals.step[critical[0]]) if len(critical) else None,
        value=float(verdicts.value[worst]),
        limit=float(verdicts.limit[worst]),
        message=check.message(verdicts, worst),
    )


def _plain(value: float) -> float | str:
    if np.isfinite(value):
        return value
    return "NaN" if np.isnan(value) else "Infinity" if value > 0 else "-Infinity"
