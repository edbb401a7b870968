"""Changes of the run card after launch: noticed, listed key by key, and signed with an author and a reason.

A changed card is in force at once (somebody may be stopping a plan), but it is *unsigned*, and the daemon reports that, until
`runwatch amend RUN_DIR --by NAME --reason TEXT` signs it. `runwatch ladder register --amend` puts author and reason into the card itself.
The audit log keeps every text of the card, every change, and who signed what.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sql
import yaml

from runwatch.monitor.card.rulebook import CardFile
from runwatch.monitor.store.schema import AUDIT
from runwatch.monitor.store.store import Store, Transaction

SEEN, SIGNED = "card", "card_signed"
"""Settings of the store: the hash of the card as it was last read, and as it was last signed (or launched with)."""
SHOWN_KEYS, SHOWN_LETTERS = 8, 60

KeyChange = dict[str, Any]
"""`key` (dotted), `before` and `after`; None where the key was or is not there."""


class AmendError(ValueError):
    """There is nothing to sign, or it cannot be signed; the text says why."""


def key_changes(before: str, after: str) -> list[KeyChange]:
    """The keys whose values differ between two texts of a card, in the order of their names."""
    old, new = dict(_leaves(yaml.safe_load(before), "")), dict(_leaves(yaml.safe_load(after), ""))
    keys = sorted(key for key in {*old, *new} if _text_of(old, key) != _text_of(new, key))
    return [{"key": key, "before": old.get(key), "after": new.get(key)} for key in keys]


def _text_of(values: Mapping[str, Any], key: str) -> str:
    """A value as JSON, which tells 1 from true; nothing where there is none."""
    return json.dumps(values[key]) if key in values else ""


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Every value by its dotted key; an empty section is a value, and so is a list of plain values."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{key}[{number}]")
    else:
        yield key, json.loads(json.dumps(value, default=str))


def described(changes: Sequence[KeyChange]) -> str:
    """The changes in one line."""
    told = [f"{one['key']} {_short(one['before'])} → {_short(one['after'])}" for one in changes[:SHOWN_KEYS]]
    more = len(changes) - SHOWN_KEYS
    return "; ".join(told) + (f"; and {more} more keys" if more > 0 else "")


def _short(value: Any) -> str:
    text = "nothing" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_LETTERS else f"{text[: SHOWN_LETTERS - 1]}…"


def notice(tx: Transaction, card: CardFile, now: float, *, launched: bool) -> None:
    """Write down that the card was read for the first time, or that it has changed, and what of it."""
    known = tx.setting(SEEN, "")
    if not card.hash or card.hash == known:
        return
    signed = tx.setting(SIGNED, known)
    changes = key_changes(_text(tx, signed), card.text) if signed else []
    author = _own_author(changes, card)
    sentence = f"The run card was {_event(known, signed, card.hash, changes, launched=launched)} ({card.hash[:19]})"
    told = f"{sentence}: {described(changes)}." if changes and card.hash != signed else f"{sentence}."
    tx.audit("card", {"sentence": told, "hash": card.hash, "text": card.text, "changes": changes}, now)
    tx.put_setting(SEEN, card.hash)
    if not (known and launched and changes):
        tx.put_setting(SIGNED, card.hash)
    elif author is not None:
        _sign(tx, card, signed, changes, author, now)
    else:
        tx.put_setting(SIGNED, signed)


def _event(known: str, signed: str, new: str, changes: Sequence[KeyChange], *, launched: bool) -> str:
    if not known:
        return "read"
    if new == signed:
        return "changed back to the signed one"
    if not changes:
        return "rewritten; no key has changed"
    return "amended" if launched else "changed before launch"


def _own_author(changes: Sequence[KeyChange], card: CardFile) -> tuple[str, str] | None:
    """Author and reason that `runwatch ladder register --amend` has put into the card, where nothing else has changed."""
    ladder = card.card.ladder if card.card else None
    if ladder is None or not all(str(one["key"]).startswith("ladder") for one in changes):
        return None
    if not any(str(one["key"]).startswith("ladder.amendments") for one in changes):
        return None
    newest = ladder.amendments[-1] if ladder.amendments else None
    return (newest.by, newest.reason) if newest else None


def unsigned(tx: Transaction, run_dir: Path) -> str | None:
    """That a change of the card has no author yet, or None."""
    seen, signed = tx.setting(SEEN, ""), tx.setting(SIGNED, "")
    if not signed or seen == signed:
        return None
    told = described(key_changes(_text(tx, signed), _text(tx, seen)))
    remedy = f"`runwatch amend {run_dir} --by NAME --reason TEXT`"
    return f"the run card was changed after launch without an author and a reason ({told}); sign it with {remedy}"


def _text(tx: Transaction, wanted: str) -> str:
    """The card's text with this hash, from the audit log; empty where it is not there."""
    cards = (
        sql.select(AUDIT.c.payload).where(AUDIT.c.run == tx.run, AUDIT.c.kind == "card").order_by(AUDIT.c.seq.desc())
    )
    for payload in tx.connection.scalars(cards):
        body: Mapping[str, Any] = json.loads(payload)
        if body["hash"] == wanted:
            return str(body["text"])
    return ""


def _sign(
    tx: Transaction, card: CardFile, was: str, changes: Sequence[KeyChange], author: tuple[str, str], now: float
) -> str:
    by, reason = author
    sentence = f"{by} amended the run card: {reason} ({described(changes)})."
    body = {"sentence": sentence, "by": by, "reason": reason, "was": was, "hash": card.hash, "changes": changes}
    tx.audit("amendment", body, now)
    tx.put_setting(SIGNED, card.hash)
    return sentence


def amend(store: Store, run_dir: Path, by: str, reason: str) -> str:
    """Sign what has changed in the card since it was last signed; the sentence that says so.

    Raises:
        AmendError: the card has mistakes, or nothing has changed.
    """
    card = CardFile(run_dir)
    card.refresh()
    if card.problem is not None:
        raise AmendError(card.problem)
    now = time.time()
    with store.transaction() as tx:
        if not tx.setting(SEEN, ""):
            raise AmendError("no daemon has read this run's card yet, so there is nothing to compare it with")
        notice(tx, card, now, launched=any((run_dir / "telemetry").glob("*.jsonl")))
        signed = tx.setting(SIGNED, "")
        if card.hash == signed:
            raise AmendError(
                "there is nothing to sign: edit run.yaml first; the card is as it was launched or last signed"
            )
        return _sign(tx, card, signed, key_changes(_text(tx, signed), card.text), (by, reason), now)
