"""One run under watch: `tick` reads, judges, decides, stores, and then acts, in this order.

A tick reads the new rows, judges them with every check, and decides on alerts, incidents, nodes and plans; all of it goes
to the store in one transaction. Only then are directives written and messages sent, from what is stored.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runwatch.checks import all_checks
from runwatch.monitor.act.delivery import Delivery
from runwatch.monitor.act.directives import receipts_of, requests_of, write_json, write_requests
from runwatch.monitor.card.rulebook import CardFile, answered, rulebook
from runwatch.monitor.daemon import amendments
from runwatch.monitor.daemon.conditions import Conditions
from runwatch.monitor.daemon.recovery import take_over_control, take_over_log
from runwatch.monitor.daemon.settings import DaemonConfig
from runwatch.monitor.engine.conclude import conclude
from runwatch.monitor.engine.evaluate import LiveJudge
from runwatch.monitor.engine.history import SPARKLINE, RunHistory
from runwatch.monitor.engine.tick import Tick
from runwatch.monitor.notify.outbox import Outbox, Standing, unsent
from runwatch.monitor.read.run_directory import RunReader
from runwatch.monitor.show.build_status import build_status, curve_at
from runwatch.monitor.store import audit
from runwatch.monitor.store.incident import Incident
from runwatch.monitor.store.store import RunState, Store, Transaction
from runwatch.rules import Mark

if TYPE_CHECKING:
    from runwatch.monitor.show.status import Status

log = logging.getLogger(__name__)

LEASE_SECONDS = 30.0
STUCK_SECONDS = 90.0
"""Longer than any receiver's own deadline: W&B's, the longest, is 40 s."""
STATUS_INCIDENTS = 100
STATUS_AUDIT = 50


class Watch:
    """A run directory, what is known of its run, and how far it has been judged."""

    def __init__(self, run_dir: Path, store: Store, outbox: Outbox, config: DaemonConfig, holder: str) -> None:
        self.run_dir, self.store, self.outbox, self.config, self.holder = run_dir, store, outbox, config, holder
        self.conditions = Conditions()
        self.status: Status | None = None
        self.last_tick: Tick | None = None
        """The newest one that was stored."""
        self.check_errors: Counter[str] = Counter()
        self.acting = False
        """Whether this daemon holds the lease."""
        self.standing_by = False
        """Whether another daemon holds it."""
        self.unpaged = False
        """Whether a receiver does not take what it is sent."""
        self._card = CardFile(run_dir)
        self._receipts, self._requests = receipts_of(run_dir), requests_of(run_dir)
        self._log_settled = False
        self.delivery = Delivery(run_dir, store, outbox, lambda: self._card.card, lambda: self.links)
        self._mirror = run_dir / ".runwatch" / "audit.jsonl"
        self._started = time.time()
        with store.transaction() as tx:
            self._state = tx.load()
        self._open(self._state.cursor)

    @property
    def run(self) -> str:
        """The run's name."""
        return self.store.run

    @property
    def links(self) -> dict[str, str]:
        """Where people read on: the status page and what the card names."""
        card = self._card.card
        declared = {name: url for name, url in card.run.links.items() if url} if card else {}
        return {"status": self.config.page, **declared}

    def expected_loss(self) -> dict[str, float]:
        """The registered loss and its band at the tokens of the newest record; empty outside the curve."""
        card, tokens = self._card.card, self.judge.context.tokens
        if card is None or card.ladder is None or not len(tokens):
            return {}
        return curve_at(card.ladder.curve, float(tokens[-1]))

    def _open(self, cursor: Mapping[str, Any]) -> None:
        """Begin, or begin again, at a cursor: everything before it is context."""
        self._card.refresh()
        self.reader = RunReader(self.run_dir, cursor)
        context = self.reader.context
        self.judge = LiveJudge(all_checks(), context, self.reader.history)
        self.records = int(context.trained.sum())
        book = rulebook(self._card.card, self._state.executions, self._state.declarations)
        self.history = RunHistory()
        self.history.add(context, self.judge.again(SPARKLINE, book.checks, book.changes))
        self.judge.accept(context.take(slice(0, 0)), book.checks, book.changes)

    def tick(self, now: float) -> str:
        """Do everything that is due at `now` (Unix seconds); the sentence that says what it was.

        Raises:
            Exception: something could not be read or stored; nothing has been done, and the next tick does it.
        """
        tick = self._look(now)
        with self.store.transaction() as tx:
            if not tx.take_lease(self.holder, tx.clock(now), LEASE_SECONDS):
                self.acting, self.standing_by = False, True
                self.conditions.put("standby", "another daemon holds the lease; this one is on standby", now)
                return "standing by"
            if not self.acting:
                self.outbox.take_over(tx)
            taken_over = self._take_over(tx, tick)
            before = tx.load()
            if taken_over or before.cursor != self.reader.accepted:
                self._state = before
                self._open(before.cursor)
                return "began again where the store stands"
            self.conditions.put("stored rows", _set_aside(tx.unreadable), now)
            tick = conclude(replace(tick, state=before, taken=tick.taken | frozenset(tx.unreadable)))
            self._note(tick)
            self._keep(tx, tick, before)
        self._accept(tick)
        self._act(tick)
        return f"{len(tick.block)} rows, {len(tick.transitions)} changes of alerts, {len(tick.messages)} messages"

    def _look(self, now: float) -> Tick:
        """What has come by `now`, judged; nothing is decided yet."""
        self._card.refresh()
        block = self.reader.read(now)
        receipts = dict(self._receipts.read())  # after the rows: those under a new plan have its receipt by now
        with self.store.transaction() as tx:  # what is declared by now holds for these rows
            state = replace(self._state, declarations=tx.declarations())
        book = rulebook(self._card.card, answered(state.executions, receipts), state.declarations)
        judged = self.judge.judge(block, book.checks, book.changes)
        return Tick(
            run=self.run,
            directory=str(self.run_dir),
            now=now,
            rows=self.judge.rows,
            block=block,
            judged=judged,
            attempts=self.reader.attempts,
            records=self.records + int(block.trained.sum()),
            rulebook=book,
            receipts=receipts,
            state=state,
            taken=self._requests.names | self._receipts.names,
            links=self.links,
        )

    def _take_over(self, tx: Transaction, tick: Tick) -> bool:
        """Whether the database has just learnt what only the files of the run knew: it is new, or older than they are."""
        sentence = None if self._log_settled else take_over_log(tx, self._mirror)
        self._log_settled = sentence is None
        rows = tick.rows
        step, tokens = (int(rows.step[-1]), float(rows.tokens[-1])) if len(rows) else (0, float("nan"))
        at = Mark(time=tick.now, records=tick.records, step=step, tokens=tokens)
        found = take_over_control(tx, self._requests.read(), self._receipts.found, tick.rulebook.nodes, at)
        for one in filter(None, [sentence, *found]):
            log.warning("%s", one)
        return bool(sentence or found)

    def _keep(self, tx: Transaction, tick: Tick, before: RunState) -> None:
        """Store all that was decided, with the cursor that says from which rows."""
        now, state = tick.now, tick.state
        self._keep_card(tx, now)
        tx.put_alerts([alert for name, alert in state.alerts.items() if alert is not before.alerts.get(name)])
        for incident in state.incidents.values():
            _keep_incident(tx, incident, before.incidents.get(incident.id), now)
        for event in tick.events:
            tx.put_execution(event.execution)
            body = event.execution.model_dump(mode="json")
            tx.audit("plan", {"sentence": event.sentence, "was": event.was, "execution": body}, now)
        for sentence in self.conditions.news():
            tx.audit("condition", {"sentence": sentence}, now)
        for message in tick.messages:
            self.outbox.put(tx, message)
        self.delivery.put(tx, state.executions, now)
        tx.put_cursor(self.reader.cursor())

    def _keep_card(self, tx: Transaction, now: float) -> None:
        """The card is part of the audit log: as it was first read, and each change; one after launch wants an author."""
        amendments.notice(tx, self._card, now, launched=bool(self.reader.attempts))
        self.conditions.put("unsigned card", amendments.unsigned(tx, self.run_dir), now)

    def _accept(self, tick: Tick) -> None:
        """The tick is stored: its rows become the past."""
        self.reader.accept()
        self.judge.accept(tick.block, tick.rulebook.checks, tick.rulebook.changes)
        self.records = tick.records
        self.history.add(tick.block, tick.judged)
        self._state, self.last_tick = tick.state, tick

    def _act(self, tick: Tick) -> None:
        """What follows from the store: directives for the trainer, the mirror of the audit log, the document."""
        for directive in write_requests(self.run_dir, tick.state.executions):
            log.info("directive %s (%s) is written", directive.id, directive.plan)
        with self.store.transaction() as tx:
            rows = tx.audit_rows(after=self._mirrored(tx))
            incidents = tx.incidents(STATUS_INCIDENTS)
            newest = tx.audit_rows(limit=STATUS_AUDIT, newest_first=True)
        if rows:
            audit.append(self._mirror, rows)
        self._note_receivers(self.outbox.standing(), tick.now)
        self._publish(tick, incidents, newest)

    def _mirrored(self, tx: Transaction) -> int:
        """How far the mirror of the audit log has come; one that cannot be read is set aside and written anew."""
        try:
            return audit.mirrored(self._mirror)
        except ValueError as error:
            aside = audit.set_aside(self._mirror)
            sentence = (
                f"The mirror of the audit log was damaged ({error}); it is kept as {aside.name} and written anew."
            )
            log.warning("%s", sentence)
            tx.audit("mirror", {"sentence": sentence})
            return 0

    def _note_receivers(self, standing: Mapping[str, Standing], now: float) -> None:
        """A receiver that takes nothing, or holds its sender, is a condition: its pages do not reach anybody."""
        stuck = self.outbox.stuck(STUCK_SECONDS)
        self.unpaged = False
        for name, one in standing.items():
            held = f"{name} has not answered for {STUCK_SECONDS:.0f} s" if name in stuck else None
            problem = unsent(name, one) or held
            self.unpaged |= problem is not None
            self.conditions.put(f"receiver {name}", problem, now)

    @property
    def unwell(self) -> bool:
        """Whether telemetry cannot be read, a check raises or a receiver takes no pages: the run is not watched as it should be."""
        return self.unpaged or bool(self.judge.errors) or bool(self.reader.unreadable)

    def _note(self, tick: Tick) -> None:
        """Keep the daemon's own conditions."""
        put, judged, now = self.conditions.put, tick.judged, tick.now
        self.acting, self.standing_by = True, False
        put("standby", None, now)
        self.check_errors.update(judged.errors.keys())
        put("card", self._card.problem, now)
        problems = self.reader.problems
        put("telemetry", f"{self.reader.malformed} lines skipped; last: {problems[-1]}" if problems else None, now)
        unread = [f"{name} {why}" for name, why in self.reader.unreadable.items()]
        put(
            "segments",
            f"{len(unread)} telemetry files cannot be read: {'; '.join(unread[:3])}" if unread else None,
            now,
        )
        for name, problem in self._receipts.problems.items():
            put(f"receipt {name}", str(problem), now)
        for name in all_checks():
            if name in judged.errors or name in judged.verdicts:
                error = judged.errors.get(name)
                put(f"check {name}", error and f"the check {name} raised {error}; its alert stays as it is", now)

    def _publish(self, tick: Tick, incidents: Sequence[Incident], newest: Sequence[audit.AuditRow]) -> None:
        standing = self.outbox.standing()
        self.status = build_status(
            tick,
            self.history,
            number=self.status["version"] + 1 if self.status else 1,
            incidents=incidents,
            audit=newest,
            check_errors=self.judge.errors,
            conditions=self.conditions.listed(),
            daemon={
                "started": self._started,
                "tick": tick.now,
                "listen": self.config.listen,
                "holder": self.holder,
                "outbox": standing,
            },
        )
        write_json(self.run_dir / ".runwatch" / "status.json", self.status, durable=False)


def _set_aside(unreadable: Mapping[str, str]) -> str | None:
    if not unreadable:
        return None
    first = next(iter(unreadable.values()))
    return f"{len(unreadable)} stored rows cannot be read and are set aside as they are; the first: {first}"


def _keep_incident(tx: Transaction, incident: Incident, before: Incident | None, now: float) -> None:
    """Store an incident that has changed; what people should know of it goes to the audit log."""
    if before is None or before.standing != incident.standing:
        tx.audit("incident", {"sentence": incident.sentence, **incident.model_dump(mode="json")}, now)
    if before != incident:
        tx.put_incident(incident)
