"""The run card (`run.yaml`): what was declared before launch, validated key by key with file and line.

The models follow `docs/run-directory.md`. `load_card` tells all mistakes at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from runwatch.checks import Change, Settings
from runwatch.rules import PlannedRun, PlanRules, Receipt


@dataclass(frozen=True)
class CardMistake:
    """One mistake: where (file, line, dotted key) and the sentence with the remedy."""

    file: str
    line: int
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.key + ': ' if self.key else ''}{self.message}"


class CardError(ValueError):
    """A card with mistakes; its text has one line for each."""

    def __init__(self, mistakes: Sequence[CardMistake]) -> None:
        super().__init__("\n".join(map(str, mistakes)))
        self.mistakes = tuple(mistakes)


class Section(BaseModel):
    """A frozen part of the card that rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Run(Section):
    """Identity and hypothesis."""

    name: str = Field(pattern=r"^[a-z0-9-]{1,63}$")
    hypothesis: str = ""
    owner: str = ""
    links: dict[str, str] = Field(default_factory=dict)


class Model(Section):
    """The decoder's shape."""

    vocabulary_size: int = Field(default=256, ge=1)
    width: int = Field(default=128, ge=1)
    layers: int = Field(default=4, ge=1)
    heads: int = Field(default=4, ge=1)
    kv_heads: int = Field(default=2, ge=1)
    head_width: int = Field(default=32, ge=1)
    global_every: int = Field(default=4, ge=1)
    window: int = Field(default=64, ge=1)
    experts: int = Field(default=8, ge=1)
    experts_per_token: int = Field(default=2, ge=1)
    expert_width: int = Field(default=128, ge=1)
    shared_experts: int = Field(default=2, ge=0)
    shared_expert_width: int = Field(default=128, ge=0)
    latent_width: int = Field(default=64, ge=1)
    capacity_factor: float = Field(default=1.15, gt=0)
    balance_rate: float = Field(default=0.01, ge=0)
    router_bias_limit: float = Field(default=4.0, gt=0)
    qk_gain: float = Field(default=1.3, ge=0)
    z_loss_weight: float = Field(default=0.0001, ge=0)
    router_z_loss_weight: float = Field(default=0.0, ge=0)


class Hardware(Section):
    """What the run computes on."""

    devices: int = Field(default=1, ge=1)
    peak_flops_per_second: float = Field(default=5.0e10, gt=0)


class LearningRate(Section):
    """Warmup, stable, decay over the token budget."""

    peak: float | None = Field(default=None, gt=0)
    warmup_fraction: float = Field(default=0.02, ge=0, lt=1)
    decay_fraction: float = Field(default=0.2, ge=0, le=1)
    final_fraction: float = Field(default=0.05, ge=0, le=1)


class Mixture(Section):
    """Shares of the sources in the stable phase and in the decay (the same when not given)."""

    stable: dict[str, float]
    decay: dict[str, float] | None = None


class Checkpoints(Section):
    """How often a checkpoint is written and how many are kept."""

    every_steps: int = Field(default=100, ge=1)
    keep: int = Field(default=4, ge=1)


class Evaluation(Section):
    """How often the held-out loss is measured, and over how many sequences."""

    every_steps: int = Field(default=100, ge=1)
    sequences: int = Field(default=32, ge=1)


class Plan(Section):
    """The training plan."""

    token_budget: int = Field(ge=1)
    context_length: int = Field(ge=1)
    sequences_per_step: int = Field(ge=1)
    learning_rate: LearningRate = LearningRate()
    mixture: Mixture
    checkpoint: Checkpoints = Checkpoints()
    eval: Evaluation = Evaluation()
    deadline: datetime | None = None


class Rung(Section):
    """One finished small run of the ladder."""

    name: str
    parameters: int = Field(ge=1)
    tokens: int = Field(ge=1)
    loss: float = Field(gt=0)


class LadderFormula(Section):
    """L(N, D) as fitted."""

    irreducible: float
    parameter_scale: float
    parameter_exponent: float
    token_scale: float
    token_exponent: float


class LadderCurve(Section):
    """The registered loss over tokens with its 95 % band."""

    tokens: tuple[float, ...] = Field(min_length=2)
    loss: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


class Ladder(Section):
    """The pre-registration."""

    registered: datetime
    hash: str
    rungs: tuple[Rung, ...] = ()
    formula: LadderFormula | None = None
    curve: LadderCurve


class Declaration(Section):
    """A planned change: checks re-base there."""

    step: int = Field(ge=0)
    signals: tuple[str, ...] = Field(min_length=1)
    reason: str = ""


class Card(Section):
    """The whole card."""

    version: Annotated[int, Field(ge=1, le=1)] = 1
    run: Run
    seed: int = 0
    model: Model = Model()
    hardware: Hardware = Hardware()
    plan: Plan
    ladder: Ladder | None = None
    checks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    nodes: dict[str, dict[str, Any]] = Field(default_factory=dict)
    declarations: tuple[Declaration, ...] = ()
    faults: tuple[str, ...] = ()

    def planned(self) -> PlannedRun:
        """What plans need of it."""
        raise NotImplementedError


def load_card(path: Path) -> Card:
    """Read and validate a card.

    Raises:
        CardError: it cannot be read, is not YAML, or has mistakes; all of them are told at once.
    """
    raise NotImplementedError


def check_settings(card: Card, receipts: Sequence[Receipt] = ()) -> dict[str, Settings]:
    """The settings of every check: the card's own, with context from its other sections and from applied directives."""
    raise NotImplementedError


def node_settings(card: Card) -> dict[str, PlanRules]:
    """The settings of every node."""
    raise NotImplementedError


def changes(card: Card, receipts: Sequence[Receipt] = (), declared: Sequence[Declaration] = ()) -> tuple[Change, ...]:
    """Planned changes in order of their steps: the card's, those of `runwatch declare`, and those of applied directives."""
    raise NotImplementedError
