"""A trainer by script that falls into the trouble of any node, and obeys, refuses, keeps silent or lies.

It trains nothing: it writes the run directory as a trainer would. The trouble begins at step `FAULT` of attempt a0001 and ends when a
directive has been carried out.
"""

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import scripted

FAULT = 130
DEADLINE_STEPS = 2000
"""Of 3,000 steps of one second each."""
Answers = Literal["obeys", "rejects", "silent", "lies"]
NODES = ("early_divergence", "instability", "routing_collapse", "throughput_shortfall")
FAST = {"cooldown_records": 30, "expires_seconds": 40, "ack_seconds": 30, "verify_records": 30}
OWN: dict[str, dict[str, Any]] = {
    "early_divergence": {},
    "instability": {"max_executions": 3},
    "routing_collapse": {"critical_records": 20},
    "throughput_shortfall": {},
}


def card(node: str, mode: str, **rules: Any) -> dict[str, Any]:
    """A card on which `node` alone may do anything."""
    nodes = {name: {"mode": "observe"} for name in NODES}
    document = scripted.card({**nodes, node: {"mode": mode, **FAST, **OWN[node], **rules}})
    document["plan"]["checkpoint"] = {"every_steps": 40, "keep": 6}
    document["checks"] = {"token_drop": {"settle_steps": 20}}
    if node == "throughput_shortfall":
        document["plan"]["deadline"] = datetime.fromtimestamp(scripted.START + DEADLINE_STEPS, UTC).isoformat()
    return document


@dataclass
class Obedient(scripted.ScriptedTrainer):
    """`node` says which trouble, `answers` what it does with a directive; `again` brings the trouble back in every attempt."""

    node: str = "early_divergence"
    answers: Answers = "obeys"
    again: int = 0
    attempt: int = 1
    position: int = 0
    applied: list[str] = field(default_factory=list[str])
    """Directives in the order in which they were acted upon."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fault = FAULT

    def train(self, steps: int) -> float:
        """Do so many steps; the time at the end of the last."""
        for _ in range(steps):
            self.obey()
            if self.plan["paused"]:
                self.clock += 1.0
                self.write({**self.head(), "phase": "paused"})
                continue
            self.step, self.clock, self.position = self.step + 1, self.clock + 1.0, self.position + 8
            self.write(self.record())
            if self.step % 40 == 0 and not self.ill:
                self.save()
        return self.clock

    def save(self) -> None:
        """A checkpoint, as telemetry tells it."""
        self.write({**self.head(), "phase": "checkpoint", "checkpoint/step": self.step})

    def write(self, record: dict[str, Any]) -> None:
        """Append one record to the attempt's segment."""
        with (self.run_dir / "telemetry" / f"a{self.attempt:04d}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def head(self) -> dict[str, Any]:
        """What every record begins with."""
        return {**super().head(), "attempt": f"a{self.attempt:04d}"}

    @property
    def ill(self) -> bool:
        """Whether the trouble is on."""
        return self.step >= self.fault and not self.cured

    def record(self) -> dict[str, Any]:
        """The train record of the step, with what the node looks at."""
        self.shift = 0.5 if self.node == "early_divergence" else 0.0
        record = {**super().record(), "data/position": self.position, "moe/drop_rate": 0.03}
        if self.ill and self.node == "instability":
            record |= {"train/loss": "NaN", "optim/grad_norm": "NaN"}
        if self.ill and self.node == "routing_collapse":
            record["moe/drop_rate"] = 0.4
        return record

    def obey(self) -> None:
        """Answer every request that has no receipt yet, each once."""
        if self.answers != "silent":
            super().obey()

    def answer(self, request: dict[str, Any]) -> None:
        """Act upon a directive, or not, and write the receipt."""
        head, before = self.head(), dict(self.plan)
        refused = self.answers == "rejects"
        after = {**before, **({} if refused else self.planned(request["actions"]))}
        if not refused:
            self.applied.append(request["id"])
        if self.answers == "obeys":
            self.plan, self.cured = after, True
            for action in request["actions"]:
                if action["action"] == "rewind":
                    self.apply(action)
        status = {"status": "rejected", "reason": "it has its own reasons"} if refused else {"status": "applied"}
        self.write_receipt({**head, "id": request["id"], **status, "before": before, "after": after})

    def planned(self, actions: list[dict[str, Any]]) -> dict[str, Any]:
        """What of the plan the actions change."""
        was, self.plan = self.plan, dict(self.plan)
        for action in actions:
            if action["action"] != "rewind":
                self.apply(action)
        changed, self.plan = self.plan, was
        return changed

    def rewind(self, checkpoint_step: int, skip_steps: int) -> None:
        """Go on from a checkpoint as a new attempt, with the next batches left out."""
        self.position += (skip_steps - (self.step - checkpoint_step)) * 8
        self.step, self.attempt = checkpoint_step, self.attempt + 1
        self.save()
        if self.again:
            self.again, self.cured, self.fault = self.again - 1, False, checkpoint_step + 60
