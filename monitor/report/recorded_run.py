"""Everything that is known of a run directory: card, telemetry, verdicts, incidents, plans, audit log, and its world.

With the daemon's database, incidents and plans are those that it stored. Without one, every check is judged as a backtest
judges it, and plans are known from the files in `control/`. The world is the daemon's own: the rows that it has not seen
yet are taken up as its next tick would.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from runwatch.checks import Level, Signals, Verdicts
from runwatch.monitor.act.directives import receipts_of, requests_of
from runwatch.monitor.card.rulebook import CardFile, Rulebook, answered, rulebook, run_name
from runwatch.monitor.card.run_card import Card
from runwatch.monitor.engine.backtest import backtest
from runwatch.monitor.engine.conclude import alerted
from runwatch.monitor.engine.evaluate import Judged
from runwatch.monitor.engine.incidents import followed
from runwatch.monitor.engine.tick import Tick
from runwatch.monitor.engine.world import world_of
from runwatch.monitor.read.sources import Loaded, load, load_run
from runwatch.monitor.store.audit import AuditRow, broken, read_mirror
from runwatch.monitor.store.incident import Incident
from runwatch.monitor.store.store import RunState, read_store, sqlite_url
from runwatch.rules import (
    Alert,
    Execution,
    Mark,
    NodeVerdict,
    PlanRules,
    Receipt,
    World,
    all_nodes,
    evaluate,
    from_control,
)


@dataclass(frozen=True)
class Remembered:
    """What the daemon stored of a run, or, with `watched` false, what the files in `control/` tell.

    `chain` says what is wrong with the audit log; None when it holds, or when there is none.
    """

    run: str
    watched: bool
    state: RunState
    incidents: tuple[Incident, ...] = ()
    audit: tuple[AuditRow, ...] = ()
    chain: str | None = None


@dataclass(frozen=True)
class RecordedRun:
    """A run as far as it has come; incidents are the oldest first. `seen` counts the rows that its daemon has judged."""

    directory: Path
    card_problem: str | None
    loaded: Loaded
    seen: int
    remembered: Remembered
    rulebook: Rulebook
    receipts: Mapping[str, Receipt]
    verdicts: Mapping[str, Verdicts]
    incidents: tuple[Incident, ...]

    @property
    def card(self) -> Card | None:
        """The run card, where there is one that can be read."""
        return self.rulebook.card

    @property
    def signals(self) -> Signals:
        """Every row of the run."""
        return self.loaded.signals

    @property
    def executions(self) -> tuple[Execution, ...]:
        """Executions of plans, oldest first."""
        return self.remembered.state.executions

    @cached_property
    def world(self) -> World | None:
        """The world at the newest record; None without a card or without a record that tells its tokens."""
        if not len(self.signals):
            return None
        state, unseen = self.remembered.state, slice(self.seen, None)
        now = max(state.cursor.get("time", -np.inf), float(self.signals.time[-1]))
        tick = self._tick(self.signals, state, now)
        judged = Judged({name: found.take(unseen) for name, found in self.verdicts.items()})
        return world_of(alerted(replace(tick, block=self.signals.take(unseen), judged=judged)))

    @cached_property
    def nodes(self) -> tuple[NodeVerdict, ...]:
        """How each node stands at the newest record; none where there is no world."""
        world = self.world
        if world is None:
            return ()
        return tuple(evaluate(node, world, self.rulebook.nodes[name]) for name, node in all_nodes().items())

    def world_at(self, row: int, alerts: Mapping[str, Alert]) -> World | None:
        """The world at `row`, when its alerts stood as given."""
        rows = self.signals.take(slice(0, row + 1))
        now = float(rows.time[-1])
        known = tuple(one for one in self.executions if not one.proposed.time > now)
        state = replace(self.remembered.state, alerts=alerts, executions=known)
        receipts = {key: one for key, one in self.receipts.items() if not one.time > now}
        return world_of(replace(self._tick(rows, state, now), receipts=receipts))

    def _tick(self, rows: Signals, state: RunState, now: float) -> Tick:
        """The tick of a daemon to which none of `rows` is new."""
        return Tick(
            run=self.remembered.run,
            directory=str(self.directory),
            now=now,
            rows=rows,
            block=rows.take(slice(0, 0)),
            judged=Judged(),
            attempts=self.loaded.attempts,
            records=int(rows.trained.sum()),
            rulebook=self.rulebook,
            receipts=self.receipts,
            state=state,
        )


def gather(run_dir: Path, database: str | None = None) -> RecordedRun:
    """Read a run directory; `database` is the daemon's SQLAlchemy URL where it is not the directory's own.

    Raises:
        SourceError: there is no telemetry that can be read.
        StoreError: the database cannot be used.
    """
    file = CardFile(run_dir)
    file.refresh()
    receipts = receipts_of(run_dir).read()
    known = database is not None or (run_dir / ".runwatch" / "state.db").exists()
    remembered = _stored(run_dir, database or sqlite_url(run_dir)) if known else None
    remembered = remembered or _unwatched(run_dir, receipts)
    state = remembered.state
    loaded, seen = _loaded(run_dir, state)
    book = rulebook(file.card, answered(state.executions, receipts), state.declarations)
    result = backtest(loaded, book.checks, book.changes)
    return RecordedRun(
        directory=run_dir,
        card_problem=file.problem,
        loaded=loaded,
        seen=seen,
        remembered=remembered,
        rulebook=book,
        receipts=receipts,
        verdicts=result.verdicts,
        incidents=remembered.incidents if remembered.watched else result.incidents,
    )


def _loaded(run_dir: Path, state: RunState) -> tuple[Loaded, int]:
    """The telemetry, and how many of its rows the daemon has judged; none of a run that was declared and has not begun."""
    if (run_dir / "telemetry").exists() or (run_dir / "run.yaml").exists():
        return load_run(run_dir, state.cursor)
    return load(run_dir), 0


def _stored(run_dir: Path, url: str) -> Remembered | None:
    """What the database knows; None where no daemon has stored a tick: a declaration alone watches nothing."""
    store = read_store(url, run_name(run_dir))
    try:
        with store.transaction() as tx:
            if not tx.watched:
                return None
            state, incidents, rows = tx.load(), tx.incidents(), tx.audit_rows()
    finally:
        store.close()
    chain = broken(rows) or _mirror_differs(run_dir / ".runwatch" / "audit.jsonl", rows)
    return Remembered(store.run, True, state, tuple(reversed(incidents)), tuple(rows), chain)


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
    return Remembered(run_name(run_dir), False, RunState(executions=executions))


@dataclass(frozen=True)
class Approach:
    """How far a node's condition was met at the worst moment of a run, at which step, and why."""

    progress: float
    reason: str
    step: int


LOOKS = 24
"""Evenly spread rows at which every node is looked at, beside the ends of critical stretches."""


def approaches(run: RecordedRun) -> dict[str, Approach]:
    """How near each node came to firing over the whole run; empty without a card."""
    signals, closest = run.signals, dict[str, Approach]()
    alerts: dict[str, Alert] = {}
    begin = 0
    for row in _rows_to_look_at(run.verdicts, len(signals)):
        block = slice(begin, row + 1)
        verdicts = {name: found.take(block) for name, found in run.verdicts.items()}
        alerts, _, _ = followed(alerts, {}, verdicts, signals.take(block), 0.0)
        begin = row + 1
        world = run.world_at(row, alerts)
        if world is None:
            continue
        for name, node in all_nodes().items():
            condition = node.condition(world, run.rulebook.nodes[name])
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
