"""What a plan asked for must show in the telemetry after its receipt."""

from dataclasses import replace

import numpy as np
import pytest
import worlds
from worlds import PLANNED, after_actions, telemetry, world

from runwatch.checks import Column, Phase
from runwatch.rules import Checkpoint, Receipt, World
from runwatch.rules.effect import missing_effects
from runwatch.rules.plan import (
    Action,
    CheckpointNow,
    Pause,
    Resume,
    Rewind,
    ScaleLr,
    SetBalanceRate,
    SetCapacityFactor,
    SetContextLength,
    SetDataMixture,
    SetLrDecay,
    SetTokenBudget,
    SetZLossWeight,
    Stop,
)

PLAN = PLANNED.plan_state()
RECEIPT_STEP = 600
MIXTURE = SetDataMixture(shares={"code": 0.2, "docs": 0.3, "prose": 0.5})
DECAY = SetLrDecay(start_tokens=601_000, final_fraction=0.05)


def receipt(*actions: Action) -> Receipt:
    """Applied at step 600."""
    return Receipt(
        id="x-0001",
        status="applied",
        attempt="a0001",
        step=RECEIPT_STEP,
        tokens=RECEIPT_STEP * worlds.STEP,
        time=worlds.START + RECEIPT_STEP + 0.5,
        before=PLAN,
        after=after_actions(PLAN, actions),
    )


def obeyed(*actions: Action, steps: int = 30) -> World:
    """Fifty steps before the receipt under the old plan, and `steps` after it under the new one."""
    plan = after_actions(PLAN, actions)
    before, after = telemetry(RECEIPT_STEP), telemetry(RECEIPT_STEP + steps, plan)
    rows = after.take(np.flatnonzero(after.step > RECEIPT_STEP))
    return world(RECEIPT_STEP + steps, plan=plan, recent=type(after).concatenate([before, rows]))


@pytest.mark.parametrize(
    "actions",
    [
        (SetTokenBudget(tokens=1_500_000),),
        (SetTokenBudget(tokens=1_500_000), DECAY),
        (SetTokenBudget(tokens=1_500_000), SetLrDecay(start_tokens=1_200_000, final_fraction=0.05)),
        (MIXTURE,),
        (ScaleLr(factor=0.5),),
        (SetCapacityFactor(factor=1.5),),
        (SetBalanceRate(rate=0.02),),
        (SetContextLength(tokens=50),),
        (SetZLossWeight(weight=0.001),),
    ],
)
def test_an_obeyed_action_is_seen_and_an_ignored_one_is_not(actions: tuple[Action, ...]) -> None:
    assert missing_effects(actions, receipt(*actions), obeyed(*actions)) == []
    ignored = receipt(*actions).model_copy(update={"after": PLAN})
    assert missing_effects(actions, ignored, world(630)) != []


def test_a_receipt_alone_is_no_effect() -> None:
    for action in (SetTokenBudget(tokens=1_500_000), MIXTURE, DECAY, SetZLossWeight(weight=0.001)):
        (sentence,) = missing_effects([action], receipt(action), world(RECEIPT_STEP))
        assert sentence.endswith(".")


SETTINGS = (
    SetZLossWeight(weight=0.001), SetCapacityFactor(factor=1.5), SetBalanceRate(rate=0.02), SetContextLength(tokens=50),
)  # fmt: skip


@pytest.mark.parametrize("action", SETTINGS, ids=lambda action: action.action)
def test_a_setting_that_the_receipt_claims_and_the_steps_do_not_show_is_missed(action: Action) -> None:
    (sentence,) = missing_effects([action], receipt(action), world(630))
    assert sentence.startswith("plan/")
    assert " should be " in sentence


@pytest.mark.parametrize("action", SETTINGS, ids=lambda action: action.action)
def test_of_a_setting_that_a_trainer_never_emits_the_receipt_is_believed_once_a_step_was_trained(
    action: Action,
) -> None:
    silent = blind(world(630))
    assert missing_effects([action], receipt(action), silent) == []
    assert missing_effects([action], receipt(action), blind(world(RECEIPT_STEP))) != []
    claimed = receipt(action).model_copy(update={"after": PLAN})
    assert "the receipt says" in missing_effects([action], claimed, silent)[0]


def blind(at: World) -> World:
    """The same run by a trainer that emits no `plan/` signal."""
    kept = {name: column for name, column in at.recent.columns.items() if not name.startswith("plan/")}
    return replace(at, recent=replace(at.recent, columns=kept))


def test_a_learning_rate_that_does_not_fall_is_missed() -> None:
    actions = (SetTokenBudget(tokens=1_000_000), DECAY)
    at = obeyed(*actions, steps=60)
    flat = Column(np.full(len(at.recent), 0.01), np.ones(len(at.recent), bool))
    at = replace(at, recent=replace(at.recent, columns={**at.recent.columns, "optim/learning_rate": flat}))
    (sentence,) = missing_effects(actions, receipt(*actions), at)
    assert "should follow the new schedule" in sentence


def test_a_noisy_mixture_is_seen_by_its_mean_and_too_few_records_say_nothing() -> None:
    at = obeyed(MIXTURE)
    noise = np.random.default_rng(1).binomial(10, 0.2, len(at.recent)) / 10
    noisy = Column(np.where(at.recent.step > RECEIPT_STEP, noise, 0.5), np.ones(len(at.recent), bool))
    at = replace(at, recent=replace(at.recent, columns={**at.recent.columns, "data/mixture/code": noisy}))
    assert missing_effects([MIXTURE], receipt(MIXTURE), at) == []
    assert "10 are needed" in missing_effects([MIXTURE], receipt(MIXTURE), obeyed(MIXTURE, steps=9))[0]


def rewound(first: int = 501, position: int = 6_210, attempt: int = 1, rows: int = 20) -> World:
    """Back to step 500 from 600, the 120 batches from there left out: position 5,000 + 1,200 + 10."""
    after = telemetry(first + rows - 1, PLAN, attempt, position + 10 * (rows - 1))
    after = after.take(slice(len(after) - rows, None))
    after = replace(after, time=worlds.START + RECEIPT_STEP + np.arange(1.0, rows + 1))
    recent = type(after).concatenate([telemetry(RECEIPT_STEP), after])
    return world(first + rows - 1, recent=recent, attempt="a0002")


@pytest.mark.parametrize(
    ("at", "missing"),
    [
        (rewound(), None),
        (rewound(attempt=0), "new attempt"),
        (rewound(first=601), "continued at step 601"),
        (rewound(position=5_010), "should have jumped to 6,210"),
        (world(RECEIPT_STEP), "No step was trained"),
    ],
)
def test_a_rewind_shows_as_a_new_attempt_after_the_checkpoint_with_the_data_moved_on(
    at: World, missing: str | None
) -> None:
    rewind = Rewind(checkpoint_step=500, skip_steps=120)
    found = missing_effects([rewind], receipt(rewind), at)
    assert (found == []) if missing is None else (missing in found[0]), found


@pytest.mark.parametrize(
    ("action", "phase", "seen"),
    [
        (Pause(), Phase.PAUSED, True),
        (Pause(), Phase.TRAIN, False),
        (Resume(), Phase.TRAIN, True),
        (Resume(), Phase.PAUSED, False),
        (Stop(), Phase.FINISHED, True),
        (Stop(), Phase.TRAIN, False),
    ],
)
def test_holding_and_ending_show_in_the_phase(action: Action, phase: Phase, seen: bool) -> None:
    assert (missing_effects([action], receipt(action), world(610, phase=phase)) == []) == seen


def test_a_checkpoint_counts_from_the_receipt_on() -> None:
    now = CheckpointNow()
    older = world(610, checkpoints=(Checkpoint(599, 599e3, worlds.START),))
    newer = world(610, checkpoints=(Checkpoint(600, 600e3, worlds.START),))
    assert missing_effects([now], receipt(now), older)
    assert not missing_effects([now], receipt(now), newer)
