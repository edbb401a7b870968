"""Following a run directory: segments, torn lines, hostile ones, restarts at any byte, silence."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runwatch.checks import Signals
from runwatch.monitor.read.records import LINE_LIMIT
from runwatch.monitor.read.run_directory import RunReader

START = 1.79e9


def line(step: int, attempt: str = "a", **metrics: float | str) -> bytes:
    record = {"attempt": attempt, "step": step, "tokens": step * 10, "time": START + step, "phase": "train", **metrics}
    return json.dumps(record).encode() + b"\n"


def write(run_dir: Path, name: str, content: bytes) -> None:
    (run_dir / "telemetry").mkdir(exist_ok=True)
    with (run_dir / "telemetry" / name).open("ab") as file:
        file.write(content)


def steps(signals: Signals) -> list[int]:
    return [int(step) for step in signals.step[~signals.tick]]


def test_segments_are_read_in_order_of_their_names_and_growth_is_followed(tmp_path: Path) -> None:
    write(tmp_path, "0002.jsonl", line(3))
    write(tmp_path, "0001.jsonl", line(1) + line(2))
    reader = RunReader(tmp_path)
    assert steps(reader.read(START)) == [1, 2, 3]
    reader.accept()
    write(tmp_path, "0002.jsonl", line(4))
    write(tmp_path, "0003.jsonl", line(5, "b"))
    assert steps(reader.read(START)) == [4, 5]
    assert reader.attempts == ["a", "b"]


def test_what_nobody_accepted_is_given_again_with_what_is_new(tmp_path: Path) -> None:
    write(tmp_path, "0001.jsonl", line(1))
    reader = RunReader(tmp_path)
    assert steps(reader.read(START)) == [1]
    write(tmp_path, "0001.jsonl", line(2))
    assert steps(reader.read(START)) == [1, 2]
    reader.accept()
    assert steps(reader.read(START)) == []
    assert steps(reader.history()) == [1, 2]


def test_a_torn_last_line_waits_for_its_end(tmp_path: Path) -> None:
    whole = line(2, **{"train/loss": 3.5})
    write(tmp_path, "0001.jsonl", line(1) + whole[:20])
    reader = RunReader(tmp_path)
    assert steps(reader.read(START)) == [1]
    write(tmp_path, "0001.jsonl", whole[20:])
    assert steps(reader.read(START)) == [1, 2]
    assert reader.malformed == 0


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"{nonsense\n", "is not JSON"),
        (b'{"step": -1}\n', "step is -1"),
        (b"\xff\xfe\x00\n", "is not JSON"),
        (b"x" * (LINE_LIMIT + 10) + b"\n", "bytes"),
    ],
    ids=["no JSON", "negative step", "no text", "too long"],
)
def test_a_bad_line_is_told_with_file_and_line_and_the_others_are_read(bad: bytes, reason: str, tmp_path: Path) -> None:
    write(tmp_path, "0001.jsonl", line(1) + b"\n" + bad + line(2))
    reader = RunReader(tmp_path)
    assert steps(reader.read(START)) == [1, 2]
    assert reader.malformed == 1
    assert str(reader.problems[0]).startswith("telemetry/0001.jsonl:3: ")
    assert reason in str(reader.problems[0])
    assert reader.records == 2


def test_a_line_without_end_does_not_hold_the_rest_up(tmp_path: Path) -> None:
    write(tmp_path, "0001.jsonl", line(1) + b"x" * (LINE_LIMIT + 2))
    reader = RunReader(tmp_path)
    reader.read(START)
    write(tmp_path, "0001.jsonl", b"\n" + line(2))
    assert steps(reader.read(START)) == [1, 2]


def test_a_segment_that_has_shrunk_is_told_and_gives_no_row_twice(tmp_path: Path) -> None:
    write(tmp_path, "0001.jsonl", line(1) + line(2))
    reader = RunReader(tmp_path)
    reader.read(START)
    reader.accept()
    (tmp_path / "telemetry" / "0001.jsonl").write_bytes(line(1))
    assert steps(reader.read(START)) == []
    assert "has shrunk" in str(reader.problems[-1])
    write(tmp_path, "0001.jsonl", line(3))
    assert steps(reader.read(START)) == [3]


def test_no_telemetry_yet_is_no_error_and_a_vanished_run_is(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    reader = RunReader(run_dir)
    assert len(reader.read(START)) == 0
    run_dir.rmdir()
    with pytest.raises(FileNotFoundError, match="the run directory has gone"):
        reader.read(START)


def test_silence_becomes_tick_rows_that_a_restart_does_not_repeat(tmp_path: Path) -> None:
    write(tmp_path, "0001.jsonl", line(1))
    reader = RunReader(tmp_path)
    first = reader.read(START + 40)
    cursor = json.loads(json.dumps(reader.cursor()))
    again = RunReader(tmp_path, cursor)
    assert list(again.context.time) == list(first.time)
    assert first.tick.sum() == 3
    assert len(again.read(START + 40)) == 0
    assert again.read(START + 50).tick.sum() == 1


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_cut_of_the_bytes_and_any_restart_gives_every_row_once(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    content = b"".join(line(step, "ab"[step > 6], **{"train/loss": step / 7}) for step in range(1, 12))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=6)))
    got: list[Signals] = []
    cursor: dict[str, Any] = {}
    for begin, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
        write(run_dir, "0001.jsonl", content[begin:end])
        reader = RunReader(run_dir, cursor)
        got.append(reader.read(START))
        if data.draw(st.booleans()):
            cursor = json.loads(json.dumps(reader.cursor()))
        else:
            got.pop()
    got.append(RunReader(run_dir, cursor).read(START))
    found = Signals.concatenate(got)
    assert steps(found) == list(range(1, 12))
    np.testing.assert_allclose(found.values("train/loss"), np.arange(1, 12) / 7)
