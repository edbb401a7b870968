"""Live verdicts, block by block with a context that is cut short, are those of the whole run at once."""

from pathlib import Path

import numpy as np
import pytest
import runs

from runwatch.checks import Change, Signals, Verdicts, all_checks, judge
from runwatch.monitor.card.context import check_settings
from runwatch.monitor.card.run_card import load_card
from runwatch.monitor.engine import context, evaluate
from runwatch.monitor.engine.evaluate import LiveJudge
from runwatch.monitor.read.run_directory import RunReader

CRASHES = {"one attempt": (), "resumes": (900, 1000, 1700), "a resume from long ago": (1150,)}


@pytest.mark.parametrize("case", CRASHES)
def test_blocks_with_a_short_context_give_the_verdicts_of_the_whole(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "RECENT_ROWS", 20)
    monkeypatch.setattr(evaluate, "SLACK_ROWS", 60)
    every = 1000 if case == "a resume from long ago" else 200
    runs.write(runs.healthy(7, records=2000, crashes=CRASHES[case], checkpoint_every=every), tmp_path / "run")
    settings = check_settings(load_card(tmp_path / "run" / "run.yaml"))
    changes = (Change(51_500, ("moe",)),)
    signals = RunReader(tmp_path / "run").read(float("-inf"))
    read = [0]
    live = LiveJudge(all_checks(), signals.take(slice(0, 0)), lambda: signals.take(slice(0, read[0])))
    found: dict[str, list[Verdicts]] = {name: [] for name in all_checks()}
    sizes: list[int] = []
    rng = np.random.default_rng(len(case))
    while read[0] < len(signals):
        block = signals.take(slice(read[0], read[0] + int(rng.integers(1, 80))))
        judged = live.judge(block, settings, changes)
        assert not judged.errors
        for name, verdicts in judged.verdicts.items():
            found[name].append(verdicts)
        live.accept(block, settings, changes)
        read[0] += len(block)
        sizes.append(len(live.context))
    assert sizes[-1] < len(signals) / 2 or case != "one attempt"
    for name, check in all_checks().items():
        same(name, Verdicts.concatenate(found[name]), judge(check, signals, settings[name], changes))


def same(name: str, found: Verdicts, expected: Verdicts) -> None:
    for part in ("level", "value", "limit", "reason"):
        np.testing.assert_array_equal(getattr(found, part), getattr(expected, part), f"{name} {part}")


def test_a_long_run_keeps_few_rows(tmp_path: Path) -> None:
    runs.write(runs.healthy(3, records=12_000), tmp_path / "run")
    settings = check_settings(load_card(tmp_path / "run" / "run.yaml"))
    signals: Signals = RunReader(tmp_path / "run").read(float("-inf"))
    rows = context.needed_rows(signals, all_checks(), settings, ())
    assert len(rows) < len(signals) / 2
