"""`logit_growth`: over the ceiling, grown, or drifting; deaf to single records and to what is too small to harm."""

import json
from pathlib import Path

import numpy as np
import pytest
from scenarios import (
    CRITICAL,
    OK,
    UNKNOWN,
    WARN,
    Change,
    Scenario,
    assert_as_expected,
    healthy,
    incidents,
    verdicts,
)

from runwatch.checks.logit_growth import CHECK

RUN = healthy(1000)
Z = "train/z_loss"
FLAT = RUN.put(Z, 0, 999, 120.0)


def ramp(factor: float, first: int = 400, last: int = 999) -> np.ndarray:
    return np.linspace(1.0, factor, last - first + 1)


TABLE = [
    Scenario("a healthy run is known after nine records", RUN, [(UNKNOWN, 0, 8), (OK, 9, 999)]),
    Scenario("up by 1.6 at once, for good", FLAT.scale(Z, 600, 999, 1.6), [(WARN, 616, 999)]),
    Scenario("up by 1.5 at once: 1.46 on top of the offset", FLAT.scale(Z, 600, 999, 1.5)),
    Scenario("up fourfold at once", FLAT.scale(Z, 600, 999, 4.0), [(WARN, 615, 615), (CRITICAL, 616, 999)]),
    Scenario("doubles in 600 records", RUN.scale(Z, 400, 999, ramp(2.0)), [(WARN, 686, 999)]),
    Scenario("up fourfold for fifteen records", FLAT.scale(Z, 600, 614, 4.0)),
    Scenario("one record", RUN.scale(Z, 600, 600, 100.0)),
    Scenario("over the ceiling from the start", FLAT.put(Z, 0, 999, 1001.0), [(WARN, 9, 999)]),
    Scenario("at the ceiling", FLAT.put(Z, 0, 999, 1000.0)),
    Scenario("far over the ceiling", FLAT.put(Z, 0, 999, 4001.0), [(CRITICAL, 9, 999)]),
    Scenario("ten times of next to nothing harms nobody", FLAT.put(Z, 0, 599, 0.1).put(Z, 600, 999, 1.0)),
    Scenario("falls to a third", FLAT.scale(Z, 600, 999, 1 / 3)),
    Scenario("the z-loss is missing", RUN.only("train/loss"), [(UNKNOWN, 0, 999)]),
    Scenario("the z-loss is missing for a while", RUN.lose(Z, 500, 600)),
    Scenario("NaN is another check's", RUN.put(Z, 600, 610, np.nan), [(UNKNOWN, 600, 610)]),
    Scenario("too little history", healthy(8), [(UNKNOWN, 0, 7)]),
    Scenario(
        "a resume forgets the superseded growth", FLAT.scale(Z, 560, 599, 1.6).resume(600, 5560), [(WARN, 576, 599)]
    ),
    Scenario("a pause of an hour", RUN.pause(600, 3600.0, ticks=9)),
    Scenario("a declared change", FLAT.scale(Z, 600, 999, 2.0), changes=[Change(5600, (Z,))]),
    Scenario(
        "one value in ten steps that creeps up by a tenth",
        healthy(8000).scale(Z, 0, 7999, np.linspace(1, 1.1, 8000)).keep_every(Z, 10),
    ),
]


@pytest.mark.parametrize("scenario", TABLE, ids=str)
def test_logit_growth_says_what_the_table_says(scenario: Scenario) -> None:
    assert_as_expected(CHECK, scenario)


@pytest.mark.parametrize("seed", range(10))
def test_heavy_tailed_noise_raises_nothing(seed: int) -> None:
    noise = np.exp(0.05 * np.random.default_rng(seed).standard_t(3, 9600))
    found = verdicts(CHECK, Scenario("", healthy(9600, seed).scale(Z, 0, 9599, noise)))
    assert not len(incidents(found.level, WARN))


def test_a_drift_of_a_quarter_in_400_records_is_found_before_it_is_growth() -> None:
    run = healthy(1000).scale(Z, 400, 999, ramp(1.4))
    found = verdicts(CHECK, Scenario("", run))
    first = int(np.argmax(found.level >= WARN))
    assert 650 < first < 750
    assert "drifted" in CHECK.message(found, first)


@pytest.mark.parametrize(("weight", "worst"), [("0", WARN), ("0.001", OK)])
def test_a_model_trained_without_z_loss_is_told_from_the_same_one_with_it(weight: str, worst: int) -> None:
    """The z-loss of the 600 steps of `benchmarks/trainer/ablation.py`, as the trainer emitted it."""
    course = json.loads((Path(__file__).parent / "samples" / "z-loss-ablation.json").read_text())[weight]
    found = verdicts(CHECK, Scenario("", healthy(len(course), first=1).put(Z, 0, len(course) - 1, course)))
    assert found.level.max() == worst
