"""The laws that every check keeps, over all checks that are discovered."""

import builtins
import socket
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scenarios import Run, clock, healthy

from runwatch.checks import Change, Check, Column, Level, Phase, Signals, Verdicts, all_checks, judge

CHECKS = list(all_checks().values())
every_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
HOSTILE = (np.nan, np.inf, -np.inf, 1e300, -1e300, 5e-324, 0.0, -1.0, 2.0**53)


def random_run(seed: int) -> Run:
    """A run of up to 1,500 records with gaps, sparse signals, faults, resumes, pauses, evaluations and checkpoints."""
    rng = np.random.default_rng(seed)
    records = int(rng.integers(700, 1500))
    run = healthy(records, seed, tail=float(rng.choice([0.0, 3.0])), first=int(rng.choice([0, 5000])))
    for name in list(run.signals.columns):
        run = _disturbed(run, name, rng)
    for _ in range(int(rng.integers(0, 4))):
        row = int(rng.integers(2, records))
        run = run.resume(row, int(run.signals.step[row] - rng.integers(-3, 150)))
    for row in sorted((int(row) for row in rng.integers(2, records, 6)), reverse=True):
        run = _interrupted(run, row, rng)
    return run


def _disturbed(run: Run, name: str, rng: np.random.Generator) -> Run:
    records = len(run.signals)
    first = int(rng.integers(0, records))
    last = min(records - 1, first + int(rng.choice([0, 1, 5, 60, 400])))
    kind = rng.integers(0, 10)
    if kind == 0:
        return run.keep_every(name, int(rng.choice([2, 5, 50])))
    if kind == 1:
        return run.lose(name, first, last)
    if kind == 2:
        return run.put(name, first, last, float(rng.choice(HOSTILE)))
    if kind <= 5:
        return run.scale(name, first, last, float(rng.choice([0.0, 0.5, 1.3, 3.0, 50.0])))
    return run


def _interrupted(run: Run, row: int, rng: np.random.Generator) -> Run:
    kind = rng.integers(0, 4)
    if kind == 0:
        return run.pause(row, float(rng.choice([30.0, 4000.0])), ticks=int(rng.integers(0, 9)))
    if kind == 1:
        return run.insert(row, Phase.EVAL, eval__loss=float(2.2 + rng.choice([0.0, 0.01, 1.0, np.nan])))
    if kind == 2:
        return run.insert(row, Phase.CHECKPOINT, checkpoint__step=float(run.signals.step[row]))
    return run.in_phase(Phase(int(rng.integers(0, 7))), row, row + 2)


def random_changes(run: Run, seed: int) -> list[Change]:
    rng = np.random.default_rng([seed, 1])
    names = list(run.signals.columns)
    step = int(rng.choice(run.signals.step))
    return [Change(step, (str(rng.choice(names)), "train/loss"))] if rng.random() < 0.4 else []


def assert_same(found: Verdicts, wanted: Verdicts, what: str) -> None:
    for name in ("level", "value", "limit", "reason"):
        one, other = getattr(found, name), getattr(wanted, name)
        rows = np.flatnonzero(~((one == other) | (np.isnan(one) & np.isnan(other))))
        assert not len(rows), f"{what}: {name} differs first at row {rows[0]}: {one[rows[0]]} and {other[rows[0]]}"


@every_check
@few
@given(seeds)
def test_a_prefix_of_the_run_gives_a_prefix_of_the_verdicts(check: Check, seed: int) -> None:
    run = random_run(seed)
    changes = random_changes(run, seed)
    whole = judge(check, run.signals, check.settings(), changes)
    assert len(whole) == len(run.signals)
    for stop in np.random.default_rng(seed).integers(0, len(run.signals), 4).tolist():
        prefix = judge(check, run.signals.take(slice(0, stop)), check.settings(), changes)
        assert_same(prefix, whole.take(slice(0, stop)), f"prefix of {stop} rows")


@every_check
@few
@given(seeds)
def test_rows_judged_live_with_their_look_back_get_the_verdicts_of_the_whole_run(check: Check, seed: int) -> None:
    run = random_run(seed)
    changes = random_changes(run, seed)
    whole = judge(check, run.signals, check.settings(), changes)
    rng = np.random.default_rng(seed)
    for begin in rng.integers(0, len(run.signals), 16).tolist():
        stop = min(len(run.signals), begin + int(rng.choice([1, 1, 1, 7, 90])))
        live = judge(check, run.signals.take(slice(0, stop)), check.settings(), changes, known=begin)
        assert_same(live, whole.take(slice(begin, stop)), f"rows {begin} to {stop}")


@every_check
@few
@given(seeds)
def test_what_lies_before_the_look_back_has_no_influence(check: Check, seed: int) -> None:
    run = random_run(seed).signals
    names, lookback = check.signals, check.lookback(check.settings())
    row = int(np.random.default_rng(seed).integers(0, len(run)))
    piece = next(piece for piece in run.pieces() if piece.start <= row < piece.stop)
    context = piece.context(run, row, lookback, names)
    alone = check.evaluate(run.take(np.append(context, row)), check.settings()).take(slice(len(context), None))
    assert_same(alone, judge(check, run.take(slice(0, row + 1)), check.settings(), known=row), f"row {row}")


@every_check
@few
@given(seeds)
def test_a_superseded_tail_has_no_influence_on_what_follows_the_resume(check: Check, seed: int) -> None:
    rng = np.random.default_rng(seed)
    row, back = int(rng.integers(300, 700)), int(rng.integers(1, 200))
    healthy_run = healthy(900, seed)
    crashed = healthy_run
    for name in healthy_run.signals.columns:
        crashed = crashed.scale(name, row - back, row - 1, float(rng.choice([0.1, 7.0])))
    step = int(healthy_run.signals.step[row]) - back
    found, wanted = (judge(check, run.resume(row, step).signals, check.settings()) for run in (crashed, healthy_run))
    assert_same(found.take(slice(row, None)), wanted.take(slice(row, None)), f"{back} steps superseded at row {row}")


@every_check
@few
@given(seeds)
def test_a_check_says_the_same_twice_and_changes_nothing_it_was_given(check: Check, seed: int) -> None:
    signals = random_run(seed).signals
    before = {name: (column.values.copy(), column.present.copy()) for name, column in signals.columns.items()}
    first = judge(check, signals, check.settings())
    assert_same(judge(check, signals.take(slice(None)), check.settings()), first, "second call")
    for name, (values, present) in before.items():
        np.testing.assert_array_equal(signals.columns[name].values, values)
        np.testing.assert_array_equal(signals.columns[name].present, present)


@every_check
def test_a_check_reads_no_file_no_socket_and_no_clock(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    signals = random_run(7).signals

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a check touched the world")

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", forbidden)
        patch.setattr(socket, "socket", forbidden)
        for name in ("time", "monotonic", "perf_counter", "time_ns", "sleep", "localtime", "gmtime"):
            patch.setattr(time, name, forbidden)
        found = judge(check, signals, check.settings())
    assert len(found) == len(signals)


@every_check
def test_without_its_signals_a_check_knows_nothing(check: Check) -> None:
    run = Run(replace(healthy(300).signals, columns={}))
    if check.required:
        assert (judge(check, run.signals, check.settings()).level == Level.UNKNOWN).all()


@every_check
def test_what_is_missing_alone_raises_no_alarm(check: Check) -> None:
    everything = healthy(700)
    for name in everything.signals.columns:
        level = judge(check, everything.lose(name, 300, 699).signals, check.settings()).level
        assert level.max() <= Level.OK, f"{name} stops at row 300"


def _all_equal(value: float) -> Signals:
    run = healthy(700)
    for name in run.signals.columns:
        run = run.put(name, 0, 699, value)
    return run.insert(500, Phase.EVAL, eval__loss=value, checkpoint__step=value).signals


def _all_hostile() -> Signals:
    rng = np.random.default_rng(0)
    signals = _all_equal(0.0)
    columns = {
        name: Column(rng.choice(HOSTILE, len(signals)), rng.random(len(signals)) < 0.9) for name in signals.columns
    }
    return replace(signals, columns=columns)


ODD_RUNS: dict[str, Callable[[], Signals]] = {
    "no record": lambda: clock(0),
    "one record": lambda: healthy(1).signals,
    "two records": lambda: healthy(2).signals,
    "no record with metrics": lambda: Run(clock(50)).signals,
    "nothing but ticks": lambda: replace(clock(50), tick=np.ones(50, np.bool_)),
    "no clock": lambda: replace(healthy(700).signals, time=np.full(700, np.nan)),
    "no token count": lambda: replace(healthy(700).signals, tokens=np.full(700, np.nan)),
    "the clock goes back": lambda: replace(healthy(700).signals, time=healthy(700).signals.time[::-1].copy()),
    "the same step again and again": lambda: replace(healthy(700).signals, step=np.full(700, 7)),
    "steps go back without a new attempt": lambda: replace(healthy(700).signals, step=np.arange(700)[::-1].copy()),
    **{f"every value is {value}": (lambda value=value: _all_equal(value)) for value in HOSTILE},
    "every value is hostile": _all_hostile,
}


@every_check
@pytest.mark.parametrize("case", ODD_RUNS)
def test_no_input_is_too_odd(check: Check, case: str) -> None:
    signals = ODD_RUNS[case]()
    found = judge(check, signals, check.settings())
    assert len(found) == len(found.value) == len(found.limit) == len(found.reason) == len(signals)
    assert found.level.dtype == np.int8
    assert set(found.level.tolist()) <= {int(level) for level in Level}
    for row in range(0, len(found), 97):
        assert check.message(found, row)


@every_check
def test_the_hot_state_of_a_check_is_small(check: Check) -> None:
    assert 0 < check.lookback(check.settings()) <= 620


@every_check
@few
@given(seeds)
def test_an_alarm_names_what_it_judged(check: Check, seed: int) -> None:
    found = judge(check, random_run(seed).signals, check.settings())
    for row in np.flatnonzero(found.level >= Level.WARN)[:20].tolist():
        assert 0 <= found.reason[row] < len(check.messages)
        assert check.message(found, row)
        assert not np.isnan(found.limit[row]), f"row {row}: {check.message(found, row)}"
