"""What each drill expects, and whether it was found: the links from a fault to the recovery of the run, by name.

The table is written before any drill: which check must fire first, which node must fire, and whether the run must
recover. A plan that is not expected is a fault of its own, and so is an alert before the fault.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from runwatch.monitor.store.incident import Incident
from runwatch.rules import Execution, ExecutionState, all_nodes

State = Literal["seen", "missing", "not expected"]


@dataclass(frozen=True)
class Drill:
    """A fault and the response that it expects.

    `faults` are the trainer's, with `{step}` for the step of the onset. One of `checks` must be the first to fire,
    within `steps` of the onset. `quiet` records without a plan must follow where no node is expected. `restarts`: the drill
    starts the trainer again when it dies. `offset`: steps from the restore to the onset. `slowed`: the steps around the
    onset take a quarter of a second more, so that a tick of the daemon sees each, as in a run whose steps take seconds.
    """

    name: str
    what: str
    faults: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    node: str | None = None
    recovers: bool = False
    steps: int = 100
    quiet: int = 40
    restarts: bool = False
    offset: int = 100
    slowed: bool = False

    @property
    def plan(self) -> str | None:
        """The plan of the expected node."""
        return all_nodes()[self.node].plan if self.node else None


@dataclass(frozen=True)
class Onset:
    """The last record before the fault: number of the attempt, step, tokens, Unix seconds."""

    attempt: int
    step: int
    tokens: float
    time: float


@dataclass(frozen=True)
class Losses:
    """Medians of the training loss (nats) before the onset and now, and how far the second may lie above the first."""

    before: float = float("nan")
    now: float = float("nan")
    allowed: float = 0.0

    @property
    def recovered(self) -> bool:
        """Whether the loss is back; False while it is not finite."""
        return self.now <= self.before + self.allowed


@dataclass(frozen=True)
class Found:
    """What a drill has left so far. `told` are the subjects of the messages that the receiver got.

    `records` counts train records since the onset, `critical` names checks that are critical at the newest record.
    """

    onset: Onset | None = None
    incidents: Sequence[Incident] = ()
    early: Sequence[Incident] = ()
    executions: Sequence[Execution] = ()
    requests: frozenset[str] = frozenset()
    told: frozenset[str] = frozenset()
    losses: Losses = field(default_factory=Losses)
    records: int = 0
    critical: tuple[str, ...] = ()


@dataclass(frozen=True)
class Link:
    """One link of the chain: whether it is there, and what was found in its place."""

    name: str
    state: State
    detail: str = ""


@dataclass(frozen=True)
class Delay:
    """From the onset to the first alert of an expected check."""

    steps: int
    tokens: float
    seconds: float


def first_alerts(found: Found) -> list[Incident]:
    """The incidents that began at the earliest record since the onset."""
    if not found.incidents:
        return []
    begin = min(map(_key, found.incidents))
    return [one for one in found.incidents if _key(one) == begin]


def _key(incident: Incident) -> tuple[int, int]:
    return incident.since.attempt, incident.since.step


def delay(drill: Drill, found: Found) -> Delay | None:
    """How late the first expected check fired; None when none did."""
    right = [one for one in found.incidents if one.check in drill.checks]
    if not right or found.onset is None:
        return None
    since, onset = min(right, key=_key).since, found.onset
    return Delay(
        max(0, since.step - onset.step - 1), max(0.0, since.tokens - onset.tokens), max(0.0, since.time - onset.time)
    )


def links(drill: Drill, found: Found) -> list[Link]:
    """Every link in the order of the chain."""
    return [
        _quiet_before(found),
        _detected(drill, found),
        _alert(drill, found),
        *_plan_links(drill, found),
        _recovered(drill, found),
        _nothing_else(drill, found),
    ]


def missing(drill: Drill, found: Found) -> list[Link]:
    """The expected links that were not seen."""
    return [link for link in links(drill, found) if link.state == "missing"]


def _link(name: str, expected: bool, seen: bool, detail: str = "") -> Link:
    return Link(name, ("seen" if seen else "missing") if expected else "not expected", detail)


def _names(incidents: Sequence[Incident]) -> str:
    return ", ".join(dict.fromkeys(one.check for one in incidents))


def _quiet_before(found: Found) -> Link:
    return _link("quiet before", expected=True, seen=not found.early, detail=_names(found.early))


def _detected(drill: Drill, found: Found) -> Link:
    first, late = first_alerts(found), delay(drill, found)
    if not drill.checks:
        return Link("detected", "missing" if first else "not expected", f"{_names(first)} fired" if first else "")
    right = any(one.check in drill.checks for one in first)
    in_time = late is not None and late.steps <= drill.steps
    if right and in_time:
        return Link("detected", "seen", _names(first))
    wanted = " or ".join(drill.checks)
    said = (
        f"{_names(first)} fired first"
        if first and not right
        else f"it took {late.steps} steps"
        if late
        else "none fired"
    )
    return Link("detected", "missing", f"expected {wanted} within {drill.steps} steps; {said}")


def _alert(drill: Drill, found: Found) -> Link:
    told = [one.id for one in found.incidents if one.check in drill.checks and one.id in found.told]
    return _link("alert", bool(drill.checks), bool(told), ", ".join(told))


def _plan_links(drill: Drill, found: Found) -> list[Link]:
    """Node, plan, directive, receipt and effect, of the execution that got furthest."""
    ours = [one for one in found.executions if one.node == drill.node]
    expected = drill.node is not None
    best = max(ours, key=_progress, default=None)
    told = f"{best.id} is {best.state.replace('_', ' ')}: {best.reason}" if best else f"{drill.node} proposed no plan"
    told = told if expected else ""
    applied = best is not None and best.receipt is not None and best.receipt.status == "applied"
    return [
        _link("node", expected, best is not None, best.id if best else told),
        _link("plan", expected, best is not None and best.plan == drill.plan, best.plan if best else told),
        _link("directive", expected, best is not None and best.id in found.requests, told),
        _link("applied", expected, applied, told),
        _link("verified", expected, best is not None and best.state is ExecutionState.VERIFIED, told),
    ]


def _progress(execution: Execution) -> tuple[bool, bool]:
    return execution.state is ExecutionState.VERIFIED, execution.receipt is not None


def _recovered(drill: Drill, found: Found) -> Link:
    losses = found.losses
    told = f"loss {losses.now:.3f} after {losses.before:.3f} nats"
    if found.critical:
        told += f"; {', '.join(found.critical)} still critical"
    return _link("recovered", drill.recovers, losses.recovered and not found.critical, told if drill.recovers else "")


def _nothing_else(drill: Drill, found: Found) -> Link:
    others = [one.id for one in found.executions if one.node != drill.node]
    return _link("no other plan", expected=True, seen=not others, detail=", ".join(others))


def settled(drill: Drill, found: Found) -> bool:
    """Whether nothing more can come: every expected link was seen, and a drill without a plan had time to propose one."""
    if missing(drill, found):
        return False
    return drill.node is not None or found.records >= drill.quiet
