"""Executions from proposal to end: every path, and a crash between any two ticks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import pytest
import worlds
from hypothesis import given
from hypothesis import strategies as st
from worlds import after_actions, applied, diverged, later, resolved, settings, telemetry, world

from runwatch.checks import Phase
from runwatch.rules import (
    Decision,
    Execution,
    ExecutionState,
    Receipt,
    World,
    advance_execution,
    all_nodes,
    decide,
)
from runwatch.rules.carry_out import GRACE_SECONDS
from runwatch.rules.execution import OPEN

NODES = all_nodes()
S = ExecutionState


@dataclass(frozen=True)
class Tick:
    """What the rules are given in one tick."""

    world: World
    receipts: Mapping[str, Receipt] = field(default_factory=dict)
    decisions: Mapping[str, Decision] = field(default_factory=dict)


def say(execution_id: str, approved: bool) -> dict[str, Decision]:
    return {execution_id: Decision(approved=approved, by="owner", reason="as agreed.", time=worlds.START)}


def proposal(mode: str = "auto") -> tuple[World, Execution]:
    at = diverged(300, settings=settings(early_divergence={"mode": mode}))
    (execution,) = decide(NODES, at, {}, {}).executions
    return at, execution


def story(mode: str = "auto", shows: bool = True) -> list[Tick]:
    """From the proposal through receipt and effect, one tick after the other."""
    at, execution = proposal(mode)
    id_ = execution.id
    decisions = {} if mode == "auto" else say(id_, approved=True)
    boundary = later(at, 5)
    plan = after_actions(at.plan, execution.actions)
    receipts = {id_: applied(execution, boundary, plan)}
    told = worlds.telemetry(340, plan if shows else at.plan)
    after = later(boundary, 35, plan=plan, recent=told)
    return [
        Tick(at),
        Tick(later(at, 2)),
        Tick(later(at, 3), decisions=decisions),
        Tick(later(at, 4), decisions=decisions),
        Tick(boundary, receipts, decisions),
        Tick(after, receipts, decisions),
        Tick(later(after, 60, recent=told), receipts, decisions),
        Tick(later(after, 120, recent=told), receipts, decisions),
        Tick(later(after, 180, recent=told), receipts, decisions),
    ]


def run(ticks: list[Tick]) -> tuple[tuple[Execution, ...], list[str]]:
    """Every tick once, what it decides stored; the executions at the end and the sentences told on the way."""
    stored: dict[str, Execution] = {}
    told: list[str] = []
    for tick in ticks:
        decided = decide(NODES, replace(tick.world, executions=tuple(stored.values())), tick.receipts, tick.decisions)
        stored |= {execution.id: execution for execution in decided.executions}
        told += [event.sentence for event in decided.events]
    return tuple(stored.values()), told


@pytest.mark.parametrize("mode", ["auto", "confirm"])
@pytest.mark.parametrize(("shows", "end"), [(True, S.VERIFIED), (False, S.UNVERIFIED)])
def test_a_plan_is_carried_out_and_its_effect_verified_or_missed(mode: str, shows: bool, end: S) -> None:
    (execution,), told = run(story(mode, shows))
    assert execution.state is end, execution.reason
    assert [line.split(" is ")[1].split(":")[0] for line in told] == [
        "proposed",
        "approved",
        "requested",
        "acknowledged",
        end,
    ]
    assert execution.by == ("run card" if mode == "auto" else "owner")


@given(
    st.sampled_from(["auto", "confirm"]),
    st.booleans(),
    st.lists(st.integers(1, 3), min_size=9, max_size=9),
    st.sets(st.integers(1, 6)),
)
def test_a_crash_between_any_two_ticks_loses_nothing_and_does_nothing_twice(
    mode: str, shows: bool, repeats: list[int], lost: set[int]
) -> None:
    """A tick may be repeated (its inputs come again after a restart) or be lost (its transaction was never stored)."""
    ticks = story(mode, shows)
    crashed = [tick for number, tick in enumerate(ticks) if number not in lost for _ in range(repeats[number])]
    (whole,), told = run(ticks)
    (execution,), told_again = run(crashed)
    assert [sentence.split(":")[0] for sentence in told_again] == [sentence.split(":")[0] for sentence in told]
    assert (execution.state, execution.actions) == (whole.state, whole.actions)


@pytest.mark.parametrize("prefix", range(9))
def test_the_rest_of_the_story_follows_from_every_stored_prefix(prefix: int) -> None:
    ticks = story()
    (stored,), _ = run(ticks[: max(prefix, 1)])
    reread = Execution.model_validate_json(stored.model_dump_json())
    assert reread == stored
    for tick in ticks[prefix:]:
        at = replace(tick.world, executions=(reread,))
        reread = next(iter(decide(NODES, at, tick.receipts, tick.decisions).executions), reread)
    assert reread.state is S.VERIFIED


# ruff: noqa: ARG005 - every row of the table takes the world and the execution
Change = Callable[[World, Execution], tuple[World, Receipt | None, Decision | None]]


@pytest.mark.parametrize(
    ("name", "mode", "change", "end", "escalates"),
    [
        ("a person refuses", "confirm",
         lambda at, e: (at, None, say(e.id, approved=False)[e.id]), S.REFUSED, False),
        ("nobody decides in time", "confirm",
         lambda at, e: (later(at, 0, now=e.expires), None, None), S.EXPIRED, True),
        ("an approval that is found too late does not count", "confirm",
         lambda at, e: (later(at, 0, now=e.expires + 1), None, say(e.id, approved=True)[e.id]), S.EXPIRED, True),
        ("the window closes while it waits", "confirm",
         lambda at, e: (later(at, 451), None, None), S.EXPIRED, True),
        ("the run starts another attempt while it waits", "confirm",
         lambda at, e: (later(at, 1, attempt="a0002"), None, None), S.EXPIRED, True),
        ("the alert resolves before anybody decides", "confirm",
         lambda at, e: (later(at, 9, alerts={"ladder_deviation": resolved("ladder_deviation", 309)}), None, None),
         S.SUPERSEDED, False),
        ("the trainer rejects it", "auto",
         lambda at, e: (later(at, 2), applied(e, at, at.plan, "rejected"), None), S.REJECTED, True),
        ("the trainer does not answer", "auto",
         lambda at, e: (later(at, 2, now=at.now + e.ack_seconds + GRACE_SECONDS + 1), None, None),
         S.UNACKNOWLEDGED, True),
        ("a decision after the request changes nothing", "auto",
         lambda at, e: (later(at, 2), None, say(e.id, approved=False)[e.id]), S.REQUESTED, False),
        ("an alert that resolves after the request changes nothing", "auto",
         lambda at, e: (later(at, 2, alerts={}), None, None), S.REQUESTED, False),
    ],
)  # fmt: skip
def test_other_ends(name: str, mode: str, change: Change, end: S, escalates: bool) -> None:
    at, execution = proposal(mode)
    now, receipt, decision = change(at, execution)
    after, events = advance_execution(execution, now, receipt, decision)
    assert after.state is end, f"{name}: {after.reason}"
    assert [event.escalate for event in events] == ([escalates] if events else [])


def test_the_kill_switch_holds_an_approved_plan_until_it_expires() -> None:
    at, execution = proposal("confirm")
    yes = say(execution.id, approved=True)[execution.id]
    held, _ = advance_execution(execution, replace(at, plans_enabled=False), None, yes)
    assert held.state is S.APPROVED
    assert advance_execution(held, replace(at, plans_enabled=False, now=at.now + 9), None, yes)[1] == ()
    assert advance_execution(held, at, None, yes)[0].state is S.REQUESTED
    late = replace(at, now=execution.expires)
    assert advance_execution(held, late, None, yes)[0].state is S.EXPIRED


def test_the_directive_is_the_same_whenever_it_is_written() -> None:
    at, execution = proposal()
    moved, _ = advance_execution(execution, later(at, 30))
    assert moved.directive.document() == execution.directive.document()
    document = execution.directive.document()
    assert document["expires"] == execution.requested.time + execution.ack_seconds
    assert document["preconditions"] == {"attempt": "a0001", "min_tokens": 0, "max_tokens": 750_000}
    assert [action["action"] for action in document["actions"]] == [
        "set_token_budget",
        "set_lr_decay",
        "set_data_mixture",
    ]
    waiting = proposal("confirm")[1]
    with pytest.raises(ValueError, match="it has no directive yet"):
        _ = waiting.directive


@given(
    st.sampled_from([state for state in S if state not in OPEN]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10_000),
)
def test_an_ended_execution_never_changes(state: S, receipt: bool, approved: bool, steps: int) -> None:
    at, execution = proposal()
    ended = execution.model_copy(update={"state": state})
    now = later(at, steps)
    after, events = advance_execution(
        ended, now, applied(ended, now, now.plan) if receipt else None, say(ended.id, approved)[ended.id]
    )
    assert (after, events) == (ended, ())


def test_a_run_that_falls_silent_after_the_receipt_is_unverified_by_time() -> None:
    at, execution = proposal()
    receipt = applied(execution, at, after_actions(at.plan, execution.actions))
    acknowledged, _ = advance_execution(execution, later(at, 1), receipt)
    assert acknowledged.state is S.ACKNOWLEDGED
    silent = replace(later(at, 0), now=at.now + 1 + execution.verify_seconds)
    after, events = advance_execution(acknowledged, silent, receipt)
    assert after.state is S.UNVERIFIED
    assert events[0].escalate
    assert "was not seen" in after.reason


def test_a_restart_is_acknowledged_by_a_new_attempt_and_verified_by_training() -> None:
    stalled = worlds.alert("progress", 600, 600).model_copy(
        update={"lives": 2, "at": worlds.moment(600).model_copy(update={"time": worlds.START + 1600})}
    )
    rules = settings(throughput_shortfall={"mode": "auto", "restart_command": ["systemctl", "restart", "trainer"]})
    at = world(alerts={"progress": stalled}, settings=rules)
    (execution,) = decide(NODES, at, {}, {}).executions
    assert (execution.state, execution.command) == (S.REQUESTED, ("systemctl", "restart", "trainer"))
    assert advance_execution(execution, later(at, 0))[1] == ()
    starting = later(at, 0, attempt="a0002", phase=Phase.COMPILE)
    acknowledged, _ = advance_execution(execution, starting)
    assert acknowledged.state is S.ACKNOWLEDGED
    trains = later(at, 1, attempt="a0002", recent=telemetry(601, attempt=1))
    assert advance_execution(acknowledged, trains)[0].state is S.VERIFIED
