"""`progress`: a clock that runs on while nothing is trained."""

from dataclasses import replace

import numpy as np
import pytest
from scenarios import CRITICAL, OK, UNKNOWN, WARN, Run, Scenario, assert_as_expected, healthy

from runwatch.checks import Phase
from runwatch.checks.progress import CHECK

RUN = healthy(400)
FOREIGN = RUN.only("train/loss")
DROPPED = "telemetry/dropped_records"


def hung(run: Run, before: int, seconds: float) -> Run:
    """The run with a tick row every ten seconds of a silence before row `before`."""
    return run.pause(before, seconds - 18.0, ticks=int(seconds // 10) - 1)


def in_phase(phase: Phase, seconds: float) -> Run:
    """Row 200 enters a phase, and nothing comes for that long (a tick each ten seconds)."""
    return hung(RUN.in_phase(phase, 200, 200), 201, seconds)


def restarted(*rows: int) -> Run:
    """The run restarted from step 5190 at each of these rows."""
    run = RUN
    for row in rows:
        run = run.resume(row, 5190)
    return run


def without_clock(run: Run) -> Run:
    """The run of a source that does not tell the time."""
    return Run(replace(run.signals, time=np.full(len(run.signals), np.nan)))


TABLE = [
    Scenario("a healthy run is ok from its first record", RUN, [(OK, 0, 399)]),
    Scenario("no step for ten minutes", hung(RUN, 200, 600.0), [(WARN, 206, 229), (CRITICAL, 230, 258)]),
    Scenario("no step for just under the budget", hung(RUN, 200, 60.0)),
    Scenario("no step for just over the budget", hung(RUN, 200, 80.0), [(WARN, 206, 206)]),
    Scenario(
        "the last records are ticks of a run that hangs",
        Run(hung(RUN, 200, 600.0).signals.take(slice(0, 230))),
        [(WARN, 206, 229)],
    ),
    Scenario("the trainer ends", hung(RUN.in_phase(Phase.FINISHED, 200, 200), 201, 90_000.0)),
    Scenario("the trainer is paused for a night", in_phase(Phase.PAUSED, 40_000.0)),
    Scenario("an evaluation within its budget", in_phase(Phase.EVAL, 1500.0)),
    Scenario("an evaluation hangs", in_phase(Phase.EVAL, 2000.0), [(CRITICAL, 381, 399)]),
    Scenario("a checkpoint hangs", in_phase(Phase.CHECKPOINT, 2000.0), [(CRITICAL, 381, 399)]),
    Scenario(
        "the job dies in the first step after a checkpoint",
        hung(RUN.insert(200, Phase.CHECKPOINT).insert(201, Phase.CHECKPOINT, checkpoint__step=5199.0), 202, 600.0),
        [(WARN, 208, 231), (CRITICAL, 232, 260)],
    ),
    Scenario(
        "the job dies in the first step after an evaluation",
        hung(RUN.insert(200, Phase.EVAL).insert(201, Phase.EVAL, eval__loss=2.5), 202, 600.0),
        [(WARN, 208, 231), (CRITICAL, 232, 260)],
    ),
    Scenario(
        "a source that announces no phases evaluates on after its first result",
        hung(FOREIGN.insert(200, Phase.EVAL, eval__loss=2.5), 201, 1500.0),
    ),
    Scenario("a compilation within its budget", in_phase(Phase.COMPILE, 2600.0)),
    Scenario("a compilation hangs", in_phase(Phase.COMPILE, 2800.0), [(CRITICAL, 471, 479)]),
    Scenario("a restore hangs", in_phase(Phase.RESTORE, 2800.0), [(CRITICAL, 471, 479)]),
    Scenario("initialisation hangs", in_phase(Phase.INIT, 2800.0), [(CRITICAL, 471, 479)]),
    Scenario("records that repeat a phase are no progress", RUN.in_phase(Phase.EVAL, 200, 399), [(CRITICAL, 301, 399)]),
    Scenario(
        "the job is down between two attempts",
        hung(RUN.resume(200, 5190), 200, 600.0),
        [(WARN, 206, 229), (CRITICAL, 230, 258)],
    ),
    Scenario("a source that announces no phases evaluates for four minutes", hung(FOREIGN, 200, 250.0)),
    Scenario(
        "a source that announces no phases hangs", hung(FOREIGN, 200, 600.0), [(WARN, 230, 253), (CRITICAL, 254, 258)]
    ),
    Scenario("nothing has been timed yet", hung(RUN, 1, 1000.0), [(WARN, 91, 99)]),
    Scenario(
        "steps of five minutes are no stall",
        slow := Run(replace(RUN.signals, time=RUN.signals.time[0] + 300.0 * np.arange(400))),
        [(OK, 0, 399)],
    ),
    Scenario("steps of five minutes and one of fourteen", slow.pause(200, 540.0, ticks=40), [(OK, 0, 439)]),
    Scenario("steps of five minutes and one of sixteen", slow.pause(200, 660.0, ticks=47), [(WARN, 245, 246)]),
    Scenario("the clock is set back", Run(replace(RUN.signals, time=RUN.signals.time - 9e3 * (np.arange(400) > 200)))),
    Scenario("no clock", without_clock(hung(RUN, 200, 600.0)), [(UNKNOWN, 0, 399)][:0]),
    Scenario("one restart", restarted(200)),
    Scenario("two restarts that left nothing", restarted(200, 220), [(WARN, 220, 399)]),
    Scenario("three restarts that left nothing", restarted(200, 220, 240), [(WARN, 220, 239), (CRITICAL, 240, 399)]),
    Scenario(
        "the writer gives up records",
        RUN.put(DROPPED, 0, 399, np.maximum(0, np.arange(400) - 199).clip(0, 5)),
        [(WARN, 200, 223)],
    ),
    Scenario("the writer gave up records long ago", RUN.put(DROPPED, 0, 399, 7)),
    Scenario("NaN in the count of lost records", RUN.put(DROPPED, 0, 399, np.nan)),
    Scenario("one record", healthy(1), [(OK, 0, 0)]),
]


@pytest.mark.parametrize("scenario", TABLE, ids=str)
def test_progress_says_what_the_table_says(scenario: Scenario) -> None:
    assert_as_expected(CHECK, scenario)


@pytest.mark.parametrize("seed", range(10))
def test_heavy_tailed_steps_and_their_ticks_raise_nothing(seed: int) -> None:
    seconds = 18.0 * np.exp(0.1 * np.random.default_rng(seed).standard_t(3, 2000).clip(-10, 10))
    run = Run(replace(healthy(2000).signals, time=np.cumsum(seconds)))
    for row in (500, 900, 1300):
        run = run.pause(row, 5.0, ticks=1)
    assert_as_expected(CHECK, Scenario("heavy tails", run))
