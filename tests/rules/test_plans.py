"""The formula of each plan, in figures."""

from dataclasses import replace

import numpy as np
import pytest
import worlds
from hypothesis import given
from hypothesis import strategies as st
from worlds import BUDGET, PLANNED, START, alert, alerts, applied, diverged, later, settings, telemetry, world

from runwatch.rules import (
    Checkpoint,
    Execution,
    Forecast,
    Proposal,
    Refusal,
    Throughput,
    World,
    all_nodes,
    decide,
    evaluate,
    preview,
)
from runwatch.rules.execution import ExecutionState
from runwatch.rules.plan import (
    Pause,
    Rewind,
    ScaleLr,
    SetBalanceRate,
    SetCapacityFactor,
    SetContextLength,
    SetDataMixture,
    SetLrDecay,
    SetTokenBudget,
)

NODES = all_nodes()
DAY = 86_400.0


def planned(node: str, at: World, **changed: object) -> Proposal | Refusal:
    """What the node's plan would do."""
    return preview(NODES[node], at, settings(**{node: changed})[node])


def proposed(node: str, at: World, **changed: object) -> Proposal:
    found = planned(node, at, **changed)
    assert isinstance(found, Proposal), found
    return found


@pytest.mark.parametrize(
    ("name", "step", "changed", "budget", "start"),
    [
        ("half of the budget, decay over the card's fifth of it", 300, {}, 1_500_000, 1_200_000),
        ("at the end of the window", 750, {}, 1_500_000, 1_200_000),
        ("rounded up to a whole checkpoint interval", 300, {"budget_fraction": 0.51}, 1_600_000, 1_280_000),
        ("a longer decay than the card's", 300, {"min_decay_fraction": 0.4}, 1_500_000, 900_000),
        ("the decay begins at the next step at the earliest", 750, {"min_decay_fraction": 0.6, "budget_fraction": 0.3},
         1_900_000, 760_000),
        ("a budget too short for its decay is made longer", 749, {"budget_fraction": 0.3}, 900_000, 750_000),
    ],
)  # fmt: skip
def test_shorten_budget(name: str, step: int, changed: dict[str, object], budget: int, start: int) -> None:
    found = proposed("early_divergence", diverged(step), **changed)
    cut, decay, mixture = found.actions
    assert (cut, decay) == (
        SetTokenBudget(tokens=budget),
        SetLrDecay(start_tokens=start, final_fraction=0.05),
    ), name
    assert mixture == SetDataMixture(shares=PLANNED.decay_mixture)
    assert found.preconditions.max_tokens == 750_000
    assert len(found.effects) == 3


def test_shorten_budget_is_refused_after_the_window_and_when_nothing_can_be_cut() -> None:
    assert isinstance(planned("early_divergence", diverged(751)), Refusal)
    short = replace(PLANNED, token_budget=200_000, checkpoint_every_steps=200)
    at = replace(diverged(40), planned=short, plan=short.plan_state())
    refused = planned("early_divergence", at)
    assert isinstance(refused, Refusal)
    assert "not shorter" in refused.reason


def test_a_mixture_that_is_in_force_already_is_not_set_again() -> None:
    at = diverged()
    at = replace(at, plan=at.plan.model_copy(update={"mixture": dict(PLANNED.decay_mixture)}))
    assert len(proposed("early_divergence", at).actions) == 2
    assert len(proposed("early_divergence", diverged(), mixture_to_decay=False).actions) == 2


def test_the_predicted_loss_of_both_budgets_comes_from_the_ladder_with_its_band() -> None:
    forecast = proposed("early_divergence", diverged()).forecast
    assert isinstance(forecast, Forecast)
    assert (forecast.old.loss, forecast.old.low, forecast.old.high) == pytest.approx((2.5, 2.4, 2.6))
    more = 100.0 * (1_500_000**-0.3 - BUDGET**-0.3)
    assert forecast.new.loss == pytest.approx(2.5 + more)
    assert forecast.new.low < forecast.new.loss < forecast.new.high
    no_ladder = replace(diverged(), planned=replace(PLANNED, formula=None))
    assert proposed("early_divergence", no_ladder).forecast is None


@given(
    st.integers(1, 749),
    st.floats(0.05, 0.95),
    st.floats(0.01, 0.9),
    st.integers(1, 400),
    st.integers(1, 5_000),
    st.floats(0, 0.5),
)
def test_a_shortened_budget_is_whole_and_its_decay_ends_with_it(
    step: int, fraction: float, decay: float, every: int, tokens_per_step: int, card_decay: float
) -> None:
    """Laws of every proposal: shorter, whole steps and checkpoints, in the future, and long enough a decay."""
    run = replace(PLANNED, checkpoint_every_steps=every, decay_fraction=card_decay, tokens_per_step=tokens_per_step)
    at = replace(diverged(step), planned=run, plan=run.plan_state())
    rules = {"budget_fraction": fraction, "min_budget_fraction": 0.01, "max_budget_fraction": 0.99}
    found = planned("early_divergence", at, min_decay_fraction=decay, **rules)
    if isinstance(found, Refusal):
        return
    cut, start = found.actions[0], found.actions[1]
    assert isinstance(cut, SetTokenBudget)
    assert isinstance(start, SetLrDecay)
    assert at.tokens < start.start_tokens < cut.tokens < BUDGET
    assert cut.tokens % (every * tokens_per_step) == 0
    assert start.start_tokens % tokens_per_step == 0
    assert cut.tokens - start.start_tokens >= decay * cut.tokens - tokens_per_step


def unstable(step: int = 600, onset: int = 580, **changed: object) -> World:
    """NaN since `onset`."""
    return world(step, **{"alerts": alerts(alert("finite", onset, step)), **changed})


@pytest.mark.parametrize(
    ("name", "at", "changed", "back", "skip"),
    [
        ("the newest checkpoint before the onset, not before the alarm", unstable(), {}, 500, 110),
        ("a checkpoint within the margin is too young", unstable(onset=505), {}, 400, 210),
        ("a checkpoint at the margin is old enough", unstable(onset=510), {}, 500, 110),
        ("a larger margin", unstable(), {"margin_records": 81}, 400, 210),
        ("a warning shortly before belongs to the trouble",
         unstable(alerts=alerts(alert("finite", 520, 600), alert("grad_norm", 503, 600))), {}, 400, 210),
        ("a warning long before does not",
         unstable(alerts=alerts(alert("finite", 580, 600), alert("grad_norm", 205, 600))), {}, 500, 110),
        ("more batches are left out", unstable(), {"skip_margin_records": 40}, 500, 140),
    ],
)  # fmt: skip
def test_rewind_and_skip(name: str, at: World, changed: dict[str, object], back: int, skip: int) -> None:
    found = proposed("instability", at, **changed)
    assert found.actions == (Rewind(checkpoint_step=back, skip_steps=skip), ScaleLr(factor=0.8)), name
    assert found.preconditions.attempt == "a0001"
    assert found.healthy_loss == pytest.approx(2.56, abs=0.02)


def test_without_a_checkpoint_before_the_onset_a_person_is_needed() -> None:
    at = unstable(step=90, onset=60)
    verdict = evaluate(NODES["instability"], at, at.settings["instability"])
    assert verdict.needs_person
    assert "no complete, finite checkpoint at or before step 50" in verdict.reason


def rewound(times: int, **changed: object) -> World:
    """Unstable again after that many rewinds, each to step 500 at step 600, cooldown over."""
    at = unstable(settings=settings(instability={"mode": "auto", "cooldown_records": 0}))
    done: list[Execution] = []
    for _ in range(times):
        now = replace(at, executions=tuple(done))
        (execution,) = decide(NODES, now, {}, {}).executions
        receipt = applied(execution, now, now.plan)
        done.append(execution.model_copy(update={"state": ExecutionState.VERIFIED, "receipt": receipt}))
    return replace(at, executions=tuple(done), **changed)


def test_margin_and_skip_grow_with_each_repeat() -> None:
    first, second, third = (proposed("instability", rewound(times)).actions[0] for times in range(3))
    assert [rewind.skip_steps - (600 - rewind.checkpoint_step) for rewind in (first, second, third)] == [10, 20, 40]
    late = rewound(2, alerts=alerts(alert("finite", 535, 600)))
    assert proposed("instability", late).actions[0].checkpoint_step == 400


def test_a_checkpoint_of_a_superseded_tail_is_not_gone_back_to() -> None:
    again = later(rewound(1), 200, alerts=alerts(alert("finite", 790, 800)))
    superseded = Checkpoint(600, 600e3, START + 600)
    own = Checkpoint(600, 600e3, START + 700)
    older = tuple(Checkpoint(at, at * 1e3, START + at) for at in (400, 500))
    assert proposed("instability", replace(again, checkpoints=(*older, superseded))).actions[0].checkpoint_step == 500
    assert proposed("instability", replace(again, checkpoints=(*older, own))).actions[0].checkpoint_step == 600


def test_after_the_last_rewind_early_divergence_takes_over_inside_its_window() -> None:
    at = rewound(3)
    instability, early = (evaluate(NODES[name], at, at.settings[name]) for name in ("instability", "early_divergence"))
    assert instability.proposal is None
    assert not instability.needs_person
    assert "early_divergence takes over" in instability.reason
    assert early.proposal is not None
    assert "rewound 3 times" in early.reason


def test_after_the_last_rewind_the_run_is_paused_outside_that_window() -> None:
    at = rewound(3)
    late = later(at, 400, alerts=alerts(alert("finite", 990, 1000)), checkpoints=at.checkpoints)
    verdict = evaluate(NODES["instability"], late, late.settings["instability"])
    assert verdict.proposal is not None
    assert verdict.proposal.actions == (Pause(),)
    watched = replace(at, settings={**at.settings, **settings(early_divergence={"mode": "observe"})})
    watched = replace(watched, settings={**watched.settings, "instability": at.settings["instability"]})
    verdict = evaluate(NODES["instability"], watched, watched.settings["instability"])
    assert verdict.proposal is not None, "a plan that is only observed takes nothing over"
    assert verdict.proposal.actions == (Pause(),)


@pytest.mark.parametrize(
    ("losses", "well"),
    [
        ([2.5] * 9, None),
        ([2.5] * 10, True),
        ([4.0] * 10, False),
        ([2.5] * 9 + [np.nan], False),
        ([4.0, *[2.5] * 10], True),
    ],
)
def test_a_rewound_run_is_well_when_its_loss_is_finite_and_back_at_its_level(
    losses: list[float], well: bool | None
) -> None:
    execution = rewound(1).executions[0]
    recent = telemetry(500 + len(losses), attempt=1)
    recent = recent.take(slice(len(recent) - len(losses), None))
    recent = replace(recent, time=START + 601 + np.arange(len(losses)))
    recent.columns["train/loss"].values[:] = losses
    recovered = NODES["instability"].recovered
    assert recovered is not None
    assert recovered(execution, world(500 + len(losses), recent=recent)) is well


def collapsed(**plan: object) -> World:
    at = world(alerts=alerts(alert("token_drop", 500, 600)))
    return replace(at, plan=at.plan.model_copy(update=plan))


@pytest.mark.parametrize(
    ("name", "at", "changed", "context", "capacity", "rate"),
    [
        ("half of the card's context", collapsed(), {}, 50, 1.4375, 0.02),
        ("back to the card's own after an extension", collapsed(context_length=500), {}, 100, 1.4375, 0.02),
        ("the longest of the lengths that the card names", collapsed(context_length=500),
         {"context_lengths": [50, 100, 250, 500]}, 250, 1.4375, 0.02),
        ("a length that does not divide a step is left out", collapsed(), {"context_lengths": [30, 20]}, 20, 1.4375, 0.02),
        ("no shorter length is left", collapsed(), {"min_context_length": 80}, None, 1.4375, 0.02),
        ("capacity and rate stop at their bounds", collapsed(capacity_factor=1.9, balance_rate=0.1), {}, 50, 2.0, None),
    ],
)  # fmt: skip
def test_retreat_context(
    name: str, at: World, changed: dict[str, object], context: int | None, capacity: float | None, rate: float | None
) -> None:
    expected = [
        None if context is None else SetContextLength(tokens=context),
        None if capacity is None else SetCapacityFactor(factor=capacity),
        None if rate is None else SetBalanceRate(rate=rate),
    ]
    found = proposed("routing_collapse", at, **changed)
    assert list(found.actions) == [action for action in expected if action is not None], name
    assert len(found.effects) == len(found.actions)


def test_there_is_no_retreat_when_everything_is_at_its_bound() -> None:
    at = collapsed(context_length=20, capacity_factor=2.0, balance_rate=0.1)
    assert isinstance(planned("routing_collapse", at, min_context_length=20, context_lengths=[20]), Refusal)


def test_routing_has_recovered_when_no_check_is_critical_on_records_after_the_plan() -> None:
    at = collapsed()
    at = replace(at, settings=settings(routing_collapse={"mode": "auto"}))
    (execution,) = decide(NODES, at, {}, {}).executions
    execution = execution.model_copy(update={"receipt": applied(execution, at, at.plan)})
    recovered = NODES["routing_collapse"].recovered
    assert recovered is not None
    assert recovered(execution, at) is None
    assert recovered(execution, later(at, 9, alerts=alerts(alert("token_drop", 500, 609)))) is False
    calm = worlds.resolved("token_drop", 640)
    assert recovered(execution, later(at, 40, alerts=alerts(calm))) is True


def hurried(days: float, rate: float = 10.0, spread: float = 0.1, step: int = 600) -> World:
    """At `rate` tokens per second, with a deadline that many days off."""
    speed = Throughput(rate, rate * (1 - spread), rate * (1 + spread))
    at = world(step, throughput=speed)
    return replace(at, planned=replace(PLANNED, deadline=at.now + days * DAY))


@pytest.mark.parametrize(
    ("days", "progress", "state"),
    [(4, 0, "quiet"), (2.7, 0.5, "armed"), (2.5, 1, "firing"), (1, 1, "blocked")],
)
def test_a_deadline_is_missed_for_certain_only_when_missed_at_the_fast_end(
    days: float, progress: float, state: str
) -> None:
    """2.4M tokens are left: 2.78 days at 10 tokens per second, 2.53 at 11."""
    at = hurried(days)
    verdict = evaluate(NODES["throughput_shortfall"], at, at.settings["throughput_shortfall"])
    assert (verdict.progress, verdict.state) == (progress, state), verdict.reason


def test_fit_to_deadline_plans_with_the_slow_end_and_rounds_down() -> None:
    at = hurried(2.0)
    found = proposed("throughput_shortfall", at)
    paid = 600_000 + 9.0 * 2.0 * DAY * 0.98
    budget = int(paid // 100_000) * 100_000
    assert budget == 2_100_000
    assert found.actions == (
        SetTokenBudget(tokens=budget),
        SetLrDecay(start_tokens=1_680_000, final_fraction=0.05),
    )
    assert found.preconditions.max_tokens == 1_680_000
    assert "9 tokens per second" in found.effects[0]


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        (hurried(30), "nothing to re-plan"),
        (hurried(1), "a person must decide"),
        (replace(hurried(2), throughput=None), "not known yet"),
        (world(), "no deadline"),
        (hurried(-1), "a person must decide"),
    ],
)
def test_fit_to_deadline_is_refused(at: World, reason: str) -> None:
    found = planned("throughput_shortfall", at)
    assert isinstance(found, Refusal)
    assert reason in found.reason


def test_a_slow_run_whose_deadline_holds_is_armed_only() -> None:
    at = replace(hurried(30), alerts=alerts(alert("throughput", 400, 600)))
    verdict = evaluate(NODES["throughput_shortfall"], at, at.settings["throughput_shortfall"])
    assert (verdict.state, verdict.progress) == ("armed", 0.5)


def stalled(lives: int, **rules: object) -> World:
    late = worlds.moment(600).model_copy(update={"time": START + 600 + 900})
    one = alert("progress", 600, 600).model_copy(update={"at": late, "lives": lives})
    return world(alerts=alerts(one), settings=settings(throughput_shortfall=rules))


def test_a_run_that_stands_still_is_restarted_at_its_second_stall_or_a_person_is_called() -> None:
    command = ["kubectl", "rollout", "restart", "job/trainer"]
    for at, words in ((stalled(2), "no restart_command"), (stalled(1, restart_command=command), "this is stall 1")):
        verdict = evaluate(NODES["throughput_shortfall"], at, at.settings["throughput_shortfall"])
        assert not verdict.needs_person, "progress calls already"
        assert words in verdict.reason
    at = stalled(2, restart_command=command)
    verdict = evaluate(NODES["throughput_shortfall"], at, at.settings["throughput_shortfall"])
    assert verdict.proposal is not None
    assert list(verdict.proposal.command) == command
