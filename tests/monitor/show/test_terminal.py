"""What the terminal shows beside the words of the status document."""

import time
from typing import Any

import pytest

from runwatch.monitor.show.status import LossSeries
from runwatch.monitor.show.terminal import clock, loss_plot

NOW = 1_790_000_000.0


@pytest.mark.parametrize(
    ("hours", "form"), [(0, "%H:%M"), (11, "%H:%M"), (-11, "%H:%M"), (13, "%Y-%m-%d %H:%M"), (2400, "%Y-%m-%d %H:%M")]
)
def test_the_end_of_a_run_of_a_hundred_days_has_its_day(hours: float, form: str) -> None:
    at = NOW + 3600 * hours
    assert clock(at, NOW) == time.strftime(form, time.localtime(at))


LOSS: LossSeries = {
    "steps": [1, 2], "tokens": [10.0, 500.0], "loss": [3.0, 2.5], "low": [3.0, 2.5], "high": [3.0, 2.5],
    "eval_tokens": [], "eval_loss": [], "curve_tokens": [], "curve": [], "curve_low": [], "curve_high": [],
    "plan_tokens": [], "plan_curve": [],
}  # fmt: skip


def drawn(loss: dict[str, Any], budget: int | None) -> str:
    run: Any = {"declared_budget": budget, "token_budget": budget}
    shown: Any = {**LOSS, **loss}
    return str(loss_plot(shown, run))


def test_nothing_is_said_of_shares_of_a_budget_that_is_not_known() -> None:
    assert "25 %" in drawn({}, 1000)
    assert "%" not in drawn({}, None)
    assert "500 tokens" in drawn({}, None)


def test_the_curve_of_the_plan_in_force_is_drawn_and_named_once_there_is_one() -> None:
    curve = {"curve_tokens": [10.0, 1000.0], "curve": [3.0, 2.0], "curve_low": [2.9, 1.9], "curve_high": [3.1, 2.1]}
    before = drawn(curve, 1000)
    after = drawn({**curve, "plan_tokens": [10.0, 300.0, 400.0], "plan_curve": [3.0, 2.6, 2.4]}, 1000)
    assert "plan in force" not in before
    assert "+" not in before
    assert "+ plan in force" in after
    assert after.count("+") > 3
