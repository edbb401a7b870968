"""Attaches a training loop to runwatch without importing it: copy this file beside your own loop.

It needs the standard library only. Telemetry never raises and never waits for a daemon; a directive is obeyed as a whole or not at all.
"""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class RefusedError(Exception):
    """Why a directive cannot be carried out."""


class Sidecar:
    """One attempt of the run in `run_dir`; `docs/run-directory.md` is the contract."""

    def __init__(self, run_dir: Path) -> None:
        self.telemetry, self.control, self.lost = run_dir / "telemetry", run_dir / "control", 0
        for folder in (self.telemetry, self.control / "requests", self.control / "receipts"):
            folder.mkdir(parents=True, exist_ok=True)
        self.new_attempt()

    def new_attempt(self) -> None:
        """At process start, and after going back to a checkpoint."""
        self.attempt = f"a{len(list(self.telemetry.glob('*.jsonl'))) + 1:04d}"
        self.segment = self.telemetry / f"{self.attempt}-00001.jsonl"

    def emit(self, step: int, tokens: int, phase: str, **metrics: float) -> None:
        """Write one record; give it up when the disk is full, for the run goes first."""
        head = {"attempt": self.attempt, "step": step, "tokens": tokens, "time": time.time(), "phase": phase}
        numbers = {name.replace("__", "/"): x if math.isfinite(x) else str(x) for name, x in metrics.items()}
        named = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
        line = json.dumps(head | {name: named.get(str(x), x) for name, x in numbers.items()}) + "\n"
        try:
            with self.segment.open("a") as file:
                file.write(line)
        except OSError:
            self.lost += 1

    def admit(self, order: dict[str, Any], tokens: int) -> None:
        """Raise RefusedError for a directive that is not meant for here and now."""
        wanted = order["preconditions"]
        if order["expires"] < time.time() or wanted.get("attempt", self.attempt) != self.attempt:
            raise RefusedError("expired, or meant for another attempt")
        if not wanted.get("min_tokens", 0) <= tokens <= wanted.get("max_tokens", math.inf):
            raise RefusedError(f"not meant for {tokens} tokens")

    def obey(
        self, step: int, tokens: int, plan: dict[str, Any], carry_out: Callable[[list[Any]], dict[str, Any]]
    ) -> None:
        """At a step boundary: `carry_out` gets the actions, and returns the plan after them or raises RefusedError."""
        for path in sorted((self.control / "requests").glob("*.json")):
            answer = self.control / "receipts" / path.name
            if answer.exists():
                continue
            order, after, why = json.loads(path.read_text()), plan, None
            try:
                self.admit(order, tokens)
                after = carry_out(order["actions"])
            except (RefusedError, KeyError, TypeError, ValueError) as error:
                why = str(error) or repr(error)
            head = {"version": 1, "id": order["id"], "status": "rejected" if why else "applied", "reason": why}
            place = {"attempt": order["attempt"], "step": step, "tokens": tokens, "time": time.time()}
            temporary = answer.with_suffix(".tmp")
            with temporary.open("w") as file:
                json.dump(head | place | {"before": plan, "after": after}, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(answer)
