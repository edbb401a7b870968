"""Alerts to incidents: one for each life of an alert, what people are notified of, and in which words.

An incident's id is the check's name and the number of the life (`loss_spike-0003`). It is made of nothing but the alert,
so that the daemon, a backtest and a report have the same ones. What people were notified of is kept with it: a change
that was held back (the run was down) is sent when it may be, and one that is over by then is not.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from runwatch.checks import Check, Level, Signals, Verdicts, all_checks
from runwatch.checks.signals import VOCABULARY
from runwatch.monitor.engine.tick import Tick
from runwatch.monitor.notify import IncidentPayload, Kind, Series
from runwatch.monitor.store.incident import Incident, Severity
from runwatch.rules import Alert, AlertState, Moment, NodeState, Reason, Transition, advance, policy_of

PLOT_ROWS = 300
EDIT_SECONDS = (60.0, 900.0)
"""Least and most time between two edits of a firing incident's message; in between a tenth of its age, so that a message
that stays open for a day is edited a hundred times and not a thousand."""
LEVELS = {Level.UNKNOWN: "not judged", Level.OK: "OK", Level.WARN: "warning", Level.CRITICAL: "critical"}

OPENS = (Reason.FIRED, Reason.ESCALATED, Reason.EASED, Reason.RESOLVED)


def followed(
    alerts: Mapping[str, Alert],
    incidents: Mapping[str, Incident],
    verdicts: Mapping[str, Verdicts],
    block: Signals,
    now: float,
) -> tuple[dict[str, Alert], dict[str, Incident], tuple[Transition, ...]]:
    """Alerts (of every check) and incidents (by id, new ones last) after the rows of `block`, and the changes on the way.

    `verdicts` have one entry a row of `block`; a check without any keeps its alert. `now` (Unix seconds) stands in for a
    time that the records do not tell.
    """
    after = {name: alerts.get(name) or Alert(check=name) for name in all_checks()}
    transitions: list[Transition] = []
    for name, judged in verdicts.items():
        after[name], changes = advance(after[name], all_checks()[name], judged, block, policy_of(name))
        transitions += changes
    transitions.sort(key=lambda transition: transition.row)
    current = dict(incidents)
    for one in transitions:
        if one.reason in OPENS:
            key = id_of(one.alert)
            current[key] = _changed(current.get(key), one, now)
    refreshed = {key: _refreshed(incident, after[incident.check]) for key, incident in current.items()}
    return after, refreshed, tuple(transitions)


def id_of(alert: Alert) -> str:
    """The id of the incident that the alert's newest life is."""
    return f"{alert.check}-{alert.lives:04d}"


def _changed(before: Incident | None, transition: Transition, now: float) -> Incident:
    alert = transition.alert
    since, at, worst = alert.since, alert.at, alert.worst
    if since is None or at is None or worst is None:
        raise ValueError(f"the alert {alert.check} changed without a record")
    incident = before or Incident(
        id=id_of(alert),
        check=alert.check,
        state="firing",
        severity="warning",
        change="",
        what="",
        value=worst.value,
        limit=worst.limit,
        since=since,
        last=at,
        opened=_seconds(alert.fired or at, now),
    )
    update: dict[str, Any] = {"change": transition.reason.value, "critical": incident.critical or alert.critical_since}
    if transition.reason is Reason.RESOLVED:
        update |= {"state": "resolved", "resolved": _seconds(at, now), "resolution": resolution(alert)}
    return incident.model_copy(update=_bad_records(alert) | update)


def _refreshed(incident: Incident, alert: Alert) -> Incident:
    """A firing incident with the newest and the worst bad record of its alert."""
    if alert.state is not AlertState.FIRING or incident.id != id_of(alert) or incident.last == alert.last_bad:
        return incident
    return incident.model_copy(update=_bad_records(alert))


def _bad_records(alert: Alert) -> dict[str, Any]:
    """What an incident says of its alert's bad records: severity, sentence, value and limit of the worst, and the newest."""
    worst = alert.worst
    if worst is None:
        return {}
    severity: Severity = "critical" if worst.level is Level.CRITICAL else "warning"
    return {
        "severity": severity,
        "what": worst.message,
        "value": worst.value,
        "limit": worst.limit,
        "last": alert.last_bad or alert.at,
    }


def resolution(alert: Alert) -> str:
    """What resolved an alert, at the record at which it did."""
    step = alert.at.step if alert.at else 0
    return f"The last {alert.ok_records} observations, up to step {step:,}, are OK; the newest {_value(alert)}."


def _value(alert: Alert) -> str:
    """`value is 0.31, limit 0.3`, as far as they are numbers."""
    value = f"value is {alert.value:.4g}" if math.isfinite(alert.value) else "value is not a finite number"
    return f"{value}, limit {alert.limit:.4g}" if math.isfinite(alert.limit) else value


def due(incident: Incident, inhibited: frozenset[str], now: float) -> Kind | None:
    """The message that is due at `now` (Unix seconds), if any; `incident_value` where its text may be sent anew."""
    if incident.check in inhibited:
        return None
    if incident.standing == incident.notified:
        least, most = EDIT_SECONDS
        pause = min(max(least, 0.1 * (now - incident.opened)), most)
        return "incident_value" if incident.state == "firing" and now - incident.notified_at >= pause else None
    if incident.state == "resolved":
        return "incident_resolved" if incident.notified else None
    return "incident_updated" if incident.notified else "incident_opened"


def _seconds(moment: Moment, now: float) -> float:
    return moment.time if math.isfinite(moment.time) else now


def payload(incident: Incident, check: Check, tick: Tick) -> IncidentPayload:
    """The incident as the notifiers get it."""
    alert = tick.state.alerts[incident.check]
    newest = alert.at or incident.last
    return {
        "id": incident.id,
        "run": tick.run,
        "check": incident.check,
        "severity": incident.severity,
        "state": incident.state,
        "change": incident.change,
        "summary": check.docs.partition("\n")[0],
        "what": incident.said,
        "value": _finite(incident.value),
        "limit": _finite(incident.limit),
        "newest": f"Now {LEVELS[alert.level]}: {_value(alert)}." if incident.state == "firing" else "",
        "since_step": incident.since.step,
        "since_tokens": _finite(incident.since.tokens),
        "since_time": _seconds(incident.since, incident.opened),
        "step": newest.step,
        "opened": incident.opened,
        "resolved": incident.resolved,
        "agreeing": agreeing(incident.check, tick.state.alerts),
        "certainty": certainty(incident.check, tick.state.alerts),
        "plan": _armed(incident.check, tick),
        "command": f"runwatch status {tick.directory}",
        "links": {"runbook": f"{tick.links['status']}runbooks/{incident.check}", **tick.links},
        "series": series(incident, check, tick.judged.verdicts.get(incident.check), tick.rows),
    }


def changing_text(body: IncidentPayload) -> str:
    """What people read that may change while state and severity stay: two equal ones need no second message."""
    return "\n".join((body["what"], body["newest"], body["certainty"], body["plan"]))


def agreeing(check: str, alerts: Mapping[str, Alert]) -> list[str]:
    """Other checks that are firing now."""
    return sorted(name for name, alert in alerts.items() if name != check and alert.state is AlertState.FIRING)


def certainty(check: str, alerts: Mapping[str, Alert]) -> str:
    """How certain the incident is: which checks agree, and which could not be judged."""
    others = agreeing(check, alerts)
    silent = sorted(name for name, alert in alerts.items() if alert.level is Level.UNKNOWN and name != check)
    agree = f"{_list(others)} {'agrees' if len(others) == 1 else 'agree'}" if others else "No other check is firing"
    return f"{agree}; {_list(silent)} could not be judged." if silent else f"{agree}."


def _list(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _armed(check: str, tick: Tick) -> str:
    verdicts = [node for node in tick.nodes if check in node.checks]
    armed = [node for node in verdicts if node.state in {NodeState.ARMED, NodeState.FIRING}]
    if not armed:
        return "This incident does not arm a plan."
    node = max(armed, key=lambda verdict: verdict.progress)
    mode = tick.rulebook.nodes[node.node].mode
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
        f"Worst value {value}{limit}; since step {incident['since_step']:,}{tokens}; newest step {incident['step']:,}.",
        *([incident["newest"]] if incident["newest"] else []),
        incident["certainty"],
        incident["plan"],
        f"Next: {incident['command']}",
        *(f"{label}: {url}" for label, url in incident["links"].items() if url),
    ]
    return "\n".join(lines)
