"""The pure middle of a tick: from verdicts to alerts, incidents, plans and messages, all out of one snapshot."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from runwatch.checks import Phase, Signals, all_checks
from runwatch.monitor.card.rulebook import Rulebook
from runwatch.monitor.engine import incidents
from runwatch.monitor.engine.evaluate import Judged
from runwatch.monitor.engine.incidents import Surroundings
from runwatch.monitor.engine.messages import plan_message
from runwatch.monitor.engine.world import checkpoints, plan_in_force, sustained
from runwatch.monitor.notify import Message
from runwatch.monitor.store.incident import Incident
from runwatch.monitor.store.store import Saved
from runwatch.rules import (
    Alert,
    Decided,
    Execution,
    Receipt,
    Transition,
    World,
    advance,
    all_nodes,
    decide,
    inhibited,
    policy_of,
)


@dataclass(frozen=True)
class Snapshot:
    """All that a tick is decided from. `rows` end with the unjudged `block`; `records` counts train records."""

    run: str
    directory: str
    page: Mapping[str, str]
    now: float
    block: Signals
    rows: Signals
    judged: Judged
    attempts: list[str]
    records: int
    rulebook: Rulebook
    receipts: Mapping[str, Receipt]
    saved: Saved
    incidents: Mapping[str, Incident]
    taken: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Outcome:
    """What a tick decided. `incidents` and `decided.executions` are those that changed; `executions` are all."""

    alerts: Mapping[str, Alert]
    transitions: tuple[Transition, ...] = ()
    incidents: Mapping[str, Incident] = field(default_factory=dict[str, Incident])
    decided: Decided = field(default_factory=lambda: Decided((), (), ()))
    executions: tuple[Execution, ...] = ()
    messages: tuple[Message, ...] = ()
    world: World | None = None
    rulebook: Rulebook = field(default_factory=lambda: Rulebook({}))


def conclude(now: Snapshot) -> Outcome:
    """One tick's decisions."""
    alerts, transitions = _advance_alerts(now)
    changed = incidents.after(now.incidents, transitions, now.now)
    current = {**now.incidents, **changed}
    current = {key: incidents.refreshed(one, alerts[one.check]) for key, one in current.items()}
    world = world_of(now, alerts)
    decided = Decided((), (), ())
    if world is not None:
        decided = decide(all_nodes(), world, now.receipts, now.saved.decisions)
    told, messages = _tell(now, alerts, current, decided)
    news = {execution.id: execution for execution in decided.executions}
    messages += [plan_message(now.run, now.directory, now.page, now.now, one) for one in news.values()]
    known = {execution.id: execution for execution in now.saved.executions}
    return Outcome(
        alerts=alerts,
        transitions=transitions,
        incidents={key: one for key, one in told.items() if one != now.incidents.get(key)},
        decided=decided,
        executions=tuple({**known, **news}.values()),
        messages=tuple(messages),
        world=world,
        rulebook=now.rulebook,
    )


def _advance_alerts(now: Snapshot) -> tuple[dict[str, Alert], tuple[Transition, ...]]:
    alerts = {name: now.saved.alerts.get(name) or Alert(check=name) for name in all_checks()}
    transitions: list[Transition] = []
    for name, verdicts in now.judged.verdicts.items():
        check = all_checks()[name]
        alerts[name], changes = advance(alerts[name], check, verdicts, now.block, policy_of(name))
        transitions += changes
    return alerts, tuple(sorted(transitions, key=lambda transition: transition.row))


def world_of(now: Snapshot, alerts: Mapping[str, Alert]) -> World | None:
    """The world for plans; None without a card or before the first record that tells its tokens."""
    planned, rows = now.rulebook.planned, now.rows
    known = np.flatnonzero(np.isfinite(rows.tokens))
    if planned is None or not len(known):
        return None
    last = len(rows) - 1
    trained = int(((now.block.phase == Phase.TRAIN) & ~now.block.tick).sum())
    return World(
        run=now.run,
        now=now.now,
        attempt=now.attempts[int(rows.attempt[last])],
        phase=Phase(int(rows.phase[last])),
        records=now.records + trained,
        step=int(rows.step[last]),
        tokens=float(rows.tokens[known[-1]]),
        time=float(rows.time[last]),
        planned=planned,
        plan=plan_in_force(planned, now.receipts.values()),
        recent=rows,
        settings=now.rulebook.nodes,
        alerts=alerts,
        executions=now.saved.executions,
        checkpoints=checkpoints(rows, planned.checkpoint_keep),
        throughput=sustained(rows),
        plans_enabled=now.saved.plans_enabled,
        taken=now.taken,
    )


def _tell(
    now: Snapshot, alerts: Mapping[str, Alert], current: Mapping[str, Incident], decided: Decided
) -> tuple[dict[str, Incident], list[Message]]:
    """The incidents with what people will then know of them, and the messages that tell it."""
    held_back = inhibited(alerts)
    modes = {name: settings.mode for name, settings in now.rulebook.nodes.items()}
    around = Surroundings(now.run, now.directory, now.now, alerts, decided.nodes, modes, now.page, now.rows)
    told: dict[str, Incident] = {}
    messages: list[Message] = []
    for key, incident in current.items():
        kind = incidents.to_tell(incident, held_back, now.now)
        told[key] = incident
        if kind is None:
            continue
        verdicts = now.judged.verdicts.get(incident.check)
        body = incidents.payload(incident, all_checks()[incident.check], verdicts, around)
        words = incidents.words_of(body)
        told[key] = incident.model_copy(update={"told": incident.standing, "told_at": now.now, "words": words})
        if kind == "incident_value" and words == incident.words:
            continue
        event = f"value-{now.now:.0f}" if kind == "incident_value" else incident.standing.replace(" ", "-")
        name = f"{now.run}/{key}/{event}"
        messages.append(Message(name, kind, key, now.run, now.now, dict(body), incidents.alert_text(body)))
    return told, messages
