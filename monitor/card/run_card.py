"""The run card (`run.yaml`): what was declared before launch, validated key by key with file and line.

The models follow `docs/run-directory.md`. `load_card` tells all mistakes at once.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from runwatch.checks import all_checks
from runwatch.checks.signals import FAMILIES, VOCABULARY
from runwatch.monitor.card.yaml_lines import Place, read_lines
from runwatch.rules import Curve, Formula, PlannedRun, all_nodes
from runwatch.rules.plan import check_shares


@dataclass(frozen=True)
class CardMistake:
    """One mistake: where (file, line, dotted key) and the sentence with the remedy."""

    file: str
    line: int
    key: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.key} {self.message}" if self.key else f"{place}: {self.message}"


class CardError(ValueError):
    """A card with mistakes; its text has one line for each."""

    def __init__(self, mistakes: Sequence[CardMistake]) -> None:
        super().__init__("\n".join(map(str, mistakes)))
        self.mistakes = tuple(mistakes)


def _number(value: Any) -> Any:
    """Text in quotes and a boolean are no numbers; the trainer refuses them too."""
    if isinstance(value, str | bool):
        raise PydanticCustomError("number", "must be a number")
    return value


Number = Annotated[float, BeforeValidator(_number)]
Count = Annotated[int, BeforeValidator(_number)]


def _shares(shares: dict[str, float]) -> dict[str, float]:
    try:
        check_shares(shares)
    except ValueError as error:
        raise PydanticCustomError("shares", "{problem}", {"problem": str(error)}) from error
    return shares


Shares = Annotated[dict[str, Number], AfterValidator(_shares)]


def _known_signal(name: str) -> str:
    known = {*VOCABULARY, *FAMILIES, *(signal.split("/")[0] for signal in VOCABULARY)}
    if name in known or any(name.startswith(f"{family}/") for family in FAMILIES):
        return name
    raise PydanticCustomError("signal", "{problem}", {"problem": f"{name} is not a signal{nearest(name, known)}"})


SignalName = Annotated[str, AfterValidator(_known_signal)]


def _fault(text: str) -> str:
    if not re.fullmatch(r"[a-z_]+@\d+(:.*)?", text):
        raise PydanticCustomError("signal", "{problem}", {"problem": f"must be kind@step:key=value,…; it is {text!r}"})
    return text


FaultText = Annotated[str, AfterValidator(_fault)]


def nearest(name: str, known: Iterable[str]) -> str:
    """The question that names the nearest known word, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _require(holds: bool, key: str, rule: str) -> None:
    """A rule between keys of one section; `key` is the one to look at."""
    if not holds:
        raise PydanticCustomError("rule", "{rule}", {"rule": rule, "key": key})


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

    vocabulary_size: Count = Field(default=256, ge=1)
    width: Count = Field(default=128, ge=1)
    layers: Count = Field(default=4, ge=1)
    heads: Count = Field(default=4, ge=1)
    kv_heads: Count = Field(default=2, ge=1)
    head_width: Count = Field(default=32, ge=1)
    global_every: Count = Field(default=4, ge=1)
    window: Count = Field(default=64, ge=1)
    experts: Count = Field(default=8, ge=1)
    experts_per_token: Count = Field(default=2, ge=1)
    expert_width: Count = Field(default=128, ge=1)
    shared_experts: Count = Field(default=2, ge=0)
    shared_expert_width: Count = Field(default=128, ge=0)
    latent_width: Count = Field(default=64, ge=1)
    capacity_factor: Number = Field(default=1.15, gt=0)
    balance_rate: Number = Field(default=0.01, ge=0)
    router_bias_limit: Number = Field(default=4.0, gt=0)
    qk_gain: Number = Field(default=1.3, ge=0)
    z_loss_weight: Number = Field(default=0.0001, ge=0)
    router_z_loss_weight: Number = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _fits_together(self) -> "Model":
        _require(self.vocabulary_size >= 256, "vocabulary_size", "must be at least 256: text is read as bytes")
        _require(self.heads % self.kv_heads == 0, "heads", f"must be a multiple of kv_heads, {self.kv_heads}")
        _require(self.head_width % 4 == 0, "head_width", "must be a multiple of 4: half of it is rotated in pairs")
        most = f"must not be more than experts, {self.experts}"
        _require(self.experts_per_token <= self.experts, "experts_per_token", most)
        return self


class Hardware(Section):
    """What the run computes on."""

    devices: Count = Field(default=1, ge=1)
    waves: Count = Field(default=1, ge=1)
    peak_flops_per_second: Number = Field(default=5.0e10, gt=0)


class LearningRate(Section):
    """Warmup, stable, decay over the token budget."""

    peak: Number | None = Field(default=None, gt=0)
    warmup_fraction: Number = Field(default=0.02, ge=0, lt=1)
    decay_fraction: Number = Field(default=0.2, ge=0, le=1)
    final_fraction: Number = Field(default=0.05, ge=0, le=1)

    @model_validator(mode="after")
    def _leaves_a_run(self) -> "LearningRate":
        both = self.warmup_fraction + self.decay_fraction
        _require(both <= 1, "decay_fraction", f"and warmup_fraction make {both:g} of the budget; together at most 1")
        return self


class Mixture(Section):
    """Shares of the sources in the stable phase and in the decay (the same when not given)."""

    stable: Shares
    decay: Shares | None = None


class Checkpoints(Section):
    """How often a checkpoint is written and how many are kept."""

    every_steps: Count = Field(default=100, ge=1)
    keep: Count = Field(default=4, ge=1)


class Evaluation(Section):
    """How often the held-out loss is measured, and over how many sequences."""

    every_steps: Count = Field(default=100, ge=1)
    sequences: Count = Field(default=32, ge=1)


class Plan(Section):
    """The training plan."""

    token_budget: Count = Field(ge=1)
    context_length: Count = Field(ge=1)
    sequences_per_step: Count = Field(ge=1)
    learning_rate: LearningRate = LearningRate()
    mixture: Mixture
    checkpoint: Checkpoints = Checkpoints()
    eval: Evaluation = Evaluation()
    deadline: datetime | None = None
    lm_head_optimizer: Literal["adamh", "adam"] = "adamh"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step; a change of context keeps them."""
        return self.context_length * self.sequences_per_step

    @model_validator(mode="after")
    def _holds_a_step(self) -> "Plan":
        step = self.tokens_per_step
        _require(self.token_budget >= step, "token_budget", f"must hold at least one step of {step:,} tokens")
        zoned = self.deadline is None or self.deadline.tzinfo is not None
        _require(zoned, "deadline", "needs a time zone: write 2026-12-31T00:00:00Z")
        return self


class Rung(Section):
    """One finished small run of the ladder."""

    name: str
    parameters: Count = Field(ge=1)
    tokens: Count = Field(ge=1)
    loss: Number = Field(gt=0)


class LadderFormula(Section):
    """L(N, D) as fitted."""

    irreducible: Number
    parameter_scale: Number
    parameter_exponent: Number
    token_scale: Number
    token_exponent: Number


class LadderCurve(Section):
    """The registered loss over tokens with its 95 % band."""

    tokens: tuple[Number, ...] = Field(min_length=2)
    loss: tuple[Number, ...]
    low: tuple[Number, ...]
    high: tuple[Number, ...]

    @model_validator(mode="after")
    def _is_a_curve(self) -> "LadderCurve":
        lengths = {len(self.tokens), len(self.loss), len(self.low), len(self.high)}
        _require(len(lengths) == 1, "tokens", "and loss, low and high must have the same number of points")
        rising = all(a < b for a, b in pairwise(self.tokens))
        _require(rising and self.tokens[0] >= 0, "tokens", "must rise from 0 or more")
        inside = all(0 < low <= loss <= high for low, loss, high in zip(self.low, self.loss, self.high, strict=True))
        _require(inside, "loss", "must be above 0 and lie between low and high at every point")
        return self


class Amendment(Section):
    """A change of the ladder after it was registered, or after launch; `was` is the hash before it."""

    time: datetime
    by: str = Field(min_length=1)
    reason: str = Field(min_length=1)
    was: str


class Ladder(Section):
    """The pre-registration."""

    registered: datetime
    hash: str
    rungs: tuple[Rung, ...] = ()
    formula: LadderFormula | None = None
    curve: LadderCurve
    amendments: tuple[Amendment, ...] = ()


class Declaration(Section):
    """A planned change: the affected checks reset their baseline there."""

    step: Count = Field(ge=0)
    signals: tuple[SignalName, ...] = Field(min_length=1)
    reason: str = ""


class Execution(Section):
    """How a directive reaches the trainer beside its file: not at all, by webhook or by command.

    The card is public, so the webhook's secret is not in it but in a file or an environment variable of the daemon. The longest
    `timeout_seconds` is shorter than the outbox's claim on a message: nobody else sends what is still being sent.
    """

    kind: Literal["files", "webhook", "command"] = "files"
    url: str | None = Field(default=None, pattern=r"^https?://[^\s]+$")
    secret_file: str | None = None
    secret_env: str | None = None
    argv: tuple[Annotated[str, Field(pattern=r"^[^\x00]+$")], ...] = ()
    timeout_seconds: Number = Field(default=10.0, gt=0, le=50)

    @model_validator(mode="after")
    def _fits_its_kind(self) -> "Execution":
        secrets = (self.secret_file is not None) + (self.secret_env is not None)
        if self.kind == "webhook":
            _require(self.url is not None, "url", "is required where kind is webhook")
            _require(secrets == 1, "kind", "webhook needs secret_file or secret_env (one of them): bodies are signed")
        else:
            _require(self.url is None and not secrets, "kind", f"{self.kind} takes no url and no secret")
        _require(bool(self.argv) == (self.kind == "command"), "kind", "takes argv where it is command, and only there")
        return self


class Card(Section):
    """The whole card."""

    version: Annotated[int, Field(ge=1, le=1)] = 1
    run: Run
    seed: Count = Field(default=0, ge=0)
    model: Model = Model()
    hardware: Hardware = Hardware()
    plan: Plan
    ladder: Ladder | None = None
    execution: Execution = Execution()
    checks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    nodes: dict[str, dict[str, Any]] = Field(default_factory=dict)
    declarations: tuple[Declaration, ...] = ()
    faults: tuple[FaultText, ...] = ()

    def planned(self) -> PlannedRun:
        """What plans need of it."""
        plan, rate = self.plan, self.plan.learning_rate
        ladder = self.ladder
        formula = None if ladder is None or ladder.formula is None else Formula(**ladder.formula.model_dump())
        return PlannedRun(
            token_budget=plan.token_budget,
            tokens_per_step=plan.tokens_per_step,
            sequences_per_step=plan.sequences_per_step,
            context_length=plan.context_length,
            warmup_fraction=rate.warmup_fraction,
            decay_fraction=rate.decay_fraction,
            final_fraction=rate.final_fraction,
            stable_mixture=plan.mixture.stable,
            decay_mixture=plan.mixture.decay or plan.mixture.stable,
            checkpoint_every_steps=plan.checkpoint.every_steps,
            checkpoint_keep=plan.checkpoint.keep,
            capacity_factor=self.model.capacity_factor,
            balance_rate=self.model.balance_rate,
            z_loss_weight=self.model.z_loss_weight,
            deadline=None if plan.deadline is None else plan.deadline.timestamp(),
            formula=formula,
            curve=None if ladder is None else Curve(**ladder.curve.model_dump()),
        )


def load_card(path: Path) -> Card:
    """Read and validate a card.

    Raises:
        CardError: it cannot be read, is not YAML, or has mistakes; all of them are told at once.
    """
    lines = read_lines(path)
    found = [CardMistake(str(path), line, dotted(place), sentence) for line, place, sentence in lines.mistakes]
    card: Card | None = None
    if isinstance(lines.values, dict):
        card, more = _validated(lines.values)
        found += [CardMistake(str(path), lines.line(place), dotted(place), sentence) for place, sentence in more]
    elif not found:
        found.append(
            CardMistake(
                str(path), lines.line(()), "", "is not a card: it must be a mapping that begins with `version: 1`."
            )
        )
    if found or card is None:
        raise CardError(sorted(found, key=lambda mistake: mistake.line))
    return card


def dotted(place: Place) -> str:
    """A place as people write it: `plan.mixture.stable`, `declarations[0].step`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


Mistakes = list[tuple[Place, str]]


def _validated(values: dict[str, Any]) -> tuple[Card | None, Mistakes]:
    found = [
        *_section_mistakes(values, "checks", {name: check.settings for name, check in all_checks().items()}),
        *_section_mistakes(values, "nodes", {name: node.settings for name, node in all_nodes().items()}),
    ]
    try:
        return Card.model_validate(values), found
    except ValidationError as error:
        return None, [*_explained(error, Card, ()), *found]


def _section_mistakes(values: dict[str, Any], section: str, known: Mapping[str, type[BaseModel]]) -> Mistakes:
    """Mistakes in the settings of each check or node."""
    found: Mistakes = []
    given = values.get(section)
    for name, settings in given.items() if isinstance(given, dict) else ():
        if name not in known:
            found.append(((section, name), f"there is no {section[:-1]} of this name{nearest(name, known)}"))
        elif isinstance(settings, dict):
            try:
                known[name].model_validate(settings)
            except ValidationError as error:
                found += _explained(error, known[name], (section, name))
    return found


def _explained(error: ValidationError, model: type[BaseModel], before: Place) -> Mistakes:
    details = error.errors(include_url=False)
    inner = {detail["loc"][:-1] for detail in details}
    # A list whose only item is wrong is not too short as well.
    told = (detail for detail in details if detail["type"] != "too_short" or detail["loc"] not in inner)
    return [_explain(detail, model, before) for detail in told]


def _explain(detail: Any, model: type[BaseModel], before: Place) -> tuple[Place, str]:
    """One pydantic error as the place of the key to look at and a sentence with the remedy."""
    place: Place = tuple(part for part in detail["loc"] if not str(part).startswith("function-"))
    context: dict[str, Any] = detail.get("ctx") or {}
    if detail["type"] == "extra_forbidden":
        known = _fields(model, place[:-1])
        return (*before, *place), f"is an unknown key{nearest(str(place[-1]), known)}"
    if detail["type"] == "missing":
        return (*before, *place), "is required; add it"
    if "key" in context:
        place = (*place, context["key"])
    sentence = str(detail["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
    given = detail["input"]
    explained = detail["type"] in {"rule", "shares", "signal"} or isinstance(given, dict | list | BaseModel)
    return (*before, *place), sentence if explained else f"{sentence}; it is {given!r}"


def _fields(model: type[BaseModel], place: Place) -> list[str]:
    """The keys that a section has."""
    for part in place:
        if isinstance(part, str) and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation) or model
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in an annotation such as `X | None` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(inner) for inner in get_args(annotation))
    return next((model for model in found if model is not None), None)


def remarks(card: Card) -> tuple[str, ...]:
    """What is allowed and perhaps not meant."""
    plan, step = card.plan, card.plan.tokens_per_step
    found: list[str] = []
    if plan.token_budget % step:
        last = -(-plan.token_budget // step) * step
        found.append(
            f"plan.token_budget is not a multiple of {step:,} tokens a step: the run will end at {last:,} tokens."
        )
    if -(-plan.token_budget // step) % plan.checkpoint.every_steps:
        found.append("plan.token_budget is not a multiple of the checkpoint interval: the last stretch is shorter.")
    if card.model.experts % card.hardware.devices:
        found.append(
            "hardware.devices does not divide model.experts: the reference trainer spreads experts evenly and will refuse it."
        )
    if card.ladder is None:
        found.append(
            "there is no ladder: ladder_deviation judges only the run's own trend (`runwatch ladder register` adds a curve)."
        )
    elif card.ladder.curve.tokens[-1] < plan.token_budget:
        found.append("ladder.curve ends before plan.token_budget: nothing is registered for the rest of the run.")
    return tuple(found)
