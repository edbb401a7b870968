import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import payloads
import pytest
import yaml
from http_collector import Collector
from pydantic import TypeAdapter

from runwatch.checks import all_checks
from runwatch.monitor.notify import Kind, Message, Notifier, NotifyConfig, connect
from runwatch.monitor.notify.alertmanager import alert_name

CONFIG = Path(__file__).parents[2] / "deploy" / "alertmanager" / "alertmanager.yml"
PAGE, TICKET, DEAD_MAN = "/page", "/ticket", "/dead-man"
QUIET_SECONDS = 3.0  # three group intervals of the test's configuration


def notifier(server: Any) -> Notifier:
    config = {"kind": "alertmanager", "urls": [server.url], "resend_seconds": 5}
    return connect(TypeAdapter(NotifyConfig).validate_python(config))


def message(kind: Kind, change: str = "fired", check: str = "loss_spike", **changed: Any) -> Message:
    now = time.time()
    resolved = now if change == "resolved" else None
    told = {"check": check, "id": f"cpu-demo-{check}-0001", "opened": now - 5, "resolved": resolved, **changed}
    return payloads.message(kind, payloads.incident(change, **told), time=now)


def told(collector: Collector, path: str, status: str = "firing") -> list[dict[str, Any]]:
    bodies = [json.loads(request.body) for request in collector.requests if request.path == path]
    return [body for body in bodies if body["status"] == status]


def test_amtool_accepts_the_configuration(find_tool: Callable[[str], str]) -> None:
    subprocess.run([find_tool("amtool"), "check-config", CONFIG], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        ("alertname=RunLossSpike severity=critical run=a", "page"),
        ("alertname=RunLossSpike severity=warning run=a", "ticket"),
        ("alertname=RunWatchdog severity=none run=a", "dead_man"),
        ("alertname=RunwatchPrometheusWatchdog severity=none", "dead_man"),
        ("alertname=RunwatchDaemonGone severity=critical", "page"),
        ("alertname=RunwatchOutboxStuck severity=warning", "ticket"),
    ],
)
def test_an_alert_is_routed(find_tool: Callable[[str], str], labels: str, receiver: str) -> None:
    command = [find_tool("amtool"), "config", "routes", "test", f"--config.file={CONFIG}", *labels.split()]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == receiver


def test_the_run_that_is_down_inhibits_the_alert_of_every_other_check() -> None:
    rules = yaml.safe_load(CONFIG.read_text())["inhibit_rules"]
    matchers = [re.fullmatch(r'alertname (=~|!~) "(.*)"', text) for text in rules[0]["target_matchers"]]
    [covered, excepted] = [match[2] for match in matchers if match]
    names = {alert_name(name) for name in all_checks()}
    left_out = {name for name in names if not re.fullmatch(covered, name) or re.fullmatch(excepted, name)}
    assert left_out == {"RunProgress"}


@pytest.mark.slow
def test_a_storm_of_500_alerts_pages_once_per_incident_and_resolves_once(
    alertmanager: Any, collector: Collector, eventually: Callable[..., None]
) -> None:
    send = notifier(alertmanager).send
    checks = ["loss_spike", "grad_norm", "finite", "token_drop", "logit_growth"]
    for count in range(100):
        for check in checks:
            send(message("incident_updated", check=check, what=f"Value number {count}."), {})
    eventually(lambda: len(told(collector, PAGE)) == len(checks))
    for check in checks:
        for _ in range(3):  # a resolution is sent again
            send(message("incident_resolved", "resolved", check), {})
    eventually(lambda: len(told(collector, PAGE, "resolved")) == len(checks))
    time.sleep(QUIET_SECONDS)
    assert len(told(collector, PAGE)) == len(checks)
    assert len(told(collector, PAGE, "resolved")) == len(checks)


@pytest.mark.slow
def test_a_page_carries_the_whole_alert(
    alertmanager: Any, collector: Collector, eventually: Callable[..., None]
) -> None:
    notifier(alertmanager).send(message("incident_opened"), {})
    eventually(lambda: told(collector, PAGE))
    [alert] = told(collector, PAGE)[0]["alerts"]
    assert alert["labels"]["alertname"] == "RunLossSpike"
    assert alert["labels"]["check"] == "loss_spike"
    assert alert["annotations"]["description"] == "The loss is 0.9 nats above its trend (limit 0.3 nats)."
    assert {"summary", "certainty", "plan", "command", "runbook_url", "dashboard_url"} <= set(alert["annotations"])


@pytest.mark.slow
def test_an_escalation_pages_and_ends_the_warning(
    alertmanager: Any, collector: Collector, eventually: Callable[..., None]
) -> None:
    send = notifier(alertmanager).send
    memory = send(message("incident_opened", severity="warning"), {}).remembered
    eventually(lambda: told(collector, TICKET))
    memory = send(message("incident_updated", "escalated"), memory).remembered
    eventually(lambda: told(collector, PAGE))
    firing = httpx.get(f"{alertmanager.url}/api/v2/alerts").json()
    assert [alert["labels"]["severity"] for alert in firing] == ["critical"]


@pytest.mark.slow
def test_a_silence_is_respected(alertmanager: Any, collector: Collector, eventually: Callable[..., None]) -> None:
    matcher = {"name": "check", "value": "loss_spike", "isRegex": False}
    span = {"startsAt": "2020-01-01T00:00:00Z", "endsAt": "2090-01-01T00:00:00Z"}
    silence = {"matchers": [matcher], **span, "createdBy": "test", "comment": "known"}
    httpx.post(f"{alertmanager.url}/api/v2/silences", json=silence).raise_for_status()
    notifier(alertmanager).send(message("incident_opened"), {})
    notifier(alertmanager).send(message("incident_opened", check="grad_norm"), {})
    eventually(lambda: told(collector, PAGE))
    time.sleep(QUIET_SECONDS)
    assert [body["groupLabels"]["alertname"] for body in told(collector, PAGE)] == ["RunGradNorm"]


@pytest.mark.slow
def test_a_run_that_is_down_inhibits_its_other_alerts(
    alertmanager: Any, collector: Collector, eventually: Callable[..., None]
) -> None:
    send = notifier(alertmanager).send
    send(message("incident_opened", check="progress"), {})
    eventually(lambda: told(collector, PAGE))
    send(message("incident_opened", check="throughput"), {})
    send(message("incident_opened", check="throughput", run="other"), {})
    eventually(lambda: len(told(collector, PAGE)) == 2)
    time.sleep(QUIET_SECONDS)
    paged = [(body["groupLabels"]["run"], body["groupLabels"]["alertname"]) for body in told(collector, PAGE)]
    assert paged == [("cpu-demo", "RunProgress"), ("other", "RunThroughput")]


@pytest.mark.slow
def test_a_restart_of_either_side_pages_nobody_again(
    alertmanager: Any, collector: Collector, eventually: Callable[..., None]
) -> None:
    opened = message("incident_opened")
    memory = notifier(alertmanager).send(opened, {}).remembered
    eventually(lambda: told(collector, PAGE))
    alertmanager.stop()
    alertmanager.start()
    notifier(alertmanager).send(opened, memory)
    time.sleep(QUIET_SECONDS)
    assert len(told(collector, PAGE)) == 1


@pytest.mark.slow
def test_the_watchdog_reaches_the_dead_man_route(
    alertmanager: Any, collector: Collector, eventually: Callable[..., None]
) -> None:
    observed = {"run": "cpu-demo", "observed": time.time(), "until": time.time() + 180}
    alive = Message("alive", "deadman", "deadman", "cpu-demo", time.time(), observed, "alive")
    notifier(alertmanager).send(alive, {})
    eventually(lambda: told(collector, DEAD_MAN))
    assert not told(collector, PAGE)
