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

import numpy as np

from runwatch.checks import Phase, Signals, all_checks
from runwatch.monitor.act.delivery import Delivery
from runwatch.monitor.act.directives import receipts_of, requests_of, write_json, write_requests
from runwatch.monitor.card.rulebook import CardFile, Rulebook, answered, rulebook
from runwatch.monitor.daemon import amendments
from runwatch.monitor.daemon.conditions import Conditions
from runwatch.monitor.daemon.recovery import take_over_control, take_over_log
from runwatch.monitor.daemon.settings import DaemonConfig
from runwatch.monitor.engine.conclude import Outcome, Snapshot, conclude, world_of
from runwatch.monitor.engine.evaluate import Judged, LiveJudge
from runwatch.monitor.engine.history import SPARKLINE, Series, sparkline
from runwatch.monitor.notify.outbox import Outbox, Standing, unsent
from runwatch.monitor.read.run_directory import RunReader
from runwatch.monitor.show.build_status import View, compose, curve_at
from runwatch.monitor.store import audit
from runwatch.monitor.store.store import Saved, Store, Transaction
from runwatch.rules import Mark, Receipt, World

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
        self.outcome: Outcome | None = None
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
            self._saved = tx.load()
        self._open(self._saved.cursor)

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
        self.records = _train_records(context)
        self._loss, self._evaluation = Series("train/loss"), Series("eval/loss")
        self._remember(context)
        book = self._rulebook()
        tail = self.judge.again(SPARKLINE, book.checks, book.changes)
        self._sparklines = {name: sparkline([], verdicts.value) for name, verdicts in tail.verdicts.items()}
        self.judge.accept(context.take(slice(0, 0)), book.checks, book.changes)

    def _remember(self, rows: Signals) -> None:
        self._loss.add(rows)
        self._evaluation.add(rows)

    def _rulebook(self, receipts: Mapping[str, Receipt] | None = None) -> Rulebook:
        """The rulebook with what the trainer has answered so far, taken up by an execution or not yet."""
        executions = answered(self._saved.executions, receipts or {})
        return rulebook(self._card.card, executions, self._saved.declarations)

    def tick(self, now: float) -> str:
        """Do everything that is due at `now` (Unix seconds); the sentence that says what it was.

        Raises:
            Exception: something could not be read or stored; nothing has been done, and the next tick does it.
        """
        self._card.refresh()
        block = self.reader.read(now)
        receipts = dict(self._receipts.read())  # after the rows: those under a new plan have its receipt by now
        with self.store.transaction() as tx:  # what is declared by now holds for these rows
            self._saved = replace(self._saved, declarations=tx.declarations())
        book = self._rulebook(receipts)
        judged = self.judge.judge(block, book.checks, book.changes)
        with self.store.transaction() as tx:
            if not tx.take_lease(self.holder, tx.clock(now), LEASE_SECONDS):
                self.acting, self.standing_by = False, True
                self.conditions.put("standby", "another daemon watches this run; this one takes over when it ends", now)
                return "standing by"
            if not self.acting:
                self.outbox.take_over(tx)
            taken_over = self._take_over(tx, block, book, now)
            saved = tx.load()
            if taken_over or saved.cursor != self.reader.accepted:
                self._saved = saved
                self._open(saved.cursor)
                return "began again where the store stands"
            snapshot = self._snapshot(now, block, judged, book, receipts, saved, tx)
            self.conditions.put("stored rows", _set_aside(tx.unreadable), now)
            outcome = conclude(snapshot)
            self._note(judged, now)
            self._keep(tx, outcome, saved, now)
        self._accept(block, judged, book)
        self._saved = replace(saved, executions=outcome.executions)
        self.outcome = outcome
        self._act(now)
        return f"{len(block)} rows, {len(outcome.transitions)} changes of alerts, {len(outcome.messages)} messages"

    def _take_over(self, tx: Transaction, block: Signals, book: Rulebook, now: float) -> bool:
        """Whether the database has just learnt what only the files of the run knew: it is new, or older than they are."""
        sentence = None if self._log_settled else take_over_log(tx, self._mirror)
        self._log_settled = sentence is None
        last = block if len(block) else self.judge.context
        step, tokens = (int(last.step[-1]), float(last.tokens[-1])) if len(last) else (0, float("nan"))
        at = Mark(time=now, records=self.records + _train_records(block), step=step, tokens=tokens)
        found = take_over_control(tx, self._requests.read(), self._receipts.found, book.nodes, at)
        for one in filter(None, [sentence, *found]):
            log.warning("%s", one)
        return bool(sentence or found)

    def world(self, now: float) -> World | None:
        """The world as it is without judging anything new; None while no plan can be made."""
        self._card.refresh()
        block = self.reader.read(float("-inf"))
        self.judge.rows = Signals.concatenate([self.judge.context, block])
        with self.store.transaction() as tx:
            saved = tx.load()
            snapshot = self._snapshot(now, block, Judged(), self._rulebook(), self._receipts.read(), saved, tx)
        return world_of(snapshot, saved.alerts)

    def _snapshot(
        self,
        now: float,
        block: Signals,
        judged: Judged,
        book: Rulebook,
        receipts: Mapping[str, Receipt],
        saved: Saved,
        tx: Transaction,
    ) -> Snapshot:
        return Snapshot(
            run=self.run,
            directory=str(self.run_dir),
            page=self.links,
            now=now,
            block=block,
            rows=self.judge.rows,
            judged=judged,
            attempts=self.reader.attempts,
            records=self.records,
            rulebook=book,
            receipts=receipts,
            taken=self._requests.names | self._receipts.names | frozenset(tx.unreadable),
            saved=saved,
            incidents=tx.open_incidents(),
        )

    def _keep(self, tx: Transaction, outcome: Outcome, saved: Saved, now: float) -> None:
        """Store all that was decided, with the cursor that says from which rows."""
        self._keep_card(tx, now)
        tx.put_alerts([alert for name, alert in outcome.alerts.items() if alert is not saved.alerts.get(name)])
        self._keep_incidents(tx, outcome, now)
        for execution in outcome.decided.executions:
            tx.put_execution(execution)
        for event in outcome.decided.events:
            body = event.execution.model_dump(mode="json")
            tx.audit("plan", {"sentence": event.sentence, "was": event.was, "execution": body}, now)
        for sentence in self.conditions.news():
            tx.audit("condition", {"sentence": sentence}, now)
        for message in outcome.messages:
            self.outbox.put(tx, message)
        self.delivery.put(tx, outcome.executions, now)
        tx.put_cursor(self.reader.cursor())

    def _keep_card(self, tx: Transaction, now: float) -> None:
        """The card is part of the audit log: as it was first read, and each change; one after launch wants an author."""
        amendments.notice(tx, self._card, now, launched=bool(self.reader.attempts))
        self.conditions.put("unsigned card", amendments.unsigned(tx, self.run_dir), now)

    def _keep_incidents(self, tx: Transaction, outcome: Outcome, now: float) -> None:
        known = tx.open_incidents()
        for incident in outcome.incidents.values():
            before = known.get(incident.id)
            if before is None or before.standing != incident.standing:
                tx.audit("incident", {"sentence": incident.sentence, **incident.model_dump(mode="json")}, now)
            tx.put_incident(incident)

    def _accept(self, block: Signals, judged: Judged, book: Rulebook) -> None:
        """The tick is stored: its rows become the past."""
        self.reader.accept()
        self.judge.accept(block, book.checks, book.changes)
        self.records += _train_records(block)
        self._remember(block)
        told = ~block.tick
        for name, verdicts in judged.verdicts.items():
            self._sparklines[name] = sparkline(self._sparklines.get(name, []), verdicts.value[told])

    def _act(self, now: float) -> None:
        """What follows from the store: directives for the trainer, the mirror of the audit log, the document."""
        for directive in write_requests(self.run_dir, self._saved.executions):
            log.info("directive %s (%s) is written", directive.id, directive.plan)
        with self.store.transaction() as tx:
            rows = tx.audit_rows(after=audit.mirrored(self._mirror))
            incidents = tx.incidents(STATUS_INCIDENTS)
            newest = tx.audit_rows(limit=STATUS_AUDIT, newest_first=True)
        if rows:
            audit.append(self._mirror, rows)
        standing = self.outbox.standing()
        self._note_receivers(standing, now)
        self._publish(now, incidents, newest, standing)

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
        """Whether a check raises or a receiver takes no pages: the run is not watched as it should be."""
        return self.unpaged or bool(self.judge.errors)

    def _note(self, judged: Judged, now: float) -> None:
        """Keep the daemon's own conditions."""
        put = self.conditions.put
        self.acting, self.standing_by = True, False
        put("standby", None, now)
        self.check_errors.update(judged.errors.keys())
        put("card", self._card.problem, now)
        problems = self.reader.problems
        put("telemetry", f"{self.reader.malformed} lines left out; last: {problems[-1]}" if problems else None, now)
        for name, problem in self._receipts.problems.items():
            put(f"receipt {name}", str(problem), now)
        for name in all_checks():
            if name in judged.errors or name in judged.verdicts:
                error = judged.errors.get(name)
                put(f"check {name}", error and f"the check {name} raised {error}; its alert stays as it is", now)

    def _publish(
        self, now: float, incidents: Sequence[Any], newest: Sequence[audit.AuditRow], standing: Mapping[str, Any]
    ) -> None:
        outcome = self.outcome
        if outcome is None:
            return
        number = self.status["version"] + 1 if self.status else 1
        world = outcome.world
        self.status = compose(
            View(
                name=self.run,
                directory=str(self.run_dir),
                card=self._card.card,
                rows=self.judge.context,
                attempts=self.reader.attempts,
                plan=world.plan if world else None,
                throughput=world.throughput if world else None,
                loss=self._loss,
                evaluation=self._evaluation,
                alerts=outcome.alerts,
                check_errors=self.judge.errors,
                sparklines=self._sparklines,
                nodes=outcome.decided.nodes,
                settings=self._rulebook().nodes,
                executions=outcome.executions,
                incidents=incidents,
                audit=newest,
                conditions=self.conditions.listed(),
                plans_enabled=self._saved.plans_enabled,
                daemon={
                    "started": self._started,
                    "tick": now,
                    "listen": self.config.listen,
                    "holder": self.holder,
                    "outbox": standing,
                },
            ),
            number,
        )
        write_json(self.run_dir / ".runwatch" / "status.json", self.status, durable=False)


def _set_aside(unreadable: Mapping[str, str]) -> str | None:
    if not unreadable:
        return None
    first = next(iter(unreadable.values()))
    return f"{len(unreadable)} stored rows cannot be read and are set aside as they are; the first: {first}"


def _train_records(rows: Signals) -> int:
    return int(np.count_nonzero((rows.phase == Phase.TRAIN) & ~rows.tick))
