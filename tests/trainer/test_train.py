"""Whole runs of the tiny card as its user starts them: a process, a directory, signals and directives."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runwatch.checks.signals import VOCABULARY
from runwatch.trainer import checkpoint

pytestmark = pytest.mark.slow

Telemetry = Callable[[Path], list[dict[str, Any]]]


def losses(records: list[dict[str, Any]]) -> dict[int, float]:
    """The loss of each step, that of the last attempt where several trained it."""
    return {record["step"]: record["train/loss"] for record in records if record["phase"] == "train"}


def order(run_dir: Path, name: str, actions: list[dict[str, Any]], **more: Any) -> None:
    """Put a directive where the trainer looks for it."""
    requests = run_dir / "control" / "requests"
    requests.mkdir(parents=True, exist_ok=True)
    directive = {
        "version": 1,
        "id": name,
        "node": "n",
        "plan": "p",
        "created": 0.0,
        "expires": None,
        "actions": actions,
        **more,
    }
    (requests / f".{name}").write_text(json.dumps(directive))
    (requests / f".{name}").rename(requests / f"{name}.json")


def receipt(run_dir: Path, name: str) -> dict[str, Any]:
    return json.loads((run_dir / "control" / "receipts" / f"{name}.json").read_text())


def test_every_canonical_signal_is_emitted(whole_run: Path, telemetry: Telemetry) -> None:
    seen = {key for record in telemetry(whole_run) for key in record}
    assert set(VOCABULARY) - seen == set()
    assert {"data/mixture/code", "data/mixture/docs", "data/mixture/prose", "moe/layers/drop_rate"} <= seen


def test_the_run_ends_at_its_budget_with_a_checkpoint(whole_run: Path, telemetry: Telemetry) -> None:
    last = telemetry(whole_run)[-1]
    assert (last["phase"], last["step"], last["tokens"]) == ("finished", 40, 5120)
    assert [found.step for found in checkpoint.found(whole_run / "checkpoints")] == [20, 30, 40]


def test_the_loss_falls_and_mfu_is_a_ratio(whole_run: Path, telemetry: Telemetry) -> None:
    steps = [record for record in telemetry(whole_run) if record["phase"] == "train"]
    assert steps[-1]["train/loss"] < steps[0]["train/loss"] - 0.5
    assert all(0 < record["throughput/mfu"] < 1 for record in steps)


def test_the_mixture_moves_to_its_decay_shares(whole_run: Path, telemetry: Telemetry) -> None:
    steps = [record for record in telemetry(whole_run) if record["phase"] == "train"]
    assert [record["data/mixture/prose"] for record in steps] == [0.25] * 30 + [0.5] * 10


def test_losses_after_kill_9_and_resume_equal_those_of_the_uninterrupted_run(
    whole_run: Path, tmp_path: Path, write_card: Callable[..., None], train: Any, telemetry: Telemetry
) -> None:
    write_card(tmp_path)
    killed = train(tmp_path, "--fault", "kill@27")
    assert killed.returncode == -signal.SIGKILL
    assert train(tmp_path, "--fault", "kill@27").returncode == 0
    records = telemetry(tmp_path)
    assert {record["attempt"] for record in records} == {"a0001", "a0002"}
    assert losses(records) == losses(telemetry(whole_run))
    positions = [
        {r["step"]: r["data/sample_fingerprint"] for r in telemetry(d) if r["phase"] == "train"}
        for d in (tmp_path, whole_run)
    ]
    assert positions[0] == positions[1]


def test_a_shortened_budget_is_applied_receipted_and_visible(
    tmp_path: Path, write_card: Callable[..., None], train: Any, telemetry: Telemetry
) -> None:
    write_card(tmp_path)
    shares = {"code": 0.25, "docs": 0.25, "prose": 0.5}
    actions = [
        {"action": "set_token_budget", "tokens": 1280},
        {"action": "set_lr_decay", "start_tokens": 640, "final_fraction": 0.1},
        {"action": "set_data_mixture", "shares": shares},
    ]
    order(tmp_path, "shorten-0001", actions, preconditions={"attempt": "a0001", "max_tokens": 640})
    assert train(tmp_path).returncode == 0
    answer = receipt(tmp_path, "shorten-0001")
    assert (answer["status"], answer["before"]["token_budget"], answer["after"]["token_budget"]) == (
        "applied",
        5120,
        1280,
    )
    steps = [record for record in telemetry(tmp_path) if record["phase"] == "train"]
    assert (len(steps), steps[-1]["plan/token_budget"], steps[-1]["data/mixture/prose"]) == (10, 1280, 0.5)
    assert steps[-1]["optim/learning_rate"] == pytest.approx(0.01 * 0.1)
    assert checkpoint.found(tmp_path / "checkpoints")[-1].step == 10


def test_a_second_process_never_applies_a_directive_again(
    tmp_path: Path, write_card: Callable[..., None], train: Any
) -> None:
    write_card(tmp_path)
    order(tmp_path, "half", [{"action": "scale_lr", "factor": 0.5}])
    assert train(tmp_path, "--fault", "kill@15").returncode == -signal.SIGKILL
    (tmp_path / "control" / "receipts" / "half.json").unlink()
    assert train(tmp_path, "--fault", "kill@15").returncode == 0
    assert receipt(tmp_path, "half")["after"]["lr_scale"] == 0.5
    assert checkpoint.found(tmp_path / "checkpoints")[-1].meta["plan"]["lr_scale"] == 0.5


def test_a_rejected_directive_changes_nothing(
    whole_run: Path, tmp_path: Path, write_card: Callable[..., None], train: Any, telemetry: Telemetry
) -> None:
    write_card(tmp_path)
    order(
        tmp_path, "bad", [{"action": "scale_lr", "factor": 0.5}, {"action": "set_data_mixture", "shares": {"moon": 1}}]
    )
    (tmp_path / "control" / "requests" / "torn.json").write_text('{"version": 1, "id"')
    assert train(tmp_path).returncode == 0
    assert "moon" in receipt(tmp_path, "bad")["reason"]
    assert receipt(tmp_path, "torn")["status"] == "rejected"
    assert losses(telemetry(tmp_path)) == losses(telemetry(whole_run))


def test_a_rewind_starts_a_new_attempt_past_the_skipped_batches(
    tmp_path: Path, write_card: Callable[..., None], environment: dict[str, str], telemetry: Telemetry
) -> None:
    write_card(tmp_path, token_budget=128 * 400)
    with training(tmp_path, environment) as process:
        until(lambda: len(checkpoint.found(tmp_path / "checkpoints")) > 0, process)
        step = checkpoint.found(tmp_path / "checkpoints")[-1].step
        order(
            tmp_path,
            "back",
            [{"action": "rewind", "checkpoint_step": step, "skip_steps": 5}, {"action": "scale_lr", "factor": 0.5}],
        )
        until((tmp_path / "control" / "receipts" / "back.json").exists, process)
        order(tmp_path, "end", [{"action": "stop"}])
        assert process.wait(120) == 0
    assert receipt(tmp_path, "back")["status"] == "applied"
    again = [record for record in telemetry(tmp_path) if record["attempt"] == "a0002" and record["phase"] == "train"]
    assert again[0]["step"] == step + 1
    assert again[0]["data/position"] == (step + 5 + 1) * 4
    assert again[0]["plan/lr_scale"] == 0.5


def test_pause_holds_and_resume_goes_on(
    tmp_path: Path, write_card: Callable[..., None], environment: dict[str, str], telemetry: Telemetry
) -> None:
    write_card(tmp_path)
    order(tmp_path, "hold", [{"action": "pause"}])
    with training(tmp_path, environment) as process:
        until(lambda: any(record["phase"] == "paused" for record in telemetry(tmp_path)), process)
        assert losses(telemetry(tmp_path)) == {}
        order(tmp_path, "on", [{"action": "resume"}])
        assert process.wait(120) == 0
    assert len(losses(telemetry(tmp_path))) == 40


def test_sigterm_saves_and_asks_to_be_started_again(
    tmp_path: Path, write_card: Callable[..., None], environment: dict[str, str], telemetry: Telemetry
) -> None:
    write_card(tmp_path, token_budget=128 * 4000)
    with training(tmp_path, environment) as process:
        until(lambda: losses(telemetry(tmp_path)), process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75
    assert checkpoint.found(tmp_path / "checkpoints")[-1].step == max(losses(telemetry(tmp_path)))


def test_a_full_disk_stops_no_step_and_its_records_are_written_once_there_is_room(
    tmp_path: Path, write_card: Callable[..., None], train: Any, telemetry: Telemetry
) -> None:
    write_card(tmp_path, eval={"every_steps": 100, "sequences": 6}, checkpoint={"every_steps": 5, "keep": 3})
    done = train(tmp_path, "--fault", "full_disk@10:steps=20")
    assert done.returncode == 0, done.stderr
    assert "checkpoint failed" in done.stderr
    assert list(losses(telemetry(tmp_path))) == list(range(1, 41))
    announced = [record["checkpoint/step"] for record in telemetry(tmp_path) if "checkpoint/step" in record]
    assert announced == [5, 30, 35, 40]


def test_a_card_that_cannot_be_read_is_told_with_its_key(tmp_path: Path, train: Any) -> None:
    (tmp_path / "run.yaml").write_text("model: {widht: 16}\nplan: {}\n")
    done = train(tmp_path)
    assert done.returncode == 64
    assert "run.yaml:1: model.widht is an unknown key; did you mean width?" in done.stderr


def until(holds: Callable[[], object], process: subprocess.Popen[bytes], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert process.poll() is None, "the trainer ended early"
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def training(run_dir: Path, environment: dict[str, str]) -> Generator[subprocess.Popen[bytes]]:
    """A trainer in the background, ended with the block whatever happens in it."""
    command = [sys.executable, "-P", "-m", "runwatch.trainer.train", str(run_dir), "--wandb", "off"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


def test_wandb_offline_holds_the_same_metrics(
    tmp_path: Path, write_card: Callable[..., None], environment: dict[str, str]
) -> None:
    pytest.importorskip("wandb")
    write_card(tmp_path, token_budget=128 * 10)
    command = [sys.executable, "-P", "-m", "runwatch.trainer.train", str(tmp_path), "--wandb", "offline"]
    done = subprocess.run(
        command, env=environment | {"WANDB_SILENT": "true"}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    files = list((tmp_path / "wandb").rglob("*.wandb"))
    assert len(files) == 1
    assert b"optim/grad_norm" in files[0].read_bytes()
    assert os.path.getsize(files[0]) > 1000  # noqa: PTH202 - one call is enough
