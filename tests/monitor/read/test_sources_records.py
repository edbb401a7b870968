import math
from itertools import pairwise

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runwatch.checks import Phase
from runwatch.monitor.read.records import LINE_LIMIT, Rows, tick_times

GOOD = {"attempt": "a1", "step": 7, "tokens": 512, "time": 1e9, "phase": "train", "train/loss": 2.5}


def read(*lines: bytes) -> Rows:
    rows = Rows(file="telemetry/000.jsonl")
    for number, line in enumerate(lines, start=1):
        rows.read_line(line, number)
    return rows


def test_a_record_becomes_one_row_with_head_and_metrics() -> None:
    signals = read(orjson.dumps(GOOD)).drain()
    assert (signals.step[0], signals.tokens[0], signals.time[0], signals.phase[0]) == (7, 512, 1e9, Phase.TRAIN)
    assert signals.values("train/loss").tolist() == [2.5]


def test_records_of_different_shape_keep_their_order_and_their_missing_signals() -> None:
    rows = Rows()
    for step in range(3000):
        metric = "eval/loss" if step % 3 else "train/loss"
        rows.append({"attempt": "a", "step": step, metric: float(step), "other/thing": 1, "moe/layers/x": [1, 2]})
    signals = rows.drain()
    assert signals.step.tolist() == list(range(3000))
    assert signals.values("train/loss").tolist() == [float(step) for step in range(0, 3000, 3)]
    assert set(signals.columns) == {"train/loss", "eval/loss"}
    assert not rows.problems


@pytest.mark.parametrize("written", [b'"NaN"', b"NaN", b'"Infinity"', b"-Infinity", b"1e999"])
def test_a_non_finite_number_stays_visible(written: bytes) -> None:
    signals = read(b'{"step": 1, "train/loss": ' + written + b"}").drain()
    assert signals.has("train/loss")
    assert not np.isfinite(signals.values("train/loss"))[0]


LEFT_OUT = {
    "is not JSON": b"{",
    "nested too deeply": b"[" * 100_000,
    "can't decode byte": b'{"step": 1, "x": "\xff"}',
    "not a JSON object": b"[1]",
    "step is missing": b'{"train/loss": 1}',
    "step is true": b'{"step": true}',
    "step is -1": b'{"step": -1}',
    "step is 1.5": b'{"step": 1.5}',
    "step is 1e+": b'{"step": 1' + b"0" * 40 + b"}",
    "step is inf": b'{"step": 1' + b"0" * 5000 + b"}",
    "attempt is 3": b'{"step": 1, "attempt": 3}',
    "phase is holiday": b'{"step": 1, "phase": "holiday"}',
    "phase is a list": b'{"step": 1, "phase": [[]]}',
    "11,534,336 bytes": b"x" * (11 << 20),
}


@pytest.mark.parametrize(("reason", "line"), LEFT_OUT.items(), ids=LEFT_OUT)
def test_a_malformed_line_is_counted_told_with_its_place_and_left_out(reason: str, line: bytes) -> None:
    rows = read(orjson.dumps(GOOD), line, orjson.dumps(GOOD))
    assert (len(rows), rows.malformed) == (2, 1)
    assert str(rows.problems[0]).startswith("telemetry/000.jsonl:2: ")
    assert reason in rows.problems[0].reason
    assert rows.problems[0].remedy.endswith("the line is skipped")


MISSING = {
    "train/loss is null": b'"train/loss": null',
    "train/loss is true": b'"train/loss": true',
    "train/loss is 2.5": b'"train/loss": "2.5"',
    "train/loss is a list": b'"train/loss": ' + b"[" * 900 + b"]" * 900,
    "train/loss is an object": b'"train/loss": {}',
    "tokens is many": b'"tokens": "many"',
    "tokens is -5": b'"tokens": -5',
    "time is false": b'"time": false',
}


@pytest.mark.parametrize(("reason", "pair"), MISSING.items(), ids=MISSING)
def test_a_value_of_the_wrong_type_is_missing_and_the_record_stays(reason: str, pair: bytes) -> None:
    rows = read(b'{"step": 1, "optim/grad_norm": 0.5, ' + pair + b"}")
    assert (len(rows), rows.malformed) == (1, 0)
    assert [problem.reason for problem in rows.problems] == [reason]
    signals = rows.drain()
    assert signals.values("optim/grad_norm").tolist() == [0.5]
    assert not signals.has("train/loss")


def test_problems_are_kept_to_a_hundred_and_signals_to_their_limit() -> None:
    rows = Rows()
    for _ in range(1000):
        rows.read_line(b"?")
    rows.append({"step": 1} | {f"data/mixture/{number}": 0.0 for number in range(5000)})
    assert (rows.malformed, len(rows.problems)) == (1000, 100)
    assert len(rows.drain().columns) == 512


def test_a_line_just_within_the_limit_is_read() -> None:
    pair = b'{"step": 1, "x": "'
    assert len(read(pair + b"x" * (LINE_LIMIT - len(pair) - 2) + b'"}')) == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
keys = st.sampled_from(["attempt", "step", "tokens", "time", "phase", "train/loss", "data/mixture/a", "x"])


@given(st.lists(st.dictionaries(keys, json_values), max_size=8))
def test_no_record_ever_raises_and_none_is_lost_without_a_word(records: list[dict[str, object]]) -> None:
    rows = Rows(ticks=False)
    for record in records:
        rows.append(record)
    assert len(rows) + rows.malformed == len(records)
    assert len(rows.problems) >= min(rows.malformed, 1)
    assert len(rows.drain()) == len(records) - rows.malformed


@given(st.binary(max_size=60))
def test_no_line_ever_raises(line: bytes) -> None:
    rows = Rows()
    rows.read_line(line)
    assert len(rows) + rows.malformed == 1


@given(st.floats(0, 2e9), st.floats(0, 1e9), st.floats(0, 1e9))
def test_ticks_depend_on_the_beginning_of_the_silence_only(last: float, first: float, second: float) -> None:
    sooner, later = sorted((last + first, last + second))
    assert tick_times(last, later)[: len(tick_times(last, sooner))] == tick_times(last, sooner)
    gaps = [after - before for before, after in pairwise(tick_times(last, later))]
    assert all(gap >= 9.99 for gap in gaps)
    assert len(gaps) < 200


def test_ticks_begin_after_ten_seconds_and_grow_by_a_tenth_of_the_silence() -> None:
    assert tick_times(0, 100.5) == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    assert tick_times(0, 250)[-3:] == pytest.approx([100 * 1.1**7, 100 * 1.1**8, 100 * 1.1**9])
    assert tick_times(0, math.inf)[-1] > 1e9


def test_a_clock_looked_at_often_gives_the_same_ticks_as_the_gap_in_a_backtest() -> None:
    live, whole = Rows(), Rows()
    for rows in (live, whole):
        rows.append(GOOD)
    for second in np.arange(0.0, 400.0, 0.7):
        live.pass_time(GOOD["time"] + second)
    for rows in (live, whole):
        rows.append(GOOD | {"step": 8, "time": GOOD["time"] + 400.0})
    one, other = live.drain(), whole.drain()
    assert one.time.tolist() == other.time.tolist()
    assert one.tick.tolist() == other.tick.tolist()
    assert int(one.tick.sum()) == len(tick_times(0, 400))
    assert set(one.step[one.tick]) == {7}


def test_the_first_name_in_the_order_of_aliases_wins_and_the_other_is_told() -> None:
    rows = Rows()
    rows.append({"step": 1, "loss": 9.0, "lm loss": 2.0, "lr": 3.0, "learning_rate": 1.0})
    signals = rows.drain()
    assert signals.values("train/loss").tolist() == [2.0]
    assert signals.values("optim/learning_rate").tolist() == [1.0]
    assert rows.shadowed == {"loss": "lm loss", "lr": "learning_rate"}


def test_a_record_without_an_attempt_belongs_to_the_last_one() -> None:
    rows = Rows()
    for attempt in (None, "b", None, "c", "b"):
        rows.append({"step": 1} | ({} if attempt is None else {"attempt": attempt}))
    assert rows.attempts == ["", "b", "c"]
    assert rows.drain().attempt.tolist() == [0, 1, 1, 2, 1]
