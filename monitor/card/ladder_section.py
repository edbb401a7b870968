"""The registered curve in the run card: written once before launch, changed only by a logged amendment, and proof against tampering."""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from runwatch.monitor.card.ladder_fit import LadderError, LadderFit, fit_rungs, prediction_of
from runwatch.monitor.card.run_card import Card, Ladder, Model, load_card


@dataclass(frozen=True)
class Change:
    """Who amends a registered curve, and why."""

    by: str
    reason: str


def active_parameters(model: Model) -> int:
    """Parameters that work on one token, as the trainer's model counts them: K of E experts, and no embedding table."""
    width, latent = model.width, model.latent_width
    queries, keys = model.heads * model.head_width, model.kv_heads * model.head_width
    attention = 2 * width * queries + 2 * width * keys
    shared = 3 * model.shared_experts * width * model.shared_expert_width
    routed = 3 * model.experts_per_token * latent * model.expert_width
    mixture = width * model.experts + 2 * width * latent + shared + routed
    norms = 2 * width
    return model.layers * (attention + mixture + norms) + width * model.vocabulary_size + width


def asked(card: Card) -> tuple[str, ...]:
    """What a fit is asked about this run: its size, and budget, end of warm-up and start of decay in tokens; its seed."""
    budget, rate = card.plan.token_budget, card.plan.learning_rate
    schedule = (budget, round(budget * rate.warmup_fraction), round(budget * (1 - rate.decay_fraction)))
    return ("--predict", *map(str, (active_parameters(card.model), *schedule)), "--seed", str(card.seed))


def launched(card_path: Path) -> bool:
    """Whether telemetry lies beside the card: the run has begun."""
    return any((card_path.parent / "telemetry").glob("*.jsonl"))


def register(card_path: Path, rungs_path: Path, change: Change | None = None) -> dict[str, Any]:
    """Write the predicted curve with its band into the run card, and return the section; see `prepare` and `write`."""
    section, _ = prepare(card_path, rungs_path, change)
    write(card_path, section)
    return section


def prepare(card_path: Path, rungs_path: Path, change: Change | None = None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The `ladder` section to be written, and what to know before its fit is trusted. Takes seconds.

    Raises:
        LadderError: the card has a registered curve, or its run has begun, and no `change` is given; the rungs cannot be fitted.
        CardError: the card has mistakes.
    """
    card = load_card(card_path)
    if change is None:
        _refuse_changes(card_path, card)
    fitted = fit_rungs(rungs_path, *asked(card))
    return section_of(fitted, rungs_path, card, change), fitted.warnings


def write(card_path: Path, section: Mapping[str, Any]) -> None:
    """Put the section into the card; every other byte of the card stays, comments too.

    Raises:
        LadderError: the card cannot be edited in place.
    """
    old = card_path.read_bytes().decode("utf-8")
    _replace(card_path, spliced(old, section, str(card_path)))


def _refuse_changes(card_path: Path, card: Card) -> None:
    remedy = "amend it with --amend --by NAME --reason TEXT"
    if launched(card_path):
        raise LadderError(f"{card_path}: the run has begun; a curve that is registered now is an amendment: {remedy}")
    if card.ladder is not None:
        raise LadderError(f"{card_path} holds a curve registered on {card.ladder.registered:%Y-%m-%d %H:%M}; {remedy}")


def section_of(fitted: LadderFit, rungs_path: Path, card: Card, change: Change | None = None) -> dict[str, Any]:
    """The card's `ladder` section: date, hash, the rungs and what they predict, and every amendment so far.

    Raises:
        LadderError: the fit gives no curve that a card may hold.
    """
    now = datetime.now(UTC).replace(microsecond=0)
    section: dict[str, Any] = {
        "registered": now,
        "rungs": [
            {"name": rung.name, "parameters": rung.parameters, "tokens": rung.tokens, "loss": round(rung.loss, 5)}
            for rung in fitted.rungs
        ],
        **prediction_of(fitted),
    }
    before = [] if card.ladder is None else [one.model_dump() for one in card.ladder.amendments]
    if change is not None:
        was = "nothing was registered" if card.ladder is None else card.ladder.hash
        before.append({"time": now, "by": change.by, "reason": change.reason, "was": was})
    if before:
        section["amendments"] = before
    section = {"registered": now, "hash": section_hash(section, rungs_path), **section}
    try:
        Ladder.model_validate(section)
    except ValidationError as error:
        told = "; ".join(str(one["msg"]) for one in error.errors())
        raise LadderError(f"{rungs_path}: the fit gives no usable curve: {told}") from error
    return section


def section_hash(section: Mapping[str, Any], rungs_path: Path) -> str:
    """SHA-256 over the rungs file and everything in the section but the hash."""
    body = {key: value for key, value in section.items() if key != "hash"}
    text = json.dumps(body, sort_keys=True, default=_instant)
    return f"sha256:{hashlib.sha256(rungs_path.read_bytes() + text.encode()).hexdigest()}"


def _instant(value: datetime) -> str:
    """A time as text, however the card writes it; YAML gives times with a zone, or in UTC without one."""
    return (value if value.tzinfo else value.replace(tzinfo=UTC)).astimezone(UTC).isoformat()


def verify(card_path: Path, rungs_path: Path) -> bool:
    """Whether the registered section and the rungs it came from are what was written.

    Raises:
        LadderError: the card holds no registered curve, or a file cannot be read.
    """
    try:
        section = (yaml.safe_load(card_path.read_text(encoding="utf-8")) or {}).get("ladder")
        if not isinstance(section, dict):
            raise LadderError(f"{card_path} holds no registered curve; write one with `runwatch ladder register`")
        return section.get("hash") == section_hash(section, rungs_path)
    except OSError as error:
        raise LadderError(f"{error.filename}: {error.strerror}") from error
    except (yaml.YAMLError, TypeError, UnicodeDecodeError):
        return False


class _Plain(yaml.SafeDumper):
    """Writes a value that comes twice out twice."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the signature is PyYAML's
        """All of them."""
        return True


def spliced(text: str, section: Mapping[str, Any], name: str) -> str:
    """A card's text with its `ladder` section replaced, or added at its end.

    Raises:
        LadderError: the card is not written as a block of keys, so that a section cannot be replaced in place.
    """
    written = yaml.dump({"ladder": dict(section)}, Dumper=_Plain, sort_keys=False, default_flow_style=None, width=140)
    ending = "\r\n" if "\r\n" in text else "\n"
    start, end = _section_span(text)
    before = text[:start] if not start or text[start - 1] == "\n" else text[:start] + ending
    result = before + written.replace("\n", ending) + text[end:]
    if _others(result) != _others(text):
        raise LadderError(
            f"{name}: write the card as a block, one key a line, so that `ladder` can be written in place"
        )
    return result


def _section_span(text: str) -> tuple[int, int]:
    """From the key `ladder` to the end of the last line of its value; the end of the text where there is none."""
    root = yaml.compose(text)
    for key, value in root.value if isinstance(root, yaml.MappingNode) and not root.flow_style else ():
        if key.value == "ladder":
            line_end = text.find("\n", max(_end(value) - 1, key.end_mark.index))
            return key.start_mark.index, len(text) if line_end < 0 else line_end + 1
    return len(text), len(text)


def _end(node: yaml.Node) -> int:
    """Where a value's own text ends; a block's own mark lies behind the comments that follow it."""
    if isinstance(node, yaml.MappingNode | yaml.SequenceNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _others(text: str) -> Any:
    """Everything in a card but the ladder; the text itself where it is no card, which equals nothing else."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return {key: value for key, value in values.items() if key != "ladder"} if isinstance(values, dict) else text


def _replace(path: Path, text: str) -> None:
    """Write through a file beside it: a reader sees the old card or the new one."""
    path = path.resolve()
    with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        written = Path(file.name)
        try:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
            written.chmod(path.stat().st_mode & 0o777)
            written.replace(path)
        finally:
            written.unlink(missing_ok=True)
