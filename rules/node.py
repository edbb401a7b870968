"""A risk node: a window of the run, a condition over alerts, and the plan that was written down with it."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from runwatch.rules.carry_out import Recovered
from runwatch.rules.execution import Execution, ExecutionState, Forecast, Mark
from runwatch.rules.plan import Action, PlanRules, Preconditions
from runwatch.rules.world import World, spent


@dataclass(frozen=True)
class Condition:
    """How far a node's condition is met: 1 fully, 0 not at all. `checks` are the alerts that count for it."""

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
    """Why the plan cannot be made now; pages a person unless it is `settled`: another node takes over, or it is done."""

    reason: str
    settled: bool = False


@dataclass(frozen=True)
class Node:
    """One written-down risk.

    `window` gives the fractions of the token budget between which it may fire. `condition` and `propose` are pure
    functions of the world and of the node's settings; `recovered` says whether the run has recovered after the plan, and
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
    """The state of a node."""

    QUIET = "quiet"
    ARMED = "armed"
    OUTSIDE_WINDOW = "outside_window"
    FIRING = "firing"
    BLOCKED = "blocked"


@dataclass(frozen=True)
class NodeVerdict:
    """A node's state with the sentence that says why; `proposal` is there when it fires and no plan is in progress.

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


def evaluate(node: Node, world: World, settings: PlanRules) -> NodeVerdict:
    """The state of `node` in `world`."""

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
    held = guard(node, world, settings)
    if held is not None:
        return verdict(NodeState.BLOCKED, f"{condition.reason} But {held}", condition)
    proposal = _proposal(node, world, settings)
    if isinstance(proposal, Refusal):
        reason = f"{condition.reason} But {proposal.reason}"
        return verdict(NodeState.BLOCKED, reason, condition, needs_person=not proposal.settled)
    return verdict(NodeState.FIRING, condition.reason, condition, proposal=proposal)


def preview(node: Node, world: World, settings: PlanRules) -> Proposal | Refusal:
    """What the node's plan would do in `world`, whether or not its condition holds."""
    outside = _outside(node, world, settings)
    return Refusal(outside) if outside is not None else node.propose(world, settings)


def settings_of(node: Node, world: World) -> PlanRules:
    """The node's settings in this world, or its defaults."""
    return world.settings.get(node.name) or node.settings()


def _outside(node: Node, world: World, settings: PlanRules) -> str | None:
    """Why the run is outside the node's window, or None."""
    begin, end = node.window(settings)
    at = world.tokens / world.plan.token_budget
    if begin <= at <= end:
        return None
    return f"The run is at {at:.1%} of its token budget; the window is {begin:.0%} to {end:.0%}."


def guard(node: Node, world: World, settings: PlanRules) -> str | None:
    """What forbids any plan now, or None."""
    if not world.plans_enabled:
        return "plans are disabled; enable them with `runwatch plan enable`."
    if world.plan.paused:
        return "the run is paused; a person must decide how it continues."
    other = next((one for one in world.executions if one.open), None)
    if other is not None and not _yields(other, settings):
        return f"{other.id} is in progress, and only one plan runs at a time."
    last = [one for one in world.executions if one.node == node.name and one.state not in _NO_COOLDOWN]
    if last and (rest := cooldown(last[-1], world, settings)) > 0:
        return f"{last[-1].id} was {last[-1].state.replace('_', ' ')} recently; the cooldown lasts {rest} more records."
    return None


_NO_COOLDOWN = (ExecutionState.SUPERSEDED, ExecutionState.UNPLANNED)
"""Nothing was requested of the trainer, and nobody has rejected anything."""


def cooldown(last: Execution, world: World, settings: PlanRules) -> int:
    """Train records until the cooldown after an execution is over; 0 or less when it is."""
    return settings.cooldown_records - (world.records - _latest(last).records)


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
    return Refusal(f"{node.plan} has been carried out {settings.max_executions} times, the most the card allows.")
