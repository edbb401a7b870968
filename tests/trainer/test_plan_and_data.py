"""The schedule is a pure function of plan and tokens; the order of the data one of position and mixtures."""

import collections
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runwatch.trainer.data import FINGERPRINT_BITS, SOURCES, DataOrder, SourceError, fingerprint, load
from runwatch.trainer.plan import PlanState, lr_fraction

NAMES = ("code", "docs", "prose")
STABLE = {"code": 0.5, "docs": 0.25, "prose": 0.25}
DECAY = {"code": 0.2, "docs": 0.3, "prose": 0.5}
PLAN = PlanState(1000, 800, 0.05, ((0, STABLE),), 1.0, 1e-4, 1.15, 0.01, 128)


@pytest.fixture(scope="module")
def order() -> DataOrder:
    return DataOrder(NAMES, 0, 128)


@pytest.mark.parametrize(
    ("tokens", "fraction"), [(0, 0), (10, 0.5), (20, 1), (500, 1), (800, 1), (900, 0.525), (1000, 0.05), (2000, 0.05)]
)
def test_the_learning_rate_warms_up_holds_and_decays(tokens: int, fraction: float) -> None:
    assert lr_fraction(PLAN, tokens, 20) == pytest.approx(fraction)


def test_the_learning_rate_is_that_of_the_contract(contract: Path) -> None:
    """The same table as for the checks (`tests/checks/test_planned.py`): code is not shared, numbers are."""
    for case in json.loads((contract / "schedules" / "wsd.json").read_text())["cases"]:
        given_plan = {name: case[name] for name in ("token_budget", "decay_start_tokens", "final_fraction")}
        plan = dataclasses.replace(PLAN, **given_plan)
        shares = [lr_fraction(plan, tokens, case["warmup_tokens"]) for tokens in case["tokens"]]
        assert shares == pytest.approx(case["share"], abs=1e-12), case["name"]


@given(
    budget=st.integers(100, 10**9),
    start=st.floats(0, 1),
    final=st.floats(0, 1),
    scale=st.floats(0.01, 10),
    at=st.floats(0, 1.2),
)
def test_the_learning_rate_stays_between_its_floor_and_its_peak(
    budget: int, start: float, final: float, scale: float, at: float
) -> None:
    plan = dataclasses.replace(
        PLAN, token_budget=budget, decay_start_tokens=int(start * budget), final_fraction=final, lr_scale=scale
    )
    fraction = lr_fraction(plan, int(at * budget), 0)
    assert final * scale - 1e-9 <= fraction <= scale + 1e-9
    assert lr_fraction(plan, budget + 1, 0) == pytest.approx(final * scale)


def test_there_are_five_megabytes_of_text_and_none_of_it_is_both_trained_on_and_held_out() -> None:
    loaded = [load(name) for name in SOURCES]
    assert sum(len(source.train) for source in loaded) > 5_000_000
    for source in loaded:
        assert len(source.held_out) > 50_000
        text, held = source.train.tobytes(), source.held_out.tobytes()
        assert text.count(held[:512]) == 0, source.name


def test_an_unknown_source_is_named_with_the_known_ones() -> None:
    with pytest.raises(SourceError, match=r"unknown text source 'web'.*code, docs, prose"):
        DataOrder(("web",), 0, 128)


@pytest.mark.parametrize("shares", [STABLE, DECAY, {"code": 0.07, "docs": 0.33, "prose": 0.6}])
def test_over_a_hundred_sequences_no_share_is_off_by_more_than_one_per_cent(
    order: DataOrder, shares: dict[str, float]
) -> None:
    plan = dataclasses.replace(PLAN, mixtures=((0, shares),))
    _, sources = order.batch(plan, 0, 500)
    for start in range(0, 400, 37):
        counts = collections.Counter(sources[start : start + 100])
        for name, share in shares.items():
            assert abs(counts[name] - 100 * share) <= 2, (
                start,
                name,
            )  # a window's two ends are each off by at most one
        counts = collections.Counter(sources[: start + 100])
        for name, share in shares.items():
            assert abs(counts[name] - (start + 100) * share) <= 1


def test_the_same_position_gives_the_same_sequences_whatever_was_drawn_before(order: DataOrder) -> None:
    plan = PLAN.with_mixture(DECAY, 400, pinned=True)
    forward = [order.batch(plan, position, 8) for position in range(380, 440, 8)]
    fresh = DataOrder(NAMES, 0, 128)
    for position, (tokens, sources) in reversed(list(zip(range(380, 440, 8), forward, strict=True))):
        again, names = fresh.batch(plan, position, 8)
        assert sources == names
        np.testing.assert_array_equal(tokens, again)


def test_a_new_mixture_leaves_the_past_as_it_was_and_holds_from_its_position(order: DataOrder) -> None:
    changed = PLAN.with_mixture(DECAY, 200, pinned=True)
    np.testing.assert_array_equal(order.batch(PLAN, 100, 100)[0], order.batch(changed, 100, 100)[0])
    counts = collections.Counter(order.batch(changed, 200, 100)[1])
    assert {name: counts[name] / 100 for name in NAMES} == DECAY


def test_no_sequence_comes_twice_within_an_epoch(order: DataOrder) -> None:
    tokens, _ = order.batch(PLAN, 0, 4000)
    assert len({row.tobytes() for row in tokens}) > 3990  # a licence header may stand twice


def test_another_seed_is_another_order() -> None:
    first, second = (DataOrder(NAMES, seed, 128).batch(PLAN, 0, 8)[0] for seed in (0, 1))
    assert fingerprint(first) != fingerprint(second)


def test_a_longer_context_reads_on_in_the_same_text(order: DataOrder) -> None:
    short = order.batch(PLAN, 16, 4)[0]
    long = order.batch(dataclasses.replace(PLAN, context_length=256), 16, 4)[0]
    assert long.shape == (4, 257)
    np.testing.assert_array_equal(long[:, :129], short)


@given(st.lists(st.integers(0, 255), min_size=1, max_size=64), st.data())
def test_a_fingerprint_fits_a_float_and_tells_one_changed_byte(values: list[int], data: st.DataObject) -> None:
    tokens = np.array(values, np.uint8)
    mark = fingerprint(tokens)
    assert 0 <= mark < 2**FINGERPRINT_BITS
    assert int(float(mark)) == mark
    changed = tokens.copy()
    changed[data.draw(st.integers(0, len(values) - 1))] ^= 1
    assert fingerprint(changed) != mark
