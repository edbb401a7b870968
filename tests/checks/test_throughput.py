"""`throughput`: slow against a floor, against its own best, in its tail, by and by; never a single slow step."""

from dataclasses import replace

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

from runwatch.checks.throughput import CHECK

TOKENS, MFU, STEP_TIME = "throughput/tokens_per_second", "throughput/mfu", "throughput/step_time"


def steady(records: int = 1000) -> Run:
    """A run of perfectly even speed."""
    run, last = healthy(records), records - 1
    return run.put(TOKENS, 0, last, 233016.9).put(MFU, 0, last, 0.225).put(STEP_TIME, 0, last, 18.0)


def slower(run: Run, first: int, last: int, factor: float) -> Run:
    """The run with steps that take `factor` times as long."""
    return (
        run.scale(STEP_TIME, first, last, factor)
        .scale(TOKENS, first, last, 1 / factor)
        .scale(MFU, first, last, 1 / factor)
    )


def sparse(first: int, last: int) -> Run:
    """A run that tells its step time each hundredth record; the step takes 4.2 times as long from `first` to `last`."""
    return steady(6000).only(STEP_TIME).scale(STEP_TIME, first, last, 4.2).keep_every(STEP_TIME, 100)


def with_doubled_batch(run: Run, first: int) -> Run:
    """The run with twice the tokens in twice the time from `first` on."""
    tokens = run.signals.tokens.copy()
    tokens[first:] += tokens[first:] - tokens[first - 1]
    return Run(replace(run.signals, tokens=tokens)).scale(STEP_TIME, first, len(tokens) - 1, 2.0).only(STEP_TIME)


RUN = steady()

TABLE = [
    Scenario("a healthy run is judged after its warm-up", healthy(1000), [(UNKNOWN, 0, 72), (OK, 73, 999)]),
    Scenario("it is a third slower for two hundred records", slower(RUN, 300, 499, 1.5), [(WARN, 308, 506)]),
    Scenario(
        "it is three times slower",
        slower(RUN, 300, 499, 3.0),
        [(WARN, 307, 307), (CRITICAL, 308, 506), (WARN, 507, 507)],
    ),
    Scenario(
        "only the step time tells",
        slower(RUN, 300, 499, 3.0).only(STEP_TIME),
        [(WARN, 307, 307), (CRITICAL, 308, 506), (WARN, 507, 507)],
    ),
    Scenario(
        "only the MFU falls", RUN.scale(MFU, 300, 499, 0.4), [(WARN, 307, 307), (CRITICAL, 308, 506), (WARN, 507, 507)]
    ),
    Scenario("just under the drop of a warning", slower(RUN, 300, 499, 1.24)),
    Scenario("just over the drop of a warning", slower(RUN, 300, 499, 1.26), [(WARN, 308, 506)]),
    Scenario("just under the critical drop", slower(RUN, 300, 499, 1.98), [(WARN, 307, 507)]),
    Scenario(
        "just over the critical drop",
        slower(RUN, 300, 499, 2.04),
        [(WARN, 307, 307), (CRITICAL, 308, 506), (WARN, 507, 507)],
    ),
    Scenario(
        "under a declared floor of the MFU from its first step on",
        RUN,
        [(UNKNOWN, 0, 72), (CRITICAL, 73, 999)],
        {"mfu_floor": 0.3},
    ),
    Scenario("just over a declared floor", RUN, settings={"mfu_floor": 0.2249, "tokens_per_second_floor": 233016.0}),
    Scenario(
        "under a declared floor of tokens per second",
        RUN.scale(TOKENS, 300, 399, 0.9),
        [(CRITICAL, 308, 406)],
        {"tokens_per_second_floor": 2.2e5},
    ),
    Scenario("one step takes a minute and a half", slower(RUN, 300, 300, 5.0)),
    Scenario(
        "each 250th step holds an evaluation", RUN.scale(STEP_TIME, 0, 999, np.where(np.arange(1000) % 250, 1, 60))
    ),
    Scenario("the ten first steps after a restart are slow", slower(RUN, 500, 509, 3.0).resume(500, 5500)),
    Scenario("sixty steps after a restart recompile", slower(RUN, 500, 559, 5.0).resume(500, 5500)),
    Scenario(
        "every fourth step straggles",
        RUN.scale(STEP_TIME, 300, 599, np.where(np.arange(300) % 4, 1, 2)),
        [(WARN, 348, 675)],
    ),
    Scenario(
        "every eighth step straggles",
        RUN.scale(STEP_TIME, 300, 599, np.where(np.arange(300) % 8, 1, 2)),
        [(WARN, 396, 627)],
    ),
    Scenario("every twelfth step straggles", RUN.scale(STEP_TIME, 300, 599, np.where(np.arange(300) % 12, 1, 2))),
    Scenario("step times are sparse and one is slow", sparse(3000, 3000)),
    Scenario(
        "step times are sparse and three are slow",
        sparse(3000, 3200),
        [(CRITICAL, 3100, 3299)],
    ),
    Scenario("steps take twice as long because the batch doubles", with_doubled_batch(RUN, 300)),
    Scenario("none of the signals is there", RUN.only("train/loss"), [(UNKNOWN, 0, 999)]),
    Scenario(
        "the signals go missing while slow",
        slower(RUN, 300, 499, 3.0).lose(TOKENS, 400, 449).lose(MFU, 400, 449).lose(STEP_TIME, 400, 449),
        [(WARN, 307, 307), (CRITICAL, 308, 506), (WARN, 507, 507)],
    ),
    Scenario("NaN and zero say nothing", RUN.put(TOKENS, 300, 499, np.nan).put(STEP_TIME, 300, 499, 0.0)),
    Scenario("too little history", steady(70), [(UNKNOWN, 0, 69)]),
    Scenario(
        "ticks of a pause repeat the verdict",
        slower(RUN, 300, 399, 3.0).pause(350, 900.0, ticks=10),
        [(WARN, 307, 307), (CRITICAL, 308, 416), (WARN, 417, 417)],
    ),
    Scenario("a declared change is judged afresh", slower(RUN, 300, 999, 3.0), changes=[Change(5300, ("throughput",))]),
]


@pytest.mark.parametrize("scenario", TABLE, ids=str)
def test_throughput_says_what_the_table_says(scenario: Scenario) -> None:
    assert_as_expected(CHECK, scenario)


@pytest.mark.parametrize("seed", range(10))
def test_heavy_tails_raise_no_critical_and_at_most_one_warning_in_4800_records(seed: int) -> None:
    noise = np.exp(0.03 * np.random.default_rng(seed).standard_t(3, 4800).clip(-60, 60))
    level = verdicts(CHECK, Scenario("heavy tails", slower(healthy(4800, seed), 0, 4799, noise))).level
    assert not incidents(level, CRITICAL)
    assert len(incidents(level, WARN)) <= 1


def test_a_creeping_decline_is_told_before_a_fifth_of_the_speed_is_lost() -> None:
    creep = np.linspace(1, 1 / 0.7, 4000)
    found = verdicts(CHECK, Scenario("decline", slower(healthy(5000), 1000, 4999, creep)))
    level = found.level
    assert (found.value < found.limit)[found.reason == 2].all(), "it tells of a fall"
    first = incidents(level, WARN)[0][0]
    assert 1000 < first < 3700
