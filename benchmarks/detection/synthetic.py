"""Part b: runs of the seeded generator, with incidents and without, before runwatch and its rivals."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from injections import KINDS, Kind, inject
from judging import runwatch_levels
from rivals import RIVALS
from runs import DECAY_START, NOISES, Run, healthy
from scoring import Clean, Levels, Outcome, incidents, outcome

from runwatch.checks import Level, Signals

TUNE, REPORT = 0, 100_000
"""First seeds: checks may be tuned on the one set, figures come from the other."""


@dataclass(frozen=True)
class Judge:
    """Anything that turns a run's records into levels by rule."""

    name: str
    levels: Callable[[Signals, Mapping[str, Any]], Levels]
    answers: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])


def judges() -> list[Judge]:
    """Runwatch first."""
    ours = Judge("runwatch", runwatch_levels)
    return [ours, *(Judge(rival.name, _ignoring_card(rival.judge), rival.answers) for rival in RIVALS)]


def _ignoring_card(judge: Callable[[Signals], Levels]) -> Callable[[Signals, Mapping[str, Any]], Levels]:
    return lambda signals, _: judge(signals)


@dataclass
class Tally:
    """All that one judge did, and how long it took."""

    name: str
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    clean: Clean = field(default_factory=Clean)
    restarts: Clean = field(default_factory=Clean)
    cuts: int = 0
    after_restart: list[str] = field(default_factory=list[str])
    requeues: int = 0
    requeues_warned: int = 0
    requeues_paged: int = 0
    seconds: float = 0.0
    records: int = 0

    def judge(self, judge: Judge, signals: Signals, card: Mapping[str, Any]) -> Levels:
        """Levels, with the CPU seconds they cost."""
        begin = time.process_time()
        levels = judge.levels(signals, card)
        self.seconds += time.process_time() - begin
        self.records += int(np.count_nonzero(~signals.tick))
        return levels


Progress = Callable[[str, int, int], None]


def with_incidents(
    tallies: Sequence[tuple[Judge, Tally]],
    first_seed: int,
    seeds: int,
    progress: Progress,
    kinds: Sequence[Kind] = KINDS,
) -> None:
    """Every kind of incident on `seeds` runs."""
    for done, kind in enumerate(kinds):
        progress(f"incident: {kind.name}", done, len(kinds))
        for seed in range(first_seed, first_seed + seeds):
            labelled = inject(kind, seed)
            for judge, tally in tallies:
                levels = tally.judge(judge, labelled.signals, labelled.run.card)
                tally.outcomes.append(outcome(labelled, levels, judge.answers))


def clean_runs(first_seed: int, records: int, rounds: int) -> Iterator[tuple[str, Run]]:
    """Healthy runs of every noise from every part of a run, with three restarts each."""
    seats = (1, 5_000, 50_000, 120_000, 250_000, DECAY_START - records // 2)
    for number in range(rounds * len(seats) * len(NOISES)):
        seat, noise = seats[number % len(seats)], list(NOISES)[number // len(seats) % len(NOISES)]
        seed = first_seed + number
        rng = np.random.default_rng([seed, 5])
        crashes = np.sort(rng.choice(np.arange(1, records // 800 - 1), 3, replace=False) * 800 + rng.integers(0, 99, 3))
        yield (
            f"seed {seed}, {noise}, from step {seat}",
            healthy(seed, records=records, first=seat, noise=noise, crashes=[int(crash) for crash in crashes]),
        )


def without_incidents(
    tallies: Sequence[tuple[Judge, Tally]], first_seed: int, records: int, rounds: int, progress: Progress
) -> None:
    """Count alarms on healthy runs."""
    total = rounds * 6 * len(NOISES)
    for done, (name, run) in enumerate(clean_runs(first_seed, records, rounds)):
        progress(f"clean: {name}", done, total)
        signals, _ = run.signals()
        for judge, tally in tallies:
            tally.clean.add(name, signals, tally.judge(judge, signals, run.card))


def restarts(tallies: Sequence[tuple[Judge, Tally]], first_seed: int, count: int, progress: Progress) -> None:
    """Healthy runs whose job is cut every 700 steps (230 minutes of queue limit) and resumed: alarms after each."""
    each = 25
    for done in range(-(-count // each)):
        seed, noise = first_seed + 50_000 + done, list(NOISES)[done % len(NOISES)]
        progress(f"restarts: seed {seed}, {noise}", done * each, count)
        rng = np.random.default_rng([seed, 6])
        spread = rng.integers(0, 60, min(each, count - done * each))
        crashes = [800 + 700 * number + int(late) for number, late in enumerate(spread)]
        run = healthy(seed, records=crashes[-1] + 700, first=30_000 + 9_000 * done, noise=noise, crashes=crashes)
        signals, rows = run.signals()
        begin = rows[np.array(crashes) - 1]
        spans = list(zip(begin.tolist(), rows[np.array(crashes) + 100].tolist(), strict=True))
        for judge, tally in tallies:
            levels = tally.judge(judge, signals, run.card)
            tally.cuts += len(crashes)
            name = f"seed {seed}, {noise}, from step {run.step[0]}"
            tally.restarts.add(name, signals, levels)
            found = [one for one in incidents(levels, signals) if any(a < one.first <= b for a, b in spans)]
            tally.after_restart += [f"{one.rule} {Level(one.level).name} {name} row {one.first}" for one in found]


def requeues(judge: Judge, tally: Tally, first_seed: int, count: int) -> None:
    """Restarts whose process writes nothing for 1 to 10 minutes: how many `progress` tells."""
    crashes = [800 + 753 * number for number in range(count)]
    run = healthy(first_seed + 90_000, records=crashes[-1] + 700, first=60_000, crashes=crashes, outage=(60.0, 600.0))
    signals, _ = run.signals()
    found = [one for one in incidents(judge.levels(signals, run.card), signals) if one.rule == "progress"]
    tally.requeues = count
    tally.requeues_paged = sum(one.level == Level.CRITICAL for one in found)
    tally.requeues_warned = len(found) - tally.requeues_paged


def percentile(delays: Sequence[float], share: float) -> float:
    """A percentile; NaN of nothing."""
    return float(np.percentile(delays, share)) if delays else float("nan")
