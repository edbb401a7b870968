"""What is to be sent, kept until it is: claim, send, retry with backoff, record.

A message is written in the transaction of the tick that made it. It goes out at least once: where a daemon was killed
between sending and recording, the next one sends it again under the same key, and receivers tell the two apart by it.

A page is state, not an event: whatever a receiver answered (an outage of hours, a 401 until somebody renews a token), what
is firing is tried again until it is taken. Only what says nothing any more after a while (`DEADLINES`) is given up.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import sqlalchemy as sql

from runwatch.monitor.notify import KEEP_RESOLVED_SECONDS, Kind, Message, Notifier, SendError
from runwatch.monitor.store.schema import OUTBOX, REMEMBERED
from runwatch.monitor.store.store import Store, Transaction

log = logging.getLogger(__name__)

WAITS = OUTBOX.c.state.in_(("pending", "refused"))
"""`refused` waits too: the receiver said that it will never take it (4xx), which a person may mend."""
MOST_RETRY_AFTER_SECONDS = 600.0
"""A receiver may ask for a pause, not for silence."""
CLAIM_SECONDS = 60.0
"""A claimed message that was not recorded is sent again after this long."""
MOST_BACKOFF_SECONDS = 60.0
"""As Alertmanager's clients re-send once a minute: a receiver that is back is told within a minute."""
DEADLINES: Mapping[str, float] = {"deadman": 120.0, "digest": 3600.0, "directive": 86_400.0}
"""Seconds after which a message is given up; one that is not named is for people, and is kept for `KEPT_SECONDS`."""
KEPT_SECONDS = 30 * 86_400.0
"""How long a receiver may be away before pages that are over by then are dropped, and how long sent ones are kept."""
OUTDATES: Mapping[Kind, tuple[Kind, ...]] = {
    "incident_value": ("incident_value",),
    "incident_updated": ("incident_updated", "incident_value"),
    "incident_resolved": ("incident_updated", "incident_value"),
}
"""Kinds of waiting messages that a newer one of the same subject replaces."""
REPEATED: frozenset[Kind] = frozenset({"incident_value", "digest", "deadman"})
"""Kinds that come again and again: of those that were sent only the newest is kept, of dead-man signals only the
newest at all, since an older one says nothing."""

FAILED_TRIES = 2
"""So many refused tries in a row are a condition of the daemon; one may be a restart of the receiver."""


class Standing(TypedDict):
    """How one notifier stands: messages that wait, that wait although they were tried, that were given up."""

    pending: int
    failing: int
    failed: int
    oldest: float | None  # Unix seconds: when the oldest waiting message was written
    error: str | None  # the newest answer to one that is failing


class Outbox:
    """The messages of one run and the notifiers that send them."""

    def __init__(self, store: Store, notifiers: Mapping[str, Notifier], clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self.notifiers = notifiers
        self._clock = clock
        self._sending: dict[str, tuple[int, float]] = {}
        """By notifier: the row that it sends now, and since when."""

    def put(self, tx: Transaction, message: Message) -> None:
        """Keep `message` for every notifier that wants its kind; one that is there already stays as it is."""
        for name, notifier in self.notifiers.items():
            if message.kind in notifier.kinds and not self._known(tx, name, message.key):
                self._drop_outdated(tx, name, message)
                tx.connection.execute(sql.insert(OUTBOX).values(**_row(tx.run, name, message)))

    def _known(self, tx: Transaction, notifier: str, key: str) -> bool:
        return bool(tx.connection.scalar(sql.select(OUTBOX.c.id).where(_of(tx, notifier), OUTBOX.c.key == key)))

    def _drop_outdated(self, tx: Transaction, notifier: str, message: Message) -> None:
        """What the message makes needless goes: an update that has not been taken yet, and sent repetitions."""
        ours = sql.and_(_of(tx, notifier), OUTBOX.c.subject == message.subject)
        outdated = sql.and_(WAITS, OUTBOX.c.kind.in_(OUTDATES.get(message.kind, ())))
        if message.kind in REPEATED:
            over = sql.true() if message.kind == "deadman" else OUTBOX.c.state == "sent"
            outdated = sql.or_(outdated, sql.and_(over, OUTBOX.c.kind == message.kind))
        tx.connection.execute(sql.delete(OUTBOX).where(ours, outdated))

    def take_over(self, tx: Transaction) -> None:
        """What the daemon before this one had begun to send is due at once: it may have died on the way."""
        begun = (OUTBOX.c.run == tx.run, OUTBOX.c.state == "pending", OUTBOX.c.attempts > 0, OUTBOX.c.error.is_(None))
        own = OUTBOX.c.id.in_([row for row, _ in self._sending.values()])
        tx.connection.execute(sql.update(OUTBOX).where(*begun, sql.not_(own)).values(due=self._clock()))

    def deliver(self, name: str, stopped: Callable[[], bool] = lambda: False) -> int:
        """Send everything that is due for one notifier, until `stopped`; how many messages went out."""
        sent = 0
        self._refresh(name)
        while not stopped() and (claimed := self._claim(name)) is not None:
            sent += self._send(self.notifiers[name], *claimed)
        return sent

    def stuck(self, seconds: float) -> list[str]:
        """The notifiers that have been sending one message for longer than `seconds`."""
        since = self._clock() - seconds
        return sorted(name for name, (_, began) in list(self._sending.items()) if began < since)

    def _claim(self, name: str) -> tuple[Any, dict[str, Any]] | None:
        """The next due message, and what is remembered of its subject; a subject's messages keep their order."""
        now = self._clock()
        with self.store.transaction() as tx:
            columns = (OUTBOX.c.id, OUTBOX.c.subject, OUTBOX.c.due, OUTBOX.c.state)
            waiting = sql.select(*columns).where(_of(tx, name), WAITS).order_by(OUTBOX.c.id)
            blocked: set[str] = set()
            for row in tx.connection.execute(waiting):
                if row.due <= now and row.subject not in blocked:
                    return self._claimed(tx, name, row.id, now)
                if row.state != "refused":  # one that is refused for itself does not hold up those after it
                    blocked.add(row.subject)
        return None

    def _claimed(self, tx: Transaction, name: str, number: int, now: float) -> tuple[Any, dict[str, Any]]:
        row = tx.connection.execute(sql.select(OUTBOX).where(OUTBOX.c.id == number)).one()
        claim = sql.update(OUTBOX).where(OUTBOX.c.id == number)
        tx.connection.execute(claim.values(due=now + CLAIM_SECONDS, attempts=row.attempts + 1))
        self._sending[name] = (number, now)
        return row, self._remembered(tx, name, row.subject)

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
        backoff = MOST_BACKOFF_SECONDS if permanent else min(MOST_BACKOFF_SECONDS, 2.0 ** min(row.attempts, 10))
        due = self._clock() + max(backoff, min(retry_after or 0.0, MOST_RETRY_AFTER_SECONDS))
        tries = row.attempts + 1
        if tries & (tries - 1) == 0:  # the 1st, 2nd, 4th, 8th ...: an outage of a night is a dozen lines
            log.warning("%s did not take %s (try %d): %s", row.notifier, row.key, tries, error)
        state = "pending" if not permanent else "failed" if row.kind in DEADLINES else "refused"
        self._record(row, {"state": state, "due": due, "error": error}, remembered)

    def _record(self, row: Any, update: Mapping[str, Any], remembered: dict[str, Any] | None) -> None:
        self._sending.pop(row.notifier, None)
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
            again = {"state": "pending", "due": now, "attempts": 0, "deadline": now + KEPT_SECONDS}
            tx.connection.execute(sql.update(OUTBOX).where(due).values(**again))

    def prune(self) -> int:
        """Drop what was sent or given up long ago and is no incident's newest word; how many rows went."""
        with self.store.transaction() as tx:
            newest = sql.select(sql.func.max(OUTBOX.c.id)).where(OUTBOX.c.run == tx.run)
            newest = newest.group_by(OUTBOX.c.notifier, OUTBOX.c.subject)
            old = sql.and_(OUTBOX.c.run == tx.run, OUTBOX.c.created < self._clock() - KEPT_SECONDS, sql.not_(WAITS))
            fires = sql.and_(OUTBOX.c.id.in_(newest), OUTBOX.c.kind.in_(("incident_opened", "incident_updated")))
            return tx.connection.execute(sql.delete(OUTBOX).where(old, sql.not_(fires))).rowcount

    def standing(self) -> dict[str, Standing]:
        """How each notifier stands."""
        found: dict[str, Standing] = {name: _nothing_waits() for name in self.notifiers}
        columns = (OUTBOX.c.notifier, OUTBOX.c.state, OUTBOX.c.attempts, OUTBOX.c.created, OUTBOX.c.error)
        with self.store.transaction() as tx:
            query = sql.select(*columns).where(OUTBOX.c.run == tx.run, OUTBOX.c.state != "sent")
            rows = tx.connection.execute(query.order_by(OUTBOX.c.id)).all()
        for row in rows:
            if row.notifier in found:
                _count(found[row.notifier], row)
        return found


def _nothing_waits() -> Standing:
    return {"pending": 0, "failing": 0, "failed": 0, "oldest": None, "error": None}


def _count(standing: Standing, row: Any) -> None:
    if row.state == "failed":
        standing["failed"] += 1
        return
    standing["pending"] += 1
    standing["oldest"] = min(row.created, standing["oldest"] or row.created)
    if row.state == "refused" or (row.error is not None and row.attempts >= FAILED_TRIES):
        standing["failing"] += 1
        standing["error"] = row.error


def unsent(name: str, standing: Standing) -> str | None:
    """That a notifier does not take what it is sent, or None."""
    if not standing["failing"]:
        return None
    count = standing["failing"]
    messages = "1 message waits" if count == 1 else f"{count:,} messages wait"
    return f"{name} takes no messages ({standing['error']}); {messages} and will be sent again until taken"


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
        "deadline": message.time + DEADLINES.get(message.kind, KEPT_SECONDS),
        "due": message.time,
        "attempts": 0,
        "state": "pending",
        "payload": json.dumps(message.payload),
        "text": message.text,
    }


def _message(row: Any, now: float) -> Message:
    payload = json.loads(row.payload)
    return Message(row.key, row.kind, row.subject, row.run, now, payload, row.text, row.attempts + 1)
