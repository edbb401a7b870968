"""The trainer's own small reader of the run card: the sections model, hardware, plan, seed and faults, as frozen dataclasses.

A card has one validator, `runwatch validate`; the trainer asks it, as a process, and shares no code with it. So what is valid
for the daemon can be trained, and the other way round. A mistake raises `CardError`, whose message names file, key and remedy.
"""

import dataclasses
import hashlib
import re
import subprocess
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

VALIDATE = (sys.executable, "-P", "-m", "runwatch.monitor.cli", "validate")
VALIDATE_SECONDS = 120.0


class CardError(ValueError):
    """A run card that cannot be trained; the message names file, key and remedy."""


class FaultError(ValueError):
    """A fault that cannot be read; the message names what is known."""


@dataclass(frozen=True)
class Model:
    """The decoder's shape. Widths are in features, `window` in tokens; ratios have no unit."""

    vocabulary_size: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 32
    global_every: int = 4
    window: int = 64
    experts: int = 8
    experts_per_token: int = 2
    expert_width: int = 128
    shared_experts: int = 2
    shared_expert_width: int = 128
    latent_width: int = 64
    capacity_factor: float = 1.15
    balance_rate: float = 0.01
    router_bias_limit: float = 4.0
    qk_gain: float = 1.3
    z_loss_weight: float = 0.0001
    router_z_loss_weight: float = 0.0


@dataclass(frozen=True)
class Hardware:
    """What the run computes on; `peak_flops_per_second` is of one device.

    The experts are spread over the `devices`, and tokens reach them in so many `waves` a layer (`parallel.py`).
    """

    devices: int = 1
    waves: int = 1
    peak_flops_per_second: float = 5.0e10


@dataclass(frozen=True)
class LearningRate:
    """Warmup, stable, decay over the token budget. `peak` None means the closed-form value of `optim.learning_rate`."""

    peak: float | None = None
    warmup_fraction: float = 0.02
    decay_fraction: float = 0.2
    final_fraction: float = 0.05


@dataclass(frozen=True)
class Mixture:
    """Shares of the text sources, each summing to 1: during the stable phase and from the start of the decay."""

    stable: dict[str, float] = field(default_factory=lambda: {"code": 0.5, "docs": 0.3, "prose": 0.2})
    decay: dict[str, float] | None = None


@dataclass(frozen=True)
class Checkpoints:
    """How often a checkpoint is written and how many complete ones are kept."""

    every_steps: int = 100
    keep: int = 4


@dataclass(frozen=True)
class Evaluation:
    """How often the held-out loss is measured, and over how many sequences."""

    every_steps: int = 100
    sequences: int = 32


@dataclass(frozen=True)
class Plan:
    """The training plan as declared before launch; tokens and steps."""

    token_budget: int = 3_072_000
    context_length: int = 128
    sequences_per_step: int = 8
    learning_rate: LearningRate = LearningRate()
    mixture: Mixture = Mixture()
    checkpoint: Checkpoints = Checkpoints()
    eval: Evaluation = Evaluation()
    deadline: Any = None
    lm_head_optimizer: Literal["adamh", "adam"] = "adamh"
    """`adam` lets the head's norm, and so the logits, grow: for ablations."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step; a change of context keeps them."""
        return self.context_length * self.sequences_per_step


@dataclass(frozen=True)
class Card:
    """What the trainer takes from `run.yaml`."""

    model: Model = Model()
    hardware: Hardware = Hardware()
    plan: Plan = Plan()
    seed: int = 0
    faults: tuple[str, ...] = ()

    @property
    def identity(self) -> dict[str, Any]:
        """What determines the losses, by dotted key: a checkpoint that differs in one of them is of another run."""
        model = {f"model.{name}": value for name, value in dataclasses.asdict(self.model).items()}
        plan = {f"plan.{name}": getattr(self.plan, name) for name in _PLAN_IDENTITY}
        return {**model, **plan, "seed": self.seed}

    @property
    def hash(self) -> str:
        """The identity as release 0.1.0 wrote it: a hash of its fields, which names none of them."""
        model = ", ".join(f"{name}={getattr(self.model, name)!r}" for name in _HASHED_MODEL)
        parts = [
            f"Model({model})",
            *(repr(one) for one in (self.plan.context_length, self.plan.sequences_per_step, self.seed)),
        ]
        if self.plan.lm_head_optimizer != "adamh":
            parts.append(repr(self.plan.lm_head_optimizer))
        return "sha256:" + hashlib.sha256(f"({', '.join(parts)})".encode()).hexdigest()


_PLAN_IDENTITY = ("context_length", "sequences_per_step", "lm_head_optimizer")
_HASHED_MODEL = (
    "vocabulary_size", "width", "layers", "heads", "kv_heads", "head_width", "global_every", "window", "experts",
    "experts_per_token", "expert_width", "shared_experts", "shared_expert_width", "latent_width", "capacity_factor",
    "balance_rate", "router_bias_limit", "qk_gain", "z_loss_weight", "router_z_loss_weight",
)  # fmt: skip
"""The fields of the model that release 0.1.0 had: those of later releases are no part of its hash."""


def differing(meta: Mapping[str, Any], card: Card) -> str | None:
    """In which key the run of a checkpoint's `meta` differs from the card's, with both values; None where it is the same run.

    A key that the checkpoint does not name has the default it had before there was a choice.
    """
    stored: Mapping[str, Any] | None = meta.get("identity")
    if stored is None:
        return None if meta["card"] == card.hash else "its model, batch or seed (release 0.1.0 did not say which)"
    defaults, now = Card().identity, card.identity
    for key in sorted({*stored, *now}):
        if key not in now:
            return f"{key} is {stored[key]!r} there, and this release does not know it"
        was = stored.get(key, defaults[key])
        if was != now[key]:
            return f"{key} was {was!r} and is {now[key]!r}"
    return None


def read_card(path: Path) -> Card:
    """Read and check a run card.

    Raises:
        CardError: the file cannot be read, a key is unknown or a value impossible.
    """
    _validate(path)
    document = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a safe loader, and the card is valid
    known = {f.name for f in dataclasses.fields(Card)}
    return _build(Card, {key: value for key, value in document.items() if key in known})


def _validate(path: Path) -> None:
    done = subprocess.run([*VALIDATE, str(path)], capture_output=True, timeout=VALIDATE_SECONDS, check=False)  # noqa: S603 - our own module
    if done.returncode:
        found = (
            done.stderr.decode(errors="replace").strip() or f"{path}: `runwatch validate` ended with {done.returncode}"
        )
        raise CardError(found)


class _Loader(yaml.SafeLoader):
    """Reads 5e10 as a number, as YAML 1.2 and the card's validator do."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _build(kind: Any, values: dict[str, Any]) -> Any:
    """Make the dataclass `kind` of a valid mapping, recursively."""
    hints = typing.get_type_hints(kind)
    return kind(**{key: _converted(hints[key], value) for key, value in values.items()})


def _converted(hint: Any, value: Any) -> Any:
    """A valid value as its annotation has it: YAML has integers where a float is meant, and lists for tuples."""
    if isinstance(hint, types.UnionType):
        kind = next(one for one in typing.get_args(hint) if one is not types.NoneType)
        return None if value is None else _converted(kind, value)
    if dataclasses.is_dataclass(hint):
        return _build(hint, value)
    if typing.get_origin(hint) is dict:
        return {str(name): float(share) for name, share in value.items()}
    if typing.get_origin(hint) is tuple:
        return tuple(value)
    return hint(value) if hint in (int, float) else value
