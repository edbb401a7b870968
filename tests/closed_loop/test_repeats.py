"""Trouble that comes back after each rewind, a checkpoint from long ago, and a condition for which there is no plan."""

import json
from collections.abc import Callable

import pytest
import scripted
from obedient import Obedient

from runwatch.monitor.daemon.watched_run import Watch
from runwatch.rules import AlertState, Execution, ExecutionState
from runwatch.rules.plan import Pause, Rewind

Begin = Callable[..., Obedient]
Open = Callable[[Obedient], Watch]


def card_of(trainer: Obedient) -> dict[str, object]:
    return json.loads((trainer.run_dir / "run.yaml").read_text())


def amend(trainer: Obedient, node: str, **rules: object) -> None:
    """Change the settings of a node in the card."""
    document = card_of(trainer)
    document["nodes"][node] |= rules
    (trainer.run_dir / "run.yaml").write_text(json.dumps(document))


def executions(watch: Watch) -> tuple[Execution, ...]:
    return watch.last_tick.state.executions if watch.last_tick else ()


def ticks(watch: Watch, trainer: Obedient, until: Callable[[], bool], most: int = 80) -> None:
    """Ten steps and a tick, again and again."""
    for _ in range(most):
        watch.tick(trainer.train(10))
        watch.outbox.deliver("sink")
        if until():
            return
    pytest.fail(f"never happened; {[(one.id, one.state, one.reason) for one in executions(watch)]}")


def ended(watch: Watch, name: str) -> Callable[[], bool]:
    return lambda: any(one.id == name and not one.open for one in executions(watch))


@pytest.mark.parametrize("inside", [True, False])
def test_rewinds_go_further_each_time_and_the_last_one_is_followed_by_a_shorter_budget_or_a_pause(
    inside: bool, begin: Begin, open_watch: Open, sink: object
) -> None:
    trainer = begin("instability", "auto", {"max_executions": 2}, again=2)
    amend(trainer, "early_divergence", mode="auto", window_fraction=0.25 if inside else 0.02)
    watch = open_watch(trainer)
    watch.tick(trainer.train(100))
    last = "early_divergence-0001" if inside else "instability-0003"
    ticks(watch, trainer, ended(watch, last))
    rewinds = [action for one in executions(watch) for action in one.actions if isinstance(action, Rewind)]
    bad = [one.receipt.step for one in executions(watch)[:2] if one.receipt]
    margins = [rewind.checkpoint_step + rewind.skip_steps - step for rewind, step in zip(rewinds, bad, strict=True)]
    assert trainer.attempt == 3
    assert len(rewinds) == 2
    assert 0 < margins[0] + 10 <= margins[1] + 10 <= margins[0] + 30
    assert [one.state for one in executions(watch)] == [ExecutionState.VERIFIED] * 3
    assert trainer.applied == ["instability-0001", "instability-0002", last]
    told = {message.payload["id"]: message.payload for message in sink.sent if message.kind == "plan_updated"}
    if inside:
        assert "rewound 2 times" in executions(watch)[-1].evidence
    else:
        assert executions(watch)[-1].actions == (Pause(),)
        first = next(m.payload for m in sink.sent if m.payload["id"] == last)
        assert first["severity"] == "critical", "whoever is on call is paged when the run is held"
        assert trainer.plan["paused"]
    assert set(told) == set(trainer.applied)


def test_the_alarms_of_the_tail_that_a_rewind_took_back_do_not_count_in_the_new_attempt(
    begin: Begin, open_watch: Open
) -> None:
    trainer = begin("instability", "auto")
    watch = open_watch(trainer)
    watch.tick(trainer.train(100))
    ticks(watch, trainer, ended(watch, "instability-0001"))
    ticks(watch, trainer, lambda: trainer.step > 200)
    assert watch.last_tick is not None
    assert len(executions(watch)) == 1
    assert watch.last_tick.state.alerts["finite"].state is AlertState.INACTIVE
    assert [one.state for one in watch.last_tick.nodes if one.node == "instability"] == ["quiet"]


def test_a_rewind_past_the_rows_that_the_daemon_keeps_knows_its_checkpoint_and_its_healthy_loss(
    begin: Begin, open_watch: Open
) -> None:
    """Plans are off while the run goes bad, and for 1,400 steps after it: more than twice the daemon's context."""
    trainer = begin("instability", "auto")
    watch = open_watch(trainer)
    with watch.store.transaction() as tx:
        tx.put_setting("plans_enabled", "false")
    for _ in range(16):
        watch.tick(trainer.train(100))
    assert len(watch.judge.context) < 1_200
    assert int(watch.last_tick.state.alerts["finite"].critical_since.step) == trainer.fault
    with watch.store.transaction() as tx:
        tx.put_setting("plans_enabled", "true")
    ticks(watch, trainer, ended(watch, "instability-0001"))
    (execution,) = executions(watch)
    rewind = execution.actions[0]
    assert isinstance(rewind, Rewind)
    assert rewind.checkpoint_step == 120, "the newest that is older than the onset at step 130, by ten steps"
    assert execution.healthy_loss is not None
    assert trainer_loss(130) < execution.healthy_loss < trainer_loss(80) + 0.06
    assert execution.state is ExecutionState.VERIFIED


def trainer_loss(step: int) -> float:
    """The scripted loss of a healthy step, without its noise."""
    low, high = scripted.CURVE["loss"]
    return float(low * (high / low) ** (scripted.np.log(step * scripted.TOKENS) / scripted.np.log(scripted.BUDGET)))


def test_a_person_is_called_once_when_no_plan_can_be_made_and_again_when_it_is_so_again(
    begin: Begin, open_watch: Open, sink: object
) -> None:
    """The onset lies before any checkpoint that is old enough."""
    trainer = begin("instability", "auto", {"margin_records": 120})
    watch = open_watch(trainer)
    watch.tick(trainer.train(100))
    ticks(watch, trainer, lambda: bool(executions(watch)))
    ticks(watch, trainer, lambda: trainer.step >= 250)
    (call,) = executions(watch)
    assert (call.id, call.state, call.ended) == ("instability-0001", ExecutionState.UNPLANNED, None)
    assert "there is no complete, finite checkpoint at or before step 10" in (call.reason or "")
    plans = [message.payload for message in sink.sent if message.kind == "plan_updated"]
    assert [(one["id"], one["severity"]) for one in plans] == [("instability-0001", "critical")]
    trainer.cured = True
    ticks(watch, trainer, lambda: executions(watch)[0].ended is not None)
    trainer.cured, trainer.fault = False, trainer.step + 60
    ticks(watch, trainer, lambda: len(executions(watch)) == 2)
    assert executions(watch)[1].state is not ExecutionState.UNPLANNED, "there is an old checkpoint by now"
