"""`grad_norm`: explosions and growth, not blips; the ceiling after the warm-up; skipped steps beyond loss scaling."""

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

from runwatch.checks.grad_norm import CHECK

RUN = healthy(800)
NORM, SKIPPED = "optim/grad_norm", "optim/skipped_step"
FLAT = RUN.put(NORM, 0, 799, 0.3)
NORM_ONLY = RUN.only(NORM)
BLOOM = np.array([0.947, 2.39, 15.9, 145.0, 960.0]) / 0.242

TABLE = [
    Scenario("a healthy run", RUN, [(OK, 20, 799)]),
    Scenario("the norm alone is known after 20 records", NORM_ONLY.only(NORM), [(UNKNOWN, 0, 8), (OK, 9, 799)]),
    Scenario(
        "BLOOM's explosion: four sigmas, outlier, critical at the third",
        RUN.scale(NORM, 600, 604, BLOOM),
        [(WARN, 601, 601), (CRITICAL, 602, 604)],
    ),
    Scenario("a blip of 19.9 times", FLAT.put(NORM, 600, 600, 0.3 * 19.9)),
    Scenario("a blip of 20.1 times", FLAT.put(NORM, 600, 600, 0.3 * 20.1), [(WARN, 600, 600)]),
    Scenario("a blip of 30 times that is gone", RUN.scale(NORM, 600, 600, 30.0), [(WARN, 600, 600)]),
    Scenario("a blip of two records", RUN.scale(NORM, 600, 601, 9.0), [(WARN, 601, 601)]),
    Scenario(
        "up three times for good: warns until it is the baseline, and then of the growth",
        FLAT.put(NORM, 500, 799, 0.9),
        [(WARN, 502, 799)],
    ),
    Scenario(
        "up ten times for good",
        FLAT.put(NORM, 500, 799, 3.0),
        [(WARN, 501, 501), (CRITICAL, 502, 799)],
    ),
    Scenario(
        "grows by half in 300 records: normal", FLAT.scale(NORM, 400, 799, np.minimum(1 + np.arange(400) / 600, 1.5))
    ),
    Scenario(
        "doubles in 200 records and stays",
        FLAT.scale(NORM, 500, 799, np.minimum(1 + np.arange(300) / 200, 2.0)),
        [(WARN, 666, 799)],
    ),
    Scenario("halves", FLAT.scale(NORM, 500, 799, 0.5)),
    Scenario("over the ceiling after the warm-up", FLAT.put(NORM, 0, 799, 5.0), [(WARN, 9, 50), (CRITICAL, 51, 799)]),
    Scenario("over the ceiling in the warm-up", healthy(800, first=0).put(NORM, 0, 799, 5.0)),
    Scenario("just under the ceiling", FLAT.put(NORM, 0, 799, 3.99)),
    Scenario("a ceiling of its own", FLAT, [(WARN, 9, 50), (CRITICAL, 51, 799)], settings={"ceiling": 0.29}),
    Scenario(
        "three of 50 steps skipped",
        RUN.put(SKIPPED, 600, 620, np.resize([1, 0, 0, 0, 0, 0, 0, 0, 0, 0], 21)),
        [(WARN, 620, 649)],
    ),
    Scenario("two of 50 steps skipped", RUN.put(SKIPPED, 600, 601, 1.0)),
    Scenario("every step skipped", RUN.put(SKIPPED, 600, 799, 1.0), [(WARN, 602, 608), (CRITICAL, 609, 799)]),
    Scenario(
        "fp16 loss scaling: a pair each hundred steps",
        RUN.put(SKIPPED, 0, 799, np.resize([1.0, 1.0] + [0.0] * 98, 800)),
        [(OK, 100, 799)],
    ),
    Scenario("five skipped while the loss scale settles", RUN.put(SKIPPED, 0, 4, 1.0)),
    Scenario("neither signal", RUN.only("train/loss"), [(UNKNOWN, 0, 799)]),
    Scenario("the norm is missing for a while", RUN.lose(NORM, 500, 560)),
    Scenario("only skipped steps", RUN.only(SKIPPED), [(UNKNOWN, 0, 99), (OK, 100, 799)]),
    Scenario("NaN is another check's", RUN.put(NORM, 600, 604, np.nan)),
    Scenario(
        "an outlier right after NaN", FLAT.put(NORM, 599, 599, np.nan).put(NORM, 600, 600, 8.0), [(WARN, 600, 600)]
    ),
    Scenario("zero", RUN.put(NORM, 600, 600, 0.0)),
    Scenario("too little history", healthy(15).put(NORM, 12, 14, 3.0)),
    Scenario(
        "an explosion before a resume is not the resume's",
        RUN.scale(NORM, 596, 599, 50.0).resume(600, 5550),
        [(WARN, 596, 597), (CRITICAL, 598, 599)],
    ),
    Scenario("a pause of an hour", RUN.pause(600, 3600.0, ticks=9)),
    Scenario(
        "a declared change of scale",
        FLAT.put(NORM, 500, 799, 2.0),
        changes=[Change(5500, (NORM,))],
    ),
    Scenario(
        "a slow peak in the middle of a run, twice in 20,000 steps",
        healthy(20_000).scale(NORM, 0, 19_999, 1 + np.exp(-(((np.arange(20_000) - 9000) / 5000.0) ** 2))),
    ),
    Scenario(
        "one norm in a hundred steps that doubles over the run",
        healthy(60_000).scale(NORM, 0, 59_999, np.linspace(1, 2, 60_000)).keep_every(NORM, 100).only(NORM),
    ),
]


@pytest.mark.parametrize("scenario", TABLE, ids=str)
def test_grad_norm_says_what_the_table_says(scenario: Scenario) -> None:
    assert_as_expected(CHECK, scenario)


@pytest.mark.parametrize("seed", range(10))
def test_skewed_noise_with_blips_warns_rarely(seed: int) -> None:
    rng = np.random.default_rng(seed)
    blips = np.where(rng.random(9600) < 1 / 3000, rng.uniform(3, 8, 9600), 1.0) * np.exp(0.2 * rng.standard_t(5, 9600))
    found = verdicts(CHECK, Scenario("", healthy(9600, seed).scale(NORM, 0, 9599, blips)))
    assert len(incidents(found.level, WARN)) <= 4
    assert not len(incidents(found.level, CRITICAL))
