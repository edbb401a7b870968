"""Directives: read at a step boundary, checked whole, applied all or none, answered with a receipt.

Standard library and orjson only. `apply` is a pure function from the plan in force to the next one; `Control` does the files.
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from runwatch.trainer.plan import PlanState

MAX_REQUEST_BYTES = 1 << 20
SETTLED_NS = 2_000_000_000
"""A folder's time of change is trusted only when older than this: two files may arrive within one tick of the clock."""


class RejectedError(ValueError):
    """A directive that is not carried out, and why."""


@dataclass(frozen=True)
class Boundary:
    """The step boundary at which directives are read, and what the trainer can do there."""

    attempt: str
    step: int
    tokens: int
    position: int
    tokens_per_step: int
    sources: tuple[str, ...]
    checkpoints: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """The plan after a directive and what the loop still has to do: rewind to a step and skip batches, save, end."""

    plan: PlanState
    rewind: tuple[int, int] | None = None
    checkpoint: bool = False
    stop: bool = False


Action = Mapping[str, Any]


def _number(action: Action, key: str, low: float, high: float = math.inf) -> float:
    value = action.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise RejectedError(f"{action['action']}: {key} must be a finite number, not {value!r}")
    if not low <= value <= high:
        raise RejectedError(f"{action['action']}: {key} must lie in {low:g} … {high:g}, not {value:g}")
    return float(value)  # a whole number would be another type of argument to the compiled step


def _count(action: Action, key: str, low: int) -> int:
    value = _number(action, key, low)
    if value != int(value):
        raise RejectedError(f"{action['action']}: {key} must be a whole number, not {value!r}")
    return int(value)


def _set_token_budget(action: Action, done: Outcome, at: Boundary) -> Outcome:
    tokens = _count(action, "tokens", 1)
    if tokens <= at.tokens:
        raise RejectedError(f"set_token_budget: {tokens} tokens are already trained (the run is at {at.tokens})")
    return dataclasses.replace(done, plan=dataclasses.replace(done.plan, token_budget=tokens))


def _set_lr_decay(action: Action, done: Outcome, at: Boundary) -> Outcome:
    del at
    start, final = _count(action, "start_tokens", 0), _number(action, "final_fraction", 0, 1)
    plan = dataclasses.replace(done.plan, decay_start_tokens=start, final_fraction=final)
    return dataclasses.replace(done, plan=plan)


def _set_data_mixture(action: Action, done: Outcome, at: Boundary) -> Outcome:
    shares = action.get("shares")
    if not isinstance(shares, dict) or not shares:
        raise RejectedError("set_data_mixture: shares must map sources to shares")
    unknown = sorted(set(shares) - set(at.sources))
    if unknown:
        raise RejectedError(f"set_data_mixture: unknown source {unknown[0]!r}; this run has {', '.join(at.sources)}")
    checked = {str(name): float(_number({**shares, "action": "set_data_mixture"}, name, 0, 1)) for name in shares}
    if abs(sum(checked.values()) - 1) > 1e-6:
        raise RejectedError(f"set_data_mixture: shares sum to {sum(checked.values()):g}, not to 1")
    return dataclasses.replace(done, plan=done.plan.with_mixture(checked, at.position, pinned=True))


def _rewind(action: Action, done: Outcome, at: Boundary) -> Outcome:
    step, skip = _count(action, "checkpoint_step", 0), _count(action, "skip_steps", 0)
    if step not in at.checkpoints:
        raise RejectedError(f"rewind: no complete checkpoint of step {step}; there are {list(at.checkpoints)}")
    return dataclasses.replace(done, rewind=(step, skip))


def _scale_lr(action: Action, done: Outcome, at: Boundary) -> Outcome:
    del at
    factor = _number(action, "factor", 1e-3, 10)
    return dataclasses.replace(done, plan=dataclasses.replace(done.plan, lr_scale=done.plan.lr_scale * factor))


def _set(field: str, key: str, low: float, high: float) -> Callable[[Action, Outcome, Boundary], Outcome]:
    def act(action: Action, done: Outcome, at: Boundary) -> Outcome:
        del at
        return dataclasses.replace(
            done, plan=dataclasses.replace(done.plan, **{field: _number(action, key, low, high)})
        )

    return act


def _set_context_length(action: Action, done: Outcome, at: Boundary) -> Outcome:
    length = _count(action, "tokens", 2)
    if at.tokens_per_step % length:
        raise RejectedError(f"set_context_length: {length} does not divide the {at.tokens_per_step} tokens of a step")
    return dataclasses.replace(done, plan=dataclasses.replace(done.plan, context_length=length))


def _flag(**change: bool) -> Callable[[Action, Outcome, Boundary], Outcome]:
    def act(action: Action, done: Outcome, at: Boundary) -> Outcome:
        del action, at
        return dataclasses.replace(done, **change)

    return act


def _paused(paused: bool) -> Callable[[Action, Outcome, Boundary], Outcome]:
    def act(action: Action, done: Outcome, at: Boundary) -> Outcome:
        del action, at
        return dataclasses.replace(done, plan=dataclasses.replace(done.plan, paused=paused))

    return act


ACTIONS: Mapping[str, tuple[Callable[[Action, Outcome, Boundary], Outcome], frozenset[str]]] = {
    "set_token_budget": (_set_token_budget, frozenset({"tokens"})),
    "set_lr_decay": (_set_lr_decay, frozenset({"start_tokens", "final_fraction"})),
    "set_data_mixture": (_set_data_mixture, frozenset({"shares"})),
    "rewind": (_rewind, frozenset({"checkpoint_step", "skip_steps"})),
    "scale_lr": (_scale_lr, frozenset({"factor"})),
    "set_z_loss_weight": (_set("z_loss_weight", "weight", 0, 1), frozenset({"weight"})),
    "set_capacity_factor": (_set("capacity_factor", "factor", 0.1, 100), frozenset({"factor"})),
    "set_balance_rate": (_set("balance_rate", "rate", 0, 1), frozenset({"rate"})),
    "set_context_length": (_set_context_length, frozenset({"tokens"})),
    "checkpoint_now": (_flag(checkpoint=True), frozenset()),
    "pause": (_paused(paused=True), frozenset()),
    "resume": (_paused(paused=False), frozenset()),
    "stop": (_flag(checkpoint=True, stop=True), frozenset()),
}


def apply(plan: PlanState, directive: Mapping[str, Any], at: Boundary, now: float) -> Outcome:
    """The outcome of a whole directive at a step boundary; `now` in Unix seconds.

    Raises:
        RejectedError: it is expired, a precondition fails, or one action does not hold; nothing of it is applied.
    """
    _check_conditions(directive, at, now)
    actions = directive.get("actions")
    if not isinstance(actions, list) or not actions:
        raise RejectedError("actions must be a list with at least one action")
    done = Outcome(plan)
    for action in actions:
        done = _act(action, done, at)
    if done.plan.decay_start_tokens > done.plan.token_budget:
        raise RejectedError(
            f"the decay would start at {done.plan.decay_start_tokens} tokens, after the budget of {done.plan.token_budget}"
        )
    directives = (*done.plan.directives, str(directive["id"]))
    return dataclasses.replace(done, plan=dataclasses.replace(done.plan, directives=directives))


def _act(action: Any, done: Outcome, at: Boundary) -> Outcome:
    if not isinstance(action, dict) or not isinstance(action.get("action"), str):
        raise RejectedError(f"an action must be an object with the key action, not {str(action)[:80]}")
    if action["action"] not in ACTIONS:
        raise RejectedError(f"unknown action {action['action']!r}; known: {', '.join(ACTIONS)}")
    act, fields = ACTIONS[action["action"]]
    unknown = sorted(set(action) - fields - {"action"})
    if unknown:
        raise RejectedError(
            f"{action['action']}: unknown field {unknown[0]!r}; it takes {', '.join(sorted(fields)) or 'none'}"
        )
    return act(action, done, at)


def _check_conditions(directive: Mapping[str, Any], at: Boundary, now: float) -> None:
    if directive.get("version") != 1:
        raise RejectedError(f"version must be 1, not {directive.get('version')!r}")
    expires = directive.get("expires")
    if isinstance(expires, int | float) and now > expires:
        raise RejectedError(f"expired {now - expires:.0f} s ago")
    wanted = directive.get("preconditions") or {}
    if not isinstance(wanted, dict) or set(wanted) - {"attempt", "min_tokens", "max_tokens"}:
        raise RejectedError("preconditions may hold attempt, min_tokens and max_tokens only")
    if wanted.get("attempt") not in (None, at.attempt):
        raise RejectedError(f"meant for attempt {wanted['attempt']}, this is {at.attempt}")
    low, high = wanted.get("min_tokens"), wanted.get("max_tokens")
    if low is not None and at.tokens < low:
        raise RejectedError(f"the run is at {at.tokens} tokens, before min_tokens {low}")
    if high is not None and at.tokens > high:
        raise RejectedError(f"the run is at {at.tokens} tokens, past max_tokens {high}")


def receipt(
    directive_id: str, at: Boundary, before: PlanState, after: PlanState, reason: str | None, compiles: int = 0
) -> dict[str, Any]:
    """The answer to a directive: applied, for which so many programs were compiled, or rejected for `reason`."""
    return {
        "version": 1,
        "id": directive_id,
        "status": "applied" if reason is None else "rejected",
        "reason": reason,
        "attempt": at.attempt,
        "step": at.step,
        "tokens": at.tokens,
        "time": time.time(),
        "compiles": compiles,
        "before": before.public(),
        "after": after.public(),
    }


class Control:
    """The folder `control/` of a run: new requests in, receipts out."""

    def __init__(self, run_dir: Path) -> None:
        self._requests, self._receipts = run_dir / "control" / "requests", run_dir / "control" / "receipts"
        self._seen: set[str] = set()
        self._changed = -1

    def poll(self) -> list[tuple[str, dict[str, Any] | str]]:
        """Requests not answered yet, oldest name first: name and directive, or name and what is wrong with the file.

        Costs one `stat` when nothing came.
        """
        try:
            changed = self._requests.stat().st_mtime_ns
            if changed == self._changed:
                return []
            names = sorted(entry.name[:-5] for entry in os.scandir(self._requests) if entry.name.endswith(".json"))
        except OSError:
            return []
        self._changed = changed if time.time_ns() - changed > SETTLED_NS else -1
        fresh = [name for name in names if name not in self._seen and not (self._receipts / f"{name}.json").exists()]
        self._seen.update(names)
        return [(name, self._read(name)) for name in fresh]

    def answer(self, name: str, answer: Mapping[str, Any]) -> bool:
        """Write a receipt atomically; False when the disk refused, and the request will be seen again."""
        try:
            self._receipts.mkdir(parents=True, exist_ok=True)
            temporary = self._receipts / f".{name}.{os.getpid()}"
            with temporary.open("wb") as file:
                file.write(orjson.dumps(answer, option=orjson.OPT_INDENT_2))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._receipts / f"{name}.json")
        except OSError:
            self._seen.discard(name)
            self._changed = -1
            return False
        return True

    def answered(self, name: str) -> bool:
        """Whether there is a receipt of that name."""
        return (self._receipts / f"{name}.json").exists()

    def applied(self) -> list[dict[str, Any]]:
        """Receipts of directives that were applied, oldest first."""
        found = [_object(path) for path in self._receipts.glob("*.json")]
        return sorted(
            (one for one in found if one.get("status") == "applied"), key=lambda one: float(one.get("time", 0))
        )

    def again(self, name: str) -> dict[str, Any]:
        """The request of a directive that was applied before: what it asked for held then, and it cannot expire any more.

        Raises:
            RejectedError: it is gone or cannot be read.
        """
        found = self._read(name)
        if isinstance(found, str):
            raise RejectedError(found)
        return {**found, "preconditions": {}, "expires": None}

    def _read(self, name: str) -> dict[str, Any] | str:
        path = self._requests / f"{name}.json"
        try:
            if path.stat().st_size > MAX_REQUEST_BYTES:
                return f"{path.name} is larger than {MAX_REQUEST_BYTES} bytes"
            document = orjson.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            return f"{path.name} is not JSON: {error}"
        if not isinstance(document, dict) or document.get("id") != name:
            return f"{path.name} must hold an object whose id is {name!r}, as the file is named"
        return document


def _object(path: Path) -> dict[str, Any]:
    """The JSON object of a file; an empty one where there is none."""
    try:
        found = orjson.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
