"""A real Prometheus scrapes real daemons and exporters beside runs in real time, and answers what the dashboards ask."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import live
import pytest
from prometheus_client.parser import text_string_to_metric_families

from runwatch.checks import all_checks
from runwatch.monitor.card.context import check_settings
from runwatch.monitor.card.run_card import load_card

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PATIENCE = 120.0

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Observed:
    """A Prometheus, and the two runs under it by name: the trainer and the ports of its daemon and its exporter."""

    url: str
    trainers: dict[str, live.LiveTrainer]
    ports: dict[str, tuple[int, int]]

    def ask(self, expr: str) -> list[dict[str, Any]]:
        """The series that an expression has now."""
        answer = httpx.post(f"{self.url}/api/v1/query", data={"query": expr}, timeout=30).json()
        assert answer["status"] == "success", f"{expr}: {answer}"
        return answer["data"]["result"]

    def value(self, expr: str) -> float:
        """The value of the expression's first series."""
        return float(self.ask(expr)[0]["value"][1])

    def metrics(self, run: str, which: int) -> str:
        """What the daemon (0) or the exporter (1) of a run serves."""
        return httpx.get(f"http://127.0.0.1:{self.ports[run][which]}/metrics", timeout=30).text


def come_true(what: Callable[[], Any]) -> Any:
    """What is true within a generous time; at its end the last answer."""
    until = time.monotonic() + PATIENCE
    while not (found := what()) and time.monotonic() < until:
        time.sleep(0.5)
    return found


@pytest.fixture(scope="module")
def observed(
    tmp_path_factory: pytest.TempPathFactory, prometheus_at: Callable[[Path], Any], find_tool: Callable[[str], str]
) -> Iterator[Observed]:
    """Two runs: `shifted` leaves its curve and obeys the plan; `dropping` drops tokens and asks first."""
    find_tool("prometheus")
    root = tmp_path_factory.mktemp("observed")
    trainers = {
        "shifted": live.prepared(root, "shifted", fault=60),
        "dropping": live.prepared(root, "dropping", fault=240, shift=0.0, shifts={"moe/drop_rate": 0.3}),
    }
    nowhere = {"kind": "webhook", "url": f"http://127.0.0.1:{live.free_port()}/"}
    for trainer in trainers.values():
        (trainer.run_dir / "runwatch.yaml").write_text(json.dumps({"notify": [nowhere]}))
    ports = {name: (live.free_port(), live.free_port()) for name in trainers}
    watched = {trainers[name].run_dir: pair for name, pair in ports.items()}
    with live.running(list(trainers.values())), live.watched(watched):
        started = Observed(prometheus_at(live.scrape(root, list(ports.values()))).url, trainers, ports)
        assert come_true(lambda: started.ask("sum(up) == 4"))
        yield started


def asked(runs: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Every query of the dashboards, and where it stands, asked of the last minutes and of either run.

    A band ends with the plan that changes the run, and marks come and go: they must have been there.
    """
    for path in sorted((DEPLOY / "grafana" / "dashboards").glob("*.json")):
        board = json.loads(path.read_text())
        panels = [one for row in board["panels"] for one in (row, *row.get("panels", ()))]
        found = [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", ())]
        found += [(mark["name"], mark["expr"]) for mark in board["annotations"].get("list", ())]
        chosen = runs if path.stem == "run" else (".*",)
        for title, expr in found:
            either = " or ".join(f"({filled(expr, run)})" for run in chosen)
            yield f"{path.stem}: {title}: {expr}", f"last_over_time(({either})[5m:1s])"


def filled(expr: str, run: str) -> str:
    """The expression with Grafana's variables put in."""
    for name, value in {"$__rate_interval": "15s", "$run": run, "$check": "token_drop"}.items():
        expr = expr.replace(name, value)
    return expr


def test_every_query_of_the_dashboards_returns_series(observed: Observed) -> None:
    assert come_true(lambda: observed.ask('runwatch_run_attempts{run="shifted"}'))
    observed.trainers["shifted"].restart()
    unanswered = dict(asked(("shifted", "dropping")))
    assert len(unanswered) > 80
    until = time.monotonic() + PATIENCE
    while unanswered and time.monotonic() < until:
        unanswered = {place: expr for place, expr in unanswered.items() if not observed.ask(expr)}
        time.sleep(0.5)
    assert list(unanswered) == []


def test_the_band_ends_where_the_check_has_no_curve_any_more(observed: Observed) -> None:
    assert come_true(lambda: observed.ask('runwatch_plan_state_timestamp_seconds{run="shifted", state="verified"}'))
    assert come_true(lambda: not observed.ask('runwatch_run_expected_loss{run="shifted"}'))
    assert come_true(lambda: len(observed.ask('runwatch_run_expected_loss{run="dropping"}')) == 3)


def test_prometheus_sees_both_exporters_and_they_agree_on_the_run(observed: Observed) -> None:
    assert {one["metric"]["job"] for one in observed.ask("up")} == {"runwatch", "runwatch-trainer"}
    lag = 'runwatch_trainer_step{run="shifted"} - on (run) runwatch_run_step'
    assert come_true(lambda: abs(observed.value(lag)) <= 60)
    for name in ("train/loss", "optim/grad_norm", "moe/drop_rate"):
        assert come_true(lambda name=name: observed.ask(f'runwatch_signal{{run="dropping", signal="{name}"}}'))
        assert come_true(lambda name=name: observed.ask(f'runwatch_trainer_signal{{run="dropping", signal="{name}"}}'))


def test_checks_nodes_plans_and_counters_reach_prometheus(observed: Observed) -> None:
    assert come_true(lambda: observed.value('count(runwatch_check_level{run="shifted"})') == len(all_checks()))
    assert come_true(lambda: observed.ask('runwatch_check_level{run="dropping", check="token_drop"} == 2'))
    verified = 'runwatch_plan_state_timestamp_seconds{run="shifted", plan="shorten_budget", state="verified"}'
    assert come_true(lambda: observed.ask(verified))
    assert abs(observed.value(verified) - time.time()) < 2 * PATIENCE
    assert come_true(lambda: observed.value('increase(runwatch_telemetry_records_total{run="shifted"}[15s])') > 0)
    assert come_true(lambda: observed.value('runwatch_outbox_pending{run="shifted"}') > 0)
    health = come_true(lambda: httpx.get(f"{observed.url}/api/v1/rules").json()["data"]["groups"])
    assert {rule["health"] for group in health for rule in group["rules"]} == {"ok"}


def test_the_limit_lines_are_the_settings_that_the_checks_judge_by(observed: Observed) -> None:
    told = come_true(lambda: observed.ask('runwatch_check_setting{run="shifted"}'))
    shown = {(one["metric"]["check"], one["metric"]["setting"]): float(one["value"][1]) for one in told}
    card = load_card(observed.trainers["shifted"].run_dir / "run.yaml")
    judged_by = {
        (check, name): float(value)
        for check, settings in check_settings(card).items()
        for name, value in settings
        if isinstance(value, int | float)
    }
    assert shown == judged_by
    assert shown["throughput", "mfu_floor"] == live.FLOORS["throughput"]["mfu_floor"]


@pytest.mark.parametrize("which", [0, 1], ids=["daemon", "exporter"])
def test_promtool_has_nothing_to_say_of_the_metrics(
    observed: Observed, which: int, find_tool: Callable[[str], str]
) -> None:
    text = come_true(lambda: "\nrunwatch_" in (found := observed.metrics("shifted", which)) and found)
    ran = subprocess.run(
        [find_tool("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")
    assert len([line for line in text.splitlines() if not line.startswith("#")]) < 2000


def test_the_exporters_metrics_are_the_documented_ones(observed: Observed) -> None:
    text = come_true(lambda: "train/loss" in (found := observed.metrics("shifted", 1)) and found)
    documented = {
        line.split("`")[1]
        for line in (ROOT / "docs" / "metrics.md").read_text().splitlines()
        if line.startswith("| `runwatch_trainer_")
    }
    assert {family.name for family in text_string_to_metric_families(text)} == documented
