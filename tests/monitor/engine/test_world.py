"""The world of a run: the same from the whole run and from the rows that a daemon keeps of it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import runs

from runwatch.checks import Column, Phase, Signals
from runwatch.monitor.card.context import check_settings
from runwatch.monitor.card.run_card import load_card
from runwatch.monitor.engine import context, evaluate
from runwatch.monitor.engine.context import recent_rows
from runwatch.monitor.engine.evaluate import LiveJudge
from runwatch.monitor.engine.world import checkpoints, sustained
from runwatch.monitor.read.run_directory import RunReader

CASES = {
    "one attempt": ((), 40),
    "resumes": ((900, 1000, 1700), 25),
    "a resume from long ago": ((1150,), 700),
    "a checkpoint at every third step": ((1500,), 3),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_world_is_made_of_is_the_same_from_the_whole_run_and_from_the_rows_that_are_kept(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "RECENT_ROWS", 40)
    monkeypatch.setattr(context, "RECENT_CHECKPOINTS", 3)
    monkeypatch.setattr(evaluate, "SLACK_ROWS", 30)
    crashes, every = CASES[case]
    runs.write(runs.healthy(7, records=2000, crashes=crashes, checkpoint_every=every), tmp_path / "run")
    settings = check_settings(load_card(tmp_path / "run" / "run.yaml"))
    signals = RunReader(tmp_path / "run").read(float("-inf"))
    read = 0
    live = LiveJudge({}, signals.take(slice(0, 0)), lambda: signals.take(slice(0, read)))
    rng, shortest = np.random.default_rng(len(case)), 1.0
    while read < len(signals):
        block = signals.take(slice(read, read + int(rng.integers(1, 60))))
        live.judge(block, settings, ())
        read += len(block)
        so_far = signals.take(slice(0, read))
        same(live.rows, so_far)
        live.accept(block, settings, ())
        shortest = min(shortest, len(live.context) / read)
    assert shortest < 0.7


def same(kept: Signals, whole: Signals) -> None:
    assert checkpoints(kept) == checkpoints(whole)
    assert checkpoints(kept, keep=4) == checkpoints(whole, keep=4)
    kept, whole = kept.take(recent_rows(kept)), whole.take(recent_rows(whole))
    assert sustained(kept) == sustained(whole)
    for part in ("attempt", "step", "tokens", "time", "phase", "tick"):
        np.testing.assert_array_equal(getattr(kept, part), getattr(whole, part), part)
    for name in whole.columns:
        np.testing.assert_array_equal(kept.observed(name), whole.observed(name), name)
        np.testing.assert_array_equal(kept.values(name), whole.values(name), name)


def steady(steps: int, every: int, *, pause: float = 0.0, attempt: int = 0, first: int = 1) -> Signals:
    """A second and a thousand tokens a step; a save at each `every` steps, which takes `pause` seconds."""
    step = np.arange(first, first + steps)
    saves = step[step % every == 0]
    rows = np.sort(np.concatenate([step, saves]))
    second = np.append(False, rows[1:] == rows[:-1])
    return Signals(
        np.full(len(rows), attempt, np.int32),
        rows,
        1000.0 * rows,
        rows + pause * np.cumsum(second),
        np.where(second, Phase.CHECKPOINT, Phase.TRAIN).astype(np.int8),
        np.zeros(len(rows), np.bool_),
        {"checkpoint/step": Column(np.where(second, rows, np.nan), second)},
    )


@pytest.mark.parametrize("every", [10, 300, 2000, 50_000])
def test_a_daemon_knows_the_speed_of_a_long_run_however_rare_its_checkpoints_are(every: int) -> None:
    """Once it had none after some 4,000 steps: the old rows at hand left a block without length."""
    signals = steady(30_000, every)
    found = sustained(signals.take(recent_rows(signals)))
    assert found is not None
    assert found.low == pytest.approx(found.high) == pytest.approx(1000.0)


def test_the_sustained_speed_has_the_pauses_for_saves_also_where_they_are_rare() -> None:
    signals = steady(30_000, 2000, pause=1000.0)
    found = sustained(signals.take(recent_rows(signals)))
    assert found is not None
    assert found.low < 1000 * 2 / 3 < found.high
    assert found.tokens_per_second == pytest.approx(1000 * 2 / 3, rel=0.15)


def test_the_speed_is_that_of_the_newest_attempt_since_a_person_last_paused_the_run() -> None:
    slow = steady(600, 100)
    slow = replace(slow, time=3 * slow.time)
    fast = steady(300, 100, attempt=1, first=601)
    signals = Signals.concatenate([slow, replace(fast, time=fast.time + 10_000)])
    found = sustained(signals.take(recent_rows(signals)))
    assert found is not None
    assert found.tokens_per_second == pytest.approx(1000.0)
    held = fast.take(slice(-1, None))
    held = replace(held, phase=np.full(1, Phase.PAUSED, np.int8), columns={})
    after = replace(fast.take(slice(0, 10)), attempt=np.full(10, 1, np.int32), step=held.step[-1] + 1 + np.arange(10))
    assert sustained(Signals.concatenate([fast, held, after])) is None


def test_every_complete_checkpoint_of_the_run_is_known_and_those_of_a_superseded_tail_are_not() -> None:
    first = steady(6000, 10)
    again = steady(500, 10, attempt=1, first=3001)
    signals = Signals.concatenate([first, again])
    assert [one.step for one in checkpoints(first)] == list(range(10, 6001, 10))
    assert [one.step for one in checkpoints(signals)] == list(range(10, 3501, 10))
    assert [one.step for one in checkpoints(signals, keep=52)] == [*range(3010, 3501, 10)]
    broken = replace(first, columns={"checkpoint/step": Column(np.full(len(first), np.nan), first.phase == 4)})
    assert checkpoints(broken) == ()
    assert checkpoints(first.take(slice(0, 0))) == ()
