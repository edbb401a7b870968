"""Every way that a plan can go, for every node: from the condition to the effect that is seen, or to the person who is called."""

from collections.abc import Callable

import pytest
from obedient import NODES, Obedient

from runwatch.monitor.act.approvals import decide
from runwatch.monitor.daemon.watched_run import Watch
from runwatch.rules import Execution, ExecutionState, NodeState

S = ExecutionState
Begin = Callable[..., Obedient]
Open = Callable[[Obedient], Watch]
CARRIED = [S.PROPOSED, S.APPROVED, S.REQUESTED]
PATHS: dict[str, tuple[str, str, bool | None, list[ExecutionState]]] = {
    "only noted": ("observe", "obeys", None, [S.OBSERVED]),
    "carried out and seen": ("auto", "obeys", None, [*CARRIED, S.ACKNOWLEDGED, S.VERIFIED]),
    "asked, approved, carried out and seen": ("confirm", "obeys", True, [*CARRIED, S.ACKNOWLEDGED, S.VERIFIED]),
    "asked and turned down": ("confirm", "obeys", False, [S.PROPOSED, S.REFUSED]),
    "asked and nobody decides": ("confirm", "obeys", None, [S.PROPOSED, S.EXPIRED]),
    "the trainer rejects it": ("auto", "rejects", None, [*CARRIED, S.REJECTED]),
    "the trainer is silent": ("auto", "silent", None, [*CARRIED, S.UNACKNOWLEDGED]),
    "the trainer says so and does not do it": ("auto", "lies", None, [*CARRIED, S.ACKNOWLEDGED, S.UNVERIFIED]),
}
"""Mode, what the trainer does, what a person says, and the states that follow."""
CALLS = {S.EXPIRED, S.REJECTED, S.UNACKNOWLEDGED, S.UNVERIFIED}


def newest(watch: Watch) -> Execution | None:
    found = watch.last_tick.state.executions if watch.last_tick else ()
    return found[-1] if found else None


def go(watch: Watch, trainer: Obedient, until: Callable[[Execution], bool]) -> Execution:
    """Ten steps and a tick, again and again, until the newest execution is as asked."""
    for _ in range(40):
        watch.tick(trainer.train(10))
        watch.outbox.deliver("sink")
        if (execution := newest(watch)) and until(execution):
            return execution
    pytest.fail(f"never happened; {newest(watch)}")


def went(watch: Watch) -> list[str]:
    """The states of the audit log's rows on plans, in order."""
    with watch.store.transaction() as tx:
        rows = [row for row in tx.audit_rows() if row.kind == "plan"]
    return [row.sentence.split(" is ")[1].split(":")[0].rstrip(".") for row in rows]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("node", NODES)
def test_a_plan_goes_its_way(node: str, path: str, begin: Begin, open_watch: Open, sink: object) -> None:
    mode, answers, says, states = PATHS[path]
    trainer = begin(node, mode, answers=answers)
    watch = open_watch(trainer)
    watch.tick(trainer.train(100))
    go(watch, trainer, lambda _: True)
    if says is not None:
        decide(watch.store, f"{node}-0001", approved=says, by="ana", reason="as agreed")
    execution = go(watch, trainer, lambda one: not one.open)
    assert (execution.id, execution.state) == (f"{node}-0001", states[-1]), execution.reason
    assert went(watch)[: len(states)] == [state.replace("_", " ") for state in states]
    assert execution.evidence.endswith(".")
    told = [message.payload for message in sink.sent if message.kind.startswith("plan_")]
    assert [one["state"] for one in told] == sorted({one["state"] for one in told}, key=[*S].index)
    assert (told[-1]["severity"] == "critical") == (states[-1] in CALLS)
    acted = S.ACKNOWLEDGED in states
    assert trainer.applied == [f"{node}-0001"] * acted
    assert watch.last_tick is not None
    stands = {verdict.node: verdict.state for verdict in watch.last_tick.nodes}[node]
    assert stands is not NodeState.FIRING


@pytest.mark.parametrize("node", ["early_divergence", "instability", "routing_collapse"])
def test_a_proposal_is_withdrawn_when_the_alarm_is_over_before_anybody_decides(
    node: str, begin: Begin, open_watch: Open
) -> None:
    trainer = begin(node, "confirm", {"expires_seconds": 3600})
    watch = open_watch(trainer)
    watch.tick(trainer.train(100))
    assert go(watch, trainer, lambda _: True).state is S.PROPOSED
    trainer.cured = True
    assert go(watch, trainer, lambda one: not one.open).state is S.SUPERSEDED
    assert not trainer.applied
