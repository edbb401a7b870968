"""Nodes against worlds: window, condition, guards, mode, and one plan at a time."""

from dataclasses import replace

import pytest
import worlds
from hypothesis import given
from hypothesis import strategies as st
from worlds import alert, alerts, diverged, settings, world

from runwatch.checks import Level
from runwatch.rules import ExecutionState, NodeState, NodeVerdict, PlanRules, World, all_nodes, decide, evaluate

NODES = all_nodes()
FIRING, BLOCKED, ARMED, QUIET, OUTSIDE = (
    NodeState.FIRING,
    NodeState.BLOCKED,
    NodeState.ARMED,
    NodeState.QUIET,
    NodeState.OUTSIDE_WINDOW,
)


def judged(name: str, at: World) -> NodeVerdict:
    return evaluate(NODES[name], at, at.settings[name])


def off_curve(steps: int, at: int = 600, **changed: object) -> World:
    return world(at, alerts=alerts(alert("ladder_deviation", at - steps, at)), **changed)


def spiking(*also: str, steps: int = 25) -> World:
    return world(alerts=alerts(alert("loss_spike", 600 - steps, 600), *(alert(name, 570, 600) for name in also)))


@pytest.mark.parametrize(
    ("name", "at", "state", "progress"),
    [
        ("early_divergence", world(), QUIET, 0),
        ("early_divergence", off_curve(3), ARMED, 0.2),
        ("early_divergence", off_curve(14), ARMED, 14 / 15),
        ("early_divergence", off_curve(15), FIRING, 1),
        ("early_divergence", off_curve(15, at=750), FIRING, 1),
        ("early_divergence", off_curve(15, at=751), OUTSIDE, 1),
        ("early_divergence", world(alerts=alerts(alert("ladder_deviation", 500, 600, Level.WARN))), QUIET, 0),
        ("early_divergence", off_curve(15, plans_enabled=False), BLOCKED, 1),
        ("instability", world(), QUIET, 0),
        ("instability", world(alerts=alerts(alert("finite", 600, 600))), FIRING, 1),
        ("instability", spiking(), ARMED, 0.9),
        ("instability", spiking("grad_norm"), FIRING, 1),
        ("instability", spiking("logit_growth"), FIRING, 1),
        ("instability", spiking("grad_norm", steps=9), ARMED, 0.5),
        ("instability", spiking("token_drop"), ARMED, 0.9),
        ("routing_collapse", world(), QUIET, 0),
        ("routing_collapse", world(alerts=alerts(alert("token_drop", 576, 600))), ARMED, 0.5),
        ("routing_collapse", world(alerts=alerts(alert("token_drop", 551, 600))), FIRING, 1),
        ("routing_collapse", world(alerts=alerts(alert("expert_balance", 551, 600))), FIRING, 1),
        ("throughput_shortfall", world(), QUIET, 0),
        ("throughput_shortfall", world(alerts=alerts(alert("throughput", 551, 600))), ARMED, 0.5),
        ("throughput_shortfall", world(alerts=alerts(alert("throughput", 501, 600))), BLOCKED, 1),
    ],
)
def test_a_node_stands_as_its_window_and_condition_say(name: str, at: World, state: NodeState, progress: float) -> None:
    verdict = judged(name, at)
    assert (verdict.state, verdict.progress) == (state, pytest.approx(progress)), verdict.reason
    assert verdict.reason.endswith("."), "the reason is a sentence"
    assert (verdict.proposal is not None) == (state is FIRING)


def test_a_break_of_a_few_records_does_not_start_the_count_again_and_a_longer_one_does() -> None:
    flickering = alert("ladder_deviation", 500, 595).model_copy(update={"at": worlds.moment(600), "level": Level.OK})
    assert judged("early_divergence", world(alerts=alerts(flickering))).state is FIRING
    over = flickering.model_copy(update={"last_bad": worlds.moment(594)})
    assert judged("early_divergence", world(alerts=alerts(over))).state is QUIET


def test_trouble_of_an_earlier_attempt_does_not_count() -> None:
    stale = alert("finite", 590, 595).model_copy(update={"at": worlds.moment(560, attempt=1), "level": Level.UNKNOWN})
    assert judged("instability", world(560, alerts=alerts(stale))).state is QUIET


def test_tokens_that_are_not_told_fire_nothing() -> None:
    blind = off_curve(100, tokens=float("nan"))
    assert judged("early_divergence", blind).state is OUTSIDE


@pytest.mark.parametrize(
    ("mode", "states"),
    [
        ("observe", [ExecutionState.OBSERVED]),
        ("confirm", [ExecutionState.PROPOSED]),
        ("auto", [ExecutionState.PROPOSED, ExecutionState.APPROVED, ExecutionState.REQUESTED]),
    ],
)
def test_the_mode_says_how_far_a_firing_node_goes_by_itself(mode: str, states: list[ExecutionState]) -> None:
    decided = decide(NODES, diverged(settings=settings(early_divergence={"mode": mode})), {}, {})
    assert [event.execution.state for event in decided.events] == states
    (execution,) = decided.executions
    assert (execution.id, execution.state, execution.mode) == ("early_divergence-0001", states[-1], mode)
    assert len(execution.effects) == len(execution.actions) == 3


def ended(at: World, state: ExecutionState) -> World:
    """`at` after an execution of its firing node that ended so, just now."""
    (execution,) = decide(NODES, at, {}, {}).executions
    over = execution.model_copy(update={"state": state, "ended": execution.proposed})
    return replace(at, executions=(over,))


@pytest.mark.parametrize(
    ("state", "steps", "expected"),
    [
        (ExecutionState.REFUSED, 0, BLOCKED),
        (ExecutionState.REFUSED, 199, BLOCKED),
        (ExecutionState.REFUSED, 200, FIRING),
        (ExecutionState.EXPIRED, 200, FIRING),
        (ExecutionState.REJECTED, 200, FIRING),
        (ExecutionState.SUPERSEDED, 0, FIRING),
        (ExecutionState.VERIFIED, 200, BLOCKED),
        (ExecutionState.UNVERIFIED, 200, BLOCKED),
        (ExecutionState.UNACKNOWLEDGED, 200, BLOCKED),
        (ExecutionState.OBSERVED, 200, BLOCKED),
    ],
)
def test_cooldown_and_cap_hold_a_node_back(state: ExecutionState, steps: int, expected: NodeState) -> None:
    before = ended(diverged(500), state)
    at = diverged(500 + steps, executions=before.executions)
    assert judged("early_divergence", at).state is expected


def test_one_plan_at_a_time() -> None:
    both = diverged(settings=settings(early_divergence={"mode": "confirm"}, routing_collapse={"mode": "confirm"}))
    both = replace(both, alerts={**both.alerts, **alerts(alert("token_drop", 500, 600))})
    decided = decide(NODES, both, {}, {})
    assert [execution.node for execution in decided.executions] == ["early_divergence"]
    after = replace(both, executions=decided.executions)
    assert judged("routing_collapse", after).state is BLOCKED
    assert judged("early_divergence", after).state is FIRING
    assert decide(NODES, after, {}, {}).executions == ()


def test_a_proposal_that_waits_for_a_person_gives_way_to_a_plan_that_needs_none() -> None:
    waiting = world(alerts=alerts(alert("finite", 600, 600)))
    first = decide(NODES, waiting, {}, {}).executions
    assert first[0].state is ExecutionState.PROPOSED
    at = diverged(executions=first)
    at = replace(at, alerts={**waiting.alerts, **at.alerts})
    superseded, new = sorted(decide(NODES, at, {}, {}).executions, key=lambda execution: execution.node, reverse=True)
    assert (superseded.id, superseded.state) == ("instability-0001", ExecutionState.SUPERSEDED)
    assert (new.id, new.state) == ("early_divergence-0001", ExecutionState.REQUESTED)


def test_of_two_plans_due_at_once_the_cheaper_goes_first() -> None:
    at = diverged(settings=settings(early_divergence={"mode": "auto"}, instability={"mode": "auto"}))
    at = replace(at, alerts={**at.alerts, **alerts(alert("finite", 600, 600))})
    assert [execution.node for execution in decide(NODES, at, {}, {}).executions] == ["instability"]


def test_a_paused_run_gets_no_further_plan() -> None:
    at = diverged()
    at = replace(at, plan=at.plan.model_copy(update={"paused": True}))
    assert judged("early_divergence", at).state is BLOCKED


def test_every_node_explains_itself_under_the_fixed_headings() -> None:
    headings = ["What it does:", "Why it matters:", "Fires when:", "Defaults:", "Does not see:", "The plan:"]
    for node in NODES.values():
        places = [node.docs.index(heading) for heading in [*headings, "What to do:"]]
        assert places == sorted(places), node.name
        for field in set(node.settings.model_fields) - set(PlanRules.model_fields):
            assert f"`{field}`" in node.docs or field == "min_context_length", f"{node.name}.{field} has no source"


worlds_of_trouble = st.builds(
    lambda step, names, since, modes, enabled: world(
        step,
        alerts=alerts(*(alert(name, max(1, step - since), step) for name in names)),
        settings=settings(**{name: {"mode": mode} for name, mode in zip(NODES, modes, strict=True)}),
        plans_enabled=enabled,
    ),
    st.integers(1, 2_990),
    st.sets(st.sampled_from(["ladder_deviation", "finite", "loss_spike", "grad_norm", "token_drop", "progress"])),
    st.integers(0, 200),
    st.tuples(*[st.sampled_from(["observe", "confirm", "auto"])] * 4),
    st.booleans(),
)


@given(st.lists(worlds_of_trouble, min_size=1, max_size=6))
def test_there_is_never_more_than_one_open_execution_and_never_one_outside_its_window(found: list[World]) -> None:
    executions: dict[str, object] = {}
    for at in found:
        now = replace(at, executions=tuple(executions.values()))
        decided = decide(NODES, now, {}, {})
        for execution in decided.executions:
            was = executions.get(execution.id)
            assert was is None or was.open or execution.state is was.state, "an execution has left an end state"
            low, high = NODES[execution.node].window(now.settings[execution.node])
            if was is None:
                assert low <= now.tokens / now.plan.token_budget <= high
                assert now.plans_enabled
        executions |= {execution.id: execution for execution in decided.executions}
        assert sum(execution.open for execution in executions.values()) <= 1
