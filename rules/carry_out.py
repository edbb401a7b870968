"""Carrying an execution out, from proposal to verified effect: a pure state machine.

    observed                                        (mode observe: nothing is done)
    proposed -> approved -> requested -> acknowledged -> verified
       |           |            |              |
       |           |            |              +-> unverified        effect not seen in time: a person is paged
       |           |            +-> rejected | unacknowledged        by the trainer | it did not answer
       +-----------+-> expired | superseded | refused_by_person
    unplanned                                       (the condition holds, no plan can be made: a person is paged)

`requested` is stored before the directive is written, so the file may be written again after a crash: its name is the
execution's id and its content follows from the stored execution alone. An ended execution never changes.
"""

from collections.abc import Callable
from typing import Any

from runwatch.checks import Phase
from runwatch.rules.effect import missing_effects
from runwatch.rules.execution import OPEN, Decision, Event, Execution, ExecutionState, Mark
from runwatch.rules.plan import Receipt
from runwatch.rules.world import World

Recovered = Callable[[Execution, World], bool | None]
"""Whether the run has recovered after the plan: None while that is unknown."""

GRACE_SECONDS = 60.0
"""A receipt may reach us this long after the directive has expired (the trainer's clock is not ours)."""

Step = tuple[ExecutionState, str, dict[str, Any]]
"""Where an execution goes, why, and what else changes with it."""


def advance_execution(
    execution: Execution,
    world: World,
    receipt: Receipt | None = None,
    decision: Decision | None = None,
    recovered: Recovered | None = None,
) -> tuple[Execution, tuple[Event, ...]]:
    """Take every step that is due now; each is an event. From any stored prefix the rest follows again."""
    events: list[Event] = []
    while (step := _due(execution, world, receipt, decision, recovered)) is not None:
        was = execution.state
        execution = _taken(execution, step, mark(world))
        events.append(Event(execution, was, told(execution), execution.calls_person))
    return execution, tuple(events)


def mark(world: World) -> Mark:
    """Now, in the world's own terms."""
    return Mark(time=world.now, records=world.records, step=world.step, tokens=world.tokens)


def told(execution: Execution) -> str:
    """The sentence for an execution's newest change."""
    sentence = f"{execution.id} ({execution.plan}) is {execution.state.replace('_', ' ')}"
    return f"{sentence}: {execution.reason}" if execution.reason else f"{sentence}."


def supersede(execution: Execution, world: World, reason: str) -> Event:
    """End a proposal without a decision in favour of another plan."""
    ended = _taken(execution, (ExecutionState.SUPERSEDED, reason, {}), mark(world))
    return Event(ended, execution.state, told(ended), escalate=False)


def _taken(execution: Execution, step: Step, now: Mark) -> Execution:
    state, reason, update = step
    if state not in OPEN:
        update = {"ended": now, **update}
    return execution.model_copy(update={"state": state, "reason": reason, **update})


def _due(
    execution: Execution,
    world: World,
    receipt: Receipt | None,
    decision: Decision | None,
    recovered: Recovered | None,
) -> Step | None:
    match execution.state:
        case ExecutionState.PROPOSED:
            return _from_proposed(execution, world, decision)
        case ExecutionState.APPROVED:
            return _from_approved(execution, world, decision)
        case ExecutionState.REQUESTED:
            return _from_requested(execution, world, receipt)
        case ExecutionState.ACKNOWLEDGED:
            return _from_acknowledged(execution, world, recovered)
        case _:
            return None


def _withdrawn(execution: Execution, world: World, decision: Decision | None) -> Step | None:
    """How a plan ends before it is requested of the trainer."""
    now = mark(world)
    if decision is not None and not decision.approved:
        return ExecutionState.REFUSED, f"{decision.by}: {decision.reason}", {"decided": now, "by": decision.by}
    broken = execution.preconditions.broken_by(world.attempt, world.tokens)
    if broken is not None:
        return ExecutionState.EXPIRED, f"{broken}.", {}
    if world.now >= execution.expires:
        return ExecutionState.EXPIRED, _why_expired(execution, world, decision), {}
    return None


def _why_expired(execution: Execution, world: World, decision: Decision | None) -> str:
    if decision is None and execution.decided is None:
        return f"no decision within {execution.expires - execution.proposed.time:,.0f} s."
    held = "plans were disabled" if not world.plans_enabled else "the daemon did not run"
    return f"{decision.by if decision else execution.by} approved it, but {held} until it had expired."


def _from_proposed(execution: Execution, world: World, decision: Decision | None) -> Step | None:
    withdrawn = _withdrawn(execution, world, decision)
    if withdrawn is not None:
        return withdrawn
    now = mark(world)
    if decision is not None:
        return ExecutionState.APPROVED, f"{decision.by}: {decision.reason}", {"decided": now, "by": decision.by}
    if execution.checks and all(name in world.alerts and not world.alerts[name].alive for name in execution.checks):
        return ExecutionState.SUPERSEDED, f"{' and '.join(execution.checks)} resolved before a decision.", {}
    if execution.mode == "auto":
        return ExecutionState.APPROVED, "the run card sets mode auto.", {"decided": now, "by": "run card"}
    return None


def _from_approved(execution: Execution, world: World, decision: Decision | None) -> Step | None:
    withdrawn = _withdrawn(execution, world, decision)
    if withdrawn is not None or not world.plans_enabled:
        return withdrawn
    return ExecutionState.REQUESTED, execution.reason or "", {"requested": mark(world)}


def _from_requested(execution: Execution, world: World, receipt: Receipt | None) -> Step | None:
    now = mark(world)
    if receipt is not None and receipt.status == "rejected":
        reason = f"the trainer rejected it at step {receipt.step:,}: {receipt.reason or 'no reason given'}."
        return ExecutionState.REJECTED, reason, {"receipt": receipt}
    if receipt is not None:
        reason = f"applied at step {receipt.step:,} ({receipt.tokens:,} tokens)."
        return ExecutionState.ACKNOWLEDGED, reason, {"receipt": receipt, "acknowledged": now}
    if execution.command and world.attempt != execution.attempt:
        return ExecutionState.ACKNOWLEDGED, f"the run came back as attempt {world.attempt}.", {"acknowledged": now}
    if execution.requested and world.now > execution.requested.time + execution.ack_seconds + GRACE_SECONDS:
        reason = f"no receipt {world.now - execution.requested.time:.0f} s after the request."
        return ExecutionState.UNACKNOWLEDGED, reason, {}
    return None


def _from_acknowledged(execution: Execution, world: World, recovered: Recovered | None) -> Step | None:
    missing = _missing(execution, world)
    well = recovered(execution, world) if recovered is not None and not missing else True
    if not missing and well:
        return ExecutionState.VERIFIED, "telemetry shows every effect.", {}
    if execution.acknowledged is None or _in_time(execution, execution.acknowledged, world):
        return None
    reason = " ".join(missing) or "telemetry shows its effects, but the run has not recovered."
    return ExecutionState.UNVERIFIED, reason, {}


def _missing(execution: Execution, world: World) -> list[str]:
    """What telemetry does not show yet of the plan, or of a restart."""
    if execution.receipt is not None:
        return missing_effects(execution.actions, execution.receipt, world)
    trains = world.phase is Phase.TRAIN and world.attempt != execution.attempt
    return [] if trains else ["The run has not trained since it was restarted."]


def _in_time(execution: Execution, acknowledged: Mark, world: World) -> bool:
    """Whether the effect may still show."""
    records = world.records - acknowledged.records
    return records < execution.verify_records and world.now < acknowledged.time + execution.verify_seconds
