import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from http_collector import Collector

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus"


def rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((RULES / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


ALERTS = rules("runwatch_alerts.yml")


def test_promtool_accepts_rules_and_configuration(find_tool: Callable[[str], str]) -> None:
    promtool = find_tool("promtool")
    subprocess.run([promtool, "check", "rules", *RULES.glob("runwatch_[ar]*.yml")], check=True, capture_output=True)
    subprocess.run([promtool, "check", "config", RULES / "prometheus.yml"], check=True, capture_output=True)


def test_the_rules_fire_when_they_should(find_tool: Callable[[str], str]) -> None:
    command = [find_tool("promtool"), "test", "rules", "runwatch_tests.yml"]
    ran = subprocess.run(command, cwd=RULES, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_alert_and_every_record_has_a_test_of_promtool() -> None:
    tests = yaml.safe_load((RULES / "runwatch_tests.yml").read_text())["tests"]
    expected = "\n".join(
        [
            sample["labels"]
            for test in tests
            for one in test.get("promql_expr_test", ())
            for sample in one["exp_samples"]
        ]
        + [one["alertname"] for test in tests for one in test.get("alert_rule_test", ())]
        + [one["expr"] for test in tests for one in test.get("promql_expr_test", ())]
    )
    names = [rule.get("alert") or rule["record"] for rule in ALERTS + rules("runwatch_records.yml")]
    assert [name for name in names if name not in expected] == []


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_has_severity_summary_description_and_a_runbook(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning", "none")
    assert alert["annotations"]["summary"].endswith(".")
    assert "{{" not in alert["annotations"]["summary"]
    assert alert["annotations"]["description"].endswith(".")
    anchor = alert["annotations"]["runbook_url"].rpartition("runbooks.md#")[2]
    assert anchor == alert["alert"].lower()
    sections = (RULES / "runbooks.md").read_text().split("\n## ")
    [section] = [part for part in sections if part.startswith(f"{alert['alert']}\n")]
    for heading in ("Meaning", "Impact", "Diagnosis", "Mitigation"):
        assert f"**{heading}:**" in section


def test_every_metric_in_a_rule_is_documented() -> None:
    documented = set(re.findall(r"`(runwatch_\w+)`", (ROOT / "docs" / "metrics.md").read_text()))
    used = {
        name.removesuffix("_bucket")
        for rule in ALERTS + rules("runwatch_records.yml")
        for name in re.findall(r"(?<![:\w])runwatch_\w+", rule["expr"])
    }
    assert used
    assert used <= documented


@pytest.mark.slow
def test_a_daemon_that_is_gone_is_paged_by_the_real_chain(
    tmp_path: Path,
    prometheus: Callable[[Path], Any],
    alertmanager: Any,
    collector: Collector,
    eventually: Callable[..., None],
) -> None:
    config = (RULES / "prometheus.yml").read_text().replace("15s", "1s")
    config = config.replace("localhost:9093", alertmanager.url.removeprefix("http://")).replace(":9464", ":9")
    (tmp_path / "prometheus.yml").write_text(config)
    for name in ("runwatch_alerts.yml", "runwatch_records.yml"):
        (tmp_path / name).write_text((RULES / name).read_text().replace("for: 1m", "for: 1s"))
    server = prometheus(tmp_path / "prometheus.yml")

    eventually(lambda: {request.path for request in collector.requests} == {"/page", "/dead-man"})
    pages = [json.loads(request.body) for request in collector.requests if request.path == "/page"]
    # On a busy machine Alertmanager may page again, once its short alert has timed out before Prometheus sends it anew.
    assert {page["groupLabels"]["alertname"] for page in pages} == {"RunwatchDaemonGone"}
    health = httpx.get(f"{server.url}/api/v1/rules").json()["data"]["groups"]
    assert {rule["health"] for group in health for rule in group["rules"]} == {"ok"}
