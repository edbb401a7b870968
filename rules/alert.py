"""The life of an alert: inactive, pending, firing, resolved, in the words of Prometheus, counted in records.

An alert opens at a warning or critical verdict, fires after `for_records` of them, and resolves after
`keep_firing_records` observations in a row that are OK. Missing data (UNKNOWN, a row that only repeats the last
verdict, a tick) resolves nothing. A severity goes down by the same rule as an alert resolves. `advance` takes a block of
any length: a day's backtest and a live row are the same code with the same result.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from runwatch.checks import Check, Level, Signals, Verdicts


class AlertState(StrEnum):
    """Where an alert is in its life."""

    INACTIVE = "inactive"
    PENDING = "pending"
    FIRING = "firing"


class Reason(StrEnum):
    """Why an alert changed."""

    PENDING = "pending"
    FIRED = "fired"
    ESCALATED = "escalated"
    EASED = "eased"
    RESOLVED = "resolved"
    CANCELLED = "cancelled"


class AlertPolicy(BaseModel):
    """Durations, in observations of the check's signals.

    An alert that fires again within `flap_records` OK observations of its last bad one is flapping: each time doubles
    the observations it has to stay OK, up to `2 ** max_flaps` times.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    for_records: int = Field(default=1, ge=1)
    keep_firing_records: int = Field(default=20, ge=1)
    flap_records: int = Field(default=100, ge=0)
    max_flaps: int = Field(default=3, ge=0, le=8)

    def keep(self, flaps: int) -> int:
        """OK observations until an alert that has flapped so often resolves."""
        return self.keep_firing_records * 2 ** min(flaps, self.max_flaps)


POLICIES: Mapping[str, AlertPolicy] = {
    # Evaluations are hours apart (5 h in the seed run): twenty good ones would keep a cured alert open for days.
    "eval_regression": AlertPolicy(keep_firing_records=2, flap_records=10),
}
"""Policies that differ from the default."""


def policy_of(check: str) -> AlertPolicy:
    """The durations for the alert of `check`."""
    return POLICIES.get(check, AlertPolicy())


class Moment(BaseModel):
    """A record: attempt (numbered in order of appearance), step, tokens and Unix seconds (NaN where not told)."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    attempt: int
    step: int
    tokens: float
    time: float


class Alert(BaseModel):
    """One check's alert after the newest judged record.

    `level`, `value` and `limit` are of that record; `message` is of the last bad one. `severity` is the level that the
    alert stands at while it lives (OK otherwise), `worst` the highest of this life or of the last one.
    `critical_since` is the first critical record, in the attempt of the newest critical one, of a stretch that has not
    eased. `lives` counts firings: a check's name and this number name an incident.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    check: str
    state: AlertState = AlertState.INACTIVE
    severity: Level = Level.OK
    worst: Level = Level.OK
    level: Level = Level.UNKNOWN
    value: float = float("nan")
    limit: float = float("nan")
    message: str = ""
    at: Moment | None = None
    since: Moment | None = None
    fired: Moment | None = None
    critical_since: Moment | None = None
    last_bad: Moment | None = None
    resolved: Moment | None = None
    bad_records: int = 0
    ok_records: int = 0
    calm_records: int = 0
    flaps: int = 0
    lives: int = 0

    @property
    def critical_now(self) -> bool:
        """Critical at the newest record, in the attempt of that record."""
        same = (
            self.critical_since is not None and self.at is not None and self.critical_since.attempt == self.at.attempt
        )
        return self.state is AlertState.FIRING and self.level is Level.CRITICAL and same


@dataclass(frozen=True)
class Transition:
    """A change, why, at which row of the block, and the alert right after it."""

    reason: Reason
    row: int
    alert: Alert


@dataclass(frozen=True)
class Incident:
    """One life of an alert: opened, first critical, resolved (None: never, or not yet)."""

    check: str
    worst: Level
    since: Moment
    opened: Moment
    critical: Moment | None
    last_bad: Moment
    resolved: Moment | None
    message: str
    value: float
    limit: float


def advance(
    alert: Alert, check: Check, verdicts: Verdicts, signals: Signals, policy: AlertPolicy
) -> tuple[Alert, tuple[Transition, ...]]:
    """The alert after the rows of `signals` (shape T), whose verdicts are `verdicts`, and what changed on the way."""
    raise NotImplementedError


def inhibited(alerts: Mapping[str, Alert]) -> frozenset[str]:
    """Checks whose alerts are not told now: all but `progress` while the run is down."""
    raise NotImplementedError


def incidents_of(check: Check, verdicts: Verdicts, signals: Signals, policy: AlertPolicy) -> tuple[Incident, ...]:
    """Every incident of a whole run, in the order in which they opened."""
    raise NotImplementedError


Rows = NDArray[np.intp]
