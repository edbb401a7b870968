"""The scoring of the detection benchmark, and that each rival does what its source says."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from injections import KINDS, inject
from runs import healthy

from runwatch.checks import Level

FOLDER = Path(__file__).parents[1] / "benchmarks" / "detection"
OK, WARN, CRITICAL = Level.OK, Level.WARN, Level.CRITICAL


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("scoring", "rivals", "recordings")
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        del sys.modules[name]


def _kind(name: str):  # noqa: ANN202 - a Kind, whose module conftest makes importable
    return next(kind for kind in KINDS if kind.name == name)


def test_alarms_less_than_twenty_ok_records_apart_are_one_incident(benchmark: dict[str, ModuleType]) -> None:
    signals, rows = healthy(0, records=200).signals()
    level = np.zeros(len(signals), np.int8)
    level[rows[50]], level[rows[60]], level[rows[100]] = WARN, CRITICAL, WARN
    found = benchmark["scoring"].incidents({"x": level}, signals)
    assert [(one.first, one.last, one.level) for one in found] == [
        (rows[50], rows[60], CRITICAL),
        (rows[100], rows[100], WARN),
    ]


@pytest.mark.parametrize(
    ("offset", "delay", "in_time", "true", "false"),
    [(0, 0.0, True, 1, 0), (3, 3.0, True, 1, 0), (50, 50.0, False, 1, 0), (-50, None, False, 0, 1)],
)
def test_an_alarm_counts_from_the_onset_to_the_horizon(
    benchmark: dict[str, ModuleType], offset: int, delay: float | None, in_time: bool, true: int, false: int
) -> None:
    case = inject(_kind("loss up by 0.1 nats, lasting"), 1)
    trained = np.flatnonzero(~case.signals.tick & (case.signals.phase == 2))
    level = np.zeros(len(case.signals), np.int8)
    level[trained[np.searchsorted(trained, case.first) + offset]] = WARN
    found = benchmark["scoring"].outcome(case, {"loss_spike": level}, {})
    assert (found.delay, found.in_time, found.true, found.false) == (delay, in_time, true, false)


@pytest.mark.parametrize(
    ("rival", "kind", "loud"),
    [
        ("mean + 6 sigma of 128", "loss spike, one step, 1 nat", True),
        ("mean + 6 sigma of 128", "z-loss x 1.6 at once", False),
        ("2 x window mean", "loss up by 3 nats, lasting", True),
        ("2 x window mean", "loss up by 1 nat, lasting", False),
        ("Marin's alerts", "loss up by 1 nat, lasting", True),
        ("Marin's alerts", "oscillation of 0.4 nats", False),
        ("Marin's alerts", "hang in training", True),
        ("EMA z > 2.5", "grad-norm outburst over six steps", True),
        ("plain CUSUM", "loss up by 0.1 nats, lasting", True),
        ("fixed thresholds", "MFU halves", True),
        ("fixed thresholds", "learning rate x 1.5", False),
    ],
)
def test_a_rival_finds_what_its_rule_can_see(
    benchmark: dict[str, ModuleType], rival: str, kind: str, loud: bool
) -> None:
    judge = next(one for one in benchmark["rivals"].RIVALS if one.name == rival)
    case = inject(_kind(kind), 3)
    found = benchmark["scoring"].outcome(case, judge.judge(case.signals), judge.answers)
    assert (found.delay is not None) == loud


@pytest.mark.parametrize(
    ("expected", "first_warn", "first_critical", "met"),
    [
        ("warn", 130, None, True),
        ("warn 100, critical by 102", 100, 102, True),
        ("warn 100, critical by 102", 100, 103, False),
        ("warn 100, critical by 102", 101, 102, False),
        ("critical within 3", 100, 103, True),
        ("critical within 3", 100, 104, False),
        ("warn 100 or 101, critical by 120", 101, 110, True),
        ("at most warn", 100, None, True),
        ("at most warn", 100, 101, False),
        ("low side: suspicious drop within 50 rows of 100", 140, None, True),
        ("low side: suspicious drop within 20 rows of 100", 140, None, False),
        ("warn or critical at the evaluation of step 112", 112, None, True),
        ("critical from 100 when the sibling is the registered curve", 100, 100, True),
    ],
)
def test_what_people_wrote_in_incidents_csv_is_understood(
    benchmark: dict[str, ModuleType], expected: str, first_warn: int, first_critical: int | None, met: bool
) -> None:
    module = benchmark["recordings"]
    signals, rows = healthy(0, records=300, first=1).signals()
    level = np.zeros(len(signals), np.int8)
    level[rows[first_warn - 1] :] = WARN
    if first_critical is not None:
        level[rows[first_critical - 1] :] = CRITICAL
    row = module.Row("file", "x", 100, 150, expected)
    assert replace(module.held_against(row, signals, {"x": level}), said="") == replace(row, met=met)
