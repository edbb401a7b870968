"""The one document that says how a run stands: `/api/status`, the status page and `runwatch status` all show it.

JSON all through: numbers that are not finite are None. It is also kept as `RUN_DIR/.runwatch/status.json`, so that
`runwatch status` answers while the daemon is down and says since when.
"""

import json
from pathlib import Path
from typing import Any, Literal, TypedDict

Health = Literal["healthy", "degraded", "critical"]


class RunFacts(TypedDict):
    """What is being trained and how far it is."""

    name: str
    directory: str
    hypothesis: str
    owner: str
    links: dict[str, str]
    attempt: str
    attempts: int
    phase: str
    step: int
    tokens: float | None
    token_budget: int | None  # in force; None without a run card
    declared_budget: int | None  # of the run card
    fraction: float | None  # of the budget in force
    time: float | None  # Unix seconds of the newest record
    tokens_per_second: float | None  # sustained
    eta: float | None  # Unix seconds
    latest: dict[str, float | None]  # newest value of each canonical signal


class LossSeries(TypedDict):
    """Training loss over tokens, thinned to at most 600 buckets, the registered curve, and that of the plan in force."""

    steps: list[int]
    tokens: list[float | None]
    loss: list[float | None]  # mean of the bucket
    low: list[float | None]  # smallest and largest in the bucket
    high: list[float | None]
    eval_tokens: list[float | None]
    eval_loss: list[float | None]
    curve_tokens: list[float]  # empty without a registered curve
    curve: list[float]
    curve_low: list[float]
    curve_high: list[float]
    plan_tokens: list[float]  # empty while the plan in force is the card's
    plan_curve: list[float]


class CheckStatus(TypedDict):
    """One check: its newest verdict and its alert."""

    name: str
    summary: str  # first line of its docstring
    level: Literal["unknown", "ok", "warning", "critical"]
    alert: Literal["inactive", "pending", "firing"]
    severity: Literal["ok", "warning", "critical"]  # at which its alert stands
    value: float | None
    limit: float | None
    message: str  # a sentence; empty when there is nothing to say
    since_step: int | None
    since_tokens: float | None
    since_time: float | None
    sparkline: list[float | None]  # newest values, at most 120
    error: str | None  # the check itself raised


class NodeStatus(TypedDict):
    """One risk node and its plan."""

    name: str
    plan: str
    summary: str
    mode: Literal["observe", "confirm", "auto"]
    state: Literal["quiet", "armed", "outside_window", "firing", "blocked"]
    reason: str
    progress: float
    window: tuple[float, float]  # fractions of the token budget


class PlanStatus(TypedDict):
    """One execution of a plan, newest first."""

    id: str
    node: str
    plan: str
    mode: str
    state: str
    evidence: str
    effects: list[str]
    actions: list[dict[str, Any]]
    by: str | None
    reason: str | None
    expires: float | None  # Unix seconds
    history: list[dict[str, Any]]  # {"event": "proposed", "time", "step", "tokens"}, ...
    open: bool
    forecast: dict[str, Any] | None


class IncidentStatus(TypedDict):
    """One incident, newest first; the newest 100."""

    id: str
    check: str
    severity: Literal["warning", "critical"]
    state: Literal["firing", "resolved"]
    what: str  # sentence of the worst record
    value: float | None  # of that record
    limit: float | None
    resolution: str  # what resolved it; empty while it fires
    opened: float  # Unix seconds
    resolved: float | None
    since_step: int
    since_tokens: float | None
    last_step: int


class AuditStatus(TypedDict):
    """One row of the audit log, newest first; the newest 50."""

    seq: int
    time: float
    kind: str
    sentence: str


class ConditionStatus(TypedDict):
    """Something that keeps the daemon from doing its whole work: a full disk, a check that raises."""

    kind: str
    message: str
    since: float


class Status(TypedDict):
    """The whole document. `version` grows with each change of it."""

    schema: Literal[1]
    version: int
    health: Health
    sentence: str  # how the run stands, in one sentence
    run: RunFacts
    loss: LossSeries
    checks: list[CheckStatus]
    nodes: list[NodeStatus]
    plans_enabled: bool
    plans: list[PlanStatus]
    incidents: list[IncidentStatus]
    audit: list[AuditStatus]
    conditions: list[ConditionStatus]
    daemon: dict[str, Any]  # {"version", "pid", "started", "tick", "listen", "holder", "outbox"}


class StatusError(RuntimeError):
    """The stored status document cannot be read; the text names the remedy."""


def read_status(run_dir: Path) -> Status | None:
    """The newest status document; None when no daemon has watched this run yet.

    Raises:
        StatusError: it cannot be read.
    """
    path = run_dir / ".runwatch" / "status.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StatusError(f"{path} cannot be read ({error}); the daemon's next tick writes it anew") from error
