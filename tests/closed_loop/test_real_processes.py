"""Every way of a plan with the real trainer and the real daemon as processes; the daemon dies at each state that it reaches."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from http_collector import Collector
from processes import PATIENCE, DaemonProcess, wait_for
from trainer_process import training

from runwatch.monitor.store.store import Transaction, open_store, sqlite_url
from runwatch.rules import Execution, ExecutionState

pytestmark = pytest.mark.slow

S = ExecutionState
CARRIED = [S.PROPOSED, S.APPROVED, S.REQUESTED]
NAN = "nan_batch@{step}:steps=10"
PACE = "slow_step@{step}:seconds={seconds}"


class Loop:
    """A run directory with both processes at work on it."""

    def __init__(self, run_dir: Path, trainer: subprocess.Popen[bytes], daemon: DaemonProcess) -> None:
        self.run_dir, self.trainer, self.daemon = run_dir, trainer, daemon

    @contextmanager
    def _store(self) -> Generator[Transaction]:
        with closing(open_store(sqlite_url(self.run_dir), "test")) as store, store.transaction() as tx:
            yield tx

    def execution(self, name: str) -> Execution | None:
        """It as the daemon's store has it."""
        with self._store() as tx:
            return next((one for one in tx.executions() if one.id == name), None)

    def follow(self, name: str, at: Mapping[ExecutionState, Callable[[], object]]) -> Execution:
        """Kill the daemon at each state in which the execution `name` is seen, do what `at` says of it, and start it again."""
        seen: set[ExecutionState] = set()
        until = time.monotonic() + PATIENCE
        while True:
            assert time.monotonic() < until, f"{name} never ended; seen {sorted(seen)}\n{self.daemon.text()[-2000:]}"
            execution = self.execution(name)
            if execution is None or execution.state in seen:
                time.sleep(0.02)
                continue
            seen.add(execution.state)
            self.daemon.end(signal.SIGKILL)
            at.get(execution.state, lambda: None)()
            self.daemon.start()
            if not execution.open:
                return execution

    def halt(self) -> None:
        """The trainer hangs."""
        self.trainer.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """The trainer hangs no longer."""
        self.trainer.send_signal(signal.SIGCONT)

    def decide(self, what: str, name: str) -> None:
        """Decide as a person does."""
        words = ["plan", what, str(self.run_dir), name, "--by", "ana", "--reason", "as agreed"]
        subprocess.run([sys.executable, "-P", "-m", "runwatch.monitor.cli", *words], check=True, capture_output=True)

    def hide_checkpoints(self) -> None:
        """Nothing to rewind to any more."""
        shutil.move(self.run_dir / "checkpoints", self.run_dir / "hidden")

    def restore_checkpoints(self) -> None:
        """All there again."""
        shutil.copytree(self.run_dir / "hidden", self.run_dir / "checkpoints", dirs_exist_ok=True)

    def went(self, name: str) -> list[str]:
        """The states of an execution in the audit log, in order."""
        with self._store() as tx:
            rows = [row.sentence for row in tx.audit_rows() if row.kind == "plan" and row.sentence.startswith(name)]
        states = [row.partition(" is ")[2].partition(":")[0].rstrip(".") for row in rows]
        return [state for state in states if state]

    def files(self, folder: str) -> set[str]:
        """The names in `control/requests` or `control/receipts`."""
        return {path.stem for path in (self.run_dir / "control" / folder).glob("*.json")}


@contextmanager
def looped(
    run_dir: Path, card: dict[str, Any], cache: str, receiver: str, *faults: str, **rules: Any
) -> Generator[Loop]:
    """Both processes on a run of `card` in which only `instability` acts, by `rules`."""
    run_dir.mkdir()
    names = ("early_divergence", "routing_collapse", "throughput_shortfall")
    nodes = {name: {"mode": "observe"} for name in names} | {"instability": {"cooldown_records": 20, **rules}}
    plan = card["plan"] | {"token_budget": 128 * 20_000, "checkpoint": {"every_steps": 10, "keep": 50}}
    (run_dir / "run.yaml").write_text(yaml.safe_dump(card | {"plan": plan, "nodes": nodes}))
    webhook = {"kind": "webhook", "url": receiver}
    with (
        training(run_dir, cache, *faults) as trainer,
        DaemonProcess(run_dir, tick_seconds=0.25, notify=[webhook]) as daemon,
    ):
        yield Loop(run_dir, trainer, daemon)


def told(receiver: Collector, name: str) -> list[tuple[str, str]]:
    """State and severity in the messages about an execution, each message once."""
    bodies = {one.headers["Idempotency-Key"]: json.loads(one.body) for one in receiver.requests}
    return [(one["payload"]["state"], one["payload"]["severity"]) for one in bodies.values() if one["subject"] == name]


def assert_gone(loop: Loop, receiver: Collector, name: str, states: list[ExecutionState]) -> None:
    """The execution went through `states`, each once, and a person was called at the end if one is needed."""
    assert loop.went(name) == [state.replace("_", " ") for state in states]
    assert (name in loop.files("requests")) == (S.REQUESTED in states)
    called = states[-1] in {S.EXPIRED, S.REJECTED, S.UNACKNOWLEDGED, S.UNVERIFIED}
    wait_for(
        f"the end of {name} is told",
        lambda: (states[-1].value, "critical" if called else "warning") in told(receiver, name),
    )
    seen = [state for state, _ in told(receiver, name)]
    assert len(seen) == len(set(seen)), "no state is told twice"


def test_a_plan_is_turned_down_then_rejected_then_not_acknowledged_then_carried_out(
    tmp_path: Path, tiny: dict[str, Any], jax_cache: str
) -> None:
    faults = [PACE.format(step=1, seconds=0.1), *(NAN.format(step=step) for step in range(45, 2000, 45))]
    with (
        Collector() as receiver,
        looped(tmp_path / "run", tiny, jax_cache, receiver.url, *faults, ack_seconds=15) as loop,
    ):
        first, second, third, fourth = (f"instability-{number:04d}" for number in range(1, 5))

        def halted(what: str, name: str) -> Callable[[], None]:
            """The trainer waits meanwhile: with the next good records the alarm ends, and the proposal with it."""
            return lambda: (loop.halt(), loop.decide(what, name))

        def without_checkpoints() -> None:
            loop.hide_checkpoints()
            loop.go_on()

        loop.follow(first, {S.PROPOSED: halted("reject", first), S.REFUSED: loop.go_on})
        loop.follow(
            second,
            {
                S.PROPOSED: halted("approve", second),
                S.REQUESTED: without_checkpoints,
                S.REJECTED: loop.restore_checkpoints,
            },
        )
        loop.follow(third, {S.PROPOSED: halted("approve", third), S.UNACKNOWLEDGED: loop.go_on})
        execution = loop.follow(fourth, {S.PROPOSED: halted("approve", fourth), S.REQUESTED: loop.go_on})
        assert_gone(loop, receiver, first, [S.PROPOSED, S.REFUSED])
        assert_gone(loop, receiver, second, [*CARRIED, S.REJECTED])
        assert_gone(loop, receiver, third, [*CARRIED, S.UNACKNOWLEDGED])
        assert_gone(loop, receiver, fourth, [*CARRIED, S.ACKNOWLEDGED, S.VERIFIED])
        assert loop.files("receipts") == {second, third, fourth}
        assert execution.receipt is not None
        assert execution.receipt.status == "applied"
        segment = max((loop.run_dir / "telemetry").glob("*.jsonl"))
        records = [json.loads(line) for line in segment.read_text().splitlines()]
        assert {one["attempt"] for one in records} == {"a0002"}, "the run went back once"


def test_an_effect_that_never_shows_calls_a_person(tmp_path: Path, tiny: dict[str, Any], jax_cache: str) -> None:
    faults = [PACE.format(step=35, seconds=0.3), NAN.format(step=45)]
    with (
        Collector() as receiver,
        looped(tmp_path / "run", tiny, jax_cache, receiver.url, *faults, mode="auto", verify_seconds=8) as loop,
    ):
        name = "instability-0001"
        wait_for("the receipt", lambda: loop.files("receipts"))
        loop.halt()
        loop.follow(name, {})
        assert_gone(loop, receiver, name, [*CARRIED, S.ACKNOWLEDGED, S.UNVERIFIED])


@pytest.mark.parametrize(("mode", "states"), [("observe", [S.OBSERVED]), ("confirm", [S.PROPOSED, S.EXPIRED])])
def test_a_plan_that_nobody_approves_is_noted_or_expires(
    mode: str, states: list[ExecutionState], tmp_path: Path, tiny: dict[str, Any], jax_cache: str
) -> None:
    faults = [PACE.format(step=1, seconds=0.05), "nan_batch@45:steps=1000"]
    with (
        Collector() as receiver,
        looped(tmp_path / "run", tiny, jax_cache, receiver.url, *faults, mode=mode, expires_seconds=4) as loop,
    ):
        loop.follow("instability-0001", {})
        assert_gone(loop, receiver, "instability-0001", states)
        assert not loop.files("receipts")
