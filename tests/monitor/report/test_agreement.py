"""The daemon, `plan preview`, `report` and a backtest say the same of a run: its world, its plans and its incidents.

Every drill is replayed once, with plans that wait for a person. Whenever one is proposed, all of them are asked; at the
end their incidents are compared.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scripted
from scripted import ScriptedTrainer
from yaml import safe_dump, safe_load

from runwatch.checks import Signals
from runwatch.monitor.act.approvals import decide
from runwatch.monitor.card.run_card import Card
from runwatch.monitor.commands.backtest import context
from runwatch.monitor.daemon.watched_run import Watch
from runwatch.monitor.drill import replay
from runwatch.monitor.drill.receiver import Receiver
from runwatch.monitor.drill.replay import Replayed, prepared, replay_drill
from runwatch.monitor.drill.scripted_trainer import SyntheticTrainer
from runwatch.monitor.drill.table import DRILLS
from runwatch.monitor.engine.backtest import as_json, backtest
from runwatch.monitor.report.preview import preview
from runwatch.monitor.report.recorded_run import gather
from runwatch.monitor.store.incident import Incident
from runwatch.rules import Execution, ExecutionState, NodeState, Proposal, World
from runwatch.rules.plan import Rewind

OpenWatch = Callable[..., Watch]

CARD = Path(__file__).parents[3] / "trainer" / "cards" / "reference-535b.yaml"
UNSEEN_IN_FILES = frozenset({"clock_jump"})
"""The silence is between the daemon's clock and the trainer's: no file tells when a record came."""
PROPOSED = ("actions", "effects", "preconditions", "forecast", "command", "healthy_loss")


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Replayed:
    """The reference card with a fortieth of its budget, its nodes in mode confirm."""
    document = safe_load(CARD.read_text())
    document["plan"]["token_budget"] //= 40
    path = tmp_path_factory.mktemp("card") / "run.yaml"
    path.write_text(safe_dump(document))
    found = prepared(path, None)
    asking = {name: {**node, "mode": "confirm"} for name, node in found.document["nodes"].items()}
    document = {**found.document, "nodes": asking}
    return replace(found, document=document, card=Card.model_validate(document))


@pytest.mark.slow
@pytest.mark.parametrize("name", DRILLS)
def test_at_every_proposed_plan_of_a_drill_all_say_the_same(
    name: str, replayed: Replayed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def tick(watch: Watch, trainer: SyntheticTrainer) -> str:
        sentence = watch.tick(trainer.clock)
        watch.outbox.deliver("webhook")
        for one in waiting(watch):
            agree(watch, one)
            watch.tick(trainer.clock)
            same_world(watch, trainer.clock)
            decide(watch.store, one.id, approved=True, by="ada", reason="all say the same")
            asked.append(one.plan)
        ended.append(watch)
        return sentence

    ended: list[Watch] = []
    monkeypatch.setattr(replay, "_tick", tick)
    with Receiver() as receiver:
        replay_drill(DRILLS[name], replayed, tmp_path / name, receiver, lambda _: None)
    plan = DRILLS[name].plan
    assert asked[:1] == ([plan] if plan else [])
    if name not in UNSEEN_IN_FILES:
        same_incidents(ended[-1])


BACK = 1900


def test_a_rewind_to_a_checkpoint_from_long_ago_is_in_preview_and_report_as_the_daemon_has_proposed_it(
    trainer: ScriptedTrainer, open_watch: OpenWatch
) -> None:
    """Once a preview saw 1,300 rows and said "would not be proposed" of what the daemon had proposed."""
    document = scripted.card({"instability": {"mode": "confirm"}})
    document["plan"] |= {"token_budget": 10 * scripted.BUDGET, "checkpoint": {"every_steps": 2000, "keep": 4}}
    (trainer.run_dir / "run.yaml").write_text(json.dumps(document))
    trainer.every, trainer.fault, trainer.shift = 2000, 2000 + BACK, float("nan")
    watch = open_watch(trainer.run_dir)
    for steps in (1000, 1000, 1000, BACK - 1000 - 1, 1):
        watch.tick(trainer.train(steps))
    (proposed,) = waiting(watch)
    assert proposed.actions[0] == Rewind(checkpoint_step=2000, skip_steps=BACK + 10)
    agree(watch, proposed)
    watch.tick(trainer.clock)
    same_world(watch, trainer.clock)
    again = open_watch(trainer.run_dir)
    again.tick(trainer.clock)
    same_world(again, trainer.clock)


def test_a_scripted_run_has_the_same_incidents_everywhere(trainer: ScriptedTrainer, open_watch: OpenWatch) -> None:
    watch = open_watch(trainer.run_dir)
    rng = np.random.default_rng(0)
    for _ in range(30):
        watch.tick(trainer.train(int(rng.integers(1, 40))))
        if rng.random() < 0.2:
            watch = open_watch(trainer.run_dir)
    assert watch.last_tick is None or watch.last_tick.state.executions
    watch.tick(trainer.clock)
    same_incidents(watch)


def waiting(watch: Watch) -> list[Execution]:
    """Executions that wait for a person."""
    assert watch.last_tick is not None
    return [one for one in watch.last_tick.state.executions if one.state is ExecutionState.PROPOSED]


def agree(watch: Watch, execution: Execution) -> None:
    """`plan preview` and `report` say of the run what the daemon has just proposed."""
    run, last = gather(watch.run_dir), watch.last_tick
    assert last is not None
    proposed = {name: getattr(execution, name) for name in PROPOSED}
    for world in (last.world, run.world):
        assert world is not None
        proposal = preview(execution.node, world).proposal
        assert isinstance(proposal, Proposal), proposal
        assert {name: getattr(proposal, name) for name in PROPOSED} == proposed
    stands = next(one for one in run.nodes if one.node == execution.node)
    assert (stands.state, stands.reason) == (NodeState.FIRING, f"{execution.id} is proposed.")
    assert run.executions[-1].model_dump_json() == execution.model_dump_json()


def same_world(watch: Watch, now: float) -> None:
    """The daemon and a report of its run directory have the same world."""
    assert watch.last_tick is not None
    assert plain(watch.last_tick.world, now) == plain(gather(watch.run_dir).world, now)


def plain(world: World | None, now: float) -> dict[str, Any]:
    """A world as values that can be compared (NaN equals NaN)."""
    assert world is not None
    assert world.now == now
    found = {field.name: getattr(world, field.name) for field in fields(world) if field.name != "taken"}
    found["alerts"] = {name: alert.model_dump_json() for name, alert in world.alerts.items()}
    found["executions"] = [one.model_dump_json() for one in world.executions]
    return found | {"recent": columns(world.recent)}


def columns(signals: Signals) -> dict[str, list[str]]:
    """Rows as text."""
    heads = (signals.attempt, signals.step, signals.tokens, signals.time, signals.phase, signals.tick)
    found = {str(number): np.asarray(head, np.float64) for number, head in enumerate(heads)}
    found |= {name: column.values for name, column in signals.columns.items() if column.present.any()}
    return {name: [repr(float(value)) for value in values] for name, values in found.items()}


def same_incidents(watch: Watch) -> None:
    """The daemon, a report and a backtest of the same records have the same incidents."""
    with watch.store.transaction() as tx:
        live = tx.incidents()
    run = gather(watch.run_dir)
    judged = backtest(run.loaded, *context(watch.run_dir, None, ())).incidents
    assert facts(live) == facts(run.incidents) == facts(judged)
    assert watch.status is not None
    shown = {one["id"]: (one["what"], one["severity"], one["state"]) for one in watch.status["incidents"]}
    assert shown == {one.id: (one.what, one.severity, one.state) for one in judged}


def facts(incidents: Sequence[Incident]) -> dict[str, Any]:
    """What people read of incidents, by id."""
    return {one.id: {**as_json(one), "state": one.state, "resolution": one.resolution} for one in incidents}
