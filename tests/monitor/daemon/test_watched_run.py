"""A watched run from the first record to a verified plan, in each mode, and with everything that may be wrong around it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scripted
from scripted import ScriptedTrainer

from runwatch.checks import Signals, Verdicts
from runwatch.monitor.act.approvals import DecisionError, decide, declare, switch_plans
from runwatch.monitor.card.run_card import Declaration
from runwatch.monitor.daemon.watched_run import Watch
from runwatch.monitor.notify import Kind, Message, Notifier, SendError, Sent
from runwatch.monitor.store.audit import read_mirror
from runwatch.rules import ExecutionState

OpenWatch = Callable[..., Watch]
STEPS = 20


def executions(watch: Watch) -> list[str]:
    """State of every execution, oldest first."""
    with watch.store.transaction() as tx:
        return [f"{one.id} {one.state.value}" for one in tx.executions()]


def sentences(watch: Watch, kind: str) -> list[str]:
    with watch.store.transaction() as tx:
        return [row.sentence for row in tx.audit_rows() if row.kind == kind]


def conditions(watch: Watch) -> dict[str, str]:
    return {one["kind"]: one["message"] for one in watch.conditions.listed()}


def until(trainer: ScriptedTrainer, watch: Watch, state: ExecutionState | None, ticks: int = 20) -> None:
    """Train and tick until the newest execution is in `state`."""
    for _ in range(ticks):
        watch.tick(trainer.train(STEPS))
        found = executions(watch)
        if found and state is not None and found[-1].endswith(f" {state.value}"):
            return
    assert state is None, f"never {state}: {executions(watch)}"


def with_nodes(trainer: ScriptedTrainer, **settings: Any) -> None:
    (trainer.run_dir / "run.yaml").write_text(json.dumps(scripted.card({"early_divergence": settings})))


def requests(trainer: ScriptedTrainer) -> list[str]:
    return sorted(path.name for path in (trainer.run_dir / "control" / "requests").glob("*"))


def test_auto_carries_the_plan_out_and_verifies_it(trainer: ScriptedTrainer, open_watch: OpenWatch) -> None:
    watch = open_watch(trainer.run_dir)
    until(trainer, watch, ExecutionState.VERIFIED)
    assert requests(trainer) == ["early_divergence-0001.json"]
    assert trainer.plan["token_budget"] == scripted.BUDGET // 2 // (100 * scripted.TOKENS) * (100 * scripted.TOKENS)
    status = watch.status
    assert status is not None
    assert status["plans"][0]["state"] == "verified"
    assert [mark["event"] for mark in status["plans"][0]["history"]][:3] == ["proposed", "decided", "requested"]
    assert status["run"]["token_budget"] == trainer.plan["token_budget"]
    assert status["run"]["declared_budget"] == scripted.BUDGET
    written = json.loads((trainer.run_dir / ".runwatch" / "status.json").read_text())
    assert written == json.loads(json.dumps(status))


def test_observe_writes_down_what_would_be_done_and_does_nothing(
    trainer: ScriptedTrainer, open_watch: OpenWatch
) -> None:
    with_nodes(trainer, mode="observe")
    watch = open_watch(trainer.run_dir)
    until(trainer, watch, ExecutionState.OBSERVED)
    assert requests(trainer) == []


def test_confirm_waits_for_a_person_and_carries_out_what_was_approved(
    trainer: ScriptedTrainer, open_watch: OpenWatch
) -> None:
    with_nodes(trainer, mode="confirm")
    watch = open_watch(trainer.run_dir)
    until(trainer, watch, ExecutionState.PROPOSED)
    watch.tick(trainer.train(STEPS))
    assert requests(trainer) == []
    told = decide(watch.store, "early_divergence-0001", approved=True, by="ada", reason="the curve is right")
    assert told == "early_divergence-0001 (shorten_budget) was approved by ada: the curve is right"
    with pytest.raises(DecisionError, match="already been decided"):
        decide(watch.store, "early_divergence-0001", approved=False, by="bob", reason="no")
    until(trainer, watch, ExecutionState.VERIFIED)
    with pytest.raises(DecisionError, match="can no longer be approved or rejected"):
        decide(watch.store, "early_divergence-0001", approved=False, by="bob", reason="no")


def test_a_rejected_plan_is_not_carried_out(trainer: ScriptedTrainer, open_watch: OpenWatch) -> None:
    with_nodes(trainer, mode="confirm")
    watch = open_watch(trainer.run_dir)
    until(trainer, watch, ExecutionState.PROPOSED)
    decide(watch.store, "early_divergence-0001", approved=False, by="ada", reason="the data loader is at fault")
    until(trainer, watch, ExecutionState.REFUSED)
    assert requests(trainer) == []


def test_nobody_decides_and_the_proposal_expires(trainer: ScriptedTrainer, open_watch: OpenWatch) -> None:
    with_nodes(trainer, mode="confirm", expires_seconds=60)
    watch = open_watch(trainer.run_dir)
    until(trainer, watch, ExecutionState.EXPIRED)
    assert requests(trainer) == []


def test_the_kill_switch_holds_across_a_restart_until_it_is_lifted(
    trainer: ScriptedTrainer, open_watch: OpenWatch
) -> None:
    watch = open_watch(trainer.run_dir)
    switch_plans(watch.store, enabled=False, by="ada", reason="maintenance")
    until(trainer, watch, None, ticks=10)
    again = open_watch(trainer.run_dir)
    watch.tick(trainer.train(STEPS))
    again.tick(trainer.clock)
    again.tick(trainer.clock)
    assert executions(again) == []
    assert again.status is not None
    assert not again.status["plans_enabled"]
    switch_plans(again.store, enabled=True, by="ada", reason="over")
    until(trainer, again, ExecutionState.VERIFIED)


def test_a_trainer_that_does_not_answer_is_escalated(trainer: ScriptedTrainer, open_watch: OpenWatch) -> None:
    with_nodes(trainer, mode="auto", ack_seconds=30)
    trainer.obeys = False
    watch = open_watch(trainer.run_dir)
    until(trainer, watch, ExecutionState.UNACKNOWLEDGED)


def test_a_declared_change_does_not_fire_and_stands_in_the_audit_log(
    trainer: ScriptedTrainer, open_watch: OpenWatch
) -> None:
    watch = open_watch(trainer.run_dir)
    declare(watch.store, Declaration(step=trainer.fault, signals=("train/loss",), reason="new data"), "ada")
    watch.tick(trainer.train(STEPS))
    until(trainer, watch, None, ticks=6)
    assert [one for one in sentences(watch, "incident") if "loss_spike" in one] == []
    assert sentences(watch, "declared") == ["ada declared that train/loss will change at step 120: new data"]


def test_without_a_card_checks_judge_and_no_plan_is_made(trainer: ScriptedTrainer, open_watch: OpenWatch) -> None:
    (trainer.run_dir / "run.yaml").unlink()
    watch = open_watch(trainer.run_dir)
    until(trainer, watch, None, ticks=9)
    assert "no plan can be proposed" in conditions(watch)["card"]
    assert len(sentences(watch, "condition")) == 1
    assert any("loss_spike" in one for one in sentences(watch, "incident"))
    assert executions(watch) == []


def test_a_card_amended_while_it_runs_is_audited_and_a_broken_one_changes_nothing(
    trainer: ScriptedTrainer, open_watch: OpenWatch
) -> None:
    watch = open_watch(trainer.run_dir)
    watch.tick(trainer.train(STEPS))
    (trainer.run_dir / "run.yaml").write_text("version: 1\nrun: {nam: x}\n")
    watch.tick(trainer.train(STEPS))
    assert "did you mean name" in conditions(watch)["card"]
    assert watch.status is not None
    assert watch.status["run"]["declared_budget"] == scripted.BUDGET
    with_nodes(trainer, mode="observe")
    watch.tick(trainer.train(STEPS))
    assert "card" not in conditions(watch)
    assert [one.split(" (")[0] for one in sentences(watch, "card")] == [
        "The run card was read",
        "The run card was amended",
    ]
    assert watch.status["nodes"][0]["mode"] == "observe"


def test_a_check_that_raises_keeps_its_alert_and_the_others_go_on(
    trainer: ScriptedTrainer, open_watch: OpenWatch
) -> None:
    def broken(_signals: Signals, _settings: object) -> Verdicts:
        raise ZeroDivisionError("division by zero")

    watch = open_watch(trainer.run_dir)
    watch.tick(trainer.train(100))
    whole = watch.judge.checks
    watch.judge.checks = {**whole, "grad_norm": replace(whole["grad_norm"], evaluate=broken)}
    watch.tick(trainer.train(60))
    assert "ZeroDivisionError" in conditions(watch)["check grad_norm"]
    assert watch.last_tick is not None
    assert watch.last_tick.state.alerts["grad_norm"].at is not None
    assert watch.last_tick.state.alerts["grad_norm"].at.step == 100
    assert any("loss_spike" in one for one in sentences(watch, "incident"))
    watch.judge.checks = whole
    watch.tick(trainer.train(STEPS))
    assert "check grad_norm" not in conditions(watch)
    assert sentences(watch, "condition")[-1].startswith("Resolved: the check grad_norm raised")


def test_of_two_daemons_one_acts_and_the_other_takes_over(trainer: ScriptedTrainer, open_watch: OpenWatch) -> None:
    first = open_watch(trainer.run_dir, holder="first")
    second = open_watch(trainer.run_dir, holder="second")
    first.tick(trainer.train(STEPS))
    assert second.tick(trainer.clock) == "standing by"
    later = trainer.train(100)
    assert second.tick(later) == "began again where the store stands"
    second.tick(later)
    assert second.status is not None
    assert second.status["run"]["step"] == trainer.step
    assert first.tick(later) == "standing by"


def test_malformed_lines_and_receipts_are_told_with_their_place(
    trainer: ScriptedTrainer, open_watch: OpenWatch
) -> None:
    watch = open_watch(trainer.run_dir)
    trainer.train(3)
    with (trainer.run_dir / "telemetry" / "a0001.jsonl").open("a") as file:
        file.write('{"step": "four"}\n')
    (trainer.run_dir / "control" / "receipts" / "x-0001.json").write_text('{"version": 1}')
    watch.tick(trainer.train(3))
    held = conditions(watch)
    assert "telemetry/a0001.jsonl:4: step is four" in held["telemetry"]
    assert "control/receipts/x-0001.json" in held["receipt x-0001.json"]
    assert watch.status is not None
    assert watch.status["health"] == "degraded"


@pytest.mark.parametrize("name", ["status.json", "audit.jsonl"])
def test_a_file_that_cannot_be_written_fails_the_tick_and_the_next_one_goes_on(
    name: str, trainer: ScriptedTrainer, open_watch: OpenWatch
) -> None:
    watch = open_watch(trainer.run_dir)
    (trainer.run_dir / ".runwatch" / name).mkdir()
    for _ in range(2):
        with pytest.raises(OSError, match="directory"):
            watch.tick(trainer.train(STEPS))
    (trainer.run_dir / ".runwatch" / name).rmdir()
    watch.tick(trainer.clock)
    assert watch.status is not None
    assert watch.status["run"]["step"] == 2 * STEPS
    assert len(read_mirror(trainer.run_dir / ".runwatch" / "audit.jsonl")) == len(watch.status["audit"]) > 0


def test_a_directive_that_cannot_be_written_is_written_by_a_later_tick(
    trainer: ScriptedTrainer, open_watch: OpenWatch
) -> None:
    control = trainer.run_dir / "control" / "requests"
    control.write_text("in the way")
    trainer.obeys = False
    watch = open_watch(trainer.run_dir)
    watch.tick(trainer.train(180))
    with pytest.raises(OSError, match="xists"):
        watch.tick(trainer.train(STEPS))
    control.unlink()
    trainer.obeys = True
    until(trainer, watch, ExecutionState.VERIFIED)


def test_a_clock_set_back_puts_in_no_row_twice(trainer: ScriptedTrainer, open_watch: OpenWatch) -> None:
    watch = open_watch(trainer.run_dir)
    now = trainer.train(STEPS)
    for clock in (now + 100, now + 40, now + 90, now + 120):
        watch.tick(clock)
    ticks = watch.judge.context.time[watch.judge.context.tick]
    assert len(set(ticks)) == len(ticks) > 3
    again = open_watch(trainer.run_dir)
    assert list(again.judge.context.time) == list(watch.judge.context.time)


def test_an_incident_opens_once_and_its_messages_have_keys_of_their_own(
    trainer: ScriptedTrainer, open_watch: OpenWatch
) -> None:
    watch = open_watch(trainer.run_dir)
    keys: list[str] = []
    for _ in range(20):
        watch.tick(trainer.train(STEPS))
        assert watch.last_tick is not None
        keys += [message.key for message in watch.last_tick.messages]
    assert len(keys) == len(set(keys))
    assert "scripted/ladder_deviation-0001/firing-critical" in keys
    assert "scripted/ladder_deviation-0001/resolved-critical" in keys


def test_a_run_that_is_down_tells_only_that(trainer: ScriptedTrainer, open_watch: OpenWatch) -> None:
    trainer.fault = 10**9
    watch = open_watch(trainer.run_dir)
    watch.tick(trainer.train(200))
    told: list[str] = []
    for minutes in range(1, 400, 20):
        watch.tick(trainer.clock + 60 * minutes)
        assert watch.last_tick is not None
        told += [message.subject for message in watch.last_tick.messages]
    assert set(told) == {"progress-0001"}


def test_an_empty_directory_is_watched_and_only_what_is_ours_is_written_there(
    tmp_path: Path, open_watch: OpenWatch
) -> None:
    (tmp_path / "empty").mkdir()
    watch = open_watch(tmp_path / "empty")
    watch.tick(scripted.START)
    assert watch.status is not None
    assert watch.status["sentence"] == "No telemetry yet."
    assert {path.name for path in (tmp_path / "empty").iterdir()} == {".runwatch"}


def test_a_receiver_that_takes_nothing_is_a_condition_until_it_does(
    trainer: ScriptedTrainer, open_watch: OpenWatch
) -> None:
    answers: list[SendError] = [SendError("down")] * 3

    def refuse(_message: Message, remembered: dict[str, Any]) -> Sent:
        if answers:
            raise answers.pop()
        return Sent(remembered)

    kinds: frozenset[Kind] = frozenset({"incident_opened"})
    watch = open_watch(trainer.run_dir, notifiers={"pager": Notifier("pager", kinds, refuse)})
    now = trainer.train(200)
    clock = [now]
    watch.outbox._clock = lambda: clock[0]  # noqa: SLF001 - no test waits for a backoff
    watch.tick(now)
    assert "receiver pager" not in conditions(watch)
    for _ in range(2):
        clock[0] += 60
        watch.outbox.deliver("pager")
    watch.tick(now + 1)
    assert conditions(watch)["receiver pager"].startswith("pager takes no messages (down)")
    assert watch.unwell
    for _ in range(2):
        clock[0] += 60
        watch.outbox.deliver("pager")
    watch.tick(now + 2)
    assert "receiver pager" not in conditions(watch)
    assert not watch.unwell
