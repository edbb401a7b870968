"""The world as it is in one tick: all that a decision may depend on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from runwatch.checks import Level, Phase, Signals
from runwatch.rules.alert import Alert, Moment
from runwatch.rules.execution import SPENT, Execution
from runwatch.rules.plan import PlanRules, PlanState

FLICKER = 5
"""Records that a critical check may be better for without having recovered."""


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
    """What the run card declares, as far as plans need it. `deadline` in Unix seconds; `checkpoint_keep` None keeps all."""

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
    checkpoint_keep: int | None = None
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
    many) with the signals that verification reads. `settings` are those of every node, by name. `taken` are the names of
    the files in `control/`: no new execution may have one of them.
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
    taken: frozenset[str] = frozenset()


def spent(node: str, world: World) -> int:
    """How many executions of `node` count against its cap."""
    return sum(one.node == node and one.state in SPENT for one in world.executions)


def critical_for(alert: Alert | None) -> Moment | None:
    """Records (as `step`), tokens and seconds (as `time`) for which a check has been critical without a break; or None.

    A break of up to `FLICKER` records counts as none: a value at its limit flickers.
    """
    if alert is None or alert.severity is not Level.CRITICAL:
        return None
    at, since, last = alert.at, alert.critical_since, alert.last_bad
    if at is None or since is None or last is None or not at.attempt == since.attempt == last.attempt:
        return None
    if at.step - last.step > FLICKER:
        return None
    return Moment(
        attempt=at.attempt, step=at.step - since.step, tokens=at.tokens - since.tokens, time=at.time - since.time
    )
