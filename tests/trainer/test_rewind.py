"""A rewind with skip leaves a bad batch behind; without the skip it comes again, as bad data does."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from runwatch.trainer import faults
from runwatch.trainer.config import read_card
from runwatch.trainer.faulty import FaultyTrainer
from runwatch.trainer.loop import Trainer


@pytest.fixture(autouse=True)
def _shared_compilations(environment: dict[str, str]) -> None:
    jax.config.update("jax_compilation_cache_dir", environment["JAX_COMPILATION_CACHE_DIR"])


def losses(run_dir: Path) -> dict[str, list[float]]:
    """Loss of each train record by attempt."""
    found: dict[str, list[float]] = {}
    for segment in sorted((run_dir / "telemetry").glob("*.jsonl")):
        for record in map(json.loads, segment.read_text().splitlines()):
            if record["phase"] == "train":
                found.setdefault(record["attempt"], []).append(float(record["train/loss"]))
    return found


def train(trainer: Trainer, steps: int) -> None:
    for _ in range(steps):
        trainer.train_step()
        trainer.after_step()


@pytest.mark.slow
@pytest.mark.parametrize(("skip", "nans"), [(5, 0), (0, 1)])
def test_the_batch_that_was_nan_is_skipped_or_met_again(
    tmp_path: Path, write_card: Callable[..., None], skip: int, nans: int
) -> None:
    run_dir = tmp_path / "run"
    write_card(run_dir, checkpoint={"every_steps": 5, "keep": 3})
    trainer = FaultyTrainer(read_card(run_dir / "run.yaml"), run_dir, None, (faults.parse("nan_batch@8"),))
    train(trainer, 8)
    requests = run_dir / "control" / "requests"
    requests.mkdir(parents=True)
    actions = [{"action": "rewind", "checkpoint_step": 5, "skip_steps": skip}]
    (requests / "back.json").write_text(json.dumps({"version": 1, "id": "back", "actions": actions}))
    trainer.directives()
    assert (trainer.loop.step, trainer.loop.position) == (5, (5 + skip) * 4)
    train(trainer, 5)
    trainer.close()
    found = losses(run_dir)
    assert [math.isnan(loss) for loss in found["a0001"]] == [False] * 7 + [True]
    assert sum(math.isnan(loss) for loss in found["a0002"]) == nans
    assert json.loads((run_dir / "control" / "receipts" / "back.json").read_text())["status"] == "applied"
