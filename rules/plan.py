"""What a plan is made of: typed actions, the directive that carries them, the receipt, and the rules of carrying out.

Field for field as `docs/run-directory.md` has them.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Record(BaseModel):
    """Frozen, strict about keys, and with NaN kept in JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class SetTokenBudget(Record):
    """The run ends at the first step whose tokens reach it."""

    action: Literal["set_token_budget"] = "set_token_budget"
    tokens: int = Field(gt=0)


class SetLrDecay(Record):
    """Linear decay from `start_tokens` to the budget's end, down to `final_fraction` of the peak."""

    action: Literal["set_lr_decay"] = "set_lr_decay"
    start_tokens: int = Field(ge=0)
    final_fraction: float = Field(ge=0, le=1)


class SetDataMixture(Record):
    """Share of each source from the next step on."""

    action: Literal["set_data_mixture"] = "set_data_mixture"
    shares: dict[str, float]

    @model_validator(mode="after")
    def _sums_to_one(self) -> "SetDataMixture":
        check_shares(self.shares)
        return self


class Rewind(Record):
    """Restore that checkpoint and leave out the next `skip_steps` batches of the data order."""

    action: Literal["rewind"] = "rewind"
    checkpoint_step: int = Field(ge=0)
    skip_steps: int = Field(ge=0)


class ScaleLr(Record):
    """Multiply the learning rate from now on."""

    action: Literal["scale_lr"] = "scale_lr"
    factor: float = Field(gt=0)


class SetZLossWeight(Record):
    """Logit z-loss weight."""

    action: Literal["set_z_loss_weight"] = "set_z_loss_weight"
    weight: float = Field(ge=0)


class SetCapacityFactor(Record):
    """Expert capacity factor."""

    action: Literal["set_capacity_factor"] = "set_capacity_factor"
    factor: float = Field(gt=0)


class SetBalanceRate(Record):
    """Step of the router-bias update."""

    action: Literal["set_balance_rate"] = "set_balance_rate"
    rate: float = Field(ge=0)


class SetContextLength(Record):
    """Sequences of that length; tokens a step stay the same."""

    action: Literal["set_context_length"] = "set_context_length"
    tokens: int = Field(gt=0)


class CheckpointNow(Record):
    """Write a checkpoint at this step."""

    action: Literal["checkpoint_now"] = "checkpoint_now"


class Pause(Record):
    """Hold at a step boundary until `resume`."""

    action: Literal["pause"] = "pause"


class Resume(Record):
    """Go on after `pause`."""

    action: Literal["resume"] = "resume"


class Stop(Record):
    """Checkpoint and end the run."""

    action: Literal["stop"] = "stop"


Action = Annotated[
    SetTokenBudget
    | SetLrDecay
    | SetDataMixture
    | Rewind
    | ScaleLr
    | SetZLossWeight
    | SetCapacityFactor
    | SetBalanceRate
    | SetContextLength
    | CheckpointNow
    | Pause
    | Resume
    | Stop,
    Field(discriminator="action"),
]


class Preconditions(Record):
    """What must hold at the step boundary; None asks nothing."""

    attempt: str | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None

    def broken_by(self, attempt: str, tokens: float) -> str | None:
        """Why a run in this attempt at these tokens may not carry the plan out, or None."""
        if self.attempt is not None and attempt != self.attempt:
            return f"it was made for attempt {self.attempt}, but the run is in attempt {attempt}"
        if self.min_tokens is not None and tokens < self.min_tokens:
            return f"the run is at {tokens:,.0f} tokens, before {self.min_tokens:,}"
        if self.max_tokens is not None and tokens > self.max_tokens:
            return f"the run is at {tokens:,.0f} tokens, past {self.max_tokens:,}"
        return None


class Directive(Record):
    """`control/requests/<id>.json`."""

    version: Literal[1] = 1
    id: str
    node: str
    plan: str
    attempt: str
    created: float
    expires: float
    evidence: str
    preconditions: Preconditions
    actions: tuple[Action, ...] = Field(min_length=1)

    def document(self) -> dict[str, Any]:
        """The JSON object of the file; preconditions that ask nothing are left out."""
        document = self.model_dump(mode="json")
        document["preconditions"] = self.preconditions.model_dump(mode="json", exclude_none=True)
        return document


class PlanState(BaseModel):
    """The plan in force, as receipts show it before and after. A trainer may say more than we know."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    token_budget: int
    decay_start_tokens: int
    final_fraction: float
    mixture: Mapping[str, float]
    lr_scale: float = 1.0
    z_loss_weight: float = 0.0
    capacity_factor: float = 1.0
    balance_rate: float = 0.0
    context_length: int = 1
    paused: bool = False


class Receipt(BaseModel):
    """`control/receipts/<id>.json`; keys that we do not know are left out."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = 1
    id: str
    status: Literal["applied", "rejected"]
    reason: str | None = None
    attempt: str
    step: int
    tokens: int
    time: float
    before: PlanState
    after: PlanState


Mode = Literal["observe", "confirm", "auto"]


class PlanRules(BaseModel):
    """How a node's plan may be carried out; every node's settings begin with these."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Mode = "confirm"
    """observe: log what would be done; confirm: ask a person; auto: do it."""
    cooldown_records: int = Field(default=200, ge=0)
    """Train records after an execution in which the node stays blocked."""
    max_executions: int = Field(default=1, ge=1)
    """Executions in the life of the run."""
    expires_seconds: float = Field(default=3600.0, gt=0)
    """How long a proposal waits for a person."""
    ack_seconds: float = Field(default=900.0, gt=0)
    """How long the trainer may take to the next step boundary (an evaluation or a save lies in between)."""
    verify_records: int = Field(default=50, ge=1)
    """Train records in which the effect must show."""
    verify_seconds: float = Field(default=7200.0, gt=0)
    """The same in seconds, for a run that falls silent."""


def check_shares(shares: Mapping[str, float]) -> None:
    """Raise `ValueError` unless the shares are at least 0 and sum to 1 within 1e-6."""
    negative = [name for name, share in shares.items() if not share >= 0]
    if negative:
        raise ValueError(f"the share of {', '.join(negative)} is negative or not a number")
    if not shares or abs(sum(shares.values()) - 1) > 1e-6:
        raise ValueError(f"the shares sum to {sum(shares.values()):g}; they must sum to 1")
