"""A risk node: a window of the run, a condition over alerts, and the plan that was written down with it.

`decide` is the whole of what the rules say in one tick: it carries the open execution on, evaluates every node against
one frozen `World`, and proposes at most one plan.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from runwatch.checks import Phase, Signals
from runwatch.rules.alert import Alert
from runwatch.rules.execution import Decision, Event, Execution, Forecast, Recovered
from runwatch.rules.plan import Action, PlanRules, PlanState, Preconditions, Receipt


@dataclass(frozen=True)
class Formula:
    """L(N, D) of the ladder: irreducible + parameter_scale / N^parameter_exponent + token_scale / D^token_exponent."""

    irreducible: float
    parameter_scale: float
    parameter_exponent: float
    token_scale: float
    token_exponent: float


@dataclass(frozen=True)
class Curve:
    """The pre-registered loss over tokens with its 95 % band; straight lines in log loss over log tokens."""

    tokens: tuple[float, ...]
    loss: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class PlannedRun:
    """What the run card declares, as far as plans need it. `deadline` in Unix seconds."""

    token_budget: int
    tokens_per_step: int
    sequences_per_step: int
    context_length: int
    warmup_fraction: float
    decay_fraction: float
    final_fraction: float
    stable_mixture: Mapping[str, float]
    decay_mixture: Mapping[str, float]
    checkpoint_every_steps: int
    capacity_factor: float
    balance_rate: float
    z_loss_weight: float
    deadline: float | None = None
    formula: Formula | None = None
    curve: Curve | None = None

    def plan_state(self) -> PlanState:
        """The plan in force before any directive."""
        return PlanState(
            token_budget=self.token_budget,
            decay_start_tokens=round(self.token_budget * (1 - self.decay_fraction)),
            final_fraction=self.final_fraction,
            mixture=self.stable_mixture,
            z_loss_weight=self.z_loss_weight,
            capacity_factor=self.capacity_factor,
            balance_rate=self.balance_rate,
            context_length=self.context_length,
        )


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is complete on disk and was found finite; `time` in Unix seconds."""

    step: int
    tokens: float
    time: float


@dataclass(frozen=True)
class Throughput:
    """Sustained tokens per second, pauses included, with its 95 % interval."""

    tokens_per_second: float
    low: float
    high: float


@dataclass(frozen=True)
class World:
    """Everything that a decision may depend on, as it is in one tick.

    `now` is the daemon's clock, `time` that of the newest record (both Unix seconds). `records` counts the train
    records of the run, all attempts together. `recent` are the newest rows (200 or more train rows where there are so
    many) with the signals that verification reads. `settings` are those of every node, by name.
    """

    run: str
    now: float
    attempt: str
    phase: Phase
    records: int
    step: int
    tokens: float
    time: float
    planned: PlannedRun
    plan: PlanState
    recent: Signals
    settings: Mapping[str, PlanRules] = field(default_factory=dict[str, PlanRules])
    alerts: Mapping[str, Alert] = field(default_factory=dict[str, Alert])
    executions: tuple[Execution, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    throughput: Throughput | None = None
    plans_enabled: bool = True


@dataclass(frozen=True)
class Condition:
    """How far a node's condition is met: 1 holds, 0 nothing of it. `checks` are those in alarm that count for it."""

    progress: float
    reason: str
    checks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Proposal:
    """What the plan would do now. `effects` has a sentence for each action."""

    actions: tuple[Action, ...]
    effects: tuple[str, ...]
    preconditions: Preconditions = field(default_factory=Preconditions)
    forecast: Forecast | None = None
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """Why the plan cannot be made now."""

    reason: str


@dataclass(frozen=True)
class Node:
    """One written-down risk.

    `window` gives the fractions of the token budget between which it may fire. `condition` and `propose` are pure
    functions of the world and of the node's settings; `recovered` says whether the run is well after the plan.
    """

    name: str
    plan: str
    checks: tuple[str, ...]
    settings: type[PlanRules]
    window: Callable[[Any], tuple[float, float]]
    condition: Callable[[World, Any], Condition]
    propose: Callable[[World, Any], Proposal | Refusal]
    recovered: Recovered | None = None

    @property
    def docs(self) -> str:
        """The docstring of its file: page, runbook and message summary."""
        return inspect.getdoc(sys.modules[self.condition.__module__]) or ""


class NodeState(StrEnum):
    """How a node stands."""

    QUIET = "quiet"
    ARMED = "armed"
    OUTSIDE_WINDOW = "outside_window"
    FIRING = "firing"
    BLOCKED = "blocked"


@dataclass(frozen=True)
class NodeVerdict:
    """A node's state with the sentence that says why; `proposal` is there when it fires."""

    node: str
    plan: str
    state: NodeState
    reason: str
    progress: float
    checks: tuple[str, ...] = ()
    proposal: Proposal | None = None


@dataclass(frozen=True)
class Decided:
    """What one tick decided: executions that changed or are new, what to tell of them, and how each node stands."""

    executions: tuple[Execution, ...]
    events: tuple[Event, ...]
    nodes: tuple[NodeVerdict, ...]


def evaluate(node: Node, world: World, settings: PlanRules) -> NodeVerdict:
    """How `node` stands in `world`."""
    raise NotImplementedError


def preview(node: Node, world: World, settings: PlanRules) -> Proposal | Refusal:
    """What the node's plan would do in `world`, whether or not its condition holds."""
    raise NotImplementedError


def decide(
    nodes: Mapping[str, Node],
    world: World,
    receipts: Mapping[str, Receipt],
    decisions: Mapping[str, Decision],
) -> Decided:
    """One tick of the rules. `receipts` and `decisions` are by execution id; those already used may be given again."""
    raise NotImplementedError
