"""A check is one file and one test table: with a new one dropped into a copy of the tree nothing else has to change."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CHECK = '''"""The parameters have grown beyond their limit.

What it does: compares `params/norm` (required) with `limit`.

Why it matters: weights without decay grow until their updates no longer matter.

Warns and turns critical when: warns above `limit`, critical above twice the limit.

Defaults:

| setting | default | source |
| ------- | ------- | --- |
| `limit` | 5000    | a guess |

Does not see: which tensor grew.

What to do:

- Meaning: weight decay is off.
- Impact: updates shrink against the weights.
- Diagnosis: the optimizer's settings.
- Mitigation: look at the optimizer.
"""

import numpy as np
from pydantic import Field

from runwatch.checks.check import Check, Settings, Verdicts, graded
from runwatch.checks.signals import Signals
from runwatch.checks.windows import usable

NAME = "params/norm"


class ParamDriftSettings(Settings):
    """How large is too large."""

    limit: float = Field(default=5000.0, gt=0)
    """Of the global norm."""


def evaluate(signals: Signals, settings: ParamDriftSettings) -> Verdicts:
    """Each observation against the limit; UNKNOWN where it is not finite (T records)."""
    norm = usable(signals.values(NAME))
    level = graded(norm > 2 * settings.limit, norm > settings.limit, ~np.isnan(norm))
    size = len(norm)
    observed = Verdicts(level, norm, np.full(size, settings.limit), np.zeros(size, np.int8))
    return Verdicts.held(observed, signals.observed(NAME), len(signals))


CHECK = Check(
    name="param_drift",
    evaluate=evaluate,
    settings=ParamDriftSettings,
    required=(NAME,),
    optional=(),
    lookback=lambda _: 1,
    messages=("The parameter norm is {value:.0f}; the limit is {limit:.0f}.",),
)
'''

TABLE = """import pytest
from scenarios import CRITICAL, Scenario, WARN, assert_as_expected, healthy

from runwatch.checks.param_drift import CHECK

RUN = healthy(300)
TABLE = [
    Scenario("healthy", RUN),
    Scenario("above", RUN.put("params/norm", 50, 60, 6e3), [(WARN, 50, 60)]),
    Scenario("far above", RUN.put("params/norm", 50, 60, 1.1e4), [(CRITICAL, 50, 60)]),
]


@pytest.mark.parametrize("scenario", TABLE, ids=str)
def test_param_drift_says_what_the_table_says(scenario: Scenario) -> None:
    assert_as_expected(CHECK, scenario)
"""

PROOF = '''"""The new check is judged, shown and exported by the daemon."""

import json
from pathlib import Path

from runwatch.monitor.daemon.metrics import Collector, Counts


def test_param_drift_is_judged_shown_and_exported(tmp_path: Path, open_watch) -> None:
    (tmp_path / "telemetry").mkdir()
    records = [
        {"attempt": "a0001", "step": step, "tokens": 1024 * step, "time": 1.79e9 + step, "phase": "train",
         "params/norm": 80.0 if step < 50 else 6000.0}
        for step in range(1, 61)
    ]
    (tmp_path / "telemetry" / "a0001.jsonl").write_text("".join(f"{json.dumps(one)}\\n" for one in records))
    watch = open_watch(tmp_path)
    watch.tick(1.79e9 + 61)
    [shown] = [one for one in watch.status["checks"] if one["name"] == "param_drift"]
    assert shown["message"] == "The parameter norm is 6000; the limit is 5000."
    [incident] = watch.status["incidents"]
    assert incident["check"] == "param_drift"
    assert 'runwatch_check_level{check="param_drift",run="scripted"} 1.0' in Collector(watch, Counts()).text().decode()
'''


def runwatch(tree: Path, *command: str) -> str:
    """Run a module of `tree`; what it prints, both streams."""
    ran = subprocess.run(
        [sys.executable, "-P", "-m", *command],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / ".typing")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


@pytest.mark.slow
def test_a_new_check_is_one_file_and_one_test_table(tmp_path: Path) -> None:
    for folder in ("checks", "rules", "monitor", "trainer", "tests", "docs", ".typing"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "checks" / "param_drift.py").write_text(CHECK)
    (tmp_path / "tests" / "checks" / "test_param_drift.py").write_text(TABLE)
    (tmp_path / "tests" / "monitor" / "daemon" / "test_param_drift.py").write_text(PROOF)

    runwatch(
        tmp_path, "runwatch.monitor.cli", "explain", "--all", "--write", "docs/runbooks"
    )  # as `make runbooks` does
    assert "# Check `param_drift`" in (tmp_path / "docs" / "runbooks" / "param_drift.md").read_text()
    assert "The parameters have grown" in runwatch(tmp_path, "runwatch.monitor.cli", "explain", "param_drift")

    suites = ("tests/checks", "tests/test_house.py", "tests/monitor/commands/test_cli.py", "tests/monitor/daemon")
    ran = runwatch(
        tmp_path, "pytest", "-v", "-p", "no:cacheprovider", "-k", "param_drift or house or runbooks", *suites
    )
    for test in (
        "test_laws.py::test_a_prefix",
        "checks/test_param_drift.py::test_param_drift_says_what_the_table_says",
        "test_house.py::test_the_table_of_a_check",
        "test_cli.py::test_the_runbooks_are_what_the_docstrings_say",
        "daemon/test_param_drift.py::test_param_drift_is_judged_shown_and_exported",
    ):
        assert test in ran, ran
