"""Recordings of real runs: their verdicts, reviewed as a diff, and what each row of `incidents.csv` asks for.

After a check has changed: `RUNWATCH_UPDATE_REPLAYS=1 pytest tests/replays`, then read the diff of `verdicts/`.
"""

import csv
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runwatch.checks import Column, Level, Settings, Signals, Verdicts, all_checks
from runwatch.monitor.engine.backtest import Result, backtest, level_of, steps_of
from runwatch.monitor.read.sources import Loaded, load

RECORDINGS = Path(__file__).parents[3] / "shared" / "recordings"
VERDICTS = Path(__file__).parent / "verdicts"
FILES = sorted(path.name for path in RECORDINGS.glob("*.csv*") if path.name not in ("index.csv", "incidents.csv"))
WARNINGS_PER_RECORDS = 4800

pytestmark = pytest.mark.skipif(not FILES, reason=f"the recordings of real runs are not at {RECORDINGS}")


@dataclass(frozen=True)
class Wanted:
    """One row of `incidents.csv` as we read it: by which step a level must be reached, if at all."""

    file: str
    check: str
    start: int
    end: int
    warn_by: int | None = None
    critical_by: int | None = None
    never_critical: bool = False
    attempt: int = 0


EIGHT_24, EIGHT_TWO = "llama31-8b-spike-24.csv", "llama31-8b-two-spikes.csv"
MIXTRAL, WMT, BLOOM = "mixtral-8x7b-h100-spikes.csv.gz", "wmt-transformer-spike-55.csv", "bloom-176b-spike-fragment.csv"
DEEPSEEK, GPT3 = "deepseekv3-proxy-h100-slow-job.csv.gz", "gpt3-15b-h100-slow-windows.csv.gz"
NAN, SLOW = "gpt2-124m-three-attempts-nan.csv", "nanochat-moe-fp8-experts-slow.csv"
EPOCHS, UNSTABLE = "mistral-7b-finetune-epoch-repeats.csv", "cs336-lr0.1-unstable.csv"
WANTED = (
    Wanted(EIGHT_24, "loss_spike", 2586, 2731, warn_by=2586, critical_by=2588),
    Wanted(EIGHT_24, "loss_spike", 2968, 3023, warn_by=2968, critical_by=2970),
    Wanted(EIGHT_TWO, "loss_spike", 878, 965, warn_by=878, critical_by=881),
    Wanted(EIGHT_TWO, "loss_spike", 2098, 2231, warn_by=2098, critical_by=2101),
    Wanted(EIGHT_TWO, "eval_regression", 2112, 2303, warn_by=2112),
    Wanted(MIXTRAL, "loss_spike", 1760, 1775, warn_by=1775),
    Wanted(MIXTRAL, "loss_spike", 2360, 2365, warn_by=2365),
    Wanted(MIXTRAL, "loss_spike", 2830, 2835, warn_by=2835),
    Wanted(MIXTRAL, "loss_spike", 3800, 3855, warn_by=3800, critical_by=3855),
    Wanted(MIXTRAL, "loss_spike", 4260, 4260, warn_by=4260),
    Wanted(MIXTRAL, "loss_spike", 4970, 4970, warn_by=4970),
    Wanted(MIXTRAL, "loss_spike", 5540, 5545, warn_by=5545),
    Wanted(DEEPSEEK, "throughput", 29950, 30650, warn_by=30050, critical_by=30650),
    Wanted(GPT3, "throughput", 2100, 2300, critical_by=2200),
    Wanted(GPT3, "throughput", 27100, 35700, never_critical=True),
    Wanted(NAN, "finite", 1, 901, critical_by=1, attempt=1),
    Wanted(NAN, "finite", 1, 99, critical_by=1, attempt=2),
    Wanted(WMT, "loss_spike", 7100, 9100, critical_by=7300),
    Wanted(WMT, "loss_spike", 13800, 16700, critical_by=14000),
    Wanted(WMT, "loss_spike", 23900, 26200, critical_by=24100),
    Wanted(BLOOM, "grad_norm", 31215, 31222, warn_by=31216, critical_by=31217),
    Wanted(BLOOM, "loss_spike", 31216, 31222, warn_by=31216, critical_by=31221),
    Wanted(SLOW, "throughput", 60, 359, critical_by=359),
    Wanted(EPOCHS, "ladder_deviation", 2170, 4329, warn_by=2670),
    Wanted(EPOCHS, "ladder_deviation", 4330, 6489, warn_by=6489),
    Wanted(EPOCHS, "ladder_deviation", 6490, 8660, warn_by=8660),
    Wanted(UNSTABLE, "ladder_deviation", 400, 9200, critical_by=400),
)


def declared(file: str) -> Mapping[str, Mapping[str, Any]]:
    """What the run card of a recording declares, where its row of `incidents.csv` speaks of a floor or a curve."""
    if file == SLOW:
        return {"throughput": {"mfu_floor": 0.10}}
    if file == DEEPSEEK:
        return {"throughput": {"critical_drop": 0.20}}
    if file == UNSTABLE:
        sibling = load(RECORDINGS / "cs336-lr0.003-clean.csv").signals
        loss = sibling.values("train/loss")
        band = {"low": (0.95 * loss).tolist(), "high": (1.05 * loss).tolist()}
        tokens = sibling.tokens[sibling.observed("train/loss")].tolist()
        return {"ladder_deviation": {"curves": [{"tokens": tokens, "loss": loss.tolist(), **band}]}}
    return {}


def with_baseline(loaded: Loaded) -> Loaded:
    """Thirty healthy rows before a fragment, as the note in `index.csv` asks: 2.20 ± 0.02 and 0.24 ± 0.05."""
    rng = np.random.default_rng(0)
    before, present = loaded.signals.take(np.zeros(30, np.intp)), np.ones(30, np.bool_)
    columns = {
        "train/loss": Column(2.20 + 0.02 * rng.standard_normal(30), present),
        "optim/grad_norm": Column(0.24 + 0.05 * rng.standard_normal(30), present),
    }
    back = np.arange(-30, 0)
    tokens = loaded.signals.tokens[0] + back * float(np.diff(loaded.signals.tokens)[0])
    steps = loaded.signals.step[0] + back
    rows = replace(before, step=steps, tokens=tokens, columns={**before.columns, **columns})
    return replace(loaded, signals=Signals.concatenate([rows, loaded.signals]))


@cache
def replay(file: str) -> Result:
    """A recording judged with defaults and with what its card declares."""
    loaded = load(RECORDINGS / file)
    settings: dict[str, Settings] = {
        name: all_checks()[name].settings.model_validate(values) for name, values in declared(file).items()
    }
    return backtest(with_baseline(loaded) if file == BLOOM else loaded, settings)


def test_our_reading_of_the_expected_verdicts_covers_the_whole_table() -> None:
    with (RECORDINGS / "incidents.csv").open() as file:
        rows = [
            (row["file"], row["kind"], int(row["start_step"]), int(row["end_step"])) for row in csv.DictReader(file)
        ]
    assert [(one.file, one.check, one.start, one.end) for one in WANTED] == rows


def rows_of(wanted: Wanted, signals: Signals) -> NDArray[np.intp]:
    inside = (signals.step >= wanted.start) & (signals.step <= wanted.end) & ~signals.tick
    return np.flatnonzero(inside & (signals.attempt == wanted.attempt))


@pytest.mark.parametrize("wanted", WANTED, ids=lambda one: f"{one.file.split('.')[0]}-{one.check}-{one.start}")
def test_each_incident_of_the_recordings_is_told_in_time(wanted: Wanted) -> None:
    result = replay(wanted.file)
    rows = rows_of(wanted, result.loaded.signals)
    level, step = result.verdicts[wanted.check].level[rows], result.loaded.signals.step[rows]
    for least, by in ((Level.WARN, wanted.warn_by), (Level.CRITICAL, wanted.critical_by)):
        reached = step[level >= least]
        assert by is None or (len(reached) and reached[0] <= by), f"{least.name} at {reached[:1]}, wanted by {by}"
    assert not (wanted.never_critical and (level == Level.CRITICAL).any())


@pytest.mark.parametrize("file", FILES)
def test_outside_of_incidents_nothing_is_critical_and_warnings_are_rare(file: str) -> None:
    result = replay(file)
    explained = np.zeros(len(result.loaded.signals), np.bool_)
    for wanted in (one for one in WANTED if one.file == file):
        rows = rows_of(wanted, result.loaded.signals)
        explained[rows[0] : rows[-1] + 1] = True
    spans = [(one, *result.rows_of(one)) for one in result.incidents]
    extra = [one for one, first, last in spans if not explained[first : last + 1].any()]
    told = [f"{one.check} {one.severity} {steps_of(one)}: {one.what}" for one in extra]
    assert not [line for line, one in zip(told, extra, strict=True) if level_of(one) is Level.CRITICAL]
    assert len(extra) <= max(1, result.loaded.records // WARNINGS_PER_RECORDS), told


def run_lengths(verdicts: Verdicts, signals: Signals) -> str:
    """Stretches of equal level: how many rows, and from which step on where it is an alarm."""
    starts = np.flatnonzero(np.diff(verdicts.level, prepend=-9))
    lengths = np.diff(np.append(starts, len(verdicts)))
    parts: list[str] = []
    for start, length in zip(starts, lengths, strict=True):
        level = Level(int(verdicts.level[start]))
        parts.append(f"{level.name.lower()} {length}" + (f" @{signals.step[start]}" if level >= Level.WARN else ""))
    return " | ".join(parts)


def as_text(result: Result) -> str:
    signals = result.loaded.signals
    head = f"{result.loaded.records} records, {int(signals.tick.sum())} ticks, {len(result.loaded.attempts)} attempts"
    judged = {name: found for name, found in result.verdicts.items() if name not in result.unknown_checks}
    return "\n".join([head, *(f"{name}: {run_lengths(found, signals)}" for name, found in judged.items()), ""])


@pytest.mark.parametrize("file", FILES)
def test_the_verdicts_on_each_recording_are_those_that_were_reviewed(file: str) -> None:
    path = VERDICTS / f"{file.split('.csv', maxsplit=1)[0]}.txt"
    text = as_text(replay(file))
    if os.environ.get("RUNWATCH_UPDATE_REPLAYS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), "if the change is meant: RUNWATCH_UPDATE_REPLAYS=1 pytest tests/replays"
