"""The writer loses nothing in silence, never raises and never leaves a line that swallows the next."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runwatch.trainer.telemetry import Telemetry, encode, next_attempt

DEADLINE = 30.0


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.02)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("value", "written"),
    [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity"), (1.5, 1.5), ([1.0, math.nan], [1.0, "NaN"])],
)
def test_a_number_that_is_not_finite_is_written_as_its_name(value: object, written: object) -> None:
    assert json.loads(encode({"train/loss": value}))["train/loss"] == written


@given(st.dictionaries(st.text(max_size=20), st.floats() | st.integers(-(2**52), 2**52), max_size=5))
def test_any_metrics_make_one_line_of_strict_json(metrics: dict[str, float]) -> None:
    line = encode(metrics)
    assert line.count(b"\n") == 1
    assert json.loads(line, parse_constant=lambda name: pytest.fail(f"bare {name}")).keys() == metrics.keys()


def test_the_contract_example_is_what_the_writer_writes(tmp_path: Path, contract: Path) -> None:
    """Every record of the example goes through the writer and comes out with the same keys and values."""
    example = [json.loads(line) for line in (contract / "telemetry" / "a0001-00001.jsonl").read_text().splitlines()]
    times = iter([record["time"] for record in example])
    writer = Telemetry(tmp_path, "a0001", clock=lambda: next(times))
    fixed = {"attempt", "step", "tokens", "time", "phase"}
    for record in example:
        metrics = {key: float(v) if isinstance(v, str) else v for key, v in record.items() if key not in fixed}
        writer.emit(record["step"], record["tokens"], record["phase"], metrics)
    writer.close()
    assert lines(tmp_path) == example


def test_segments_rotate_by_size_and_their_names_sort_in_the_order_of_writing(tmp_path: Path) -> None:
    writer = Telemetry(tmp_path, "a0001", segment_bytes=200)
    for step in range(20):
        writer.emit(step, step, "train")
    writer.close()
    assert len(list(tmp_path.glob("*.jsonl"))) > 3
    assert [record["step"] for record in lines(tmp_path)] == list(range(20))


def test_attempts_count_up_from_the_newest_segment(tmp_path: Path) -> None:
    assert next_attempt(tmp_path / "missing") == "a0001"
    (tmp_path / "a0009-00001.jsonl").touch()
    (tmp_path / "notes.jsonl").touch()
    assert next_attempt(tmp_path) == "a0010"


def test_records_that_a_dead_disk_cannot_take_are_counted_and_the_writer_recovers(tmp_path: Path) -> None:
    folder = tmp_path / "telemetry"
    folder.write_text("a file where the folder should be")
    writer = Telemetry(folder, "a0001", queue_records=10)
    for step in range(50):
        writer.emit(step, step, "train")
    assert 35 <= writer.dropped <= 41  # the queue holds ten
    folder.unlink()
    wait_for(lambda: folder.is_dir() and len(lines(folder)) == 50 - writer.dropped)
    writer.emit(50, 50, "train")
    writer.close()
    assert lines(folder)[-1]["telemetry/dropped_records"] == writer.dropped


FULL_DISK = """
import resource, signal, sys, time
from pathlib import Path
from runwatch.trainer.telemetry import Telemetry
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])
writer = Telemetry(folder, "a0001")
writer.emit(0, 0, "train")
while not (folder / "a0001-00001.jsonl").exists() or not (folder / "a0001-00001.jsonl").stat().st_size:
    time.sleep(0.01)
size = (folder / "a0001-00001.jsonl").stat().st_size
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, hard))  # room for less than a line
writer.emit(1, 1, "train")
while (folder / "a0001-00001.jsonl").stat().st_size < size + 40:
    time.sleep(0.01)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
writer.emit(2, 2, "train")
writer.close()
"""


def test_a_line_torn_by_a_full_disk_does_not_swallow_the_next(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-P", "-c", FULL_DISK, str(tmp_path)], check=True, timeout=60)
    steps, torn = [], 0
    for line in (tmp_path / "a0001-00001.jsonl").read_text().splitlines():
        try:
            steps.append(json.loads(line)["step"])
        except ValueError:
            torn += 1
    assert (steps, torn) == ([0, 1, 2], 1)


def test_a_metric_that_no_json_can_hold_costs_only_itself(tmp_path: Path) -> None:
    writer = Telemetry(tmp_path, "a0001")
    writer.emit(1, 1, "train", {"data/sample_fingerprint": 2**80})
    writer.emit(2, 2, "train")
    writer.close()
    assert [record["step"] for record in lines(tmp_path)] == [2]
    assert writer.dropped == 1


def test_importing_the_writer_and_the_control_reader_loads_neither_jax_nor_numpy() -> None:
    code = (
        "import sys, runwatch.trainer.telemetry, runwatch.trainer.control; print({'jax', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
