"""`ladder_deviation`: small lasting shifts against the registered curve, its band, and the own trend without one."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from scenarios import (
    CRITICAL,
    OK,
    TOKENS_PER_STEP,
    UNKNOWN,
    WARN,
    Change,
    Scenario,
    assert_as_expected,
    healthy,
    incidents,
    verdicts,
)

from runwatch.checks.ladder_deviation import CHECK, Curve, LadderDeviationSettings

LOSS = "train/loss"
RUN = healthy(1000)


def registered(band: float = 0.05, first: int = 5000, last: int = 6000, from_step: int = 0) -> dict[str, Any]:
    """The curve that `healthy` follows, from step `first` to step `last`."""
    steps = np.linspace(first, last, 60)
    loss = 1.6 + 9.0 * (steps + 20.0) ** -0.32
    curve = Curve(
        from_step=from_step,
        tokens=tuple((steps + 1) * TOKENS_PER_STEP),
        loss=tuple(loss),
        low=tuple(loss - band),
        high=tuple(loss + band),
    )
    return {"curves": (curve,)}


CURVE = registered()

TABLE = [
    Scenario("a healthy run on its curve", RUN, [(OK, 0, 999)], settings=CURVE),
    Scenario(
        "0.3 nats above for good",
        RUN.add(LOSS, 600, 999, 0.3),
        [(WARN, 602, 650), (CRITICAL, 651, 999)],
        settings=CURVE,
    ),
    Scenario(
        "0.3 nats above for 40 records, then back", RUN.add(LOSS, 600, 639, 0.3), [(WARN, 602, 701)], settings=CURVE
    ),
    Scenario("1 nat above for one record", RUN.add(LOSS, 600, 600, 1.0), settings=CURVE),
    Scenario(
        "0.3 nats below for good is never critical", RUN.add(LOSS, 600, 999, -0.3), [(WARN, 602, 999)], settings=CURVE
    ),
    Scenario("0.03 nats above for good", RUN.add(LOSS, 600, 999, 0.03), [(WARN, 621, 999)], settings=CURVE),
    Scenario("0.03 nats below for good", RUN.add(LOSS, 600, 999, -0.03), [(WARN, 614, 999)], settings=CURVE),
    Scenario("0.01 nats above for good: the curve is no better", RUN.add(LOSS, 0, 999, 0.01), settings=CURVE),
    Scenario("0.2 nats below where the curve begins: chance", RUN.add(LOSS, 0, 11, -0.2), settings=CURVE),
    Scenario("1 nat above where the curve begins", RUN.add(LOSS, 0, 15, 1.0), [(WARN, 2, 17)], settings=CURVE),
    Scenario("the loss is missing", RUN.only("params/norm"), [(UNKNOWN, 0, 999)], settings=CURVE),
    Scenario("the loss is missing for a while", RUN.lose(LOSS, 500, 600), settings=CURVE),
    Scenario("NaN is another check's", RUN.put(LOSS, 600, 610, np.nan), [(UNKNOWN, 600, 610)], settings=CURVE),
    Scenario(
        "a deviation ends with the superseded attempt",
        RUN.add(LOSS, 500, 599, 0.3).resume(600, 5500).put(LOSS, 600, 999, RUN.signals.values(LOSS)[500:900]),
        [(WARN, 502, 550), (CRITICAL, 551, 599)],
        settings=CURVE,
    ),
    Scenario("a pause of an hour", RUN.pause(600, 3600.0, ticks=9), settings=CURVE),
    Scenario(
        "an empty curve from step 5500 on leaves the own trend",
        RUN.add(LOSS, 500, 999, 0.06),
        settings={"curves": (*CURVE["curves"], Curve(from_step=5500))},
    ),
    Scenario("before its first step there is no curve", RUN, [(UNKNOWN, 0, 77)], settings=registered(from_step=9000)),
    Scenario("too little history for the own trend", healthy(70), [(UNKNOWN, 0, 69)]),
    Scenario("no curve: a healthy run", RUN, [(UNKNOWN, 0, 77), (OK, 78, 999)]),
    Scenario("no curve: 0.3 nats up for good", RUN.add(LOSS, 600, 999, 0.3), [(WARN, 615, 902)]),
    Scenario(
        "no curve: a slow divergence",
        RUN.add(LOSS, 400, 999, np.linspace(0, 2.0, 600)),
        [(WARN, 447, 626), (CRITICAL, 627, 999)],
    ),
    Scenario("no curve: a stair of 0.09 nats down", RUN.add(LOSS, 600, 999, -0.09), [(WARN, 611, 625)]),
    Scenario("no curve: a stair of 0.02 nats down", RUN.add(LOSS, 600, 999, -0.02)),
    Scenario(
        "no curve: 0.3 nats down over 1,000 records of decay",
        healthy(2000).add(LOSS, 1000, 1999, np.linspace(0, -0.3, 1000)),
    ),
    Scenario("no curve: recovery from a spike is no stair", RUN.add(LOSS, 600, 639, 0.5), [(WARN, 615, 655)]),
    Scenario("no curve: one record of another world", RUN.add(LOSS, 600, 600, -2.0)),
    Scenario(
        "no curve: a declared mixture swap",
        RUN.add(LOSS, 600, 999, 0.3),
        [(UNKNOWN, 600, 677)],
        changes=[Change(5600, (LOSS,))],
    ),
]


@pytest.mark.parametrize("scenario", TABLE, ids=str)
def test_ladder_deviation_says_what_the_table_says(scenario: Scenario) -> None:
    assert_as_expected(CHECK, scenario)


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("settings", [{}, registered(last=15000)], ids=["own trend", "curve"])
@pytest.mark.parametrize("tail", [0.0, 4.0])
def test_noise_alone_warns_once_in_4800_records_at_most(
    correlation: float, settings: Mapping[str, Any], tail: float
) -> None:
    run = healthy(9600, seed=int(10 * correlation), tail=tail, correlation=correlation)
    found = verdicts(CHECK, Scenario("", run, settings=settings))
    assert len(incidents(found.level, WARN)) <= 2
    assert not len(incidents(found.level, CRITICAL))


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("shift", [0.03, -0.03])
def test_a_shift_of_three_hundredths_is_found_within_a_hundred_records(correlation: float, shift: float) -> None:
    def found(seed: int) -> bool:
        run = healthy(700, seed, correlation=correlation).add(LOSS, 600, 699, shift)
        return bool((verdicts(CHECK, Scenario("", run, settings=CURVE)).level[600:] >= WARN).any())

    assert np.mean([found(seed) for seed in range(30)]) >= 0.95


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("loss", (2.0,), "same length"),
        ("tokens", (2.0, 1.0), "must ascend"),
        ("low", (1.0, 0.0), "must be positive"),
    ],
)
def test_a_curve_that_is_none_is_refused(field: str, value: tuple[float, ...], message: str) -> None:
    fields = {"tokens": (1.0, 2.0), "loss": (3.0, 2.0), "low": (2.9, 1.9), "high": (3.1, 2.1), field: value}
    with pytest.raises(ValueError, match=message):
        LadderDeviationSettings.model_validate({"curves": [fields]})
