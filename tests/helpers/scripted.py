"""A trainer by script: writes the run directory step by step and obeys directives, in its own clock, without training.

The card is the documented example; from step `fault` on the loss is half a nat above the registered curve, and back on
it once a directive was applied.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from runwatch.monitor.drill import scripted_trainer

START = 1.79e9
TOKENS = 1024
BUDGET = 3000 * TOKENS
SHOWN = (
    "token_budget", "decay_start_tokens", "lr_scale", "z_loss_weight", "capacity_factor", "balance_rate", "context_length",
)  # fmt: skip
CURVE = {"tokens": [0, BUDGET], "loss": [5.55, 2.1], "low": [5.5, 2.05], "high": [5.6, 2.15]}


def card(nodes: dict[str, Any] | None = None) -> dict[str, Any]:
    """A card whose plans are carried out without asking, unless `nodes` says otherwise."""
    return {
        "version": 1,
        "run": {"name": "scripted", "hypothesis": "A scripted run follows its curve."},
        "plan": {
            "token_budget": BUDGET,
            "context_length": 128,
            "sequences_per_step": 8,
            "learning_rate": {"peak": 0.01},
            "mixture": {"stable": {"code": 0.5, "prose": 0.5}, "decay": {"code": 0.25, "prose": 0.75}},
            "checkpoint": {"every_steps": 100, "keep": 4},
        },
        "ladder": {
            "registered": "2026-12-02T08:00:00Z",
            "hash": "sha256:0",
            "formula": {
                "irreducible": 1.2,
                "parameter_scale": 10.0,
                "parameter_exponent": 0.3,
                "token_scale": 100.0,
                "token_exponent": 0.3,
            },
            "curve": CURVE,
        },
        "nodes": nodes or {"early_divergence": {"mode": "auto"}},
    }


@dataclass
class ScriptedTrainer(scripted_trainer.ScriptedTrainer):
    """A run directory under construction; one step takes one second of the trainer's clock."""

    run_dir: Path
    fault: int = 120
    shift: float = 0.5
    every: int = 100
    """Steps between two checkpoints."""
    step: int = 0
    obeys: bool = True
    plan: dict[str, Any] = field(default_factory=dict[str, Any])
    cured: bool = False
    clock: float = START

    def __post_init__(self) -> None:
        self.plan = {
            "token_budget": BUDGET,
            "decay_start_tokens": round(0.8 * BUDGET),
            "final_fraction": 0.05,
            "mixture": {"code": 0.5, "prose": 0.5},
            "lr_scale": 1.0,
            "z_loss_weight": 0.0001,
            "capacity_factor": 1.15,
            "balance_rate": 0.01,
            "context_length": 128,
            "paused": False,
        }
        (self.run_dir / "telemetry").mkdir(parents=True, exist_ok=True)
        (self.run_dir / "control" / "receipts").mkdir(parents=True, exist_ok=True)

    def train(self, steps: int) -> float:
        """Do so many steps; the time at the end of the last."""
        lines: list[str] = []
        for _ in range(steps):
            if self.obeys:
                self.obey()
            self.step += 1
            self.clock += 1.0
            lines.append(json.dumps(self.record()))
            if self.step % self.every == 0:
                saved = {"checkpoint/step": self.step}
                lines.append(json.dumps({**self.head(), "phase": "checkpoint", **saved}))
        with (self.run_dir / "telemetry" / "a0001.jsonl").open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
        return self.clock

    def head(self) -> dict[str, Any]:
        """What every record begins with."""
        return {"attempt": "a0001", "step": self.step, "tokens": self.step * TOKENS, "time": self.clock}

    def record(self) -> dict[str, Any]:
        """The train record of the step."""
        tokens = self.step * TOKENS
        expected = np.exp(np.interp(np.log(tokens), np.log([1, BUDGET]), np.log(CURVE["loss"])))
        noise = 0.01 * np.random.default_rng(self.step).standard_normal()
        shift = self.shift if self.step >= self.fault and not self.cured else 0.0
        return {
            **self.head(),
            "phase": "train",
            "train/loss": loss if math.isfinite(loss := float(expected + noise + shift)) else "NaN",
            "optim/grad_norm": float(np.exp(0.1 * np.random.default_rng(self.step + 10**6).standard_normal())),
            "throughput/step_time": 1.0,
            "throughput/tokens_per_second": float(TOKENS),
            **{f"plan/{key}": self.plan[key] for key in SHOWN},
            **{f"data/mixture/{source}": share for source, share in self.plan["mixture"].items()},
        }
