"""`loss_spike`: found at the first record, critical when still there at the third, deaf to odd batches."""

import numpy as np
import pytest
from scenarios import (
    CRITICAL,
    OK,
    UNKNOWN,
    WARN,
    Change,
    Phase,
    Scenario,
    assert_as_expected,
    healthy,
    incidents,
    verdicts,
)

from runwatch.checks.loss_spike import CHECK

RUN = healthy(700)
LOSS = "train/loss"
BLOOM_LIKE = [0.2, 2.9, 1.0, 0.5, 0.3, 0.2]

TABLE = [
    Scenario("a healthy run is known after 26 records", RUN, [(UNKNOWN, 0, 25), (OK, 26, 699)]),
    Scenario("up by 1 nat for one record", RUN.add(LOSS, 600, 600, 1.0), [(WARN, 600, 600)]),
    Scenario("up by 1 nat for two records", RUN.add(LOSS, 600, 601, 1.0), [(WARN, 600, 601)]),
    Scenario("up by 1 nat for three records", RUN.add(LOSS, 600, 602, 1.0), [(WARN, 600, 601), (CRITICAL, 602, 602)]),
    Scenario(
        "up and healing within six records",
        RUN.add(LOSS, 600, 605, BLOOM_LIKE),
        [(WARN, 600, 601), (CRITICAL, 602, 605)],
    ),
    Scenario(
        "up by 1 nat for good: critical until it has become the trend",
        RUN.add(LOSS, 600, 699, 1.0),
        [(WARN, 600, 601), (CRITICAL, 602, 615)],
    ),
    Scenario("0.3 nats (15 sigmas) for one record", RUN.add(LOSS, 600, 600, 0.3), [(WARN, 600, 600)]),
    Scenario("0.17 nats (8 sigmas) for one record, as heavy tails give", RUN.add(LOSS, 600, 600, 0.17)),
    Scenario("0.08 nats (4 sigmas) for one record is noise", RUN.add(LOSS, 600, 600, 0.08)),
    Scenario("a jump of 0.06 nats in noise of 0.002 matters", _quiet := RUN.put(LOSS, 0, 699, 2.2), []),
    Scenario("0.051 nats without any noise", _quiet.add(LOSS, 600, 600, 0.051), [(WARN, 600, 600)]),
    Scenario("0.049 nats without any noise matter to nobody", _quiet.add(LOSS, 600, 604, 0.049)),
    Scenario("down by 1 nat is another check's", RUN.add(LOSS, 600, 699, -1.0)),
    Scenario("0.5 nats in 300 records is a drift, another check's", RUN.add(LOSS, 400, 699, np.linspace(0, 0.5, 300))),
    Scenario("the loss is missing", RUN.only("optim/grad_norm"), [(UNKNOWN, 0, 699)]),
    Scenario("the loss is missing for a while", RUN.lose(LOSS, 500, 549)),
    Scenario(
        "a spike before a silence is not over until the loss is back",
        RUN.add(LOSS, 600, 600, 1.0).lose(LOSS, 601, 620),
        [(WARN, 600, 620)],
    ),
    Scenario(
        "one loss in five records", healthy(3500).keep_every(LOSS, 5).add(LOSS, 3000, 3000, 1.0), [(WARN, 3000, 3004)]
    ),
    Scenario("NaN says nothing here", RUN.put(LOSS, 600, 600, np.nan), [(UNKNOWN, 600, 600)]),
    Scenario(
        "a spike is seen right after NaN",
        RUN.put(LOSS, 590, 599, np.nan).add(LOSS, 600, 600, 1.0),
        [(UNKNOWN, 590, 599), (WARN, 600, 600)],
    ),
    Scenario("too little history", healthy(20).add(LOSS, 15, 17, 3.0), [(UNKNOWN, 0, 19)]),
    Scenario(
        "a spike ends with the attempt: the resume has not seen it",
        RUN.add(LOSS, 590, 599, 1.0).resume(600, 5580),
        [(WARN, 590, 591), (CRITICAL, 592, 599)],
    ),
    Scenario(
        "a spike right after a resume",
        RUN.resume(600, 5550).add(LOSS, 600, 602, 1.0),
        [(WARN, 600, 601), (CRITICAL, 602, 602)],
    ),
    Scenario("a pause of an hour", RUN.pause(600, 3600.0, ticks=9)),
    Scenario(
        "a pause in a spike changes nothing",
        RUN.add(LOSS, 600, 601, 1.0).pause(601, 3600.0, ticks=9),
        [(WARN, 600, 610)],
    ),
    Scenario("an evaluation", RUN.insert(600, Phase.EVAL, eval__loss=2.3)),
    Scenario(
        "a declared mixture swap that lifts the loss",
        RUN.add(LOSS, 600, 699, 0.4),
        [(UNKNOWN, 600, 625)],
        changes=[Change(5600, ("data/mixture", LOSS))],
    ),
    Scenario("the loss falls faster in the decay", healthy(2000).add(LOSS, 1000, 1999, np.linspace(0, -0.2, 1000))),
    Scenario(
        "a violent warm-up is not critical",
        healthy(400, first=0).add(LOSS, 0, 99, 4.0 * np.exp(-np.arange(100) / 15.0)),
        [(UNKNOWN, 0, 25)],
    ),
    Scenario(
        "a batch as odd as one a hundred records ago",
        RUN.add(LOSS, 500, 500, 1.0).add(LOSS, 600, 600, 1.0),
        [(WARN, 500, 500)],
    ),
    Scenario(
        "odd batches do not hide a spike of two records",
        RUN.add(LOSS, 500, 500, 1.0).add(LOSS, 600, 601, 0.5),
        [(WARN, 500, 500), (WARN, 601, 601)],
    ),
]


@pytest.mark.parametrize("scenario", TABLE, ids=str)
def test_loss_spike_says_what_the_table_says(scenario: Scenario) -> None:
    assert_as_expected(CHECK, scenario)


@pytest.mark.parametrize("seed", range(10))
def test_heavy_tails_warn_at_most_once_in_4800_records(seed: int) -> None:
    found = verdicts(CHECK, Scenario("", healthy(9600, seed, tail=4.0)))
    assert len(incidents(found.level, WARN)) <= 4
    assert not len(incidents(found.level, CRITICAL))


def test_a_lasting_shift_of_a_tenth_of_a_nat_is_found_within_ten_records() -> None:
    found = [
        (verdicts(CHECK, Scenario("", healthy(640, seed).add(LOSS, 600, 639, 0.1))).level[600:610] >= WARN).any()
        for seed in range(100)
    ]
    assert np.mean(found) >= 0.98
