"""`plan_conformance`: schedule, batch, mixture and data order as planned."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scenarios import CRITICAL, OK, WARN, Change, Run, Scenario, assert_as_expected, healthy

from runwatch.checks.plan_conformance import CHECK, PlannedRun

LEARNING_RATE, POSITION, FINGERPRINT = "optim/learning_rate", "data/position", "data/sample_fingerprint"
STEP = 4_194_304.0
RUN = healthy(600)
START = healthy(600, first=0)
DECAY_FROM = 5300 * STEP
WSD = PlannedRun(
    tokens_per_step=STEP,
    token_budget=5700 * STEP,
    peak=3e-4,
    warmup_tokens=100 * STEP,
    decay_start_tokens=DECAY_FROM,
    final_fraction=0.1,
)
FLAT = PlannedRun(tokens_per_step=STEP, peak=3e-4)
MIXED = PlannedRun(
    mixture={"code": 0.3, "web": 0.7}, decay_mixture={"code": 0.6, "web": 0.4}, decay_start_tokens=DECAY_FROM
)


def plans(*planned: PlannedRun) -> Mapping[str, Any]:
    """Settings with these plans."""
    return {"plans": planned}


def following(run: Run, plan: PlannedRun, shift: float = 0.0) -> Run:
    """The run with the plan's learning rate, `shift` tokens late."""
    return run.put(LEARNING_RATE, 0, 599, plan.learning_rate(run.signals.tokens - shift))


def with_tokens(run: Run, change: Callable[[Any], Any]) -> Run:
    """The run with other cumulative tokens."""
    return Run(replace(run.signals, tokens=change(run.signals.tokens)))


def stepping(first: int, by: int) -> Run:
    """The run with step numbers that differ by `by` from row `first` on."""
    step = RUN.signals.step.copy()
    step[first:] += by
    return Run(replace(RUN.signals, step=step))


def quantised(share: float, seed: int = 0) -> Run:
    """Shares realised by eight sequences a step, drawn at random."""
    code = np.random.default_rng(seed).binomial(8, share, 600) / 8
    return RUN.put("data/mixture/code", 0, 599, code).put("data/mixture/web", 0, 599, 1 - code)


def skipping(row: int, sequences: float) -> Run:
    """The run with a data position that jumps by so many sequences."""
    return RUN.add(POSITION, row, 599, sequences)


def repeating(*rows: int) -> Run:
    """The run in which these rows have the fingerprint of row 100."""
    run = RUN
    for row in rows:
        run = run.put(FINGERPRINT, row, row, RUN.signals.columns[FINGERPRINT].values[100])
    return run


def resumed(position_from: int) -> Run:
    """Row 300 resumes from the step of row 200; the data goes on where row `position_from` was."""
    return RUN.resume(300, 5200).add(POSITION, 300, 599, (position_from - 300) * 512.0)


HALFWAY = np.where(np.arange(600) < 300, 3e-4, 1.5e-4)

TABLE = [
    Scenario("a healthy run without a plan", RUN, [(OK, 0, 599)]),
    Scenario("the learning rate follows warmup and decay", following(RUN, WSD), settings=plans(WSD)),
    Scenario("the warmup is one step late", following(START, WSD, STEP), settings=plans(WSD)),
    Scenario(
        "the warmup follows points",
        START.put(LEARNING_RATE, 0, 599, np.interp(START.signals.tokens, [0, 100 * STEP], [0, 3e-4])),
        settings=plans(PlannedRun(learning_rate_points=((0, 0), (100 * STEP, 3e-4)))),
    ),
    Scenario("the learning rate is 1.9 % high", RUN.scale(LEARNING_RATE, 200, 399, 1.019), settings=plans(FLAT)),
    Scenario(
        "the learning rate is 2.1 % high", RUN.scale(LEARNING_RATE, 200, 399, 1.021), [(WARN, 202, 399)], plans(FLAT)
    ),
    Scenario(
        "the learning rate is 9.9 % low", RUN.scale(LEARNING_RATE, 200, 399, 0.901), [(WARN, 202, 399)], plans(FLAT)
    ),
    Scenario(
        "the learning rate is 11 % low", RUN.scale(LEARNING_RATE, 200, 399, 0.89), [(CRITICAL, 202, 399)], plans(FLAT)
    ),
    Scenario("two records of a wild learning rate", RUN.scale(LEARNING_RATE, 200, 201, 30.0), settings=plans(FLAT)),
    Scenario("the decay does not come", RUN, [(WARN, 311, 342), (CRITICAL, 343, 599)], plans(WSD)),
    Scenario(
        "a receipt scales the learning rate",
        RUN.put(LEARNING_RATE, 0, 599, HALFWAY),
        settings=plans(FLAT, FLAT.model_copy(update={"from_step": 5300, "lr_scale": 0.5})),
    ),
    Scenario(
        "a receipt was not followed",
        RUN,
        [(CRITICAL, 302, 599)],
        plans(FLAT, FLAT.model_copy(update={"from_step": 5300, "lr_scale": 0.5})),
    ),
    Scenario("no learning rate", RUN.lose(LEARNING_RATE), settings=plans(FLAT)),
    Scenario(
        "a step takes 5 % fewer tokens than planned",
        with_tokens(RUN, lambda t: 0.95 * t),
        [(WARN, 3, 599)],
        plans(FLAT.model_copy(update={"peak": None})),
    ),
    Scenario(
        "a step takes twice the tokens planned", with_tokens(RUN, lambda t: 2 * t), [(CRITICAL, 3, 599)], plans(FLAT)
    ),
    Scenario(
        "the batch ramps up and nothing is planned",
        with_tokens(RUN, lambda t: np.cumsum(STEP * (1 + np.arange(len(t)) // 100))),
    ),
    Scenario(
        "the batch shrinks and nothing is planned",
        with_tokens(RUN, lambda t: np.cumsum(np.where(np.arange(len(t)) < 300, STEP, STEP / 2))),
        [(CRITICAL, 302, 308)],
    ),
    Scenario(
        "tokens run past the budget",
        RUN,
        [(WARN, 501, 599)],
        plans(PlannedRun(token_budget=5500 * STEP, tokens_per_step=STEP)),
    ),
    Scenario("tokens that stand still say nothing of a step", with_tokens(RUN, lambda t: np.full_like(t, t[0]))),
    Scenario(
        "tokens go back within an attempt",
        with_tokens(RUN, lambda t: t - 50 * STEP * (np.arange(600) >= 300)),
        [(CRITICAL, 300, 300)],
    ),
    Scenario("steps go back within an attempt", stepping(300, -20), [(CRITICAL, 300, 300)]),
    Scenario("steps jump ahead", stepping(300, 500), [(WARN, 300, 300)]),
    Scenario("a few records are lost", Run(RUN.signals.take(np.r_[0:300, 306:600]))),
    Scenario(
        "the mixture moves at the decay as planned",
        RUN.put("data/mixture/code", 300, 599, 0.6).put("data/mixture/web", 300, 599, 0.4),
        settings=plans(MIXED),
    ),
    Scenario("the mixture does not move at the decay", RUN, [(WARN, 323, 426), (CRITICAL, 427, 599)], plans(MIXED)),
    Scenario(
        "eight sequences a step realise the mixture at random",
        quantised(0.3),
        settings=plans(MIXED.model_copy(update={"decay_mixture": None})),
    ),
    Scenario(
        "a mixture without its code",
        RUN.put("data/mixture/code", 0, 599, 0.0).put("data/mixture/web", 0, 599, 1.0),
        [(CRITICAL, 49, 599)],
        plans(MIXED),
    ),
    Scenario(
        "a source that nobody planned",
        RUN.put("data/mixture/leak", 0, 599, 0.05),
        [(WARN, 49, 599)],
        plans(PlannedRun(mixture={"code": 0.3, "web": 0.7})),
    ),
    Scenario("one batch comes again", repeating(300), [(WARN, 300, 363)]),
    Scenario(
        "three batches come again", repeating(300, 310, 320), [(WARN, 300, 319), (CRITICAL, 320, 363), (WARN, 364, 383)]
    ),
    Scenario(
        "a batch comes again too late to be remembered",
        RUN.put(FINGERPRINT, 599, 599, RUN.signals.columns[FINGERPRINT].values[50]),
    ),
    Scenario("NaN fingerprints are no repeats", RUN.put(FINGERPRINT, 0, 599, np.nan)),
    Scenario("the data skips one batch", skipping(300, 512), [(WARN, 300, 300)]),
    Scenario("the data skips two hundred batches", skipping(300, 512 * 200), [(CRITICAL, 300, 300)]),
    Scenario("the data goes back", skipping(300, -512 * 100), [(CRITICAL, 300, 300)]),
    Scenario("the data stands still", RUN.add(POSITION, 300, 599, -512.0), [(CRITICAL, 300, 300)]),
    Scenario("a resume with the right position", resumed(200)),
    Scenario("a resume that replays from the start of the data", resumed(0), [(CRITICAL, 300, 300)]),
    Scenario("a resume whose data goes on as if nothing had been lost", resumed(300), [(WARN, 300, 300)]),
    Scenario("a rewind with skip is declared", resumed(320), changes=[Change(5200, (POSITION,))]),
    Scenario("ticks of a pause change nothing", RUN.pause(300, 900.0, ticks=10), [(OK, 0, 609)]),
    Scenario("one record", healthy(1)),
    Scenario("nothing but steps", RUN.only()),
]


@pytest.mark.parametrize("scenario", TABLE, ids=str)
def test_plan_conformance_says_what_the_table_says(scenario: Scenario) -> None:
    assert_as_expected(CHECK, scenario)


@pytest.mark.parametrize("seed", range(10))
def test_a_mixture_realised_by_small_batches_is_on_plan(seed: int) -> None:
    assert_as_expected(
        CHECK,
        Scenario(
            "small batches", quantised(0.3, seed), settings=plans(MIXED.model_copy(update={"decay_mixture": None}))
        ),
    )


@pytest.mark.parametrize(("from_time", "expected"), [(RUN.signals.time[-1], OK), (None, CRITICAL)])
def test_a_plan_that_begins_with_a_rewind_is_not_held_against_the_steps_left_behind(
    from_time: float | None, expected: int
) -> None:
    middle = int(RUN.signals.step[300])
    again = FLAT.model_copy(update={"lr_scale": 0.5, "from_step": middle, "from_time": from_time})
    verdicts = CHECK.evaluate(following(RUN, FLAT).signals, CHECK.settings(plans=(FLAT, again)))
    assert verdicts.level[400:].max() == expected
