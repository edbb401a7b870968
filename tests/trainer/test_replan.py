"""A run that is re-planned in flight compiles only new shapes, and goes on bit for bit after a kill."""

import json
import signal
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import pytest

from runwatch.trainer.config import read_card
from runwatch.trainer.loop import Trainer

pytestmark = pytest.mark.slow

COMPILED = "/jax/core/compile/backend_compile_duration"
"""JAX's own event of one program compiled or taken from the cache on disk."""

REPLAN = (
    {"action": "set_token_budget", "tokens": 128 * 36},
    {"action": "set_lr_decay", "start_tokens": 128 * 24, "final_fraction": 0.1},
    {"action": "set_data_mixture", "shares": {"code": 0.25, "docs": 0.5, "prose": 0.25}},
    {"action": "set_context_length", "tokens": 16},
    {"action": "set_capacity_factor", "factor": 1.5},
    {"action": "set_z_loss_weight", "weight": 0.01},
    {"action": "set_balance_rate", "rate": 0.05},
    {"action": "scale_lr", "factor": 0.5},
)

ACTIONS: tuple[tuple[int, dict[str, Any]], ...] = (
    (0, {"action": "scale_lr", "factor": 0.5}),
    (0, {"action": "set_lr_decay", "start_tokens": 2000, "final_fraction": 0}),
    (0, {"action": "set_data_mixture", "shares": {"code": 1}}),
    (0, {"action": "set_token_budget", "tokens": 128_000}),
    (0, {"action": "set_z_loss_weight", "weight": 1}),  # a whole number is no other type to the program
    (0, {"action": "set_balance_rate", "rate": 0}),
    (0, {"action": "set_capacity_factor", "factor": 1.152}),  # as many slots as 1.15 gives
    (1, {"action": "set_capacity_factor", "factor": 1.5}),
    (1, {"action": "set_context_length", "tokens": 16}),
    (0, {"action": "set_context_length", "tokens": 32}),  # back to a program that is there
    (0, {"action": "checkpoint_now"}),
    (0, {"action": "rewind", "checkpoint_step": 2, "skip_steps": 1}),
)
"""Programs compiled, and the action that costs them, in this order."""


@pytest.fixture(autouse=True)
def _shared_compilations(environment: dict[str, str]) -> None:
    jax.config.update("jax_compilation_cache_dir", environment["JAX_COMPILATION_CACHE_DIR"])


@pytest.fixture
def compiled() -> Generator[list[str]]:
    """The programs that JAX has compiled since the test began."""
    events: list[str] = []

    def hear(event: str, seconds: float, **details: object) -> None:
        del seconds, details
        events.extend([event] if event == COMPILED else [])

    jax.monitoring.register_event_duration_secs_listener(hear)
    yield events
    jax.monitoring.unregister_event_duration_listener(hear)


def direct(trainer: Trainer, name: str, *actions: dict[str, Any]) -> dict[str, Any]:
    """Hand a directive to a trainer at a step boundary; its receipt."""
    control = trainer.run_dir / "control"
    (control / "requests").mkdir(parents=True, exist_ok=True)
    directive = {"version": 1, "id": name, "actions": actions}
    (control / "requests" / f"{name}.json").write_text(json.dumps(directive))
    trainer.directives()
    return json.loads((control / "receipts" / f"{name}.json").read_text())


def step(trainer: Trainer, steps: int) -> None:
    for _ in range(steps):
        trainer.train_step()
        trainer.after_step()


def losses(records: list[dict[str, Any]]) -> dict[int, float]:
    """The loss of each step, that of the last attempt where several trained it."""
    return {record["step"]: record["train/loss"] for record in records if record["phase"] == "train"}


def test_only_a_new_shape_compiles_and_the_receipt_counts_what_jax_compiled(
    tmp_path: Path, write_card: Callable[..., None], compiled: list[str]
) -> None:
    write_card(tmp_path, eval={"every_steps": 1000, "sequences": 6}, checkpoint={"every_steps": 1000, "keep": 50})
    trainer = Trainer(read_card(tmp_path / "run.yaml"), tmp_path)
    step(trainer, 2)
    for number, (programs, action) in enumerate(ACTIONS):
        compiled.clear()
        answer = direct(trainer, f"d-{number:02d}", action)
        step(trainer, 1)
        counted = (answer["status"], answer["compiles"], len(compiled))
        assert counted == ("applied", programs, programs), (action, answer["reason"])
    trainer.close()


def test_losses_after_a_replan_a_kill_and_a_resume_equal_those_of_the_uninterrupted_run(
    tmp_path: Path, write_card: Callable[..., None], train: Any, telemetry: Any
) -> None:
    """Killed at step 27, re-planned at step 20 of the second process, and that one killed at step 27 under the new plan."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for run_dir in (whole, killed):
        write_card(run_dir)
    trainer = Trainer(read_card(whole / "run.yaml"), whole)
    step(trainer, 20)
    assert direct(trainer, "replan", *REPLAN)["status"] == "applied"
    while trainer.loop.tokens < trainer.loop.plan.token_budget:
        step(trainer, 1)
    trainer.close()
    fault = ("--fault", "restart_loop@24:after=3,times=2")
    assert train(killed, *fault).returncode == -signal.SIGKILL
    requests = killed / "control" / "requests"
    requests.mkdir(parents=True)
    (requests / "replan.json").write_text(json.dumps({"version": 1, "id": "replan", "actions": REPLAN}))
    assert [train(killed, *fault).returncode for _ in range(2)] == [-signal.SIGKILL, 0]
    records = telemetry(killed)
    assert [record["step"] for record in records if record["phase"] == "restore"] == [20, 20]
    assert losses(records) == losses(telemetry(whole))
    assert max(losses(records)) == 36
