"""What the rules decide in one tick, from one frozen `World`.

The open execution moves on, every node is evaluated, at most one plan is proposed, and a person is paged where a
condition holds and no plan can be made.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from runwatch.rules.carry_out import advance_execution, mark, supersede, told
from runwatch.rules.execution import Decision, Event, Execution, ExecutionState
from runwatch.rules.node import Node, NodeState, NodeVerdict, Proposal, cooldown, guard, settings_of
from runwatch.rules.node import evaluate as evaluate_node
from runwatch.rules.plan import Receipt
from runwatch.rules.world import World


@dataclass(frozen=True)
class Decided:
    """What one tick decided: executions that changed or are new, the events to report, and the state of each node."""

    executions: tuple[Execution, ...]
    events: tuple[Event, ...]
    nodes: tuple[NodeVerdict, ...]


def decide(
    nodes: Mapping[str, Node],
    world: World,
    receipts: Mapping[str, Receipt],
    decisions: Mapping[str, Decision],
) -> Decided:
    """One tick of the rules. `receipts` and `decisions` are by execution id; those already used may be given again."""
    events: list[Event] = []
    for execution in world.executions:
        if execution.open:
            events += _carried_on(execution, nodes, world, receipts, decisions)
    world = _after(world, events)
    verdicts = tuple(evaluate_node(node, world, settings_of(node, world)) for node in nodes.values())
    turns: list[tuple[Callable[[Node, World, NodeVerdict], list[Event]], NodeVerdict]]
    turns = [(_propose, verdict) for verdict in _in_order(nodes, world, verdicts)]
    turns += [(_call, verdict) for verdict in verdicts]
    for turn, verdict in turns:
        new = turn(nodes[verdict.node], world, verdict)
        world = _after(world, new)
        events += new
    return Decided(tuple({event.execution.id: event.execution for event in events}.values()), tuple(events), verdicts)


def _after(world: World, events: list[Event]) -> World:
    """The world with executions as the events left them, the new ones at the end."""
    executions = {one.id: one for one in world.executions} | {event.execution.id: event.execution for event in events}
    return replace(world, executions=tuple(executions.values()))


def _carried_on(
    execution: Execution,
    nodes: Mapping[str, Node],
    world: World,
    receipts: Mapping[str, Receipt],
    decisions: Mapping[str, Decision],
) -> tuple[Event, ...]:
    node = nodes.get(execution.node)
    receipt, decision = receipts.get(execution.id), decisions.get(execution.id)
    return advance_execution(execution, world, receipt, decision, node.recovered if node else None)[1]


def _in_order(nodes: Mapping[str, Node], world: World, verdicts: tuple[NodeVerdict, ...]) -> list[NodeVerdict]:
    """The firing ones: those that need no person first, and of them the one whose plan costs least."""
    firing = [verdict for verdict in verdicts if verdict.proposal is not None]
    auto = {name: settings_of(node, world).mode == "auto" for name, node in nodes.items()}
    return sorted(firing, key=lambda verdict: (not auto[verdict.node], nodes[verdict.node].rank))


def _propose(node: Node, world: World, verdict: NodeVerdict) -> list[Event]:
    """Propose the plan of a firing node, unless an earlier one of this tick has taken the turn."""
    rules = settings_of(node, world)
    if verdict.proposal is None or guard(node, world, rules) is not None:
        return []
    why = f"{node.name} runs automatically and goes first."
    events = [supersede(other, world, why) for other in world.executions if other.open]
    state = ExecutionState.OBSERVED if rules.mode == "observe" else ExecutionState.PROPOSED
    new = _execution(node, world, verdict, verdict.proposal, state)
    events.append(Event(new, None, told(new), escalate=new.calls_person))
    return [*events, *advance_execution(new, world)[1]]


def _call(node: Node, world: World, verdict: NodeVerdict) -> list[Event]:
    """Page a person, once, where no plan can be made; and record when that is over."""
    rules = settings_of(node, world)
    calls = [one for one in world.executions if one.node == node.name and one.state is ExecutionState.UNPLANNED]
    standing = bool(calls) and calls[-1].ended is None
    if standing and not verdict.needs_person and verdict.state is not NodeState.BLOCKED:
        over = calls[-1].model_copy(update={"ended": mark(world)})
        return [Event(over, over.state, f"{over.id} is resolved: {verdict.reason}", escalate=False)]
    recent = bool(calls) and cooldown(calls[-1], world, rules) > 0
    if not verdict.needs_person or standing or recent or rules.mode == "observe":
        return []
    new = _execution(node, world, verdict, Proposal((), ()), ExecutionState.UNPLANNED)
    return [Event(new, None, told(new), escalate=True)]


def _execution(node: Node, world: World, verdict: NodeVerdict, proposal: Proposal, state: ExecutionState) -> Execution:
    rules = settings_of(node, world)
    return Execution(
        id=_new_id(node.name, world),
        node=node.name,
        plan=node.plan,
        mode=rules.mode,
        state=state,
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
        expires=world.now + rules.expires_seconds,
        ack_seconds=rules.ack_seconds,
        verify_records=rules.verify_records,
        verify_seconds=rules.verify_seconds,
        proposed=mark(world),
        ended=mark(world) if state is ExecutionState.OBSERVED else None,
    )


def _new_id(node: str, world: World) -> str:
    """One more than the highest number of the node, among the executions and among what lies in `control/`.

    A directive is named after its execution, and a trainer never acts on a name twice: also a database that was lost
    must not give one out again.
    """
    taken = (re.fullmatch(rf"{node}-(\d+)", name) for name in (*world.taken, *(one.id for one in world.executions)))
    return f"{node}-{1 + max((int(found[1]) for found in taken if found), default=0):04d}"
