"""The pure middle of a tick: from verdicts to alerts, incidents, plans and messages."""

from dataclasses import replace

from runwatch.checks import all_checks
from runwatch.monitor.engine import incidents
from runwatch.monitor.engine.messages import plan_message
from runwatch.monitor.engine.tick import Tick
from runwatch.monitor.engine.world import world_of
from runwatch.monitor.notify import Message
from runwatch.monitor.store.incident import Incident
from runwatch.rules import all_nodes, decide, inhibited


def conclude(tick: Tick) -> Tick:
    """The tick with all that it decides."""
    return notified(planned(alerted(tick)))


def alerted(tick: Tick) -> Tick:
    """With alerts and incidents as the new rows leave them."""
    state = tick.state
    alerts, open_ones, transitions = incidents.followed(
        state.alerts, state.incidents, tick.judged.verdicts, tick.block, tick.now
    )
    return replace(tick, state=replace(state, alerts=alerts, incidents=open_ones), transitions=transitions)


def planned(tick: Tick) -> Tick:
    """With the world, how each node stands in it, and what became of executions; as it was while no plan can be made."""
    world, state = world_of(tick), tick.state
    if world is None:
        return tick
    decided = decide(all_nodes(), world, tick.receipts, state.decisions)
    executions = {one.id: one for one in (*state.executions, *decided.executions)}
    state = replace(state, executions=tuple(executions.values()))
    return replace(tick, state=state, world=world, nodes=decided.nodes, events=decided.events)


def notified(tick: Tick) -> Tick:
    """With the messages that are due, and in each incident what people are then notified of."""
    held_back = inhibited(tick.state.alerts)
    after: dict[str, Incident] = {}
    messages: list[Message] = []
    for key, incident in tick.state.incidents.items():
        after[key], message = _notified(incident, held_back, tick)
        messages += [message] if message else []
    changed = {event.execution.id: event.execution for event in tick.events}
    messages += [plan_message(tick, execution) for execution in changed.values()]
    return replace(tick, state=replace(tick.state, incidents=after), messages=tuple(messages))


def _notified(incident: Incident, held_back: frozenset[str], tick: Tick) -> tuple[Incident, Message | None]:
    kind = incidents.due(incident, held_back, tick.now)
    if kind is None:
        return incident, None
    body = incidents.payload(incident, all_checks()[incident.check], tick)
    text = incidents.changing_text(body)
    update = {"notified": incident.standing, "notified_at": tick.now, "notified_text": text}
    after = incident.model_copy(update=update)
    if kind == "incident_value" and text == incident.notified_text:
        return after, None
    event = f"value-{tick.now:.0f}" if kind == "incident_value" else incident.standing.replace(" ", "-")
    name = f"{tick.run}/{incident.id}/{event}"
    return after, Message(name, kind, incident.id, tick.run, tick.now, dict(body), incidents.alert_text(body))
