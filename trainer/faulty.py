"""A trainer that injects faults: the plain one, with what each fault does to its data, parameters, clock, files or time."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runwatch.trainer import faults
from runwatch.trainer.config import Card, Plan
from runwatch.trainer.loop import Batch, Trainer
from runwatch.trainer.step import Knobs
from runwatch.trainer.wandb_log import Mode


def read_faults(texts: Iterable[str], plan: Plan) -> tuple[faults.Fault, ...]:
    """The faults of the card and the command line.

    Raises:
        FaultError: one cannot be read, or would do nothing in a run of this plan.
    """
    found = tuple(faults.parse(text) for text in texts)
    faults.check(found, plan)
    return found


class FaultyTrainer(Trainer):
    """Every method does what the plain trainer's does, with the fault before or after it."""

    def __init__(self, card: Card, run_dir: Path, wandb: Mode | None, found: tuple[faults.Fault, ...]) -> None:
        super().__init__(card, run_dir, wandb)
        self.faults = faults.Faults(found, int(self.telemetry.attempt[1:]))

    def clock(self) -> float:
        """As the process believes it."""
        return self.faults.clock()

    @property
    def _next(self) -> int:
        return self.loop.step + 1

    def train_step(self) -> None:
        """A step of a process that is killed, has a full disk, or writes no telemetry."""
        self.faults.begin(self._next)
        self.telemetry.muted = self.faults.mutes_telemetry(self._next)
        super().train_step()

    def enter_decay(self) -> None:
        """The plan of the step, with a context that jumps."""
        super().enter_decay()
        self.loop.plan = self.faults.plan(self._next, self.loop.plan)

    def draw(self) -> Batch:
        """A batch from the wrong place, or a bad one."""
        loop, plan = self.loop, self.card.plan
        loop.position = self.faults.position(
            self._next, loop.position, plan.tokens_per_step // loop.plan.context_length
        )
        batch = super().draw()
        place = loop.position // plan.sequences_per_step + 1
        tokens, weights = self.faults.batch(place, batch.tokens, batch.weights, batch.sources)
        return dataclasses.replace(batch, tokens=tokens, weights=weights)

    def knobs(self, tokens: int) -> Knobs:
        """Settings that are wrong for a while."""
        return self.faults.knobs(self._next, super().knobs(tokens))

    def execute(self, program: Any, knobs: Knobs, batch: Batch) -> NDArray[np.float32]:
        """A step from parameters that were damaged, or one that takes its time."""
        self.loop.state = self.layout.place(self.faults.state(self._next, self.loop.state))
        vector = super().execute(program, knobs, batch)
        self.faults.wait(self._next, "train")
        return vector

    def held_out_loss(self) -> float:
        """An evaluation that hangs."""
        self.faults.wait(self.loop.step, "eval")
        return super().held_out_loss()

    def save(self) -> None:
        """A checkpoint that is left out without a word."""
        if not self.faults.skips_checkpoint(self.loop.step):
            super().save()

    def write_checkpoint(self) -> Path:
        """A checkpoint that hangs, or is torn once it was written."""
        self.faults.wait(self.loop.step, "checkpoint")
        path = super().write_checkpoint()
        self.faults.damage(self.loop.step, path)
        return path
