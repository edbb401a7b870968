"""A trainer by script in the shape of any run card: writes healthy telemetry with a fault in it, and obeys directives.

It trains nothing and has a clock of its own, so that a run of months is drilled in seconds. Levels and noise are those
of large runs: a power law or the card's own curve with 0.02 nats of noise, a right-skewed gradient norm of 0.3, 2 % of
dropped tokens, an even load.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from runwatch.checks.planned import learning_rate_share, registered_loss
from runwatch.monitor.act.directives import write_json
from runwatch.monitor.card.run_card import Card
from runwatch.rules import PlannedRun

NOISE_NATS = 0.02
PEAK_LEARNING_RATE = 3e-4
"""Where the card leaves the rate to a formula that only the trainer knows."""
MFU = 0.2

Record = dict[str, Any]
Harm = Callable[["SyntheticTrainer", Record, int], Record | None]
"""What a fault does to the record `since` steps after its onset; None: the record is never written."""


def step_loss(planned: PlannedRun, tokens: float) -> float:
    """The registered loss at `tokens` in nats."""
    if planned.curve is None:
        raise ValueError("the card of a drill has a registered curve")
    known = planned.curve.tokens
    return float(registered_loss(planned.curve, min(max(tokens, known[0]), known[-1]))[0])


def stand_in_curve(card: Card) -> dict[str, Any]:
    """A `ladder` section for a card without one: a power law that ends at 1.7 nats, with a band of 2 %."""
    plan = card.plan
    tokens = np.geomspace(plan.tokens_per_step, max(plan.token_budget, 2 * plan.tokens_per_step), 200).round()
    loss = 1.3 + 0.4 * (tokens / tokens[-1]) ** -0.3
    curve = {"tokens": tokens, "loss": loss, "low": 0.98 * loss, "high": 1.02 * loss}
    return {
        "registered": "2000-01-01T00:00:00Z",
        "hash": "drill",
        "curve": {name: [float(value) for value in values] for name, values in curve.items()},
    }


HEAD = ("attempt", "step", "tokens", "time")
SETTINGS = {
    "set_token_budget": ("token_budget", "tokens"),
    "set_data_mixture": ("mixture", "shares"),
    "set_z_loss_weight": ("z_loss_weight", "weight"),
    "set_capacity_factor": ("capacity_factor", "factor"),
    "set_balance_rate": ("balance_rate", "rate"),
    "set_context_length": ("context_length", "tokens"),
}
"""What of the plan each of these actions sets, and by which of its fields."""


class ScriptedTrainer:
    """What every trainer by script does with directives: all of one, then its receipt, each once. Drills and tests share it."""

    run_dir: Path
    plan: dict[str, Any]
    """The plan in force, as receipts show it."""
    cured: bool
    """Whether a directive has ended the trouble."""

    def head(self) -> Record:
        """Attempt, step, tokens and time of this step boundary."""
        raise NotImplementedError

    def rewind(self, checkpoint_step: int, skip_steps: int) -> None:
        """Go on from a checkpoint as a new attempt, with the next batches left out."""
        raise NotImplementedError

    def obey(self) -> None:
        """Answer every request without a receipt, oldest name first."""
        for path in sorted((self.run_dir / "control" / "requests").glob("*.json")):
            if not (self.run_dir / "control" / "receipts" / path.name).exists():
                self.answer(orjson.loads(path.read_bytes()))

    def answer(self, request: Record) -> None:
        """Apply all of a directive, and write the receipt."""
        head, before = self.head(), dict(self.plan)
        for action in request["actions"]:
            self.apply(action)
        self.cured = True
        self.write_receipt({**head, "id": request["id"], "status": "applied", "before": before, "after": self.plan})

    def write_receipt(self, receipt: Record) -> None:
        """Put a receipt in place whole."""
        known = {name: receipt[name] for name in (*HEAD, "id", "status", "before", "after")}
        path = self.run_dir / "control" / "receipts" / f"{receipt['id']}.json"
        write_json(path, {"version": 1, "reason": receipt.get("reason"), **known}, durable=False)

    def apply(self, action: Record) -> None:
        """One action."""
        match action["action"]:
            case "set_lr_decay":
                self.plan |= {
                    "decay_start_tokens": action["start_tokens"],
                    "final_fraction": action["final_fraction"],
                }
            case "scale_lr":
                self.plan["lr_scale"] *= action["factor"]
            case "rewind":
                self.rewind(action["checkpoint_step"], action["skip_steps"])
            case "pause" | "resume" as name:
                self.plan["paused"] = name == "pause"
            case name if name in SETTINGS:
                key, given = SETTINGS[name]
                self.plan[key] = action[given]
            case other:
                raise ValueError(f"a trainer by script does not know {other}")


@dataclass
class SyntheticTrainer(ScriptedTrainer):
    """A run directory under construction, in its own clock (Unix seconds)."""

    card: Card
    run_dir: Path
    step: int
    onset: int
    step_seconds: float
    clock: float
    harm: Harm | None = None
    saves: Callable[[int], float | None] = float
    """What a checkpoint at a step says of itself: its step, or None where it is not complete."""
    attempt: int = 1
    position: int = 0
    cured: bool = False
    behind: float = 0.0
    """Seconds by which the trainer's clock is behind the daemon's."""
    plan: dict[str, Any] = field(default_factory=dict[str, Any])
    lines: list[bytes] = field(default_factory=list[bytes])

    def __post_init__(self) -> None:
        self.planned = self.card.planned()
        self.plan = self.planned.plan_state().model_dump(mode="json")
        self.position = self.step * self.planned.sequences_per_step
        self._random = np.random.default_rng(self.card.seed + self.onset)
        (self.run_dir / "telemetry").mkdir(parents=True)

    @property
    def tokens(self) -> int:
        """Tokens trained so far."""
        return self.step * self.planned.tokens_per_step

    def train(self, steps: int) -> None:
        """Do so many steps, obeying what has been asked before each, and write their records."""
        for _ in range(steps):
            self.obey()
            self._step()
        self.flush()

    def flush(self) -> None:
        """Put the records on disk."""
        path = self.run_dir / "telemetry" / f"a{self.attempt:04d}-00001.jsonl"
        with path.open("ab") as file:
            file.write(b"".join(self.lines))
        self.lines = []

    def say(self, record: Record) -> None:
        """Keep a record for the next flush; non-finite numbers as the contract has them."""
        named = {key: _written(value) for key, value in record.items()}
        self.lines.append(orjson.dumps(named) + b"\n")

    def event(self, phase: str, **metrics: float) -> None:
        """A record that is no train record."""
        self.say({**self.head(), "phase": phase, **{name.replace("__", "/"): value for name, value in metrics.items()}})

    def restart(self, step: int) -> None:
        """Go on from the checkpoint of `step` as a new attempt."""
        self.flush()
        self.attempt, self.step = self.attempt + 1, step
        self.position = step * self.planned.sequences_per_step
        for phase in ("init", "compile", "restore"):
            self.clock += self.step_seconds
            self.event(phase)

    def checkpoint_before(self, step: int) -> int:
        """The newest step at which a checkpoint was due before `step`."""
        return (step - 1) // self.planned.checkpoint_every_steps * self.planned.checkpoint_every_steps

    def at_position(self, record: Record) -> Record:
        """The record with where the data order stands now."""
        mark = self.position * 0x9E3779B97F4A7C15 % (1 << 52)
        return record | {"data/position": self.position, "data/sample_fingerprint": mark}

    def head(self) -> Record:
        """What every record begins with."""
        time = self.clock - self.behind
        return {"attempt": f"a{self.attempt:04d}", "step": self.step, "tokens": self.tokens, "time": time}

    def _step(self) -> None:
        self.step += 1
        self.position += self.planned.sequences_per_step
        record: Record | None = self._healthy()
        since = self.step - self.onset
        if self.harm is not None and since >= 0 and not self.cured:
            record = self.harm(self, record, since)
        if record is None:
            return
        self.clock += record["throughput/step_time"]
        self.say({**record, **self.head(), "phase": "train"})
        self._pauses()

    def _pauses(self) -> None:
        """The evaluation and the checkpoint that are due at this step."""
        if self.step % self.card.plan.eval.every_steps == 0:
            self.event("eval")
            self.clock += 2 * self.step_seconds
            self.event("eval", eval__loss=step_loss(self.planned, self.tokens) + 0.02)
        if self.step % self.planned.checkpoint_every_steps == 0:
            self.event("checkpoint")
            self.clock += self.step_seconds
            saved = self.saves(self.step)
            self.event("checkpoint", **({} if saved is None else {"checkpoint__step": saved}))

    def _healthy(self) -> Record:
        """The train record of this step, were all well; `time` is not known yet."""
        noise = self._random.standard_normal(6).tolist()
        seconds = self.step_seconds * math.exp(0.01 * noise[0])
        speed = self.planned.tokens_per_step / seconds
        record = {
            "train/loss": step_loss(self.planned, self.tokens) + NOISE_NATS * noise[1],
            "train/z_loss": 100.0 * math.exp(0.02 * noise[2]),
            "optim/grad_norm": 0.3 * math.exp(0.15 * noise[3]),
            "optim/skipped_step": 0,
            "optim/learning_rate": self._rate(),
            "params/norm": 900.0,
            "moe/drop_rate": 0.02 * math.exp(0.1 * noise[4]),
            "moe/load_max_vio": 0.4 * math.exp(0.1 * noise[5]),
            "moe/load_entropy": 0.998,
            "moe/dead_experts": 0,
            "moe/router_bias_max": 0.1 * self.card.model.router_bias_limit,
            "throughput/step_time": seconds,
            "throughput/tokens_per_second": speed,
            "throughput/mfu": MFU * self.step_seconds / seconds,
            "telemetry/dropped_records": 0,
        }
        shown = ("token_budget", "decay_start_tokens", "lr_scale", "capacity_factor", "balance_rate", "context_length")
        record |= {f"plan/{name}": self.plan[name] for name in (*shown, "z_loss_weight")}
        record = self.at_position(record)
        return record | {f"data/mixture/{name}": share for name, share in self.plan["mixture"].items()}

    def _rate(self) -> float:
        plan, planned = self.plan, self.planned
        peak = self.card.plan.learning_rate.peak or PEAK_LEARNING_RATE
        share = learning_rate_share(
            self.tokens,
            warmup_tokens=planned.warmup_fraction * planned.token_budget,
            **{name: plan[name] for name in ("decay_start_tokens", "token_budget", "final_fraction")},
        )
        return peak * plan["lr_scale"] * float(share)

    def rewind(self, checkpoint_step: int, skip_steps: int) -> None:
        """Go on from a checkpoint as a new attempt, with the next batches left out."""
        self.restart(checkpoint_step)
        self.position += skip_steps * self.planned.sequences_per_step


def _written(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
