"""A run's records as arrays: what was observed, which rows share a past, and what a check may look back at."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenarios import Run, clock, healthy

from runwatch.checks import Change, Column, Phase, Signals
from runwatch.checks.signals import FAMILIES, VOCABULARY


def run_of(steps: Sequence[int], attempts: Sequence[int]) -> Signals:
    """Train rows with these steps and attempts."""
    return replace(clock(len(steps)), step=np.array(steps, dtype=np.int64), attempt=np.array(attempts, dtype=np.int32))


def pieces(signals: Signals, moved: Sequence[int] = ()) -> list[tuple[int, int, tuple[tuple[int, int], ...]]]:
    return [(piece.start, piece.stop, piece.intervals) for piece in signals.pieces(moved)]


PIECES = [
    ("one attempt is one piece", run_of([1, 2, 3], [0, 0, 0]), (), [(0, 3, ())]),
    ("no record is no piece", run_of([], []), (), []),
    (
        "a resume cuts the tail it replays",
        run_of([1, 2, 3, 4, 3, 4], [0] * 4 + [1] * 2),
        (),
        [(0, 4, ()), (4, 6, ((0, 2),))],
    ),
    ("a resume that goes on where it was cuts nothing", run_of([1, 2, 3, 4], [0, 0, 1, 1]), (), [(0, 4, ())]),
    ("a start from scratch leaves no past", run_of([1, 2, 3, 1, 2], [0, 0, 0, 1, 1]), (), [(0, 3, ()), (3, 5, ())]),
    (
        "two resumes cut twice",
        run_of([1, 2, 3, 3, 4, 2, 3], [0, 0, 0, 1, 1, 2, 2]),
        (),
        [(0, 3, ()), (3, 5, ((0, 2),)), (5, 7, ((0, 1),))],
    ),
    ("a declared change ends the past", run_of([1, 2, 3, 4], [0] * 4), (3,), [(0, 2, ()), (2, 4, ())]),
    ("a change before the first step is no change", run_of([5, 6], [0, 0]), (3,), [(0, 2, ())]),
    ("a change after the last step is none yet", run_of([5, 6], [0, 0]), (9,), [(0, 2, ())]),
    (
        "a resume to before a change keeps nothing of after it and goes through it again",
        run_of([1, 2, 3, 4, 2, 3, 4], [0] * 4 + [1] * 3),
        (3,),
        [(0, 2, ()), (2, 4, ()), (4, 5, ()), (5, 7, ())],
    ),
    ("a step back within an attempt cuts nothing", run_of([1, 2, 1, 2], [0] * 4), (), [(0, 4, ())]),
]


@pytest.mark.parametrize(("signals", "moved", "wanted"), [row[1:] for row in PIECES], ids=[row[0] for row in PIECES])
def test_pieces(signals: Signals, moved: Sequence[int], wanted: list[object]) -> None:
    assert pieces(signals, moved) == wanted


def test_ticks_and_other_phases_cut_nothing() -> None:
    signals = run_of([1, 2, 3, 2, 2, 4], [0, 0, 0, 1, 1, 1])
    tick = np.array([False, False, False, True, False, False])
    phase = np.array([Phase.TRAIN] * 4 + [Phase.RESTORE, Phase.TRAIN], np.int8)
    assert pieces(replace(signals, tick=tick, phase=phase)) == [(0, 6, ())]


resumes = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=100)
@given(resumes, st.lists(st.integers(0, 60), max_size=2))
def test_pieces_cover_the_run_once_and_their_pasts_keep_only_lower_steps(
    attempts: list[tuple[int, int]], moved: list[int]
) -> None:
    steps = [step for length, begin in attempts for step in range(begin, begin + length)]
    numbers = [number for number, (length, _) in enumerate(attempts) for _ in range(length)]
    signals = run_of(steps, numbers)
    found = list(signals.pieces(moved))
    assert [row for piece in found for row in range(piece.start, piece.stop)] == list(range(len(steps)))
    for piece in found:
        past = np.array([row for begin, end in piece.intervals for row in range(begin, end)], dtype=np.intp)
        assert (past < piece.start).all()
        assert (signals.step[past] < signals.step[piece.start]).all()
        assert (np.diff(past) > 0).all()


def test_context_reaches_so_many_rows_and_observations_of_each_signal() -> None:
    signals = healthy(100).keep_every("optim/grad_norm", 10).only("train/loss", "optim/grad_norm").signals
    piece = next(signals.pieces())
    context = piece.context(signals, 95, 3, ("train/loss", "optim/grad_norm", "no/such"))
    assert context.tolist() == [70, 80, 90, 92, 93, 94]


def test_context_leaves_out_what_was_superseded() -> None:
    signals = healthy(100).resume(60, 5050).only("train/loss").signals
    second = list(signals.pieces())[1]
    assert second.context(signals, 61, 4, ("train/loss",)).tolist() == [47, 48, 49, 60]


def test_missing_and_not_finite_are_different_things() -> None:
    run = healthy(5).put("train/loss", 1, 1, np.nan).lose("train/loss", 3, 3)
    assert run.signals.observed("train/loss").tolist() == [0, 1, 2, 4]
    assert np.isnan(run.signals.values("train/loss")).tolist() == [False, True, False, False]
    assert not run.signals.has("eval/loss")
    assert run.signals.values("eval/loss").shape == (0,)


def test_stretches_join_with_what_one_of_them_lacks_missing() -> None:
    head, tail = healthy(3).only("train/loss").signals, healthy(2).only("params/norm").signals
    whole = Signals.concatenate([head, tail])
    assert whole.observed("train/loss").tolist() == [0, 1, 2]
    assert whole.observed("params/norm").tolist() == [3, 4]


def test_taking_and_joining_give_the_run_back() -> None:
    signals = healthy(50).lose("train/loss", 10, 20).signals
    whole = Signals.concatenate([signals.take(slice(0, 13)), signals.take(np.arange(13, 50))])
    np.testing.assert_array_equal(whole.step, signals.step)
    for name, column in signals.columns.items():
        np.testing.assert_array_equal(whole.columns[name].values, column.values)
        np.testing.assert_array_equal(whole.columns[name].present, column.present)


def test_a_family_is_what_lies_under_its_name() -> None:
    assert healthy(2).signals.family("data/mixture") == ["data/mixture/code", "data/mixture/web"]


def test_a_change_touches_a_name_and_everything_under_it() -> None:
    change = Change(10, ("data/mixture", "train/loss"))
    assert change.touches(["data/mixture/code"])
    assert change.touches(["train/loss"])
    assert not change.touches(["train/loss_scale", "data/mixtures"])


def test_the_vocabulary_names_each_signal_once_and_no_alias_twice() -> None:
    for name, signal in {**VOCABULARY, **FAMILIES}.items():
        assert signal.name == name
        assert signal.unit
        assert signal.meaning
    aliases = [alias for signal in VOCABULARY.values() for alias in signal.aliases]
    assert len(aliases) == len(set(aliases))
    assert not set(aliases) & set(VOCABULARY)


def test_a_run_can_be_rid_of_a_column() -> None:
    run = Run(replace(healthy(3).signals, columns={"a/b": Column(np.zeros(3), np.ones(3, np.bool_))}))
    assert run.signals.has("a/b")
    assert not run.lose("a/b").signals.has("a/b")
