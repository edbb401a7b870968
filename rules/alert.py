"""The life of an alert: inactive, pending, firing, resolved, in the words of Prometheus, counted in records.

An alert opens at a warning or critical verdict, fires after `for_records` of them, and resolves after
`keep_firing_records` observations in a row that are OK. Missing data (UNKNOWN, a row that only repeats the last
verdict, a tick) resolves nothing. A severity goes down by the same rule as an alert resolves. `advance` takes a block
of any length: a backtest of a whole run and one live row are the same code with the same result.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from runwatch.checks import Check, Level, Signals, Verdicts

Rows = NDArray[np.intp]
Flags = NDArray[np.bool_]


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


class BadRecord(BaseModel):
    """What a check said of one bad record: level, value, limit and sentence belong together."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    level: Level
    value: float
    limit: float
    message: str


class Alert(BaseModel):
    """One check's alert after the newest judged record.

    `level`, `value` and `limit` are of that record; `message` is of the last bad one. `severity` is the level that the
    alert stands at while it lives (OK otherwise), `worst` the worst record of this life or of the last one: of those at
    the highest level the one that lies furthest beyond its limit, as a share of the limit.
    `critical_since` is the first critical record, in the attempt of the newest critical one, of a stretch that has not
    eased. `lives` counts firings: a check's name and this number name an incident.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    check: str
    state: AlertState = AlertState.INACTIVE
    severity: Level = Level.OK
    worst: BadRecord | None = None
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

    @model_validator(mode="before")
    @classmethod
    def _worst_was_a_level(cls, stored: Any) -> Any:
        """Databases of the releases before hold the level alone: value, limit and sentence are then of the newest record."""
        if not isinstance(stored, dict) or not isinstance(stored.get("worst"), int):
            return stored
        kept: dict[str, Any] = dict(stored)
        level = kept.pop("worst")
        if level > Level.OK:
            kept["worst"] = {"level": level} | {key: kept[key] for key in ("value", "limit", "message")}
        return kept

    @property
    def alive(self) -> bool:
        """Not inactive."""
        return self.state is not AlertState.INACTIVE

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


def advance(
    alert: Alert, check: Check, verdicts: Verdicts, signals: Signals, policy: AlertPolicy
) -> tuple[Alert, tuple[Transition, ...]]:
    """The alert after the rows of `signals` (shape T), whose verdicts are `verdicts`, and what changed on the way."""
    if not len(signals):
        return alert, ()
    block = _Block(alert, check, verdicts, signals, policy)
    transitions: list[Transition] = []
    row, current = 0, alert
    while (found := block.next_change(current, row)) is not None:
        start, (row, reason) = row, found
        current = block.changed(current, start, row, reason)
        transitions.append(Transition(reason, row, current))
    return block.after(current, row, len(signals) - 1), tuple(transitions)


def inhibited(alerts: Mapping[str, Alert]) -> frozenset[str]:
    """Checks whose alerts are inhibited: all but `progress` while the run is down."""
    progress = alerts.get("progress")
    if progress is None or progress.state is not AlertState.FIRING or progress.severity is not Level.CRITICAL:
        return frozenset()
    return frozenset(alerts) - {"progress"}


class _Block:
    """T rows of one check's verdicts, prepared so that the next change is found without looking at each row."""

    def __init__(self, alert: Alert, check: Check, verdicts: Verdicts, signals: Signals, policy: AlertPolicy) -> None:
        self.check, self.verdicts, self.signals, self.policy = check, verdicts, signals, policy
        fresh = _fresh(alert, check, verdicts, signals)
        told = fresh & ~signals.tick
        self.bad = verdicts.level >= Level.WARN
        self.critical = verdicts.level == Level.CRITICAL
        ok = told & (verdicts.level == Level.OK)
        calm = told & ~self.critical & (verdicts.level != Level.UNKNOWN)
        self.ok_run = _run_length(ok, self.bad, alert.ok_records)
        self.calm_run = _run_length(calm, self.critical, alert.calm_records)
        self.bad_run = _run_length(self.bad & fresh, ok, alert.bad_records)
        self.bad_rows, self.critical_rows, self.ok_rows = map(np.flatnonzero, (self.bad, self.critical, ok))
        self._counted = {"ok": (ok, self.ok_run), "calm": (calm, self.calm_run), "bad": (self.bad, self.bad_run)}
        self._reaching: dict[tuple[str, int], Rows] = {}

    def next_change(self, alert: Alert, row: int) -> tuple[int, Reason] | None:
        """The first row from `row` on at which `alert` changes, and why."""
        found = [(at, reason) for at, reason in self._candidates(alert, row) if at is not None]
        return min(found, key=lambda change: change[0], default=None)

    def _candidates(self, alert: Alert, row: int) -> tuple[tuple[int | None, Reason], ...]:
        """What may come next; of two at the same row the first counts."""
        if alert.state is AlertState.INACTIVE:
            at = _first(self.bad_rows, row)
            return ((at, Reason.FIRED if self.policy.for_records == 1 else Reason.PENDING),)
        if alert.state is AlertState.PENDING:
            fires = _first(self._reached("bad", self.policy.for_records), row)
            return ((fires, Reason.FIRED), (_first(self.ok_rows, row), Reason.CANCELLED))
        keep = self.policy.keep(alert.flaps)
        resolves = (_first(self._reached("ok", keep), row), Reason.RESOLVED)
        if alert.severity is Level.WARN:
            return (resolves, (_first(self.critical_rows, row), Reason.ESCALATED))
        return (resolves, (_first(self._reached("calm", keep), row), Reason.EASED))

    def _reached(self, which: str, count: int) -> Rows:
        """The counted rows at which a run has this length or more."""
        if (which, count) not in self._reaching:
            rows, run = self._counted[which]
            self._reaching[which, count] = np.flatnonzero(rows & (run >= count))
        return self._reaching[which, count]

    def changed(self, alert: Alert, start: int, row: int, reason: Reason) -> Alert:
        """`alert`, which has seen the rows before `start`, right after it changed at `row`."""
        at = self._moment(row)
        if alert.state is AlertState.INACTIVE:
            alert = alert.model_copy(update={"flaps": self.flaps(alert, row)})
        alert = self.after(alert, start, row)
        match reason:
            case Reason.PENDING:
                return alert.model_copy(update={"state": AlertState.PENDING, "since": at})
            case Reason.CANCELLED:
                return alert.model_copy(update={"state": AlertState.INACTIVE, "since": None})
            case Reason.FIRED:
                return alert.model_copy(update={**_firing(alert, at), "worst": self._bad_record(row)})
            case Reason.ESCALATED:
                return alert.model_copy(update={"severity": Level.CRITICAL, "critical_since": at})
            case Reason.EASED:
                return alert.model_copy(update={"severity": Level.WARN, "critical_since": None})
            case Reason.RESOLVED:
                return alert.model_copy(
                    update={
                        "state": AlertState.INACTIVE,
                        "severity": Level.OK,
                        "critical_since": None,
                        "resolved": at,
                    }
                )

    def after(self, alert: Alert, start: int, row: int) -> Alert:
        """`alert` with what is counted and seen from row `start` up to `row`, its state unchanged."""
        update: dict[str, object] = {
            "level": Level(int(self.verdicts.level[row])),
            "value": float(self.verdicts.value[row]),
            "limit": float(self.verdicts.limit[row]),
            "at": self._moment(row),
            "ok_records": int(self.ok_run[row]),
            "calm_records": int(self.calm_run[row]),
            "bad_records": int(self.bad_run[row]),
        }
        if alert.state is AlertState.FIRING:
            update["worst"] = self._worst(alert.worst, start, row)
        bad = _last(self.bad_rows, row)
        if bad is not None:
            update |= {"last_bad": self._moment(bad), "message": self.check.message(self.verdicts, bad)}
        critical = _last(self.critical_rows, row)
        if critical is not None and alert.critical_since is not None:
            update["critical_since"] = self._critical_since(alert.critical_since, critical)
        return alert.model_copy(update=update)

    def _worst(self, worst: BadRecord | None, start: int, row: int) -> BadRecord | None:
        """The worst of `worst` and of the bad records from `start` to `row`; the first of equals.

        Of the same level only what lies on the same side of its limit is compared: a rule that needs several records
        goes on through some that are not beyond the limit themselves.
        """
        first, last = np.searchsorted(self.bad_rows, start), np.searchsorted(self.bad_rows, row, side="right")
        rows = self.bad_rows[first:last]
        level = self.verdicts.level[rows]
        if len(rows) and (worst is None or level.max() > worst.level):
            worst = self._bad_record(int(rows[np.argmax(level)]))
        if worst is None:
            return None
        rows = rows[level == worst.level]
        side = -1.0 if worst.value < worst.limit else 1.0
        beyond = _beyond(self.verdicts.value[rows], self.verdicts.limit[rows], side)
        worse = beyond > _beyond(np.asarray([worst.value]), np.asarray([worst.limit]), side)
        return self._bad_record(int(rows[np.argmax(beyond)])) if worse.any() else worst

    def _bad_record(self, row: int) -> BadRecord:
        verdicts = self.verdicts
        return BadRecord(
            level=Level(int(verdicts.level[row])),
            value=float(verdicts.value[row]),
            limit=float(verdicts.limit[row]),
            message=self.check.message(verdicts, row),
        )

    def flaps(self, alert: Alert, row: int) -> int:
        """How often in a row it has come back soon, if it opens at `row`."""
        quiet = int(self.ok_run[row - 1]) if row else alert.ok_records
        return alert.flaps + 1 if alert.lives and quiet < self.policy.flap_records else 0

    def _critical_since(self, since: Moment, newest: int) -> Moment:
        """`since`, or the first critical row of the newest one's attempt where that is another."""
        attempts = self.signals.attempt
        if attempts[newest] == since.attempt:
            return since
        rows = self.critical_rows[: np.searchsorted(self.critical_rows, newest) + 1]
        return self._moment(int(rows[attempts[rows] == attempts[newest]][0]))

    def _moment(self, row: int) -> Moment:
        signals = self.signals
        return Moment(
            attempt=int(signals.attempt[row]),
            step=int(signals.step[row]),
            tokens=float(signals.tokens[row]),
            time=float(signals.time[row]),
        )


def _firing(alert: Alert, at: Moment) -> dict[str, object]:
    """What changes when `alert`, counted up to `at`, fires there."""
    return {
        "state": AlertState.FIRING,
        "severity": alert.level,
        "since": alert.since if alert.state is AlertState.PENDING else at,
        "fired": at,
        "critical_since": at if alert.level is Level.CRITICAL else None,
        "lives": alert.lives + 1,
    }


def _fresh(alert: Alert, check: Check, verdicts: Verdicts, signals: Signals) -> Flags:
    """Rows whose verdict is a new judgement: they carry a required signal, or the verdict is not the one before."""
    if not check.required:
        return np.ones(len(signals), np.bool_)
    level, value, limit = verdicts.level, verdicts.value, verdicts.limit
    fresh = _changes(level, alert.level) | _changes(value, alert.value) | _changes(limit, alert.limit)
    for name in check.required:
        fresh[signals.observed(name)] = True
    return fresh


def _beyond(value: NDArray[np.float64], limit: NDArray[np.float64], side: float) -> NDArray[np.float64]:
    """How far values lie above (`side` 1) or below (-1) their limits, as a share of the limit; what is no number: infinitely."""
    with np.errstate(invalid="ignore"):
        share = side * (value - limit) / np.where(limit == 0, 1.0, np.abs(limit))
    return np.where(np.isfinite(share), share, np.inf)


def _changes(values: NDArray[np.generic], before: float) -> Flags:
    """Where a value is not the one of the row before (NaN equals NaN)."""
    previous = np.concatenate([np.asarray([before], values.dtype), values[:-1]])
    return (values != previous) & ~((values != values) & (previous != previous))  # noqa: PLR0124 - NaN is not itself


def _run_length(counted: Flags, reset: Flags, carried: int) -> NDArray[np.int64]:
    """How many `counted` rows lie since the last `reset` row (which counts nothing), `carried` before the first row."""
    total = np.cumsum(counted)
    return total - np.maximum.accumulate(np.where(reset, total, -carried))


def _first(rows: Rows, start: int) -> int | None:
    """The first of the ascending `rows` at or after `start`."""
    at = int(np.searchsorted(rows, start))
    return int(rows[at]) if at < len(rows) else None


def _last(rows: Rows, stop: int) -> int | None:
    """The last of the ascending `rows` at or before `stop`."""
    at = int(np.searchsorted(rows, stop, side="right"))
    return int(rows[at - 1]) if at else None
