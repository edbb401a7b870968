"""A daemon whose database was lost, or put back from an old copy, does nothing twice and gives no name out twice."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from obedient import Obedient

from runwatch.monitor.act.approvals import decide, declare, switch_plans
from runwatch.monitor.card.run_card import Declaration
from runwatch.monitor.daemon.watched_run import Watch
from runwatch.monitor.store.audit import broken, read_mirror
from runwatch.rules import ExecutionState
from runwatch.rules.execution import OPEN

S = ExecutionState
Begin = Callable[..., Obedient]
Open = Callable[[Obedient], Watch]
PLAN = "instability-0001"


def lose(trainer: Obedient, *, mirror: bool = False) -> None:
    """Move the database aside, as the daemon says of a damaged one; with `mirror` everything of the daemon's is gone."""
    folder = trainer.run_dir / ".runwatch"
    for path in folder.iterdir():
        if path.name.startswith("state.db") or mirror:
            path.unlink()


def states(watch: Watch) -> dict[str, ExecutionState]:
    with watch.store.transaction() as tx:
        return {one.id: one.state for one in tx.executions()}


def go(watch: Watch, trainer: Obedient, until: Callable[[], bool], step: int = 10) -> None:
    for _ in range(60):
        watch.tick(trainer.train(step))
        if until():
            return
    pytest.fail(f"never happened; {states(watch)}")


def audited(watch: Watch) -> list[str]:
    """The sentences of the audit log; the log and its mirror are whole."""
    with watch.store.transaction() as tx:
        rows = tx.audit_rows()
    assert broken(rows) is None
    assert read_mirror(watch.run_dir / ".runwatch" / "audit.jsonl") == rows
    return [row.sentence for row in rows]


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("at", [S.REQUESTED, S.ACKNOWLEDGED, S.VERIFIED])
def test_a_database_lost_on_the_way_lets_the_plan_go_on_and_end_once(
    at: ExecutionState, mirror: bool, begin: Begin, open_watch: Open
) -> None:
    trainer = begin("instability", "auto")
    watch = open_watch(trainer)
    watch.tick(trainer.train(100))
    go(watch, trainer, lambda: states(watch).get(PLAN) is at, step=2 if at in OPEN else 10)
    lose(trainer, mirror=mirror)
    again = open_watch(trainer)
    go(again, trainer, lambda: trainer.step > 200)
    assert states(again) == {PLAN: S.VERIFIED}
    assert trainer.applied == [PLAN]
    sentences = audited(again)
    assert any("Taken over from audit-" in one for one in sentences) is not mirror
    assert any("is known from control/ only" in one for one in sentences) is mirror


def test_an_undecided_proposal_keeps_its_name_and_its_decision(begin: Begin, open_watch: Open) -> None:
    trainer = begin("instability", "confirm", {"expires_seconds": 3600})
    watch = open_watch(trainer)
    watch.tick(trainer.train(100))
    go(watch, trainer, lambda: PLAN in states(watch))
    decide(watch.store, PLAN, approved=True, by="ana", reason="a bad batch")
    watch.store.close()
    lose(trainer)
    again = open_watch(trainer)
    go(again, trainer, lambda: PLAN in states(again))
    assert states(again)[PLAN] is S.PROPOSED, "the decision had not reached the audit log's mirror"
    decide(again.store, PLAN, approved=True, by="ana", reason="a bad batch")
    go(again, trainer, lambda: states(again)[PLAN] is S.VERIFIED)
    assert trainer.applied == [PLAN]


def test_the_kill_switch_and_what_was_declared_outlive_the_database(begin: Begin, open_watch: Open) -> None:
    trainer = begin("instability", "auto")
    watch = open_watch(trainer)
    switch_plans(watch.store, enabled=False, by="ana", reason="maintenance")
    declare(watch.store, Declaration(step=900, signals=["train/loss"], reason="another mixture"), "ana")
    watch.tick(trainer.train(100))
    lose(trainer)
    again = open_watch(trainer)
    for _ in range(6):
        again.tick(trainer.train(20))
    assert again.last_tick is not None
    verdict = next(one for one in again.last_tick.nodes if one.node == "instability")
    assert "plans are disabled" in verdict.reason
    assert states(again) == {}
    with again.store.transaction() as tx:
        assert [one["step"] for one in tx.load().declarations] == [900]


def test_a_copy_from_before_the_plan_learns_of_it(begin: Begin, open_watch: Open, tmp_path: Path) -> None:
    trainer = begin("instability", "auto")
    watch = open_watch(trainer)
    watch.tick(trainer.train(100))
    watch.store.close()
    old = shutil.copytree(trainer.run_dir / ".runwatch", tmp_path / "copy")
    watch = open_watch(trainer)
    go(watch, trainer, lambda: states(watch).get(PLAN) is S.VERIFIED)
    watch.store.close()
    lose(trainer)
    for path in old.glob("state.db*"):
        shutil.copy(path, trainer.run_dir / ".runwatch")
    again = open_watch(trainer)
    go(again, trainer, lambda: trainer.step > 200)
    assert states(again) == {PLAN: S.VERIFIED}
    assert trainer.applied == [PLAN]


@pytest.mark.parametrize("folder", ["requests", "receipts"])
def test_a_name_that_lies_in_control_is_not_given_out(folder: str, begin: Begin, open_watch: Open) -> None:
    trainer = begin("instability", "auto", answers="silent")
    control = trainer.run_dir / "control" / folder
    control.mkdir(parents=True, exist_ok=True)
    (control / "instability-0007.json").write_text(json.dumps({"id": "instability-0007"}))
    (control / "instability-by-hand.json").write_text("{}")
    watch = open_watch(trainer)
    watch.tick(trainer.train(100))
    go(watch, trainer, lambda: bool(states(watch)))
    assert states(watch) == {"instability-0008": S.REQUESTED}


def test_a_trainer_that_was_restarted_meanwhile_and_a_lost_database_count_the_rewinds_of_before(
    begin: Begin, open_watch: Open
) -> None:
    trainer = begin("instability", "auto", {"max_executions": 1}, again=1)
    watch = open_watch(trainer)
    watch.tick(trainer.train(100))
    go(watch, trainer, lambda: states(watch).get(PLAN) is S.VERIFIED)
    lose(trainer, mirror=True)
    again = open_watch(trainer)
    go(again, trainer, lambda: len(states(again)) == 2)
    with again.store.transaction() as tx:
        assert [action.action for action in tx.executions()[-1].actions] == ["pause"], "no second rewind"
