"""`token_drop`: a lasting drop rate, never a blip."""

import numpy as np
import pytest
from scenarios import CRITICAL, OK, UNKNOWN, WARN, Change, Scenario, assert_as_expected, healthy

from runwatch.checks.token_drop import CHECK

NAME = "moe/drop_rate"
RUN = healthy(300).put(NAME, 0, 299, 0.03)
START = healthy(600, first=0).put(NAME, 0, 599, 0.02)

TABLE = [
    Scenario("a healthy run is ok once half a window is full", healthy(300), [(UNKNOWN, 0, 3), (OK, 4, 299)]),
    Scenario("it drops 40 % from record 100 on", RUN.put(NAME, 100, 299, 0.4), [(CRITICAL, 104, 299)]),
    Scenario("it drops 10 % for fifty records", RUN.put(NAME, 100, 149, 0.10001), [(WARN, 105, 153)]),
    Scenario(
        "it climbs past both limits",
        RUN.put(NAME, 100, 199, np.linspace(0.03, 0.3, 100)).put(NAME, 200, 299, 0.3),
        [(WARN, 120, 166), (CRITICAL, 167, 299)],
    ),
    Scenario("just under the limit of a warning", RUN.put(NAME, 100, 299, 0.07)),
    Scenario("just over the limit of a warning", RUN.put(NAME, 100, 299, 0.0701), [(WARN, 105, 299)]),
    Scenario("just under the critical limit", RUN.put(NAME, 100, 299, 0.2), [(WARN, 104, 299)]),
    Scenario("just over the critical limit", RUN.put(NAME, 100, 299, 0.2001), [(WARN, 104, 104), (CRITICAL, 105, 299)]),
    Scenario("one record drops everything", RUN.put(NAME, 100, 100, 1.0)),
    Scenario("four records drop everything", RUN.put(NAME, 100, 103, 1.0)),
    Scenario(
        "healthy blips of 5 % every third record", RUN.put(NAME, 100, 299, np.where(np.arange(200) % 3, 0.03, 0.05))
    ),
    Scenario(
        "the start-up transient is 30 % for 150 steps",
        START.put(NAME, 0, 149, 0.3),
        [(UNKNOWN, 0, 199), (OK, 200, 599)],
    ),
    Scenario(
        "the start-up transient never ends", START.put(NAME, 0, 599, 0.3), [(UNKNOWN, 0, 199), (CRITICAL, 200, 599)]
    ),
    Scenario("the signal is missing", RUN.lose(NAME), [(UNKNOWN, 0, 299)]),
    Scenario(
        "the signal goes missing while critical",
        RUN.put(NAME, 100, 150, 0.4).lose(NAME, 151, 200),
        [(CRITICAL, 104, 205)],
    ),
    Scenario(
        "NaN among high rates blinds nothing",
        RUN.put(NAME, 100, 199, np.where(np.arange(100) % 2, 0.4, np.nan)),
        [(CRITICAL, 106, 202)],
    ),
    Scenario(
        "only every fifth record carries it", RUN.put(NAME, 100, 199, 0.4).keep_every(NAME, 5), [(CRITICAL, 120, 224)]
    ),
    Scenario("too little history", healthy(4).put(NAME, 0, 3, 0.5), [(UNKNOWN, 0, 3)]),
    Scenario(
        "the resume is healthy and owes nothing to the superseded tail",
        RUN.put(NAME, 100, 149, 0.4).resume(150, 5090),
        [(CRITICAL, 104, 149)],
    ),
    Scenario(
        "ticks of a pause repeat the verdict",
        RUN.put(NAME, 100, 149, 0.4).pause(130, 900.0, ticks=20),
        [(CRITICAL, 104, 174)],
    ),
    Scenario(
        "a planned context extension is judged afresh",
        RUN.put(NAME, 100, 299, 0.4),
        [(UNKNOWN, 100, 103), (CRITICAL, 104, 299)],
        changes=[Change(5100, (NAME,))],
    ),
    *[
        Scenario(
            f"heavy-tailed noise, seed {seed}",
            RUN.put(NAME, 0, 299, 0.03 * np.exp(0.2 * np.random.default_rng(seed).standard_t(3, 300))),
        )
        for seed in range(10)
    ],
]


@pytest.mark.parametrize("scenario", TABLE, ids=str)
def test_token_drop_says_what_the_table_says(scenario: Scenario) -> None:
    assert_as_expected(CHECK, scenario)
