"""`expert_balance`: lasting imbalance, against absolute limits and the run's own best."""

import numpy as np
import pytest
from scenarios import (
    CRITICAL,
    OK,
    UNKNOWN,
    WARN,
    Change,
    Run,
    Scenario,
    assert_as_expected,
    healthy,
    incidents,
    verdicts,
)

from runwatch.checks.expert_balance import CHECK

VIOLATION, ENTROPY, DEAD, BIAS = "moe/load_max_vio", "moe/load_entropy", "moe/dead_experts", "moe/router_bias_max"


def steady(records: int = 600, first: int = 5000) -> Run:
    """A run whose four signals stand still."""
    run, last = healthy(records, first=first), records - 1
    run = run.put(VIOLATION, 0, last, 0.6).put(ENTROPY, 0, last, 0.99)
    return run.put(DEAD, 0, last, 0.0).put(BIAS, 0, last, 1.5)


RUN = steady()
START = steady(600, first=0)

TABLE = [
    Scenario("a healthy run", healthy(600), [(UNKNOWN, 0, 6), (OK, 7, 599)]),
    Scenario(
        "the busiest expert has three times its share",
        RUN.put(VIOLATION, 100, 599, 2.0),
        [(WARN, 107, 569)],
    ),
    Scenario("one expert takes everything", RUN.put(VIOLATION, 100, 299, 40.0), [(CRITICAL, 107, 307)]),
    Scenario("the violation is just under its limit", RUN.put(VIOLATION, 100, 599, 1.2)),
    Scenario("half of the load's entropy is gone", RUN.put(ENTROPY, 100, 299, 0.5), [(CRITICAL, 107, 307)]),
    Scenario("the entropy's deficit triples and a little", RUN.put(ENTROPY, 100, 299, 0.969), [(WARN, 108, 306)]),
    Scenario("the entropy's deficit just triples", RUN.put(ENTROPY, 100, 299, 0.9701)),
    Scenario(
        "a floor is declared for the entropy",
        RUN.put(ENTROPY, 100, 299, 0.985),
        [(WARN, 108, 306)],
        {"entropy_floor": 0.986},
    ),
    Scenario("collapsed from the first step on", RUN.put(ENTROPY, 0, 599, 0.3), [(UNKNOWN, 0, 6), (CRITICAL, 7, 599)]),
    Scenario("an expert dies", RUN.put(DEAD, 100, 299, 1), [(WARN, 115, 299)]),
    Scenario("forty experts die", RUN.put(DEAD, 100, 299, 40), [(CRITICAL, 115, 299)]),
    Scenario("experts go without a token now and then", RUN.put(DEAD, 0, 599, np.arange(600) % 4)),
    Scenario(
        "the bias passes the card's limit", RUN.put(BIAS, 100, 299, 2.5), [(WARN, 108, 306)], {"router_bias_limit": 2.0}
    ),
    Scenario(
        "the bias passes twice the card's limit",
        RUN.put(BIAS, 100, 299, 4.2),
        [(WARN, 107, 107), (CRITICAL, 108, 306), (WARN, 307, 307)],
        {"router_bias_limit": 2.0},
    ),
    Scenario(
        "the bias runs away",
        RUN.put(BIAS, 100, 599, 1.5 + 0.015 * np.arange(500)),
        [(WARN, 208, 407), (CRITICAL, 408, 599)],
    ),
    Scenario("the bias grows in proportion to the steps", START.put(BIAS, 0, 599, 0.01 * np.arange(600))),
    Scenario(
        "routing is unbalanced at the start",
        START.put(VIOLATION, 0, 180, 7.0).put(ENTROPY, 0, 180, 0.4).put(DEAD, 0, 180, 50),
    ),
    Scenario(
        "one record is out of balance",
        RUN.put(VIOLATION, 100, 100, 40.0)
        .put(ENTROPY, 100, 100, 0.0)
        .put(BIAS, 100, 100, 99.0)
        .put(DEAD, 100, 100, 99),
    ),
    Scenario("none of the signals is there", RUN.only("train/loss"), [(UNKNOWN, 0, 599)]),
    Scenario("only the bias is there", RUN.only(BIAS), [(UNKNOWN, 0, 6), (OK, 7, 599)]),
    Scenario(
        "the entropy goes missing while critical",
        RUN.put(ENTROPY, 100, 299, 0.3).lose(ENTROPY, 200, 249),
        [(CRITICAL, 107, 307)],
    ),
    Scenario(
        "NaN blinds nothing",
        RUN.put(VIOLATION, 100, 299, np.where(np.arange(200) % 2, 40.0, np.nan)),
        [(CRITICAL, 110, 304)],
    ),
    Scenario("too little history", steady(7).put(ENTROPY, 0, 6, 0.1), [(UNKNOWN, 0, 6)]),
    Scenario(
        "the resume is healthy and owes nothing to the superseded tail",
        RUN.put(ENTROPY, 100, 199, 0.3).resume(200, 5090),
        [(CRITICAL, 107, 199)],
    ),
    Scenario(
        "ticks of a pause repeat the verdict",
        RUN.put(ENTROPY, 100, 199, 0.3).pause(150, 900.0, ticks=10),
        [(CRITICAL, 107, 217)],
    ),
    Scenario(
        "a declared change is judged afresh",
        RUN.put(BIAS, 100, 599, 9.0),
        [(UNKNOWN, 100, 106)],
        changes=[Change(5100, ("moe",))],
    ),
]


@pytest.mark.parametrize("scenario", TABLE, ids=str)
def test_expert_balance_says_what_the_table_says(scenario: Scenario) -> None:
    assert_as_expected(CHECK, scenario)


@pytest.mark.parametrize("seed", range(10))
def test_heavy_tails_raise_no_critical_and_at_most_one_warning_in_4800_records(seed: int) -> None:
    noise = np.random.default_rng(seed).standard_t(4, (3, 4800))
    run = healthy(4800, seed).put(VIOLATION, 0, 4799, 0.6 * np.exp(0.2 * noise[0]))
    run = run.put(ENTROPY, 0, 4799, 1 - 0.02 * np.exp(0.3 * noise[1])).put(BIAS, 0, 4799, 1.5 * np.exp(0.1 * noise[2]))
    level = verdicts(CHECK, Scenario("heavy tails", run)).level
    assert not incidents(level, CRITICAL)
    assert len(incidents(level, WARN)) <= 1
