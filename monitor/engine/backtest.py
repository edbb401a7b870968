"""A run judged as a whole by the checks, alerts and incidents of the live daemon."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runwatch.checks import Change, Level, Settings, Signals, Verdicts, all_checks, judge
from runwatch.monitor.engine.incidents import followed
from runwatch.monitor.read.sources import Loaded
from runwatch.monitor.store.incident import Incident
from runwatch.rules import Alert, Moment


@dataclass(frozen=True)
class Result:
    """A run as it was judged: verdicts by check (shape T each), alerts after the newest row, incidents by their beginning."""

    loaded: Loaded
    verdicts: Mapping[str, Verdicts]
    alerts: Mapping[str, Alert]
    incidents: tuple[Incident, ...]

    @property
    def unknown_checks(self) -> tuple[str, ...]:
        """Checks that never had what they need."""
        silent = (name for name, found in self.verdicts.items() if (found.level == Level.UNKNOWN).all())
        return tuple(sorted(silent))

    @property
    def worst(self) -> Level:
        """The worst level of any incident."""
        return max(map(level_of, self.incidents), default=Level.OK)

    def rows_of(self, incident: Incident) -> tuple[int, int]:
        """The rows of the first and of the newest bad record of an incident."""
        return row_at(self.loaded.signals, incident.since), row_at(self.loaded.signals, incident.last)

    def as_json(self) -> dict[str, Any]:
        """The object of `--json`."""
        return {
            "records": self.loaded.records,
            "attempts": len(self.loaded.attempts),
            "unknown_checks": list(self.unknown_checks),
            "incidents": [as_json(incident) for incident in self.incidents],
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
    signals = loaded.signals
    end = float(signals.time[-1]) if len(signals) else 0.0
    alerts, incidents, _ = followed({}, {}, verdicts, signals, end)
    return Result(loaded, verdicts, alerts, tuple(incidents.values()))


def _runs(loaded: Loaded) -> list[Signals]:
    """The rows of each run in the source."""
    ends = [*loaded.starts, len(loaded.signals)]
    return [loaded.signals.take(slice(start, end)) for start, end in zip([0, *loaded.starts], ends, strict=True)]


def level_of(incident: Incident) -> Level:
    """The level of an incident's severity."""
    return Level.CRITICAL if incident.severity == "critical" else Level.WARN


def row_at(signals: Signals, moment: Moment) -> int:
    """The first row of that attempt, step and time (a time that is not told is equal to any)."""
    same = (signals.attempt == moment.attempt) & (signals.step == moment.step)
    return int(np.argmax(same & ((signals.time == moment.time) | np.isnan(signals.time))))


def steps_of(incident: Incident) -> str:
    """`120`, or `120 to 140`, with the attempt where the incident outlasted its first one."""
    first, last = incident.since, incident.last
    if (first.attempt, first.step) == (last.attempt, last.step):
        return f"{first.step:,}"
    resumed = last.attempt - first.attempt
    return f"{first.step:,} to {last.step:,}" + (f", {resumed} attempt{'s' * (resumed > 1)} later" if resumed else "")


def as_json(incident: Incident) -> dict[str, Any]:
    """An incident of `--json`; what is not finite is a string, as in telemetry."""
    return {
        "check": incident.check,
        "level": level_of(incident).name.lower(),
        "first_step": incident.since.step,
        "last_step": incident.last.step,
        "first_critical_step": incident.critical.step if incident.critical else None,
        "value": _plain(incident.value),
        "limit": _plain(incident.limit),
        "message": incident.what,
    }


def _plain(value: float) -> float | str:
    if np.isfinite(value):
        return value
    return "NaN" if np.isnan(value) else "Infinity" if value > 0 else "-Infinity"
