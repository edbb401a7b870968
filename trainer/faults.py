"""Real faults by name, for drills and tests: they change the data, the parameters or the process, never a metric.

`kind@step:key=value,…`, for instance `lr_spike@300:factor=30,steps=50`. A fault acts at its step and, where it lasts, for `steps` steps.
After a rewind, bad data stays bad where it stands in the data order (a skip leaves it out), and a passing fault of the process
or of a setting that has run its course does not come again.
"""

import collections
import dataclasses
import os
import resource
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runwatch.trainer.config import FaultError, Plan
from runwatch.trainer.plan import PlanState
from runwatch.trainer.step import Knobs, State

DEFAULTS: dict[str, dict[str, float | str]] = {
    "nan_batch": {"steps": 1},
    "corrupt_tokens": {"steps": 1_000_000, "share": 1.0},
    "lr_spike": {"steps": 20, "factor": 30.0},
    "label_shuffle": {"steps": 1_000_000, "source": "code"},
    "router_collapse": {"steps": 1},
    "bias_runaway": {"steps": 1_000_000, "rate": 1.0},
    "context_jump": {"factor": 4},
    "slow_step": {"steps": 1_000_000, "seconds": 0.1},
    "straggler": {"steps": 1_000_000, "seconds": 0.5, "every": 5},
    "hang": {"phase": "train", "seconds": 3600.0},
    "kill": {},
    "restart_loop": {"after": 3, "times": 5},
    "full_disk": {"steps": 50},
    "data_replay": {"back": 20},
    "data_skip": {"ahead": 20},
    "stale_checkpoint": {"steps": 1_000_000},
    "corrupt_checkpoint": {"steps": 1_000_000},
    "telemetry_stop": {"steps": 1_000_000},
    "clock_jump": {"seconds": -3600.0},
}
"""Every kind with its arguments and their defaults."""
PHASES = ("train", "eval", "checkpoint")
"""Where a hang may lie."""


@dataclass(frozen=True)
class Fault:
    """One fault: kind, the step at which it begins, and its arguments."""

    kind: str
    step: int
    args: dict[str, Any]

    def active(self, step: int) -> bool:
        """Whether it acts at `step`; one that does not last acts at its own step only."""
        return self.step <= step < self.step + int(self.args.get("steps", 1))


def parse(text: str) -> Fault:
    """Read `kind@step:key=value,…`.

    Raises:
        FaultError: the kind or an argument is unknown, or a number is none.
    """
    head, _, tail = text.partition(":")
    kind, _, step = head.partition("@")
    if kind not in DEFAULTS:
        raise FaultError(f"fault {text!r}: unknown kind {kind!r}; known: {', '.join(DEFAULTS)}")
    if not step.isdigit():
        raise FaultError(f"fault {text!r}: give the step as {kind}@STEP")
    args = dict(DEFAULTS[kind])
    for pair in filter(None, tail.split(",")):
        key, _, value = pair.partition("=")
        if key not in args:
            raise FaultError(f"fault {text!r}: unknown argument {key!r}; {kind} takes {', '.join(args) or 'none'}")
        args[key] = _value(text, args[key], value)
    return Fault(kind, int(step), args)


def _value(text: str, default: float | str, value: str) -> float | str:
    if isinstance(default, str):
        return value
    try:
        return float(value)
    except ValueError:
        raise FaultError(f"fault {text!r}: {value!r} is not a number") from None


def check(faults: Iterable[Fault], plan: Plan) -> None:
    """Raise `FaultError` for a fault that would do nothing, or that no run of this plan can carry out."""
    sources: list[str] = sorted({*plan.mixture.stable, *(plan.mixture.decay or {})})
    for fault in faults:
        phase, source = fault.args.get("phase"), fault.args.get("source")
        if phase not in (None, *PHASES):
            raise FaultError(f"{fault.kind}: unknown phase {phase!r}; known: {', '.join(PHASES)}")
        if source not in (None, *sources):
            raise FaultError(f"{fault.kind}: unknown source {source!r}; this run has {', '.join(sources)}")
        longer = plan.context_length * int(fault.args["factor"]) if fault.kind == "context_jump" else 1
        if longer < 1 or plan.tokens_per_step % longer:
            raise FaultError(
                f"context_jump: sequences of {longer} tokens do not divide the {plan.tokens_per_step} of a step"
            )


class Faults:
    """The faults of a run at the places where the loop asks for them."""

    def __init__(self, faults: tuple[Fault, ...], attempt_number: int) -> None:
        self._faults, self._attempt_number = faults, attempt_number
        self._offset = 0.0
        self._begun: set[Fault | int] = set()
        self._acted: collections.Counter[int] = collections.Counter()
        self._rate_before: dict[int, float] = {}  # the balance rate when a runaway began

    def _at(self, step: int, *kinds: str) -> list[Fault]:
        return [fault for fault in self._faults if fault.kind in kinds and fault.active(step)]

    def _passing(self, step: int, kind: str) -> list[Fault]:
        """Faults of `kind` that act at `step` and have not yet acted for all of their steps in this process."""
        acting = [f for f in self._at(step, kind) if self._acted[id(f)] < int(f.args["steps"])]
        self._acted.update(id(fault) for fault in acting)
        return acting

    def _once(self, step: int, kind: str) -> list[Fault]:
        """Faults of `kind` that begin at `step`, each once in the life of the process (a rewind passes the step again)."""
        new = [f for f in self._faults if f.kind == kind and f.step == step and id(f) not in self._begun]
        self._begun.update(id(fault) for fault in new)
        return new

    def clock(self) -> float:
        """Unix seconds as the process believes them."""
        return time.time() + self._offset

    def begin(self, step: int) -> None:
        """What happens to the process before a step: clock jump, kill, full disk."""
        for fault in self._once(step, "clock_jump"):
            self._offset += float(fault.args["seconds"])
        for _ in self._once(step, "kill"):
            if self._attempt_number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        for fault in self._faults:
            dies = fault.kind == "restart_loop" and self._attempt_number <= fault.args["times"]
            if dies and step >= fault.step + fault.args["after"]:
                os.kill(os.getpid(), signal.SIGKILL)
        self._fill_disk(bool(self._at(step, "full_disk")))

    def _fill_disk(self, full: bool) -> None:
        """No file of this process may grow: every write fails as on a full disk (EFBIG in place of ENOSPC)."""
        if full == (resource.RLIMIT_FSIZE in self._begun):
            return
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0 if full else hard, hard))
        (self._begun.add if full else self._begun.discard)(resource.RLIMIT_FSIZE)

    def position(self, step: int, position: int, sequences: int) -> int:
        """Where in the data order the step reads: back for a replay, ahead for a skip (both in steps)."""
        for fault in self._once(step, "data_replay"):
            position = max(0, position - int(fault.args["back"]) * sequences)
        for fault in self._once(step, "data_skip"):
            position += int(fault.args["ahead"]) * sequences
        return position

    def plan(self, step: int, plan: PlanState) -> PlanState:
        """The plan in force; a context jump is a planned change that was a mistake, and stays until a directive sets the length again."""
        for fault in self._once(step, "context_jump"):
            plan = dataclasses.replace(plan, context_length=plan.context_length * int(fault.args["factor"]))
        return plan

    def batch(
        self, place: int, tokens: NDArray[np.uint8], weights: NDArray[np.float32], sources: list[str]
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """The batch as it is fed: NaN loss weights, random bytes, or one source with its bytes shuffled.

        `place` is the step that draws these sequences in an undisturbed run.
        """
        random = np.random.default_rng(place)
        for _ in self._at(place, "nan_batch"):
            weights = np.full_like(weights, np.nan)
        for fault in self._at(place, "corrupt_tokens"):
            noise = random.integers(0, 256, tokens.shape, np.uint8)
            tokens = np.where(random.random(tokens.shape) < fault.args["share"], noise, tokens)
        for fault in self._at(place, "label_shuffle"):
            rows = [n for n, source in enumerate(sources) if source == fault.args["source"]]
            tokens = tokens.copy()
            tokens[rows] = random.permuted(tokens[rows], axis=1)
        return tokens, weights

    def knobs(self, step: int, knobs: Knobs) -> Knobs:
        """The traced scalars of the step: a learning rate multiplied, a balance rate that runs away until a directive sets another."""
        for fault in self._passing(step, "lr_spike"):
            knobs = knobs._replace(learning_rate=knobs.learning_rate * float(fault.args["factor"]))
        for fault in self._passing(step, "bias_runaway"):
            if knobs.balance_rate == self._rate_before.setdefault(id(fault), knobs.balance_rate):
                knobs = knobs._replace(balance_rate=float(fault.args["rate"]))
        return knobs

    def state(self, step: int, state: State) -> State:
        """The parameters before a step: a router that collapsed sends every token the same way."""
        if self._passing(step, "router_collapse"):
            router = state.params["router"]
            return state._replace(params={**state.params, "router": router * 0.0})
        return state

    def wait(self, step: int, phase: str) -> None:
        """Time lost in a phase: a slow step, a straggler every few steps, a hang."""
        for fault in self._at(step, "slow_step") if phase == "train" else []:
            time.sleep(float(fault.args["seconds"]))
        for fault in self._at(step, "straggler") if phase == "train" else []:
            if step % int(fault.args["every"]) == 0:
                time.sleep(float(fault.args["seconds"]))
        hangs = [f for f in self._faults if f.kind == "hang" and f.args["phase"] == phase and step >= f.step]
        for fault in hangs:
            if id(fault) not in self._begun:
                self._begun.add(id(fault))
                time.sleep(float(fault.args["seconds"]))

    def skips_checkpoint(self, step: int) -> bool:
        """Whether the checkpoint due at `step` is silently left out."""
        return bool(self._at(step, "stale_checkpoint"))

    def damage(self, step: int, checkpoint: Path) -> None:
        """Tear a checkpoint that was just written."""
        if self._at(step, "corrupt_checkpoint"):
            arrays = checkpoint / "arrays.npz"
            os.truncate(arrays, arrays.stat().st_size // 2)

    def mutes_telemetry(self, step: int) -> bool:
        """Whether the writer is switched off at `step`."""
        return bool(self._at(step, "telemetry_stop"))
