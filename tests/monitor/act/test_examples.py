"""The example of a foreign trainer: its own process, without runwatch, beside a real daemon."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import DaemonProcess, wait_for

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_does_not_import_runwatch(path: Path) -> None:
    names = [
        name
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    ]
    assert names
    assert not [name for name in names if name.startswith("runwatch")]


@pytest.mark.slow
def test_the_plain_loop_goes_back_before_its_bad_batch_as_its_card_says(tmp_path: Path) -> None:
    run_dir = tmp_path / "plain"
    command = [sys.executable, str(EXAMPLES / "plain_loop.py"), str(run_dir), "--bad-batch", "120"]
    loop = subprocess.Popen([*command, "--seconds-per-step", "0.02"])
    try:
        wait_for("the loop has begun", (run_dir / "run.yaml").exists)

        def status() -> dict[str, Any]:
            path = run_dir / ".runwatch" / "status.json"
            return json.loads(path.read_text()) if path.exists() else {"plans": [], "run": {"step": 0}}

        with DaemonProcess(run_dir):
            wait_for("the plan is verified", lambda: [plan["state"] for plan in status()["plans"]] == ["verified"])
            wait_for("the run goes on", lambda: status()["run"]["step"] > 250)
            assert status()["run"]["attempt"] == "a0002"
            assert "plan_conformance" not in {one["check"] for one in status()["incidents"]}
    finally:
        loop.kill()
        loop.wait()
    receipt = json.loads((run_dir / "control" / "receipts" / "instability-0001.json").read_text())
    assert (receipt["status"], receipt["after"]["lr_scale"]) == ("applied", 0.8)
