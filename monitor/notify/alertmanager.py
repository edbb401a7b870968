"""Alertmanager API v2: pages, tickets and the Watchdog.

A firing incident is sent with a far `endsAt` and again every `resend_seconds`, so that a daemon that is down for a
moment resolves nothing; a resolution is sent again for 15 minutes, so that a lost one is not missed (both as Prometheus
does it). Grouping, inhibition, silences and routes are Alertmanager's: `deploy/alertmanager/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from runwatch.monitor.notify import AlertmanagerConfig, Kind, Message, Notifier, SendError, Sent
from runwatch.monitor.notify.post import post

KINDS: frozenset[Kind] = frozenset(
    {"incident_opened", "incident_updated", "incident_value", "incident_resolved", "deadman"}
)
RESENDS_TO_EXPIRY = 4
"""Missed re-sends before an alert resolves by itself (Prometheus: 4 intervals)."""
SHORTEST_LIFE_SECONDS = 900.0
Alert = dict[str, Any]


def connect(config: AlertmanagerConfig) -> Notifier:
    """The notifier for one Alertmanager or one cluster of them."""
    return Notifier(
        name=config.name or config.kind,
        kinds=KINDS if config.kinds is None else frozenset(config.kinds),
        send=Alertmanager(config).send,
        refresh_seconds=config.resend_seconds,
    )


@dataclass(frozen=True)
class Alertmanager:
    """Every member gets the alerts; one that took them is enough, since members share notifications, not alerts."""

    config: AlertmanagerConfig

    def send(self, message: Message, remembered: dict[str, Any]) -> Sent:
        """Post what `message` makes of the incident's alert. Remembered: the labels under which it is known.

        Raises:
            SendError: if no member took it.
        """
        posted = alerts(message, remembered.get("labels"), self.config)
        failures = [failure for url in self.config.urls if (failure := self._post(url, posted)) is not None]
        if len(failures) == len(self.config.urls):
            raise failures[0]
        return Sent({"labels": posted[0]["labels"]})

    def _headers(self) -> dict[str, str]:
        token = self.config.bearer_token
        bearer = {} if token is None else {"Authorization": f"Bearer {token.get_secret_value()}"}
        return {"Content-Type": "application/json", **bearer}

    def _post(self, url: str, posted: list[Alert]) -> SendError | None:
        try:
            post(
                f"{url.rstrip('/')}/api/v2/alerts",
                orjson.dumps(posted),
                headers=self._headers(),
                timeout=self.config.timeout_seconds,
            )
        except SendError as error:
            return error
        return None


def alerts(message: Message, known_as: Mapping[str, str] | None, config: AlertmanagerConfig) -> list[Alert]:
    """The alert of `message`; and, where an escalation changed its labels, the end of the one known so far."""
    if message.kind == "deadman":
        return [_watchdog(message, config)]
    alert = _alert(message, config)
    if known_as is None or known_as == alert["labels"]:
        return [alert]
    return [alert, {**alert, "labels": dict(known_as), "endsAt": _rfc3339(message.time)}]


def alert_name(check: str) -> str:
    """`loss_spike` as `RunLossSpike`."""
    return "Run" + "".join(word.capitalize() for word in check.split("_"))


def _alert(message: Message, config: AlertmanagerConfig) -> Alert:
    payload = message.payload
    life = max(RESENDS_TO_EXPIRY * config.resend_seconds, SHORTEST_LIFE_SECONDS)
    ends = message.time + life if payload["resolved"] is None else payload["resolved"]
    labels = {
        "alertname": alert_name(payload["check"]),
        "run": payload["run"],
        "check": payload["check"],
        "severity": payload["severity"],
        "incident": payload["id"],
    }
    return {
        "labels": {**config.labels, **labels},
        "annotations": _annotations(message),
        "startsAt": _rfc3339(payload["opened"]),
        "endsAt": _rfc3339(ends),
        "generatorURL": payload["links"].get("dashboard", ""),
    }


def _annotations(message: Message) -> dict[str, str]:
    payload = message.payload
    links = {f"{label}_url": url for label, url in payload["links"].items() if url}
    return {
        "summary": payload["summary"],
        "description": payload["what"],
        "certainty": payload["certainty"],
        "plan": payload["plan"],
        "command": payload["command"],
        "text": message.text,
        **links,
    }


def _watchdog(message: Message, config: AlertmanagerConfig) -> Alert:
    """Always firing while the daemon can observe the run; the receiver of the dead-man route alerts when it stops."""
    return {
        "labels": {**config.labels, "alertname": "RunWatchdog", "run": message.run, "severity": "none"},
        "annotations": {"summary": "The daemon can observe this run."},
        "startsAt": _rfc3339(message.payload["observed"]),
        "endsAt": _rfc3339(message.payload["until"]),
    }


def _rfc3339(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")
