"""The command line: quick help, exit codes, one sentence for each mistake."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scripted
from click.testing import CliRunner, Result
from scripted import ScriptedTrainer

from runwatch.checks import all_checks
from runwatch.monitor.cli import LAZY, cli
from runwatch.monitor.commands.options import DATA, UNAVAILABLE, USAGE, Failure
from runwatch.monitor.commands.status import silence
from runwatch.monitor.daemon.watched_run import Watch
from runwatch.rules import all_nodes

ROOT = Path(__file__).parents[3]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def code(result: Result) -> int:
    """The exit code that `main` gives."""
    return result.exception.code if isinstance(result.exception, Failure) else result.exit_code


def in_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "runwatch.monitor.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_help_imports_nothing_heavy() -> None:
    heavy = "{'numpy', 'sqlalchemy', 'uvicorn', 'rich', 'pydantic', 'apscheduler', 'jax'}"
    script = (
        "import sys; from runwatch.monitor.cli import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        f"print('loaded', sorted({heavy} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip().endswith("loaded []")
    assert all(name in found.stdout for name in LAZY)


def test_every_command_exists_and_explains_itself() -> None:
    for name in LAZY:
        if name != "train":  # it hands --help on to the trainer
            assert run(name, "--help").exit_code == 0, name


@pytest.mark.parametrize(
    "arguments",
    [
        ["watch"],
        ["no-such-command"],
        ["watch", "/nonexistent"],
        ["plan", "approve", "/nonexistent", "x", "--reason", "y"],
    ],
    ids=" ".join,
)
def test_wrong_use_exits_with_64_and_says_why(arguments: list[str]) -> None:
    found = in_process(*arguments)
    assert found.returncode == USAGE
    assert "Error: " in found.stderr
    assert "Traceback" not in found.stderr


def test_a_status_that_nobody_has_written_says_how_to_get_one(tmp_path: Path) -> None:
    result = run("status", tmp_path)
    assert "runwatch watch" in result.output
    assert result.exit_code != 0


WatchOpener = Callable[..., Watch]


@pytest.mark.parametrize(("steps", "expected"), [(100, 0), (200, 2)])
def test_the_exit_code_of_status_is_the_runs_health(
    steps: int, expected: int, trainer: ScriptedTrainer, open_watch: WatchOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_watch(trainer.run_dir).tick(trainer.train(steps))
    monkeypatch.setattr(time, "time", lambda: trainer.clock)
    result = run("status", trainer.run_dir)
    assert result.exit_code == expected
    assert f"step {steps}" in result.output
    assert json.loads(run("status", trainer.run_dir, "--json").output)["run"]["step"] == steps


def test_the_status_of_a_silent_daemon_is_degraded_and_says_since_when(
    trainer: ScriptedTrainer, open_watch: WatchOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_watch(trainer.run_dir).tick(trainer.train(100))
    monkeypatch.setattr(time, "time", lambda: trainer.clock + 4000)
    result = run("status", trainer.run_dir)
    assert result.exit_code == 1
    assert "last reported 66 minutes ago" in result.output


@pytest.mark.parametrize(
    ("seconds", "ago"), [(31.0, "31 s"), (7_199.0, "119 minutes"), (7_200.0, "2 hours"), (6_295_720.0, "72 days")]
)
def test_how_long_ago_the_daemon_last_reported_is_said_in_the_largest_unit(seconds: float, ago: str) -> None:
    status: Any = {"daemon": {"tick": 1_000.0}, "run": {"phase": "train"}}
    assert silence(status, 1_000.0 + seconds) == f"The daemon last reported {ago} ago; this is the status at that time."


def test_validate_accepts_a_good_run_and_names_every_mistake_of_a_bad_one(trainer: ScriptedTrainer) -> None:
    trainer.train(3)
    assert run("validate", trainer.run_dir).exit_code == 0
    with (trainer.run_dir / "telemetry" / "a0001.jsonl").open("a") as file:
        file.write("{nonsense\n")
    (trainer.run_dir / "control" / "receipts" / "x.json").write_text("[]")
    (trainer.run_dir / "run.yaml").write_text("version: 1\nrn: {}\n")
    result = run("validate", trainer.run_dir)
    assert result.exit_code == DATA
    for place in ("run.yaml:2: rn", "telemetry/a0001.jsonl:4", "control/receipts/x.json"):
        assert place in result.output


def test_a_person_approves_from_the_command_line(trainer: ScriptedTrainer, open_watch: WatchOpener) -> None:
    (trainer.run_dir / "run.yaml").write_text(json.dumps(scripted.card({"early_divergence": {"mode": "confirm"}})))
    watch = open_watch(trainer.run_dir)
    watch.tick(trainer.train(200))
    listed = run("plan", "list", trainer.run_dir).output
    assert "early_divergence-0001  shorten_budget  proposed" in listed
    assert "predicted final loss" in listed
    execution = ("early_divergence-0001", "--by", "ada", "--reason", "agreed")
    assert "was approved by ada" in run("plan", "approve", trainer.run_dir, *execution).output
    assert code(run("plan", "reject", trainer.run_dir, *execution)) != 0
    watch.tick(trainer.train(1))
    assert "requested" in run("plan", "list", trainer.run_dir).output
    assert (trainer.run_dir / "control" / "requests" / "early_divergence-0001.json").exists()
    assert run("audit", "verify", trainer.run_dir).exit_code == 0
    assert "decision" in run("audit", "show", trainer.run_dir).output


def test_a_preview_shows_what_a_plan_would_do_and_refuses_after_its_window(trainer: ScriptedTrainer) -> None:
    trainer.train(50)
    shown = run("plan", "preview", trainer.run_dir, "early_divergence", "--at", "12%").output
    assert "Token budget from 3,072,000" in shown
    assert "predicted final loss" in shown
    assert (
        "the window is 0% to 25%" in run("plan", "preview", trainer.run_dir, "early_divergence", "--at", "26%").output
    )
    assert not (trainer.run_dir / "control" / "requests").exists()


def test_plans_are_disabled_and_enabled(trainer: ScriptedTrainer) -> None:
    who = ("--by", "ada", "--reason", "maintenance")
    assert "disabled by ada: maintenance" in run("plan", "disable", trainer.run_dir, *who).output
    assert "Plans are disabled" in run("plan", "list", trainer.run_dir).output
    assert "enabled by ada" in run("plan", "enable", trainer.run_dir, *who).output
    assert "Plans are disabled" not in run("plan", "list", trainer.run_dir).output


def test_a_tampered_mirror_is_found(trainer: ScriptedTrainer, open_watch: WatchOpener) -> None:
    open_watch(trainer.run_dir).tick(trainer.train(200))
    mirror = trainer.run_dir / ".runwatch" / "audit.jsonl"
    assert run("audit", "verify", trainer.run_dir).exit_code == 0
    mirror.write_text(mirror.read_text().replace("critical", "harmless", 1))
    result = run("audit", "verify", trainer.run_dir)
    assert "differs from the database" in result.output
    assert result.exit_code != 0


def test_a_declaration_of_an_unknown_signal_is_refused(trainer: ScriptedTrainer) -> None:
    wrong = ("--step", "5", "--signal", "train/los", "--reason", "new data", "--by", "ada")
    result = run("declare", trainer.run_dir, *wrong)
    assert result.exit_code != 0
    assert "train/los" in result.output


def test_explain_prints_the_docstring_and_suggests_a_name() -> None:
    assert "What to do:" in run("explain", "finite").output
    assert "did you mean finite?" in run("explain", "finit").output
    assert code(run("explain")) != 0


def test_every_signal_is_listed() -> None:
    shown = run("signals").output
    assert "train/loss" in shown
    assert "data/mixture/" in shown


def test_the_runbooks_are_what_the_docstrings_say(tmp_path: Path) -> None:
    assert run("explain", "--all", "--write", tmp_path).exit_code == 0
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / "docs" / "runbooks").iterdir()}
    assert set(kept) == {f"{name}.md" for name in (*all_checks(), *all_nodes())}
    assert kept == written, "the runbooks are stale: make runbooks"


def test_one_tick_is_enough_for_a_look_and_its_exit_code_is_the_health(trainer: ScriptedTrainer) -> None:
    trainer.clock = time.time() - 60
    trainer.train(50)
    found = in_process("watch", str(trainer.run_dir), "--once")
    assert found.returncode == 0, found.stderr
    assert (trainer.run_dir / ".runwatch" / "status.json").exists()


BAD_CONFIGS = {
    "listen: here": "is not HOST:PORT",
    "lisen: 127.0.0.1:1": "known keys: listen",
    "notify: [{kind: pager}]": "pager",
    "notify: [{kind: slack, channel: general}]": "bot_token",
    "{": "not YAML",
}


@pytest.mark.parametrize("text", BAD_CONFIGS)
def test_a_mistake_in_the_daemons_settings_is_told_with_file_and_key(text: str, trainer: ScriptedTrainer) -> None:
    (trainer.run_dir / "runwatch.yaml").write_text(text)
    result = run("watch", trainer.run_dir, "--once")
    assert re.search(rf"runwatch\.yaml: .*{re.escape(BAD_CONFIGS[text])}", result.output), result.output
    assert result.exit_code not in {0, 2, UNAVAILABLE}
