"""A risk node: a window of the run, a condition over alerts, and the plan that was written down with it.

`decide` is the whole of what the rules say in one tick: it carries the open execution on, evaluates every node against
one frozen `World`, and proposes at most one plan.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from runwatch.rules.carry_out import Recovered, advance_execution, mark, supersede, told
from runwatch.rules.execution import Decision, Event, Execution, ExecutionState, Forecast, Mark
from runwatch.rules.plan import Action, PlanRules, Preconditions, Receipt
from runwatch.rules.world import World, spent


@dataclass(frozen=True)
class Condition:
    """How far a node's condition is met: 1 holds, 0 nothing of it. `checks` are those in alarm that count for it."""

    progress: float
    reason: str
    checks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Proposal:
    """What the plan would do now. `effects` has a sentence for each action.

    `healthy_loss` (nats) is the level to which the loss must come back for the run to count as recovered.
    """

    actions: tuple[Action, ...]
    effects: tuple[str, ...]
    preconditions: Preconditions = field(default_factory=Preconditions)
    forecast: Forecast | None = None
    command: tuple[str, ...] = ()
    healthy_loss: float | None = None


@dataclass(frozen=True)
class Refusal:
    """Why the plan cannot be made now; a person is needed unless another node takes over (`handed_on`)."""

    reason: str
    handed_on: bool = False


@dataclass(frozen=True)
class Node:
    """One written-down risk.

    `window` gives the fractions of the token budget between which it may fire. `condition` and `propose` are pure
    functions of the world and of the node's settings; `recovered` says whether the run is well after the plan, and
    `exhausted` what comes when the plan has been carried out as often as allowed. Of two plans that are due at once the
    one of lower `rank` goes first: it costs less.
    """

    name: str
    plan: str
    checks: tuple[str, ...]
    settings: type[PlanRules]
    window: Callable[[Any], tuple[float, float]]
    condition: Callable[[World, Any], Condition]
    propose: Callable[[World, Any], Proposal | Refusal]
    rank: int
    recovered: Recovered | None = None
    exhausted: Callable[[World, Any], Proposal | Refusal] | None = None

    @property
    def docs(self) -> str:
        """The docstring of its file: page, runbook and message summary."""
        return inspect.getdoc(sys.modules[self.condition.__module__]) or ""


class NodeState(StrEnum):
    """How a node stands."""

    QUIET = "quiet"
    ARMED = "armed"
    OUTSIDE_WINDOW = "outside_window"
    FIRING = "firing"
    BLOCKED = "blocked"


@dataclass(frozen=True)
class NodeVerdict:
    """A node's state with the sentence that says why; `proposal` is there when it fires and nothing is under way.

    `needs_person`: the condition holds and no plan can be made.
    """

    node: str
    plan: str
    state: NodeState
    reason: str
    progress: float
    checks: tuple[str, ...] = ()
    proposal: Proposal | None = None
    needs_person: bool = False


@dataclass(frozen=True)
class Decided:
    """What one tick decided: executions that changed or are new, what to tell of them, and how each node stands."""

    executions: tuple[Execution, ...]
    events: tuple[Event, ...]
    nodes: tuple[NodeVerdict, ...]


def evaluate(node: Node, world: World, settings: PlanRules) -> NodeVerdict:
    """How `node` stands in `world`."""

    def verdict(state: NodeState, reason: str, condition: Condition, **more: Any) -> NodeVerdict:
        return NodeVerdict(node.name, node.plan, state, reason, condition.progress, condition.checks, **more)

    condition = node.condition(world, settings)
    own = next((one for one in world.executions if one.open and one.node == node.name), None)
    if own is not None:
        return verdict(NodeState.FIRING, f"{own.id} is {own.state}.", condition)
    outside = _outside(node, world, settings)
    if outside is not None:
        return verdict(NodeState.OUTSIDE_WINDOW, outside, condition)
    if condition.progress < 1:
        return verdict(NodeState.ARMED if condition.progress > 0 else NodeState.QUIET, condition.reason, condition)
    guard = _guard(node, world, settings)
    if guard is not None:
        return verdict(NodeState.BLOCKED, f"{condition.reason} But {guard}", condition)
    proposal = _proposal(node, world, settings)
    if isinstance(proposal, Refusal):
        reason = f"{condition.reason} But {proposal.reason}"
        return verdict(NodeState.BLOCKED, reason, condition, needs_person=not proposal.handed_on)
    return verdict(NodeState.FIRING, condition.reason, condition, proposal=proposal)


def preview(node: Node, world: World, settings: PlanRules) -> Proposal | Refusal:
    """What the node's plan would do in `world`, whether or not its condition holds."""
    outside = _outside(node, world, settings)
    return Refusal(outside) if outside is not None else node.propose(world, settings)


def decide(
    nodes: Mapping[str, Node],
    world: World,
    receipts: Mapping[str, Receipt],
    decisions: Mapping[str, Decision],
) -> Decided:
    """One tick of the rules. `receipts` and `decisions` are by execution id; those already used may be given again."""
    carried = [_carried_on(one, nodes, world, receipts, decisions) for one in world.executions if one.open]
    changed = {execution.id: execution for execution, events in carried if events}
    events = [event for _, happened in carried for event in happened]
    world = replace(world, executions=tuple(changed.get(one.id, one) for one in world.executions))
    verdicts = tuple(evaluate(node, world, _settings(node, world)) for node in nodes.values())
    for verdict in _in_order(nodes, world, verdicts):
        world, new = _propose(nodes[verdict.node], world, verdict)
        changed |= {event.execution.id: event.execution for event in new}
        events += new
    return Decided(tuple(changed.values()), tuple(events), verdicts)


def _settings(node: Node, world: World) -> PlanRules:
    return world.settings.get(node.name) or node.settings()


def _outside(node: Node, world: World, settings: PlanRules) -> str | None:
    """Why the run is outside the node's window, or None."""
    begin, end = node.window(settings)
    at = world.tokens / world.plan.token_budget
    if begin <= at <= end:
        return None
    return f"The run is at {at:.1%} of its token budget; the window is {begin:.0%} to {end:.0%}."


def _guard(node: Node, world: World, settings: PlanRules) -> str | None:
    """What forbids any plan now, or None."""
    if not world.plans_enabled:
        return "plans are switched off; `runwatch plan enable` switches them on."
    if world.plan.paused:
        return "the run is paused; a person decides how it goes on."
    other = next((one for one in world.executions if one.open), None)
    if other is not None and not _yields(other, settings):
        return f"{other.id} is under way, and one plan at a time is carried out."
    last = [one for one in world.executions if one.node == node.name and one.state is not ExecutionState.SUPERSEDED]
    if last:
        rest = settings.cooldown_records - (world.records - _latest(last[-1]).records)
        if rest > 0:
            return f"{last[-1].id} was {last[-1].state.replace('_', ' ')} a short time ago; {rest} records remain."
    return None


def _yields(other: Execution, settings: PlanRules) -> bool:
    """A proposal that waits for a person gives way to a plan that needs none."""
    return other.state is ExecutionState.PROPOSED and settings.mode == "auto" and other.mode != "auto"


def _latest(execution: Execution) -> Mark:
    marks = (execution.ended, execution.acknowledged, execution.requested, execution.decided)
    return next((mark for mark in marks if mark is not None), execution.proposed)


def _proposal(node: Node, world: World, settings: PlanRules) -> Proposal | Refusal:
    """The plan, or what comes after its last execution."""
    if spent(node.name, world) < settings.max_executions:
        return node.propose(world, settings)
    if node.exhausted is not None:
        return node.exhausted(world, settings)
    return Refusal(f"{node.plan} has been carried out {settings.max_executions} times, as often as the card allows.")


def _carried_on(
    execution: Execution,
    nodes: Mapping[str, Node],
    world: World,
    receipts: Mapping[str, Receipt],
    decisions: Mapping[str, Decision],
) -> tuple[Execution, tuple[Event, ...]]:
    node = nodes.get(execution.node)
    receipt, decision = receipts.get(execution.id), decisions.get(execution.id)
    return advance_execution(execution, world, receipt, decision, node.recovered if node else None)


def _in_order(nodes: Mapping[str, Node], world: World, verdicts: tuple[NodeVerdict, ...]) -> list[NodeVerdict]:
    """The firing ones: those that need no person first, and of them the one whose plan costs least."""
    firing = [verdict for verdict in verdicts if verdict.proposal is not None]
    auto = {name: _settings(node, world).mode == "auto" for name, node in nodes.items()}
    return sorted(firing, key=lambda verdict: (not auto[verdict.node], nodes[verdict.node].rank))


def _propose(node: Node, world: World, verdict: NodeVerdict) -> tuple[World, list[Event]]:
    """Propose the plan of a firing node, unless an earlier one of this tick has taken the turn."""
    settings = _settings(node, world)
    if verdict.proposal is None or _guard(node, world, settings) is not None:
        return world, []
    why = f"{node.name} needs no decision and goes first."
    events = [supersede(other, world, why) for other in world.executions if other.open]
    new = _execution(node, world, settings, verdict, verdict.proposal)
    events.append(Event(new, None, told(new), escalate=False))
    new, happened = advance_execution(new, world)
    events += happened
    ended = {event.execution.id: event.execution for event in events}
    kept = tuple(ended.get(one.id, one) for one in world.executions)
    return replace(world, executions=(*kept, new)), events


def _execution(node: Node, world: World, settings: PlanRules, verdict: NodeVerdict, proposal: Proposal) -> Execution:
    observed = settings.mode == "observe"
    number = 1 + sum(one.node == node.name for one in world.executions)
    return Execution(
        id=f"{node.name}-{number:04d}",
        node=node.name,
        plan=node.plan,
        mode=settings.mode,
        state=ExecutionState.OBSERVED if observed else ExecutionState.PROPOSED,
        reason=verdict.reason,
        evidence=verdict.reason,
        checks=verdict.checks,
        actions=proposal.actions,
        effects=proposal.effects,
        command=proposal.command,
        attempt=world.attempt,
        preconditions=proposal.preconditions,
        forecast=proposal.forecast,
        healthy_loss=proposal.healthy_loss,
        expires=world.now + settings.expires_seconds,
        ack_seconds=settings.ack_seconds,
        verify_records=settings.verify_records,
        verify_seconds=settings.verify_seconds,
        proposed=mark(world),
        ended=mark(world) if observed else None,
    )
