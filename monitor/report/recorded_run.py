"""Everything that is known of a run directory: card, telemetry, verdicts, incidents, plans, audit log, and its world.

With the daemon's database, incidents and plans are those that it stored. Without one, every check is judged as a backtest
judges it, and plans are known from the files in `control/`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from runwatch.checks import Level, Signals, Verdicts, all_checks
from runwatch.monitor.act.directives import receipts_of, requests_of
from runwatch.monitor.card.rulebook import CardFile, Rulebook, rulebook, run_name
from runwatch.monitor.card.run_card import Card
from runwatch.monitor.engine.backtest import backtest
from runwatch.monitor.engine.conclude import Snapshot, world_of
from runwatch.monitor.engine.evaluate import Judged
from runwatch.monitor.engine.incidents import after
from runwatch.monitor.read.run_directory import RunReader
from runwatch.monitor.read.sources import Loaded, load
from runwatch.monitor.store.audit import AuditRow, broken, read_mirror
from runwatch.monitor.store.incident import Incident
from runwatch.monitor.store.store import Saved, read_store, sqlite_url
from runwatch.rules import (
    Alert,
    Execution,
    Mark,
    NodeVerdict,
    PlanRules,
    Receipt,
    Transition,
    World,
    advance,
    all_nodes,
    evaluate,
    from_control,
    policy_of,
)

RECENT_ROWS = 1300
"""About as many as the daemon's context spans: the checks look back over 603 records, and each brings a tick."""


@dataclass(frozen=True)
class Remembered:
    """What the daemon stored of a run, or, with `watched` false, what the files in `control/` tell.

    `chain` says what is wrong with the audit log; None when it holds, or when there is none.
    """

    run: str
    watched: bool
    saved: Saved
    incidents: tuple[Incident, ...] = ()
    audit: tuple[AuditRow, ...] = ()
    chain: str | None = None


@dataclass(frozen=True)
class Dossier:
    """A run as far as it has come. `alerts` are as the newest record leaves them; incidents are the oldest first."""

    directory: Path
    card: Card | None
    card_problem: str | None
    loaded: Loaded
    remembered: Remembered
    rulebook: Rulebook
    receipts: Mapping[str, Receipt]
    verdicts: Mapping[str, Verdicts]
    alerts: Mapping[str, Alert]
    incidents: tuple[Incident, ...]

    @property
    def signals(self) -> Signals:
        """Every row of the run."""
        return self.loaded.signals

    @property
    def executions(self) -> tuple[Execution, ...]:
        """Executions of plans, oldest first."""
        return self.remembered.saved.executions

    @cached_property
    def world(self) -> World | None:
        """The world at the newest record; None without a card or without a record that tells its tokens."""
        return self.world_at(len(self.signals) - 1, self.alerts) if len(self.signals) else None

    @cached_property
    def nodes(self) -> tuple[NodeVerdict, ...]:
        """How each node stands at the newest record; none where there is no world."""
        world = self.world
        if world is None:
            return ()
        return tuple(evaluate(node, world, self.rulebook.nodes[name]) for name, node in all_nodes().items())

    def world_at(self, row: int, alerts: Mapping[str, Alert]) -> World | None:
        """The world as the daemon saw it at `row`, when its alerts stood as given."""
        rows = self.signals.take(slice(0, row + 1))
        recent = rows.take(slice(max(0, len(rows) - RECENT_ROWS), len(rows)))
        now = float(rows.time[-1])
        saved = self.remembered.saved
        known = tuple(one for one in saved.executions if not one.proposed.time > now)
        snapshot = Snapshot(
            run=self.remembered.run,
            directory=str(self.directory),
            page={},
            now=now,
            block=rows.take(slice(0, 0)),
            rows=recent,
            judged=Judged(),
            attempts=list(self.loaded.attempts),
            records=int((~rows.tick).sum()),
            rulebook=self.rulebook,
            receipts={key: one for key, one in self.receipts.items() if not one.time > now},
            saved=replace(saved, executions=known),
            incidents={},
        )
        return world_of(snapshot, alerts)


def gather(run_dir: Path, database: str | None = None) -> Dossier:
    """Read a run directory; `database` is the daemon's SQLAlchemy URL where it is not the directory's own.

    Raises:
        SourceError: there is no telemetry that can be read.
        StoreError: the database cannot be used.
    """
    file = CardFile(run_dir)
    file.refresh()
    receipts = receipts_of(run_dir).read()
    loaded = _loaded(run_dir)
    known = database is not None or (run_dir / ".runwatch" / "state.db").exists()
    remembered = _stored(run_dir, database or sqlite_url(run_dir)) if known else None
    remembered = remembered or _unwatched(run_dir, receipts)
    book = rulebook(file.card, remembered.saved.executions, remembered.saved.declarations)
    verdicts = backtest(loaded, book.checks, book.changes).verdicts
    alerts, transitions = judged_alerts(verdicts, loaded.signals)
    found = after({}, transitions, float(loaded.signals.time[-1]) if len(loaded.signals) else 0.0)
    return Dossier(
        directory=run_dir,
        card=file.card,
        card_problem=file.problem,
        loaded=loaded,
        remembered=remembered,
        rulebook=book,
        receipts=receipts,
        verdicts=verdicts,
        alerts=remembered.saved.alerts if remembered.watched else alerts,
        incidents=remembered.incidents if remembered.watched else tuple(found.values()),
    )


def _loaded(run_dir: Path) -> Loaded:
    """The telemetry; none of a run that was declared and has not begun."""
    if not (run_dir / "telemetry").exists() and (run_dir / "run.yaml").exists():
        return Loaded(str(run_dir), RunReader(run_dir).read(float("-inf")))
    return load(run_dir)


def judged_alerts(
    verdicts: Mapping[str, Verdicts], signals: Signals, before: Mapping[str, Alert] | None = None
) -> tuple[dict[str, Alert], tuple[Transition, ...]]:
    """The alerts after all rows of `signals`, judged by `verdicts`, and what changed on the way."""
    alerts = {name: (before or {}).get(name) or Alert(check=name) for name in verdicts}
    transitions: list[Transition] = []
    for name, found in verdicts.items():
        alerts[name], changes = advance(alerts[name], all_checks()[name], found, signals, policy_of(name))
        transitions += changes
    return alerts, tuple(sorted(transitions, key=lambda transition: transition.row))


def _stored(run_dir: Path, url: str) -> Remembered | None:
    """What the database knows; None where no daemon has stored a tick: a declaration alone watches nothing."""
    store = read_store(url, run_name(run_dir))
    try:
        with store.transaction() as tx:
            if not tx.watched:
                return None
            saved, incidents, rows = tx.load(), tx.incidents(), tx.audit_rows()
    finally:
        store.close()
    chain = broken(rows) or _mirror_differs(run_dir / ".runwatch" / "audit.jsonl", rows)
    return Remembered(store.run, True, saved, tuple(reversed(incidents)), tuple(rows), chain)


def _mirror_differs(path: Path, rows: Sequence[AuditRow]) -> str | None:
    """What is wrong with the mirror of the audit log; it may be behind by the newest rows."""
    try:
        mirror = read_mirror(path)
    except ValueError as error:
        return str(error)
    pairs = zip(mirror, rows, strict=False)
    wrong = next((copy.seq for copy, row in pairs if copy != row), None)
    if wrong is None and len(mirror) > len(rows):
        wrong = mirror[len(rows)].seq
    return None if wrong is None else f"row {wrong} of {path.name} is not the row of the database"


def _unwatched(run_dir: Path, receipts: Mapping[str, Receipt]) -> Remembered:
    found: list[Execution] = []
    for directive in requests_of(run_dir).read().values():
        receipt = receipts.get(directive.id)
        step, tokens = (receipt.step, float(receipt.tokens)) if receipt else (0, float("nan"))
        at = Mark(time=directive.created, records=0, step=step, tokens=tokens)
        found.append(from_control(directive, receipt, PlanRules(), at))
    executions = tuple(sorted(found, key=lambda one: one.proposed.time))
    saved = Saved(cursor={}, alerts={}, executions=executions, decisions={}, plans_enabled=True, declarations=())
    return Remembered(run_name(run_dir), False, saved)


@dataclass(frozen=True)
class Approach:
    """How far a node's condition was met at the worst moment of a run, at which step, and why."""

    progress: float
    reason: str
    step: int


LOOKS = 24
"""Evenly spread rows at which every node is looked at, beside the ends of critical stretches."""


def approaches(dossier: Dossier) -> dict[str, Approach]:
    """How near each node came to firing over the whole run; empty without a card."""
    signals, closest = dossier.signals, dict[str, Approach]()
    alerts: dict[str, Alert] = {}
    begin = 0
    for row in _rows_to_look_at(dossier.verdicts, len(signals)):
        block = slice(begin, row + 1)
        verdicts = {name: found.take(block) for name, found in dossier.verdicts.items()}
        alerts, _ = judged_alerts(verdicts, signals.take(block), alerts)
        begin = row + 1
        world = dossier.world_at(row, alerts)
        if world is None:
            continue
        for name, node in all_nodes().items():
            condition = node.condition(world, dossier.rulebook.nodes[name])
            if name not in closest or condition.progress > closest[name].progress:
                closest[name] = Approach(condition.progress, condition.reason, int(signals.step[row]))
    return closest


def _rows_to_look_at(verdicts: Mapping[str, Verdicts], length: int) -> list[int]:
    """The last rows of each check's longest critical stretches, and some that are evenly spread."""
    rows = set(np.linspace(0, length - 1, LOOKS).astype(int).tolist()) if length else set[int]()
    for found in verdicts.values():
        edges = np.flatnonzero(np.diff(found.level == Level.CRITICAL, prepend=False, append=False))
        first, last = edges[::2], edges[1::2] - 1
        rows |= set(last[np.argsort(last - first)[-LOOKS:]].tolist())
    return sorted(rows)
