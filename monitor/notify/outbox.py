"""What is to be told, kept until it is: claim, send, retry with backoff and deadline, record.

A message is written in the transaction of the tick that made it. It goes out at least once: where a daemon was killed
between sending and recording, the next one sends it again under the same key, and receivers tell the two apart by it.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sql

from runwatch.monitor.notify import KEEP_RESOLVED_SECONDS, Kind, Message, Notifier, SendError
from runwatch.monitor.store.schema import OUTBOX, REMEMBERED
from runwatch.monitor.store.store import Store, Transaction

log = logging.getLogger(__name__)

CLAIM_SECONDS = 60.0
"""A claimed message that was not recorded is sent again after this long."""
MOST_BACKOFF_SECONDS = 300.0
DEADLINES: Mapping[str, float] = {"deadman": 120.0, "digest": 3600.0}
"""Seconds after which a message is given up; a day for what is not named."""
DAY_SECONDS = 86_400.0
OUTDATES: Mapping[Kind, tuple[Kind, ...]] = {
    "incident_value": ("incident_value",),
    "incident_updated": ("incident_updated", "incident_value"),
    "incident_resolved": ("incident_updated", "incident_value"),
}
"""Kinds of waiting messages that a newer one of the same subject replaces."""
REPEATED: frozenset[Kind] = frozenset({"incident_value", "digest", "deadman"})
"""Kinds that come again and again: of those that were sent only the newest is kept, of dead-man signals only the
newest at all, since an older one says nothing."""

OLD_SECONDS = 600.0
"""A message that has waited this long is a condition of the daemon."""

Standing = dict[str, dict[str, float | None]]


class Outbox:
    """The messages of one run and the notifiers that send them."""

    def __init__(self, store: Store, notifiers: Mapping[str, Notifier], clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self.notifiers = notifiers
        self._clock = clock
        self._sending: set[int] = set()

    def put(self, tx: Transaction, message: Message) -> None:
        """Keep `message` for every notifier that wants its kind; one that is there already stays as it is."""
        for name, notifier in self.notifiers.items():
            if message.kind in notifier.kinds and not self._known(tx, name, message.key):
                self._drop_outdated(tx, name, message)
                tx.connection.execute(sql.insert(OUTBOX).values(**_row(tx.run, name, message)))

    def _known(self, tx: Transaction, notifier: str, key: str) -> bool:
        return bool(tx.connection.scalar(sql.select(OUTBOX.c.id).where(_of(tx, notifier), OUTBOX.c.key == key)))

    def _drop_outdated(self, tx: Transaction, notifier: str, message: Message) -> None:
        """What the message makes needless goes: an update that nobody has tried to send yet, and sent repetitions."""
        ours = sql.and_(_of(tx, notifier), OUTBOX.c.subject == message.subject)
        waits = sql.and_(OUTBOX.c.state == "pending", OUTBOX.c.attempts == 0)
        outdated = sql.and_(waits, OUTBOX.c.kind.in_(OUTDATES.get(message.kind, ())))
        if message.kind in REPEATED:
            over = sql.true() if message.kind == "deadman" else OUTBOX.c.state == "sent"
            outdated = sql.or_(outdated, sql.and_(over, OUTBOX.c.kind == message.kind))
        tx.connection.execute(sql.delete(OUTBOX).where(ours, outdated))

    def take_over(self, tx: Transaction) -> None:
        """What the daemon before this one had begun to send is due at once: it may have died on the way."""
        begun = (OUTBOX.c.run == tx.run, OUTBOX.c.state == "pending", OUTBOX.c.attempts > 0, OUTBOX.c.error.is_(None))
        own = OUTBOX.c.id.in_(self._sending)
        tx.connection.execute(sql.update(OUTBOX).where(*begun, sql.not_(own)).values(due=self._clock()))

    def deliver(self, name: str) -> int:
        """Send everything that is due for one notifier; how many messages went out."""
        sent = 0
        self._refresh(name)
        while (claimed := self._claim(name)) is not None:
            sent += self._send(self.notifiers[name], *claimed)
        return sent

    def _claim(self, name: str) -> tuple[Any, dict[str, Any]] | None:
        """The next due message, and what is remembered of its subject; a subject's messages keep their order."""
        now = self._clock()
        with self.store.transaction() as tx:
            waiting = sql.select(OUTBOX).where(_of(tx, name), OUTBOX.c.state == "pending").order_by(OUTBOX.c.id)
            blocked: set[str] = set()
            for row in tx.connection.execute(waiting).all():
                if row.due > now or row.subject in blocked:
                    blocked.add(row.subject)
                    continue
                claim = sql.update(OUTBOX).where(OUTBOX.c.id == row.id, OUTBOX.c.attempts == row.attempts)
                claim = claim.values(due=now + CLAIM_SECONDS, attempts=row.attempts + 1)
                if tx.connection.execute(claim).rowcount:
                    self._sending.add(row.id)
                    return row, self._remembered(tx, name, row.subject)
        return None

    def _send(self, notifier: Notifier, row: Any, remembered: dict[str, Any]) -> bool:
        now = self._clock()
        if now > row.deadline:
            self._record(row, {"state": "failed", "error": f"given up: {row.error or 'its deadline has passed'}"}, None)
            return False
        message = _message(row, now)
        try:
            kept = notifier.send(message, remembered).remembered
        except SendError as error:
            self._failed(row, str(error), error.retry_after, permanent=error.permanent, remembered=error.remembered)
            return False
        except Exception as error:  # a notifier that breaks must not stop the others
            log.exception("%s raised while it sent %s", notifier.name, row.key)
            self._failed(row, f"{type(error).__name__}: {error}", None, permanent=False, remembered=None)
            return False
        self._record(row, {"state": "sent", "sent": self._clock(), "error": None}, kept)
        return True

    def _failed(
        self, row: Any, error: str, retry_after: float | None, *, permanent: bool, remembered: dict[str, Any] | None
    ) -> None:
        backoff = min(MOST_BACKOFF_SECONDS, 2.0 ** min(row.attempts, 10))
        due = self._clock() + max(backoff, retry_after or 0.0)
        log.warning("%s could not tell %s (try %d): %s", row.notifier, row.key, row.attempts + 1, error)
        update = {"state": "failed" if permanent else "pending", "due": due, "error": error}
        self._record(row, update, remembered)

    def _record(self, row: Any, update: Mapping[str, Any], remembered: dict[str, Any] | None) -> None:
        self._sending.discard(row.id)
        with self.store.transaction() as tx:
            tx.connection.execute(sql.update(OUTBOX).where(OUTBOX.c.id == row.id).values(**update))
            if remembered is not None:
                keys = {"notifier": row.notifier, "subject": row.subject}
                tx.put(REMEMBERED, keys, {"body": json.dumps(remembered)})

    def _remembered(self, tx: Transaction, notifier: str, subject: str) -> dict[str, Any]:
        where = (REMEMBERED.c.run == tx.run, REMEMBERED.c.notifier == notifier, REMEMBERED.c.subject == subject)
        body = tx.connection.scalar(sql.select(REMEMBERED.c.body).where(*where))
        return json.loads(body) if body else {}

    def _refresh(self, name: str) -> None:
        """Send the newest message of every incident again where the medium forgets (Alertmanager)."""
        interval = self.notifiers[name].refresh_seconds
        if interval is None:
            return
        now = self._clock()
        with self.store.transaction() as tx:
            incident = OUTBOX.c.kind.like("incident_%")
            newest = sql.select(sql.func.max(OUTBOX.c.id)).where(_of(tx, name), incident).group_by(OUTBOX.c.subject)
            lives = sql.or_(OUTBOX.c.kind != "incident_resolved", OUTBOX.c.created > now - KEEP_RESOLVED_SECONDS)
            due = sql.and_(OUTBOX.c.state == "sent", OUTBOX.c.sent < now - interval, OUTBOX.c.id.in_(newest), lives)
            again = {"state": "pending", "due": now, "attempts": 0, "deadline": now + 4 * interval}
            tx.connection.execute(sql.update(OUTBOX).where(due).values(**again))

    def standing(self) -> Standing:
        """By notifier: how many messages wait, how many were given up, and when the oldest waiting one was written."""
        found: Standing = {name: {"pending": 0, "failed": 0, "oldest": None} for name in self.notifiers}
        columns = (OUTBOX.c.notifier, OUTBOX.c.state, sql.func.count(), sql.func.min(OUTBOX.c.created))
        query = sql.select(*columns).group_by(OUTBOX.c.notifier, OUTBOX.c.state)
        with self.store.transaction() as tx:
            rows = tx.connection.execute(query.where(OUTBOX.c.run == tx.run, OUTBOX.c.state != "sent")).all()
        for notifier, state, count, oldest in rows:
            if notifier in found:
                found[notifier] |= {state: count} | ({"oldest": oldest} if state == "pending" else {})
        return found


def waiting(standing: Standing, now: float) -> str | None:
    """That messages have waited too long, or None."""
    late = [name for name, one in standing.items() if one["oldest"] is not None and now - one["oldest"] > OLD_SECONDS]
    return (
        f"messages to {', '.join(sorted(late))} have waited for over {OLD_SECONDS / 60:.0f} minutes" if late else None
    )


def _of(tx: Transaction, notifier: str) -> sql.ColumnElement[bool]:
    return sql.and_(OUTBOX.c.run == tx.run, OUTBOX.c.notifier == notifier)


def _row(run: str, notifier: str, message: Message) -> dict[str, Any]:
    return {
        "run": run,
        "notifier": notifier,
        "key": message.key,
        "kind": message.kind,
        "subject": message.subject,
        "created": message.time,
        "deadline": message.time + DEADLINES.get(message.kind, DAY_SECONDS),
        "due": message.time,
        "attempts": 0,
        "state": "pending",
        "payload": json.dumps(message.payload),
        "text": message.text,
    }


def _message(row: Any, now: float) -> Message:
    payload = json.loads(row.payload)
    return Message(row.key, row.kind, row.subject, row.run, now, payload, row.text, row.attempts + 1)
