"""`checkpoint`: the age of the newest complete checkpoint, in steps and on the clock."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from scenarios import CRITICAL, OK, UNKNOWN, WARN, Change, Run, Scenario, assert_as_expected, healthy

from runwatch.checks import Phase
from runwatch.checks.checkpoint import CHECK

NAME = "checkpoint/step"
CARD = {"interval_steps": 100}


def saving(rows: Iterable[int], records: int = 1000) -> Run:
    """A run in which these rows tell of a checkpoint of their own step."""
    run = healthy(records)
    for row in rows:
        run = run.put(NAME, row, row, 5000.0 + row)
    return run


def stretched(run: Run, first: int, seconds: float) -> Run:
    """The run with steps of so many seconds from row `first` on."""
    time = run.signals.time.copy()
    time[first:] = time[first - 1] + seconds * np.arange(1, len(time) - first + 1)
    return Run(replace(run.signals, time=time))


EACH_HUNDREDTH = range(100, 1000, 100)
RUN = saving(EACH_HUNDREDTH)
STOPPED = saving(range(100, 500, 100))

TABLE = [
    Scenario("a healthy run, its cadence learned at the third checkpoint", RUN, [(UNKNOWN, 0, 299), (OK, 300, 999)]),
    Scenario("a healthy run with a card", RUN, [(OK, 100, 999)], CARD),
    Scenario("saving stops", STOPPED, [(WARN, 551, 700), (CRITICAL, 701, 999)], CARD),
    Scenario("saving stops and no card tells the interval", STOPPED, [(WARN, 551, 700), (CRITICAL, 701, 999)]),
    Scenario(
        "one checkpoint is late, within the limit",
        saving([100, 200, 350, 450]),
        [(WARN, 601, 750), (CRITICAL, 751, 999)],
        CARD,
    ),
    Scenario(
        "one checkpoint is late, beyond the limit",
        saving([100, 200, 352, *range(452, 1000, 100)]),
        [(WARN, 351, 351)],
        CARD,
    ),
    Scenario(
        "one record tells of two checkpoints at one step",
        RUN.insert(401, Phase.CHECKPOINT, checkpoint__step=5400.0),
        settings=CARD,
    ),
    Scenario(
        "no checkpoint ever, though the card plans one each 20 steps",
        healthy(200),
        [(WARN, 41, 60), (CRITICAL, 61, 199)],
        {"interval_steps": 20},
    ),
    Scenario(
        "no checkpoint ever, seen by the evaluations",
        healthy(900).put("eval/loss", 0, 0, 3.0),
        [(WARN, 201, 300), (CRITICAL, 301, 899)],
        CARD,
    ),
    Scenario("no checkpoint ever and nothing planned", healthy(900), [(UNKNOWN, 0, 899)]),
    Scenario("two checkpoints and no card: no cadence", saving([100, 200]), [(UNKNOWN, 0, 999)]),
    Scenario("a checkpoint goes back", RUN.put(NAME, 400, 400, 5150.0), [(CRITICAL, 400, 499)], CARD),
    Scenario("a checkpoint is ahead of the run", RUN.put(NAME, 400, 400, 5401.0), [(CRITICAL, 400, 499)], CARD),
    Scenario("NaN is no checkpoint", RUN.put(NAME, 500, 500, np.nan), [(WARN, 551, 599)], CARD),
    Scenario(
        "after a resume the age counts from the resumed step",
        RUN.resume(450, 5401).lose(NAME, 450, 999).put(NAME, 549, 549, 5500.0),
        [(WARN, 700, 849), (CRITICAL, 850, 999)],
        CARD,
    ),
    Scenario(
        "steps of half an hour: the clock is over its cadence",
        stretched(STOPPED, 410, 1800.0),
        [(CRITICAL, 425, 999)],
    ),
    Scenario(
        "an overnight pause is no old checkpoint",
        RUN.in_phase(Phase.PAUSED, 450, 450).pause(451, 40_000.0, ticks=50),
        [(OK, 300, 499)],
    ),
    Scenario("a job that hangs ages its checkpoint", RUN.pause(450, 4000.0, ticks=10), [(WARN, 454, 459)]),
    Scenario("a job that ended ages nothing", RUN.in_phase(Phase.FINISHED, 999, 999).pause(999, 1.0)),
    Scenario(
        "a declared change of cadence is judged afresh",
        RUN.lose(NAME, 500),
        [(UNKNOWN, 450, 999)],
        changes=[Change(5450, (NAME,))],
    ),
]


@pytest.mark.parametrize("scenario", TABLE, ids=str)
def test_checkpoint_says_what_the_table_says(scenario: Scenario) -> None:
    assert_as_expected(CHECK, scenario)


@pytest.mark.parametrize("seed", range(10))
def test_uneven_steps_and_evaluations_raise_nothing(seed: int) -> None:
    seconds = 18.0 * np.exp(0.1 * np.random.default_rng(seed).standard_t(3, 1000).clip(-10, 10))
    seconds[250::250] += 300.0
    run = Run(replace(RUN.signals, time=np.cumsum(seconds)))
    assert_as_expected(CHECK, Scenario("uneven", run, [(OK, 100, 999)], CARD))
