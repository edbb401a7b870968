"""Alerts to incidents: one for each life of an alert, what is to be told of it, and in which words.

An incident's id is the check's name and the number of the life (`loss_spike-0003`). What has been told is kept with it,
so a change that was held back (the run was down) is told when it may be, and one that is over by then is not.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from runwatch.checks import Check, Level, Signals, Verdicts
from runwatch.checks.signals import VOCABULARY
from runwatch.monitor.notify import IncidentPayload, Kind, Series
from runwatch.monitor.store.incident import Incident, Severity
from runwatch.rules import Alert, AlertState, Moment, NodeState, NodeVerdict, Reason, Transition

PLOT_ROWS = 300
EDIT_SECONDS = (60.0, 900.0)
"""Least and most time between two edits of a firing incident's words; in between a tenth of its age, so that a message
that stays open for a day is edited a hundred times and not a thousand."""

OPENS = (Reason.FIRED, Reason.ESCALATED, Reason.EASED, Reason.RESOLVED)


def severity_of(level: Level) -> Severity:
    """A level's name in alerts."""
    return "critical" if level is Level.CRITICAL else "warning"


def after(incidents: Mapping[str, Incident], transitions: Iterable[Transition], now: float) -> dict[str, Incident]:
    """The incidents that `transitions` opened or changed; `incidents` are the open ones by id."""
    changed: dict[str, Incident] = {}
    for transition in transitions:
        if transition.reason in OPENS:
            alert = transition.alert
            key = f"{alert.check}-{alert.lives:04d}"
            changed[key] = _changed(changed.get(key) or incidents.get(key), key, transition, now)
    return changed


def _changed(incident: Incident | None, key: str, transition: Transition, now: float) -> Incident:
    alert = transition.alert
    since, at = alert.since or alert.at, alert.at
    if since is None or at is None:
        raise ValueError(f"the alert {alert.check} changed without a record")
    resolved = transition.reason is Reason.RESOLVED
    # Sentence, value and limit are of one record: once over, of the last bad one that was told of.
    shown = (incident.what, incident.value, incident.limit) if resolved and incident else None
    what, value, limit = shown or (alert.message, alert.value, alert.limit)
    return Incident(
        id=key,
        check=alert.check,
        state="resolved" if resolved else "firing",
        severity=severity_of(alert.worst),
        change=transition.reason.value,
        what=what,
        value=value,
        limit=limit,
        since=incident.since if incident else since,
        last=alert.last_bad or at,
        opened=incident.opened if incident else _seconds(alert.fired or at, now),
        resolved=_seconds(at, now) if resolved else None,
        told=incident.told if incident else None,
        told_at=incident.told_at if incident else 0.0,
        words=incident.words if incident else "",
    )


def refreshed(incident: Incident, alert: Alert) -> Incident:
    """A firing incident with the newest bad record of its alert."""
    if alert.state is not AlertState.FIRING or alert.level < Level.WARN or alert.last_bad is None:
        return incident
    update = {"what": alert.message, "value": alert.value, "limit": alert.limit, "last": alert.last_bad}
    return incident.model_copy(update=update)


def to_tell(incident: Incident, inhibited: frozenset[str], now: float) -> Kind | None:
    """The message that is due at `now` (Unix seconds), if any; `incident_value` where the words may be told anew."""
    if incident.check in inhibited:
        return None
    if incident.standing == incident.told:
        least, most = EDIT_SECONDS
        pause = min(max(least, 0.1 * (now - incident.opened)), most)
        return "incident_value" if incident.state == "firing" and now - incident.told_at >= pause else None
    if incident.state == "resolved":
        return "incident_resolved" if incident.told else None
    return "incident_updated" if incident.told else "incident_opened"


def _seconds(moment: Moment, now: float) -> float:
    return moment.time if math.isfinite(moment.time) else now


@dataclass(frozen=True)
class Surroundings:
    """What a message says beside the incident itself."""

    run: str
    directory: str
    now: float
    alerts: Mapping[str, Alert]
    nodes: Sequence[NodeVerdict]
    modes: Mapping[str, str]
    links: Mapping[str, str]
    recent: Signals


def payload(incident: Incident, check: Check, verdicts: Verdicts | None, around: Surroundings) -> IncidentPayload:
    """The incident as the notifiers get it."""
    newest = around.alerts[incident.check].at or incident.last
    return {
        "id": incident.id,
        "run": around.run,
        "check": incident.check,
        "severity": incident.severity,
        "state": incident.state,
        "change": incident.change,
        "summary": check.docs.partition("\n")[0],
        "what": incident.what,
        "value": _finite(incident.value),
        "limit": _finite(incident.limit),
        "since_step": incident.since.step,
        "since_tokens": _finite(incident.since.tokens),
        "since_time": _seconds(incident.since, incident.opened),
        "step": newest.step,
        "opened": incident.opened,
        "resolved": incident.resolved,
        "agreeing": agreeing(incident.check, around.alerts),
        "certainty": certainty(incident.check, around.alerts),
        "plan": _armed(incident.check, around),
        "command": f"runwatch status {around.directory}",
        "links": {"runbook": f"{around.links['status']}runbooks/{incident.check}", **around.links},
        "series": series(incident, check, verdicts, around.recent),
    }


def words_of(body: IncidentPayload) -> str:
    """What people read that may change while state and severity stay: two equal ones need no second message."""
    return "\n".join((body["what"], body["certainty"], body["plan"]))


def agreeing(check: str, alerts: Mapping[str, Alert]) -> list[str]:
    """Other checks in alarm now."""
    return sorted(name for name, alert in alerts.items() if name != check and alert.state is AlertState.FIRING)


def certainty(check: str, alerts: Mapping[str, Alert]) -> str:
    """How sure one may be: which checks agree, and which could not say anything."""
    others = agreeing(check, alerts)
    silent = sorted(name for name, alert in alerts.items() if alert.level is Level.UNKNOWN and name != check)
    agree = f"{_list(others)} {'agrees' if len(others) == 1 else 'agree'}" if others else "No other check is in alarm"
    return f"{agree}; {_list(silent)} could not be judged." if silent else f"{agree}."


def _list(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _armed(check: str, around: Surroundings) -> str:
    verdicts = [node for node in around.nodes if check in node.checks]
    armed = [node for node in verdicts if node.state in {NodeState.ARMED, NodeState.FIRING}]
    if not armed:
        return "No plan is armed by it."
    node = max(armed, key=lambda verdict: verdict.progress)
    mode = around.modes.get(node.node, "confirm")
    return f"{node.plan} of {node.node} ({mode}) is {node.state.value} at {node.progress:.0%}: {node.reason}"


def series(incident: Incident, check: Check, verdicts: Verdicts | None, recent: Signals) -> Series | None:
    """The first required signal around the incident, with the limit where the check judged the value itself."""
    name = next((name for name in check.required if recent.has(name)), None)
    if name is None:
        return None
    rows = recent.observed(name)[-PLOT_ROWS:]
    values, limit = recent.columns[name].values[rows], np.full(len(rows), np.nan)
    if verdicts is not None and len(verdicts):
        judged = rows - (len(recent) - len(verdicts))
        known = judged >= 0
        same = np.isclose(verdicts.value[judged[known]], values[known])
        limit[known] = np.where(same, verdicts.limit[judged[known]], np.nan)
    return {
        "signal": name,
        "unit": VOCABULARY[name].unit if name in VOCABULARY else "",
        "steps": [float(step) for step in recent.step[rows]],
        "values": [_finite(value) for value in values],
        "limit": [_finite(value) for value in limit],
        "flagged": (float(incident.since.step), float(incident.last.step)),
    }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def alert_text(incident: IncidentPayload) -> str:
    """The whole alert as plain text."""
    value = "not a finite number" if incident["value"] is None else f"{incident['value']:.4g}"
    limit = "" if incident["limit"] is None else f", limit {incident['limit']:.4g}"
    tokens = "" if incident["since_tokens"] is None else f" ({incident['since_tokens']:,.0f} tokens)"
    lines = [
        f"{incident['run']}: {incident['check']} is {incident['state']} ({incident['severity']}, {incident['change']})",
        incident["what"] or incident["summary"],
        f"Value {value}{limit}; since step {incident['since_step']:,}{tokens}; newest step {incident['step']:,}.",
        incident["certainty"],
        incident["plan"],
        f"Next: {incident['command']}",
        *(f"{label}: {url}" for label, url in incident["links"].items() if url),
    ]
    return "\n".join(lines)
