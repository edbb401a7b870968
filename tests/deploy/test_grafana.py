"""The dashboards without a server: as generated, known to Grafana's own SDK key for key, in sound PromQL, and documented."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from runwatch.checks import all_checks
from runwatch.checks.signals import FAMILIES, VOCABULARY

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "deploy" / "grafana"
NAMES = ("run", "fleet", "daemon")
BOARDS: dict[str, dict[str, Any]] = {
    name: json.loads((GRAFANA / "dashboards" / f"{name}.json").read_text()) for name in NAMES
}
PROVISIONING = {path.stem + "/" + path.parent.name: path for path in (GRAFANA / "provisioning").rglob("*.yaml")}
BY_PLUGIN = {"titleFormat", "textFormat", "useValueForTime"}
"""Keys of an annotation that the Prometheus plugin reads and the SDK's annotation has no fields for."""


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every panel that draws something, those in folded rows too."""
    for panel in board["panels"]:
        if panel["type"] != "row":
            yield panel
        yield from panel.get("panels", ())


def queries(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Where each PromQL expression stands, and the expression."""
    for panel in panels(board):
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]
    for annotation in board["annotations"].get("list", ()):
        yield annotation["name"], annotation["expr"]


def substituted(expr: str, run: str = "demo", check: str = "finite") -> str:
    """The expression as Grafana sends it."""
    for name, value in {"$__rate_interval": "1m", "$run": run, "$check": check}.items():
        expr = expr.replace(name, value)
    return expr


def missing(ours: Any, theirs: Any, place: str = "") -> list[str]:
    """Where `theirs` lacks what `ours` has, or has another value."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            lost
            for key, value in ours.items()
            for lost in (missing(value, theirs[key], f"{place}.{key}") if key in theirs else [f"{place}.{key}"])
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = zip(ours, theirs, strict=True)
        return [lost for number, pair in enumerate(pairs) for lost in missing(*pair, f"{place}[{number}]")]
    return [] if ours == theirs else [f"{place}: {ours!r} became {theirs!r}"]


def reread(board: dict[str, Any]) -> dict[str, Any]:
    """The dashboard read and written again by Grafana's SDK."""
    register_default_plugins()
    return json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))


def test_what_is_committed_is_what_the_generator_writes() -> None:
    ran = subprocess.run(
        [sys.executable, GRAFANA / "generate.py", "--check"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, f"run deploy/grafana/generate.py: {ran.stdout}{ran.stderr}"


@pytest.mark.parametrize("name", NAMES)
def test_the_sdk_knows_every_key(name: str) -> None:
    lost = missing(BOARDS[name], reread(BOARDS[name]))
    assert [place for place in lost if place.rpartition(".")[2] not in BY_PLUGIN] == []


def test_a_misspelled_key_would_be_found() -> None:
    board = json.loads(json.dumps(BOARDS["run"]))
    board["panels"][0]["fieldConfig"]["defaults"]["unti"] = "s"
    assert ".panels[0].fieldConfig.defaults.unti" in missing(board, reread(board))


@pytest.mark.parametrize("name", NAMES)
def test_every_query_is_promql_over_documented_metrics(name: str) -> None:
    documented = set(re.findall(r"`(runwatch_\w+|process_\w+)`", (ROOT / "docs" / "metrics.md").read_text()))
    recorded = {
        rule["record"]
        for group in yaml.safe_load((ROOT / "deploy/prometheus/runwatch_records.yml").read_text())["groups"]
        for rule in group["rules"]
    }
    known = documented | recorded | {"up", "scrape_samples_scraped", "ALERTS"}
    for place, expr in queries(BOARDS[name]):
        promql_parser.parse(substituted(expr))
        without_labels = re.sub(r"\{[^}]*\}|\[[^]]*\]", "", expr)
        used = set(re.findall(r"[\w:]*runwatch_[\w:]+|process_\w+|\bup\b|scrape_\w+|ALERTS", without_labels))
        assert {metric.removesuffix("_bucket") for metric in used} <= known, place


@pytest.mark.parametrize("name", NAMES)
def test_signals_checks_and_settings_in_queries_exist(name: str) -> None:
    settings = {(check.name, field) for check in all_checks().values() for field in check.settings.model_fields}
    for place, expr in queries(BOARDS[name]):
        for signal in re.findall(r'signal="([^"]+)"', expr):
            assert signal in VOCABULARY, place
        for family in re.findall(r'signal=~"([^"]+)/\.\*"', expr):
            assert family in FAMILIES, place
        for pair in re.findall(r'check="([^"]+)", setting="([^"]+)"', expr):
            assert pair in settings, place


@pytest.mark.parametrize("name", NAMES)
def test_a_panel_says_what_it_shows_in_which_unit_and_lies_free(name: str) -> None:
    board = BOARDS[name]
    for panel in panels(board):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["type"] == "table" or panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        names = [target["refId"] for target in panel["targets"]]
        assert len(set(names)) == len(names)
    assert len({panel["id"] for panel in panels(board)}) == len(list(panels(board)))
    taken = [
        (x, y)
        for one in board["panels"]
        for x in range(one["gridPos"]["x"], one["gridPos"]["x"] + one["gridPos"]["w"])
        for y in range(one["gridPos"]["y"], one["gridPos"]["y"] + one["gridPos"]["h"])
    ]
    assert len(set(taken)) == len(taken), "two panels overlap"
    assert max(x for x, _ in taken) < 24


@pytest.mark.parametrize("name", NAMES)
def test_dashboards_link_to_each_other_and_offer_source_and_run(name: str) -> None:
    board = BOARDS[name]
    assert board["uid"] == f"runwatch-{name}"
    assert [link["tags"] for link in board["links"]] == [["runwatch"]]
    assert "runwatch" in board["tags"]
    assert {"datasource", "run"} <= {one["name"] for one in board["templating"]["list"]}


def test_the_run_dashboard_shows_every_check_and_each_signal_of_the_contract_that_moves() -> None:
    asked = " ".join(expr for _, expr in queries(BOARDS["run"]))
    for signal in (
        *("train/loss", "eval/loss", "optim/grad_norm", "train/z_loss", "optim/learning_rate", "moe/drop_rate"),
        *("moe/load_max_vio", "moe/load_entropy", "moe/dead_experts", "moe/router_bias_max"),
        *("throughput/mfu", "throughput/tokens_per_second", "data/mixture/"),
    ):
        assert signal in asked
    assert 'runwatch_check_level{run="$run"}' in asked


def test_limits_of_alerts_in_the_daemon_dashboard_are_those_of_the_rules() -> None:
    rules = (ROOT / "deploy/prometheus/runwatch_alerts.yml").read_text()
    drawn = {
        target["legendFormat"].removesuffix(" after"): re.findall(r"vector\((\d+)\)", target["expr"])
        for panel in panels(BOARDS["daemon"])
        for target in panel["targets"]
        if target["legendFormat"].endswith(" after")
    }
    assert set(drawn) == {"RunwatchTickLate", "RunwatchRunSilent", "RunwatchOutboxStuck"}
    for alert, value in drawn.items():
        expr = rules.split(f"alert: {alert}\n")[1].split("for:")[0]
        assert f"> {value[0]}\n" in expr


def test_grafanas_alerts_are_the_rules_of_prometheus() -> None:
    [ours] = yaml.safe_load((GRAFANA / "provisioning/alerting/runwatch.yaml").read_text())["groups"]
    [theirs] = yaml.safe_load((ROOT / "deploy/prometheus/runwatch_alerts.yml").read_text())["groups"]
    sources = yaml.safe_load((GRAFANA / "provisioning/datasources/runwatch.yaml").read_text())["datasources"]
    assert [rule["title"] for rule in ours["rules"]] == [rule["alert"] for rule in theirs["rules"]]
    for one, other in zip(ours["rules"], theirs["rules"], strict=True):
        query, condition = one["data"]
        assert query["model"]["expr"] == other["expr"].strip()
        assert query["datasourceUid"] in {source["uid"] for source in sources}
        assert (one["condition"], condition["model"]["expression"]) == ("B", "$A == $A")
        assert one["labels"] == other["labels"]
        assert "$value " not in json.dumps(one["annotations"])
        assert len(one["uid"]) <= 40
    assert len({rule["uid"] for rule in ours["rules"]}) == len(ours["rules"])


@pytest.mark.parametrize("path", PROVISIONING.values(), ids=PROVISIONING.keys())
def test_provisioning_has_version_1_and_dashboards_come_from_files(path: Path) -> None:
    given = yaml.safe_load(path.read_text())
    assert given["apiVersion"] == 1
    for provider in given.get("providers", ()):
        assert provider["type"] == "file"
        assert provider["options"]["path"].startswith("/")
