"""The trainer's own small reader of the run card: the sections model, hardware, plan, seed and faults, as frozen dataclasses.

The daemon validates the whole card; the trainer reads only what it needs and shares no code with it. A mistake raises
`CardError`, whose message names the file, the key and the remedy.
"""

import dataclasses
import difflib
import hashlib
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

VOCABULARY = 256
"""Text is read as bytes, so a vocabulary below this cannot hold it."""


class CardError(ValueError):
    """A run card that cannot be trained; the message names file, key and remedy."""


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
    def hash(self) -> str:
        """Hash of what determines the losses: a checkpoint of another hash is another run."""
        parts: tuple[Any, ...] = (self.model, self.plan.context_length, self.plan.sequences_per_step, self.seed)
        if self.plan.lm_head_optimizer != "adamh":
            parts = (*parts, self.plan.lm_head_optimizer)
        return "sha256:" + hashlib.sha256(repr(parts).encode()).hexdigest()


def read_card(path: Path) -> Card:
    """Read and check a run card.

    Raises:
        CardError: the file cannot be read, a key is unknown or a value impossible.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise CardError(f"{path}: cannot read the run card: {error.strerror}; give one with --card") from error
    except yaml.YAMLError as error:
        raise CardError(f"{path}: not YAML: {error}") from error
    if not isinstance(document, dict):
        raise CardError(f"{path}: a run card is a mapping with the keys model, hardware, plan and seed")
    known = {f.name for f in dataclasses.fields(Card)}
    card = _build(Card, {k: v for k, v in document.items() if k in known}, str(path), "")
    _check(card, path)
    return card


def _build(kind: Any, values: Any, path: str, at: str) -> Any:
    """Make the dataclass `kind` of a mapping, recursively; `at` is the dotted key for error messages."""
    if not isinstance(values, dict):
        raise CardError(f"{path}: {at} must be a mapping, not {values!r}")
    hints = typing.get_type_hints(kind)
    made = {}
    for key, value in values.items():
        here = f"{at}.{key}" if at else str(key)
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1)
            raise CardError(f"{path}: unknown key {here}" + (f"; did you mean {near[0]}?" if near else ""))
        made[key] = _convert(hints[key], value, path, here)
    return kind(**made)


def _convert(hint: Any, value: Any, path: str, at: str) -> Any:
    """Check one value against its annotation: a nested dataclass, a number, a list of fault strings or shares."""
    if hint is Any:
        return value
    if isinstance(hint, types.UnionType):
        options = [h for h in typing.get_args(hint) if h is not types.NoneType]
        return None if value is None else _convert(options[0], value, path, at)
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, path, at)
    origin = typing.get_origin(hint)
    if origin is dict:
        return _shares(value, path, at)
    if origin is tuple:
        return tuple(str(v) for v in value or ())
    return _choice(typing.get_args(hint), value, path, at) if origin is Literal else _number(hint, value, path, at)


def _choice(known: tuple[str, ...], value: Any, path: str, at: str) -> str:
    if value not in known:
        raise CardError(f"{path}: {at} must be {' or '.join(known)}, not {value!r}")
    return str(value)


def _number(hint: Any, value: Any, path: str, at: str) -> int | float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (hint is int and value != int(value)):
        hint_text = " (YAML reads 5e10 as text: write 5.0e+10)" if isinstance(value, str) else ""
        raise CardError(f"{path}: {at} must be {hint.__name__}, not {value!r}{hint_text}")
    if not math.isfinite(value) or value < 0:
        raise CardError(f"{path}: {at} must be finite and not negative, not {value!r}")
    return hint(value)


def _shares(value: Any, path: str, at: str) -> dict[str, float]:
    if not isinstance(value, dict) or not value:
        raise CardError(f"{path}: {at} must map sources to shares, such as {{code: 0.5, docs: 0.5}}")
    shares = {str(k): float(_number(float, v, path, f"{at}.{k}")) for k, v in value.items()}
    if abs(sum(shares.values()) - 1) > 1e-6:
        raise CardError(f"{path}: the shares of {at} sum to {sum(shares.values()):g}; they must sum to 1")
    return shares


def _check(card: Card, path: Path) -> None:
    """Raise `CardError` for the first rule between values that the card breaks."""
    m, h, p = card.model, card.hardware, card.plan
    rules = [
        (
            m.vocabulary_size >= VOCABULARY,
            f"model.vocabulary_size must be at least {VOCABULARY}: text is read as bytes",
        ),
        (m.layers >= 1 and m.global_every >= 1, "model.layers and model.global_every must be at least 1"),
        (m.kv_heads >= 1 and m.heads % max(m.kv_heads, 1) == 0, "model.heads must be a multiple of model.kv_heads"),
        (m.head_width % 4 == 0, "model.head_width must be a multiple of 4: half of it is rotated in pairs"),
        (1 <= m.experts_per_token <= m.experts, "model.experts_per_token must lie in 1 … model.experts"),
        (m.capacity_factor > 0, "model.capacity_factor must be above 0"),
        (h.devices >= 1 and h.waves >= 1, "hardware.devices and hardware.waves must be at least 1"),
        (p.tokens_per_step > 0, "plan.context_length and plan.sequences_per_step must be above 0"),
        (p.token_budget >= p.tokens_per_step, "plan.token_budget must hold at least one step"),
        (
            p.checkpoint.every_steps >= 1 and p.checkpoint.keep >= 1,
            "plan.checkpoint needs every_steps and keep of at least 1",
        ),
        (p.eval.every_steps >= 1 and p.eval.sequences >= 1, "plan.eval needs every_steps and sequences of at least 1"),
    ]
    for holds, complaint in rules:
        if not holds:
            raise CardError(f"{path}: {complaint}")
