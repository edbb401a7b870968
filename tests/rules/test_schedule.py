"""The curve of the plan in force: none while it is the card's, the registered course and a predicted end after a re-plan."""

from dataclasses import replace

import pytest
from worlds import world

from runwatch.rules import Curve, Formula
from runwatch.rules.schedule import curve_in_force, predicted_loss

PLANNED = replace(
    world().planned,
    curve=Curve(tokens=(1e4, 1e5, 1e6), loss=(5.0, 4.0, 3.0), low=(4.9, 3.9, 2.9), high=(5.1, 4.1, 3.1)),
    formula=Formula(
        irreducible=1.0, parameter_scale=10.0, parameter_exponent=0.3, token_scale=50.0, token_exponent=0.3
    ),
)


def test_the_declared_plan_has_no_curve_beside_the_registered_one() -> None:
    assert curve_in_force(PLANNED, PLANNED.plan_state()) is None


def test_without_a_formula_nothing_is_predicted() -> None:
    plan = PLANNED.plan_state().model_copy(update={"token_budget": 1_000_000})
    assert curve_in_force(replace(PLANNED, formula=None), plan) is None


def test_a_shorter_budget_follows_the_registered_course_to_its_decay_and_ends_where_the_forecast_does() -> None:
    plan = PLANNED.plan_state().model_copy(update={"token_budget": 500_000, "decay_start_tokens": 400_000})
    curve, end = curve_in_force(PLANNED, plan), predicted_loss(PLANNED, 500_000)
    assert curve is not None
    assert end is not None
    assert curve.tokens == (1e4, 1e5, 400_000.0, 500_000.0)
    assert curve.loss[:2] == pytest.approx((5.0, 4.0))
    assert 3.0 < curve.loss[2] < 4.0
    assert (curve.loss[-1], curve.low[-1], curve.high[-1]) == (end.loss, end.low, end.high)
