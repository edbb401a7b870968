"""The real trainer dies at each arrow between a directive and its checkpoint: the next one obeys once, and as its receipt says."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml

from runwatch.trainer import checkpoint, control
from runwatch.trainer.config import read_card
from runwatch.trainer.loop import Trainer

pytestmark = pytest.mark.slow

SHORTEN = [
    {"action": "set_token_budget", "tokens": 128 * 30},
    {"action": "set_lr_decay", "start_tokens": 128 * 20, "final_fraction": 0.05},
    {"action": "scale_lr", "factor": 0.5},
]
REWIND = [{"action": "rewind", "checkpoint_step": 5, "skip_steps": 4}, {"action": "scale_lr", "factor": 0.5}]


class Killed(BaseException):
    """The process is gone: nobody handles it."""


def _die(*_: Any, **__: Any) -> Any:
    raise Killed


def _after(patch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    whole: Callable[..., Any] = getattr(owner, name)

    def then_die(*args: Any, **kwargs: Any) -> Any:
        whole(*args, **kwargs)
        raise Killed

    patch.setattr(owner, name, then_die)


def _full_disk(*_: Any) -> Path:
    raise checkpoint.CheckpointError("no space left on device")


POINTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "before it is applied": lambda patch: patch.setattr(control, "apply", _die),
    "applied and not saved": lambda patch: patch.setattr(checkpoint, "save", _die),
    "half of the checkpoint written": lambda patch: _after(patch, checkpoint, "_sync"),
    "saved and not answered": lambda patch: patch.setattr(control.Control, "answer", _die),
    "answered": lambda patch: _after(patch, control.Control, "answer"),
    "answered with a disk that was full": lambda patch: (
        patch.setattr(checkpoint, "save", _full_disk),
        _after(patch, control.Control, "answer"),
    ),
}


def begun(run_dir: Path) -> Trainer:
    """A trainer that goes on where the last one stopped."""
    trainer = Trainer(read_card(run_dir / "run.yaml"), run_dir)
    trainer.resume()
    return trainer


def train(trainer: Trainer, steps: int) -> None:
    for _ in range(steps):
        trainer.train_step()
        trainer.after_step()


def request(run_dir: Path, actions: list[dict[str, Any]], **preconditions: Any) -> None:
    folder = run_dir / "control" / "requests"
    folder.mkdir(parents=True)
    directive = {"version": 1, "id": "plan-0001", "preconditions": preconditions, "actions": actions}
    (folder / "plan-0001.json").write_text(json.dumps(directive))


def killed(run_dir: Path, point: str, actions: list[dict[str, Any]], **preconditions: Any) -> None:
    """Train eight steps, then die at `point` of a directive."""
    trainer = begun(run_dir)
    train(trainer, 8)
    request(run_dir, actions, **preconditions)
    with pytest.MonkeyPatch.context() as patch, suppress(Killed):
        POINTS[point](patch)
        trainer.directives()
        pytest.fail("it did not die")
    trainer.close()


def receipt(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "control" / "receipts" / "plan-0001.json").read_text())


@pytest.fixture
def run_dir(tmp_path: Path, tiny: dict[str, Any], jax_cache: str) -> Path:
    """A run of the tiny card with a checkpoint every five steps."""
    jax.config.update("jax_compilation_cache_dir", jax_cache)
    plan = {**tiny["plan"], "checkpoint": {"every_steps": 5, "keep": 4}, "eval": {"every_steps": 1000, "sequences": 6}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**tiny, "plan": plan}))
    return tmp_path


CASES = [(point, SHORTEN) for point in POINTS]
CASES += [(point, REWIND) for point in ("saved and not answered", "answered with a disk that was full")]


@pytest.mark.parametrize(("point", "actions"), CASES)
def test_a_directive_is_carried_out_once_and_as_its_receipt_says(
    point: str, actions: list[dict[str, Any]], run_dir: Path
) -> None:
    killed(run_dir, point, actions)
    trainer = begun(run_dir)
    trainer.directives()
    plan, answer = trainer.loop.plan, receipt(run_dir)
    assert answer["status"] == "applied"
    assert plan.public() == answer["after"]
    assert (plan.lr_scale, plan.directives) == (0.5, ("plan-0001",)), "once, not twice"
    if actions is REWIND:
        assert (trainer.loop.step, trainer.loop.position) == (5, (5 + 4) * 4)
    trainer.close()


def test_a_directive_for_the_attempt_that_died_is_rejected_by_the_next(run_dir: Path) -> None:
    killed(run_dir, "applied and not saved", SHORTEN, attempt="a0001")
    trainer = begun(run_dir)
    trainer.directives()
    assert receipt(run_dir)["reason"] == "meant for attempt a0001, this is a0002"
    assert trainer.loop.plan.lr_scale == 1.0
    trainer.close()


def test_a_checkpoint_that_was_torn_later_does_not_take_the_plan_with_it(run_dir: Path) -> None:
    killed(run_dir, "answered", SHORTEN)
    newest = max((run_dir / "checkpoints").glob("a*"))
    (newest / "arrays.npz").write_bytes(b"torn")
    trainer = begun(run_dir)
    assert (trainer.loop.step, trainer.loop.plan.token_budget, trainer.loop.plan.lr_scale) == (5, 128 * 30, 0.5)
    trainer.close()
