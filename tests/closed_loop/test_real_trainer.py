"""Each node against the real trainer: a real fault, the plan that was written for it, and its effect in the telemetry."""

import json
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from trainer_process import training

from runwatch.monitor.daemon.settings import DaemonConfig
from runwatch.monitor.daemon.watched_run import Watch
from runwatch.monitor.notify.outbox import Outbox
from runwatch.monitor.store.store import open_store, sqlite_url
from runwatch.rules import Execution, ExecutionState

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PATIENCE = 240.0
SETTLED = {"token_drop": {"settle_steps": 40}, "expert_balance": {"settle_steps": 40}}


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    """A daemon's watch on a run of the demo's card; what is mailed goes nowhere."""
    store = open_store(sqlite_url(tmp_path), "real")
    yield Watch(tmp_path, store, Outbox(store, {}), DaemonConfig(), "test")
    store.close()


def write_card(run_dir: Path, node: str, **rules: Any) -> dict[str, Any]:
    """The demo's card with one node that acts by itself; the others only note what they would do."""
    card = yaml.safe_load((ROOT / "trainer" / "cards" / "cpu.yaml").read_text())
    names = ("early_divergence", "instability", "routing_collapse", "throughput_shortfall")
    card["nodes"] = {name: {"mode": "observe"} for name in names} | {node: {"mode": "auto", **rules}}
    card["plan"] |= {"checkpoint": {"every_steps": 20, "keep": 6}, "eval": {"every_steps": 60, "sequences": 8}}
    card["checks"] = SETTLED
    (run_dir / "run.yaml").write_text(yaml.safe_dump(card))
    return card


def carried_out(watch: Watch, node: str, trainer: subprocess.Popen[bytes]) -> Execution:
    """Tick until the node's execution has ended."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        watch.tick(time.time())
        found = [
            one
            for one in (watch.last_tick.state.executions if watch.last_tick else ())
            if one.node == node and not one.open
        ]
        if found:
            return found[0]
        if trainer.poll() is not None:
            break
        time.sleep(0.1)
    log = (watch.run_dir / "trainer.log").read_text()[-2000:]
    pytest.fail(f"never happened; {watch.last_tick and watch.last_tick.state.executions}\n{log}")


def records(run_dir: Path) -> list[dict[str, Any]]:
    lines = [line for path in sorted((run_dir / "telemetry").glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [record for record in map(json.loads, lines) if record["phase"] == "train"]


def after_receipt(execution: Execution, run_dir: Path) -> list[dict[str, Any]]:
    """The train records under the new plan."""
    assert execution.state is ExecutionState.VERIFIED, execution.reason
    assert execution.receipt is not None
    return [one for one in records(run_dir) if one["time"] > execution.receipt.time]


def test_bad_data_inside_the_window_shortens_the_budget(watch: Watch, jax_cache: str) -> None:
    card = write_card(watch.run_dir, "early_divergence", budget_fraction=0.4)
    with training(watch.run_dir, jax_cache, "label_shuffle@190:source=code") as trainer:
        execution = carried_out(watch, "early_divergence", trainer)
    seen = after_receipt(execution, watch.run_dir)
    budget = card["plan"]["token_budget"]
    assert {one["plan/token_budget"] for one in seen} == {0.4 * budget}
    assert execution.receipt.tokens <= 0.25 * budget
    assert execution.forecast is not None
    old, new = execution.forecast.old, execution.forecast.new
    assert old.loss < new.loss, "fewer tokens cost loss"
    assert new.low < new.loss < new.high


def test_a_batch_of_nan_is_rewound_and_skipped(watch: Watch, jax_cache: str) -> None:
    write_card(watch.run_dir, "instability")
    with training(watch.run_dir, jax_cache, "nan_batch@75") as trainer:
        execution = carried_out(watch, "instability", trainer)
    seen = after_receipt(execution, watch.run_dir)
    rewind = execution.actions[0]
    assert rewind.checkpoint_step == 60, "the newest that is older than the onset by ten steps"
    assert (seen[0]["attempt"], seen[0]["step"]) == ("a0002", 61)
    assert all(isinstance(one["train/loss"], float) for one in seen), "the bad batch does not come again"
    assert seen[-1]["plan/lr_scale"] == pytest.approx(0.8)
    assert watch.last_tick.state.alerts["finite"].at.attempt == 1


def test_a_router_that_runs_away_is_led_back(watch: Watch, jax_cache: str) -> None:
    write_card(watch.run_dir, "routing_collapse", critical_records=15)
    with training(watch.run_dir, jax_cache, "bias_runaway@60:rate=1.0") as trainer:
        execution = carried_out(watch, "routing_collapse", trainer)
    seen = after_receipt(execution, watch.run_dir)
    assert (seen[-1]["plan/context_length"], seen[-1]["plan/capacity_factor"]) == (64, pytest.approx(1.4375))
    assert seen[-1]["plan/balance_rate"] == pytest.approx(0.04)


def test_a_run_that_is_too_slow_for_its_deadline_is_fitted_to_it(watch: Watch, jax_cache: str) -> None:
    """A step takes 0.1 s or more from step 5 on: 2,400 of them end a minute after the deadline at the earliest."""
    card = write_card(watch.run_dir, "throughput_shortfall", min_budget_fraction=0.05)
    began = time.time()
    card["plan"]["deadline"] = datetime.fromtimestamp(began + 180, UTC).isoformat()
    (watch.run_dir / "run.yaml").write_text(yaml.safe_dump(card))
    with training(watch.run_dir, jax_cache, "slow_step@5:seconds=0.1") as trainer:
        execution = carried_out(watch, "throughput_shortfall", trainer)
    seen = after_receipt(execution, watch.run_dir)
    budget = int(seen[-1]["plan/token_budget"])
    peak = max(one["throughput/tokens_per_second"] for one in records(watch.run_dir))
    assert budget < card["plan"]["token_budget"]
    assert budget < peak * 180
    assert "the slow end of the range" in execution.effects[0]
