"""Part a: the labelled recordings of real runs, and whether each row of `incidents.csv` is met.

`expected_verdict` is read as people wrote it: clauses such as "warn 2586, critical by 2588", "critical within 3",
"at most warn". Where a clause depends on what a card declares ("when an MFU floor is declared"), `CARDS` declares it.
"""

import csv
import gzip
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from runs import with_ticks
from scoring import Levels, incidents

from runwatch.checks import Column, Level, Phase, Settings, Signals, all_checks, judge

NAMES = {
    "loss": "train/loss",
    "grad_norm": "optim/grad_norm",
    "lr": "optim/learning_rate",
    "step_time_s": "throughput/step_time",
    "tokens_per_s": "throughput/tokens_per_second",
    "mfu": "throughput/mfu",
    "eval_loss": "eval/loss",
    "drop_rate": "moe/drop_rate",
}
PHASES = {"train": Phase.TRAIN, "eval": Phase.EVAL, "overflow": Phase.TRAIN}
NOT_RUNS = ("index.csv", "incidents.csv", "olmo-ladder-rungs.csv.gz", "olmo2-7b-evals.csv")
WARNINGS_PER = 4800
CARDS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "nanochat-moe-fp8-experts-slow.csv": {"throughput": {"mfu_floor": 0.10}},
    "deepseekv3-proxy-h100-slow-job.csv.gz": {"throughput": {"critical_drop": 0.2}},
}
"""Settings that a row's condition asks for ("if the floor is 20 percent")."""
REGISTERED = {"cs336-lr0.1-unstable.csv": "cs336-lr0.003-clean.csv"}
"""Runs whose sibling's loss is the registered curve."""


@dataclass(frozen=True)
class Row:
    """One row of `incidents.csv`, and what was said."""

    file: str
    check: str
    first: int
    last: int
    expected: str
    met: bool = False
    said: str = ""


@dataclass(frozen=True)
class Recording:
    """One file judged: alarms that no row of `incidents.csv` explains, against its budget."""

    file: str
    records: int
    warnings: int
    criticals: int
    extra: tuple[str, ...]

    @property
    def within(self) -> bool:
        """No critical alarm, and at most one warning per 4,800 records (one in a shorter file)."""
        return self.criticals == 0 and self.warnings <= max(1, self.records // WARNINGS_PER)


def load(path: Path) -> Signals:
    """A recording as signals, with tick rows where it has a clock."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        rows = list(csv.DictReader(file))
    table = {name: [row[name] for row in rows] for name in rows[0]}
    length = len(rows)
    columns = {ours: _column(table[theirs]) for theirs, ours in NAMES.items() if theirs in table}
    if "skipped_steps" in table:
        columns["optim/skipped_step"] = _differences(_column(table["skipped_steps"]))
    signals = Signals(
        np.array([int(value or 0) for value in table.get("attempt", ["0"] * length)], np.int32),
        np.array([int(float(value)) for value in table["step"]], np.int64),
        _column(table.get("tokens", [""] * length)).values,
        _column(table.get("wall_time_s", [""] * length)).values,
        np.array([PHASES[value or "train"] for value in table.get("phase", ["train"] * length)], np.int8),
        np.zeros(length, np.bool_),
        columns,
    )
    if path.name.startswith("bloom"):
        signals = _with_baseline(signals)
    return signals if np.isnan(signals.time).any() else with_ticks(signals, 0.0)[0]


def _column(texts: Sequence[str]) -> Column:
    present = np.array([text != "" for text in texts])
    return Column(np.array([float(text) if text else np.nan for text in texts]), present)


def _differences(column: Column) -> Column:
    """A cumulative count as what each row adds."""
    rows = np.flatnonzero(column.present)
    values = np.full(len(column.values), np.nan)
    values[rows] = np.diff(column.values[rows], prepend=column.values[rows[0]])
    return Column(values, column.present)


def _with_baseline(signals: Signals) -> Signals:
    """Thirty healthy rows before a fragment, as the note in `index.csv` asks: 2.20 ± 0.02 and 0.24 ± 0.05."""
    rng = np.random.default_rng(0)
    before = signals.take(np.zeros(30, np.intp))
    present = np.ones(30, np.bool_)
    columns = {
        "train/loss": Column(2.20 + 0.02 * rng.standard_normal(30), present),
        "optim/grad_norm": Column(0.24 + 0.05 * rng.standard_normal(30), present),
    }
    steps = signals.step[0] - 30 + np.arange(30)
    return Signals.concatenate([replace(before, step=steps, columns={**before.columns, **columns}), signals])


def levels_of(path: Path, signals: Signals) -> Levels:
    """What every check says under its defaults, with what `CARDS` and `REGISTERED` declare."""
    given = {name: dict(values) for name, values in CARDS.get(path.name, {}).items()}
    if path.name in REGISTERED:
        given["ladder_deviation"] = _curve(load(path.with_name(REGISTERED[path.name])))
    found: dict[str, NDArray[np.int8]] = {}
    for name, check in all_checks().items():
        settings: Settings = check.settings(**given.get(name, {}))
        found[name] = judge(check, signals, settings).level
    return found


def _curve(sibling: Signals) -> dict[str, Any]:
    """The sibling's loss as the registered curve, with a band of 5 %."""
    rows = sibling.observed("train/loss")
    loss, tokens = sibling.values("train/loss"), sibling.tokens[rows]
    band = {"tokens": tokens.tolist(), "loss": loss.tolist()}
    return {"curves": [{**band, "low": (0.95 * loss).tolist(), "high": (1.05 * loss).tolist()}]}


def expectations(folder: Path) -> list[Row]:
    """The rows of `incidents.csv`."""
    with (folder / "incidents.csv").open() as file:
        return [
            Row(row["file"], row["kind"], int(row["start_step"]), int(row["end_step"]), row["expected_verdict"])
            for row in csv.DictReader(file)
        ]


def judge_folder(folder: Path) -> tuple[list[Row], list[Recording]]:
    """Every row of `incidents.csv`, and the unexplained alarms of every recording."""
    wanted = expectations(folder)
    rows: list[Row] = []
    recordings: list[Recording] = []
    for path in sorted(path for path in folder.iterdir() if ".csv" in path.name and path.name not in NOT_RUNS):
        signals = load(path)
        levels = levels_of(path, signals)
        mine = [row for row in wanted if row.file == path.name]
        rows += [held_against(row, signals, levels) for row in mine]
        recordings.append(_unexplained(path.name, signals, levels, mine))
    return rows, recordings


def held_against(row: Row, signals: Signals, levels: Levels) -> Row:
    """The row with whether it was met, and what the check said in its range."""
    inside = _range(row, signals)
    level = levels[row.check][inside]
    loud = [(name, np.flatnonzero(level >= worth)) for name, worth in (("warn", 1), ("critical", 2))]
    said = ", ".join(f"{name} {signals.step[inside[at[0]]]}" for name, at in loud if len(at))
    trained = signals.phase[inside] == Phase.TRAIN
    return replace(row, met=_met(row, signals.step[inside], trained, level), said=said or "nothing")


def _range(row: Row, signals: Signals) -> NDArray[np.intp]:
    inside = (signals.step >= row.first) & (signals.step <= row.last) & ~signals.tick
    attempt = re.search(r"attempt (\d+)", row.expected)
    if attempt:
        inside &= signals.attempt == int(attempt[1])
    return np.flatnonzero(inside)


def _met(row: Row, step: NDArray[np.int64], trained: NDArray[np.bool_], level: NDArray[np.int8]) -> bool:
    if not len(step):
        return False
    if "at most warn" in row.expected:
        return not (level >= Level.CRITICAL).any()
    return all(_clause_met(clause, step, trained, level) for clause in row.expected.split(", "))


def _clause_met(clause: str, step: NDArray[np.int64], trained: NDArray[np.bool_], level: NDArray[np.int8]) -> bool:
    """Whether a clause's level is reached by its deadline: a step, a number of train rows, or the end of the range."""
    critical = "critical" in clause and "warn or critical" not in clause
    stop = len(step)
    rows = re.search(r"within (\d+)", clause)
    steps = re.findall(r"\b\d+\b", re.sub(r"within .*|\d+ percent|attempt \d+", "", clause))
    if "first row" in clause:
        stop = 1
    elif rows:
        stop = int(np.searchsorted(np.cumsum(trained), int(rows[1]) + 1)) + 1
    elif steps:
        stop = int(np.searchsorted(step, max(map(int, steps)), side="right"))
    return bool((level[:stop] >= (Level.CRITICAL if critical else Level.WARN)).any())


def _unexplained(file: str, signals: Signals, levels: Levels, wanted: Sequence[Row]) -> Recording:
    explained = np.zeros(len(signals), np.bool_)
    for row in wanted:
        inside = _range(row, signals)
        if len(inside):
            explained[inside[0] : inside[-1] + 1] = True
    extra = [one for one in incidents(levels, signals) if not explained[one.first : one.last + 1].any()]
    told = tuple(f"{one.rule} {one.level.name} step {signals.step[one.first]}" for one in extra)
    criticals = sum(one.level == Level.CRITICAL for one in extra)
    return Recording(file, int((~signals.tick).sum()), len(extra) - criticals, criticals, told)
