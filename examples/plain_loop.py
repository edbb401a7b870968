"""A plain training loop that runwatch watches and directs: the lines that say `sidecar` are all that was added.

    python examples/plain_loop.py RUN_DIR [--bad-batch STEP]        # and beside it: runwatch watch RUN_DIR

The model is a table of byte pairs in NumPy, trained on this repository's own documentation, so that it runs anywhere; put a PyTorch
model and optimizer in its place. `--bad-batch` makes the data of one step not a number, as a broken shard would: runwatch asks for a
rewind, and the loop goes back to its checkpoint and leaves the batch out.
"""

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
from sidecar import RefusedError, Sidecar

HERE = Path(__file__).parent
BATCH, RATE, BUDGET, EVERY = 512, 8.0, 512 * 4000, 25
TEXT = np.frombuffer(b"".join(path.read_bytes() for path in sorted((HERE.parent / "docs").glob("*.md"))), np.uint8)


class Trainer:
    """Everything that a checkpoint holds: parameters, step, position in the data, and the plan in force."""

    def __init__(self, run_dir: Path, bad_batch: int | None) -> None:
        self.table, self.step, self.position = np.zeros((256, 256)), 0, 0
        self.plan: dict[str, Any] = {
            "token_budget": BUDGET, "decay_start_tokens": BUDGET, "final_fraction": 1.0, "mixture": {"docs": 1.0},
            "lr_scale": 1.0, "paused": False,
        }  # fmt: skip
        self.checkpoints, self.bad_batch = run_dir / "checkpoints", bad_batch
        self.sidecar = Sidecar(run_dir)

    @property
    def tokens(self) -> int:
        """Trained on so far."""
        return self.step * BATCH

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.checkpoints / f"{step:06d}.npz"

    def train_step(self) -> tuple[float, float]:
        """One step of gradient descent on the next batch; its loss in nats and its gradient norm."""
        at = np.random.default_rng(self.position).integers(0, len(TEXT) - 1, BATCH)
        first, second = TEXT[at], TEXT[at + 1]
        scores = self.table[first] - self.table[first].max(axis=1, keepdims=True)
        shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        loss = -float(np.log(shares[np.arange(BATCH), second]).mean())
        shares[np.arange(BATCH), second] -= 1
        gradient = np.zeros_like(self.table)
        np.add.at(gradient, first, shares / BATCH)
        if self.position == self.bad_batch:
            gradient += np.nan
            loss = float("nan")
        self.table -= RATE * self.plan["lr_scale"] * gradient
        self.step, self.position = self.step + 1, self.position + 1
        return loss, float(np.linalg.norm(gradient))

    def save(self) -> None:
        """A checkpoint is complete or not there, and told of only if its parameters are finite."""
        self.checkpoints.mkdir(exist_ok=True)
        path = self.checkpoint(self.step)
        with path.with_suffix(".tmp").open("wb") as file:
            np.savez(file, table=self.table, position=self.position)
        path.with_suffix(".tmp").rename(path)
        if np.isfinite(self.table).all():
            self.sidecar.emit(self.step, self.tokens, "checkpoint", checkpoint__step=self.step)

    def restore(self, step: int, skip_steps: int) -> None:
        """Go back to a checkpoint, and leave out the next batches."""
        saved = np.load(self.checkpoint(step))
        self.table, self.step, self.position = saved["table"], step, int(saved["position"]) + skip_steps
        self.sidecar.new_attempt()

    def carry_out(self, actions: list[Any]) -> dict[str, Any]:
        """Look at every action first, then do all of them."""
        after, back = dict(self.plan), None
        for action in actions:
            if action["action"] == "rewind":
                back = action
                if not self.checkpoint(back["checkpoint_step"]).exists():
                    raise RefusedError(f"there is no checkpoint of step {back['checkpoint_step']}")
            else:
                after |= self.changed(action)
        self.plan = after
        if back is not None:
            self.restore(back["checkpoint_step"], back["skip_steps"])
        self.save()
        return after

    def changed(self, action: dict[str, Any]) -> dict[str, Any]:
        """What an action changes in the plan."""
        match action["action"]:
            case "scale_lr":
                return {"lr_scale": self.plan["lr_scale"] * action["factor"]}
            case "set_token_budget":
                return {"token_budget": action["tokens"]}
            case "pause" | "resume" as name:
                return {"paused": name == "pause"}
            case "stop":
                return {"token_budget": self.tokens}
            case "checkpoint_now":
                return {}
            case unknown:
                raise RefusedError(f"this trainer knows no {unknown}")

    def run(self, seconds_per_step: float) -> None:
        """Train until the budget is spent."""
        self.sidecar.emit(0, 0, "init")
        while self.tokens < self.plan["token_budget"]:
            began = time.perf_counter()
            if not self.plan["paused"]:
                loss, norm = self.train_step()
                time.sleep(seconds_per_step)
                self.sidecar.emit(
                    self.step, self.tokens, "train", train__loss=loss, optim__grad_norm=norm,
                    optim__learning_rate=RATE * self.plan["lr_scale"], plan__lr_scale=self.plan["lr_scale"],
                    plan__token_budget=self.plan["token_budget"], data__position=self.position,
                    throughput__step_time=time.perf_counter() - began,
                )  # fmt: skip
                if self.step % EVERY == 0:
                    self.save()
            else:
                time.sleep(0.1)
            self.sidecar.obey(self.step, self.tokens, dict(self.plan), self.carry_out)
        self.sidecar.emit(self.step, self.tokens, "finished")


def main() -> None:
    """Train in the folder that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--bad-batch", type=int)
    parser.add_argument("--seconds-per-step", type=float, default=0.02)
    given = parser.parse_args()
    given.run_dir.mkdir(parents=True, exist_ok=True)
    if not (given.run_dir / "run.yaml").exists():
        shutil.copy(HERE / "run.yaml", given.run_dir / "run.yaml")
    Trainer(given.run_dir, given.bad_batch).run(given.seconds_per_step)


if __name__ == "__main__":
    main()
