"""`eval_regression`: judged at each evaluation, held between them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scenarios import (
    CRITICAL,
    OK,
    UNKNOWN,
    WARN,
    Change,
    Phase,
    Run,
    Scenario,
    assert_as_expected,
    clock,
    incidents,
    verdicts,
)

from runwatch.checks import Column
from runwatch.checks.eval_regression import CHECK, EvalRegressionSettings

EVERY = 5


def evaluated(losses: Sequence[float]) -> Run:
    """An evaluation at each fifth row, from row 0 on, four train rows after each."""
    rows = len(losses) * EVERY
    values, present = np.full(rows, np.nan), np.zeros(rows, np.bool_)
    values[::EVERY], present[::EVERY] = losses, True
    phase = np.where(present, Phase.EVAL, Phase.TRAIN).astype(np.int8)
    return Run(replace(clock(rows, 5000), phase=phase, columns={"eval/loss": Column(values, present)}))


def falling(count: int = 20, seed: int = 0) -> np.ndarray:
    """A held-out loss that falls by less and less, with noise of 0.004 nats."""
    return 2.5 + 0.5 / np.sqrt(1 + np.arange(count)) + 0.004 * np.random.default_rng(seed).standard_normal(count)


def bumped(**rises: float) -> np.ndarray:
    """The falling loss with evaluations (`e12`) higher by so much."""
    losses = falling()
    for name, rise in rises.items():
        losses[int(name[1:])] += rise
    return losses


FLAT = [2.5] * 20
PROJECTION = ((1e9, 2.6), (1e12, 2.6))

TABLE = [
    Scenario(
        "a falling loss is known from the fourth evaluation on", evaluated(falling()), [(UNKNOWN, 0, 14), (OK, 15, 99)]
    ),
    Scenario("worse by 1 nat at one evaluation", evaluated(bumped(e12=1.0)), [(WARN, 60, 64)]),
    Scenario("worse by 1 nat at two", evaluated(bumped(e12=1.0, e13=1.0)), [(WARN, 60, 69)]),
    Scenario(
        "worse by 1 nat at three",
        evaluated(bumped(e12=1.0, e13=1.0, e14=1.0)),
        [(WARN, 60, 69), (CRITICAL, 70, 74)],
    ),
    Scenario("worse by 0.06", evaluated([*FLAT[:12], 2.56, *FLAT[:7]]), [(WARN, 60, 64)]),
    Scenario("worse by 0.049", evaluated([*FLAT[:12], 2.549, *FLAT[:7]])),
    Scenario("worse by 0.012, the most a healthy run showed", evaluated(bumped(e12=0.012))),
    Scenario("worse by 0.02 for three evaluations", evaluated([*FLAT[:12], *[2.52] * 3, *FLAT[:5]]), [(WARN, 70, 74)]),
    Scenario("better by 1 nat", evaluated(bumped(e12=-1.0))),
    Scenario("over-fitting: a hundredth worse each time", evaluated(2.5 + 0.012 * np.arange(20)), [(WARN, 30, 99)]),
    Scenario("a noisy evaluation set", evaluated(2.5 + 0.03 * np.resize([1, -1, 0.5, -0.5], 20))),
    Scenario("no evaluation", Run(clock(50)), [(UNKNOWN, 0, 49)]),
    Scenario("three evaluations", evaluated([2.5, 2.4, 3.0]), [(UNKNOWN, 0, 14)]),
    Scenario("NaN is another check's", evaluated(bumped(e12=np.nan)), [(UNKNOWN, 60, 79)]),
    Scenario(
        "a regression ends with the attempt that showed it",
        evaluated(bumped(e12=1.0)).resume(62, 5050),
        [(WARN, 60, 61)],
    ),
    Scenario(
        "an hour's pause after a regression", evaluated(bumped(e12=1.0)).pause(62, 3600.0, ticks=3), [(WARN, 60, 67)]
    ),
    Scenario(
        "another evaluation set, declared",
        evaluated(falling() + np.repeat([0, 0.5], 10)),
        changes=[Change(5046, ("eval",))],
    ),
    Scenario("just above the projection", evaluated([2.64] * 20), settings={"projection": PROJECTION}),
    Scenario("0.06 above the projection", evaluated([2.66] * 20), [(WARN, 5, 99)], settings={"projection": PROJECTION}),
    Scenario(
        "0.3 above the projection", evaluated([2.9] * 20), [(CRITICAL, 5, 99)], settings={"projection": PROJECTION}
    ),
]


@pytest.mark.parametrize("scenario", TABLE, ids=str)
def test_eval_regression_says_what_the_table_says(scenario: Scenario) -> None:
    assert_as_expected(CHECK, scenario)


@pytest.mark.parametrize("seed", range(10))
def test_four_hundred_healthy_evaluations_warn_once_at_most(seed: int) -> None:
    losses = falling(400, seed) + 0.003 * np.random.default_rng(seed).standard_t(4, 400)
    found = verdicts(CHECK, Scenario("", evaluated(losses)))
    assert len(incidents(found.level, WARN)) <= 1
    assert not len(incidents(found.level, CRITICAL))


@pytest.mark.parametrize("points", [((2.0, 2.5), (1.0, 2.6)), ((1.0, 2.5), (1.0, 2.5)), ((1.0, 0.0),)])
def test_a_projection_that_is_none_is_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="projection must"):
        EvalRegressionSettings(projection=points)
