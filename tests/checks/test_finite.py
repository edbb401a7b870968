"""`finite`: critical at the very record, whatever came before."""

import numpy as np
import pytest
from scenarios import CRITICAL, OK, UNKNOWN, Change, Scenario, assert_as_expected, healthy

from runwatch.checks.finite import CHECK

RUN = healthy(300)
NAMES = ("train/loss", "optim/grad_norm", "train/z_loss", "params/norm")

TABLE = [
    Scenario("a healthy run is ok from its first record", RUN, [(OK, 0, 299)]),
    *[
        Scenario(f"{name} is {value} for one record", RUN.put(name, 50, 50, value), [(CRITICAL, 50, 50)])
        for name in NAMES
        for value in (np.nan, np.inf, -np.inf)
    ],
    Scenario("NaN from the first record on", RUN.put("train/loss", 0, 299, np.nan), [(CRITICAL, 0, 299)]),
    Scenario(
        "NaN lasts until the end of the attempt and the resume is finite",
        RUN.put("train/loss", 100, 149, np.nan).resume(150, 5090),
        [(CRITICAL, 100, 149)],
    ),
    Scenario(
        "the loss goes missing after a NaN: nothing has cleared it",
        RUN.put("train/loss", 100, 100, np.inf).lose("train/loss", 101, 120),
        [(CRITICAL, 100, 120)],
    ),
    Scenario("an absurd but finite value is another check's", RUN.put("train/loss", 50, 60, 1e300)),
    Scenario("none of the four is there", RUN.only("moe/drop_rate"), [(UNKNOWN, 0, 299)]),
    Scenario("only the parameter norm is there", RUN.only("params/norm"), [(OK, 0, 299)]),
    Scenario("the loss is late", RUN.only("train/loss").lose("train/loss", 0, 9), [(UNKNOWN, 0, 9), (OK, 10, 299)]),
    Scenario("one record", healthy(1), [(OK, 0, 0)]),
    Scenario(
        "NaN over tick rows is still NaN",
        RUN.put("train/loss", 99, 99, np.nan).pause(100, 600.0, ticks=5),
        [(CRITICAL, 99, 104)],
    ),
    Scenario(
        "a planned change excuses no NaN",
        RUN.put("train/loss", 100, 100, np.nan),
        [(CRITICAL, 100, 100)],
        changes=[Change(5100, ("train/loss",))],
    ),
    *[Scenario(f"heavy-tailed noise, seed {seed}", healthy(2000, seed, tail=3)) for seed in range(10)],
]


@pytest.mark.parametrize("scenario", TABLE, ids=str)
def test_finite_says_what_the_table_says(scenario: Scenario) -> None:
    assert_as_expected(CHECK, scenario)
