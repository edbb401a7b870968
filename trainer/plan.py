"""The plan in force: the declared one with every executed directive on top, and the schedule as pure functions of it.

Standard library only. `PlanState` is saved in each checkpoint, so that a resume keeps a re-planned budget, decay and mixture.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Shares = Mapping[str, float]

PUBLIC = (
    "token_budget",
    "decay_start_tokens",
    "final_fraction",
    "mixture",
    "lr_scale",
    "z_loss_weight",
    "capacity_factor",
    "balance_rate",
    "context_length",
    "paused",
)
"""What a receipt shows before and after."""


@dataclass(frozen=True)
class PlanState:
    """Everything that a directive may change, and what it has changed so far.

    `mixtures` is the history of shares as (first sequence of the data order, shares): with the position it determines
    every sequence. `mixture_pinned` says that a directive set the shares, so the decay phase no longer moves them.
    """

    token_budget: int
    decay_start_tokens: int
    final_fraction: float
    mixtures: tuple[tuple[int, Shares], ...]
    lr_scale: float
    z_loss_weight: float
    capacity_factor: float
    balance_rate: float
    context_length: int
    paused: bool = False
    mixture_pinned: bool = False
    decayed: bool = False
    directives: tuple[str, ...] = ()

    @property
    def mixture(self) -> dict[str, float]:
        """The shares in force."""
        return dict(self.mixtures[-1][1])

    def with_mixture(self, shares: Shares, position: int, *, pinned: bool) -> "PlanState":
        """The plan with these shares from sequence `position` of the data order on."""
        earlier = tuple(m for m in self.mixtures if m[0] < position)
        return dataclasses.replace(self, mixtures=(*earlier, (position, dict(shares))), mixture_pinned=pinned)

    def public(self) -> dict[str, Any]:
        """The ten values that receipts show."""
        return {name: getattr(self, name) for name in PUBLIC}

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which `from_json` makes the same plan."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "PlanState":
        """The plan that `to_json` wrote."""
        mixtures = tuple((int(at), dict(shares)) for at, shares in values["mixtures"])
        fields: dict[str, Any] = {**values, "mixtures": mixtures, "directives": tuple(values["directives"])}
        return cls(**fields)


def lr_fraction(plan: PlanState, tokens: int, warmup_tokens: int) -> float:
    """Warmup-stable-decay: the fraction of the peak learning rate for the step that ends at `tokens`.

    Linear from 0 over the warmup, 1, then linear from `decay_start_tokens` down to `final_fraction` at the budget's end
    (WSD: Hu et al. 2024, arXiv 2404.06395; linear to 5 % as in the seed run). `lr_scale` multiplies all of it.
    """
    warmup = min(1.0, tokens / warmup_tokens) if warmup_tokens else 1.0
    span = plan.token_budget - plan.decay_start_tokens
    through = (tokens - plan.decay_start_tokens) / span if span > 0 else float(tokens > plan.decay_start_tokens)
    decay = 1 - (1 - plan.final_fraction) * min(1.0, max(0.0, through))
    return plan.lr_scale * min(warmup, decay)
