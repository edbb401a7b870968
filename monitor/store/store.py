"""The daemon's memory: one SQL database, one transaction a tick.

SQLite (write-ahead log, every commit on disk) at `RUN_DIR/.runwatch/state.db`, or PostgreSQL for a fleet. Everything
that a tick decides is stored in one transaction, so a daemon that is killed at any moment has either done the tick or not
begun it. Effects come after the commit, from rows that are stored here.
"""

import json
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sql
from pydantic import BaseModel, ValidationError
from sqlalchemy.exc import IntegrityError

from runwatch.monitor.store.audit import GENESIS, AuditRow, chained
from runwatch.monitor.store.database import StoreError as StoreError  # noqa: PLC0414  who opens a store catches it
from runwatch.monitor.store.database import known_run, open_engine, open_to_read, wait_for_turn
from runwatch.monitor.store.incident import Incident
from runwatch.monitor.store.lease import is_gone
from runwatch.monitor.store.schema import (
    ALERTS,
    AUDIT,
    CURSOR,
    DECISIONS,
    DECLARATIONS,
    EXECUTIONS,
    INCIDENTS,
    LEASE,
    SETTINGS,
)
from runwatch.rules import Alert, Decision, Execution


@dataclass(frozen=True)
class RunState:
    """What is stored of a run between two ticks; `incidents` (by id) are those of which there may be something to say."""

    cursor: Mapping[str, Any] = field(default_factory=dict[str, Any])
    alerts: Mapping[str, Alert] = field(default_factory=dict[str, Alert])
    incidents: Mapping[str, Incident] = field(default_factory=dict[str, Incident])
    executions: tuple[Execution, ...] = ()
    decisions: Mapping[str, Decision] = field(default_factory=dict[str, Decision])
    plans_enabled: bool = True
    declarations: tuple[Mapping[str, Any], ...] = ()


class Store:
    """The database, as seen by the daemon and the command line of one run."""

    def __init__(self, engine: sql.Engine, run: str, *, reading: bool = False) -> None:
        self.engine = engine
        self.run = run
        self._reading = reading

    @contextmanager
    def transaction(self) -> Generator["Transaction"]:
        """All of it is stored when the block ends well, none of it otherwise. A run has one writer at a time."""
        with self.engine.begin() as connection:
            if not self._reading:
                wait_for_turn(connection, self.run)
            yield Transaction(connection, self.run)

    def close(self) -> None:
        """Release the database's files."""
        self.engine.dispose()


def open_store(url: str, run: str) -> Store:
    """Open, and create where needed, the database at an SQLAlchemy URL.

    Raises:
        StoreError: it cannot be opened, is damaged, or is not ours.
    """
    engine = open_engine(url)
    return Store(engine, known_run(engine) or run)


def read_store(url: str, run: str) -> Store:
    """Open the database at an SQLAlchemy URL to read, without write access to it and without a trace in it.

    Raises:
        StoreError: there is none, or it cannot be read.
    """
    engine = open_to_read(url)
    return Store(engine, known_run(engine) or run, reading=True)


def sqlite_url(run_dir: Path) -> str:
    """Where a run's database lies unless another is configured."""
    return f"sqlite:///{run_dir / '.runwatch' / 'state.db'}"


Stored = TypeVar("Stored", bound=BaseModel)


def _rows_of(table: sql.Table, run: str) -> sql.Select[Any]:
    return sql.select(table).where(table.c.run == run)


class Transaction:
    """Reads and writes of one run inside one transaction."""

    def __init__(self, connection: sql.Connection, run: str) -> None:
        self.connection = connection
        self.run = run
        self.unreadable: dict[str, str] = {}
        """What was stored and cannot be read, by id: set aside, and as it was."""

    def load(self) -> RunState:
        """Everything that a tick needs."""
        return RunState(
            cursor=self.cursor(),
            alerts={alert.check: alert for alert in self._bodies(Alert, _rows_of(ALERTS, self.run), ALERTS.c.check)},
            incidents=self.open_incidents(),
            executions=self.executions(),
            decisions={
                row.execution: Decision(approved=row.approved, by=row.by, reason=row.reason, time=row.time)
                for row in self._rows(DECISIONS)
            },
            plans_enabled=self.setting("plans_enabled", "true") == "true",
            declarations=self.declarations(),
        )

    def _rows(self, table: sql.Table) -> Sequence[Any]:
        return self.connection.execute(sql.select(table).where(table.c.run == self.run)).all()

    def _bodies(self, kind: type[Stored], query: sql.Select[Any], key: sql.Column[str]) -> list[Stored]:
        """What the rows of a query hold, each read by itself; one that cannot be read is in `unreadable`.

        Keys that this release does not know are left out: a later one may have written them.
        """
        found: list[Stored] = []
        for row in self.connection.execute(query).mappings():
            try:
                found.append(kind.model_validate_json(row["body"], extra="ignore"))
            except ValidationError as error:
                first = error.errors()[0]
                place = ".".join(map(str, first["loc"])) or "it"
                self.unreadable[row[key.name]] = f"{key.table.name} {row[key.name]}: {place}: {first['msg']}"
        return found

    def put(self, table: sql.Table, keys: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Insert or replace the one row with `keys`."""
        same = sql.and_(table.c.run == self.run, *(table.c[name] == value for name, value in keys.items()))
        changed = self.connection.execute(sql.update(table).where(same).values(**values)).rowcount
        if not changed:
            self.connection.execute(sql.insert(table).values(run=self.run, **keys, **values))

    @property
    def watched(self) -> bool:
        """Whether a daemon has stored a tick of this run; a decision or a declaration alone watches nothing."""
        return bool(self.cursor())

    def cursor(self) -> Mapping[str, Any]:
        """How far the run has been judged; empty before the first tick."""
        body = self.connection.scalar(sql.select(CURSOR.c.body).where(CURSOR.c.run == self.run))
        return json.loads(body) if body else {}

    def put_cursor(self, cursor: Mapping[str, Any]) -> None:
        """Remember how far the run has been judged."""
        self.put(CURSOR, {}, {"body": json.dumps(cursor)})

    def put_alerts(self, alerts: Sequence[Alert]) -> None:
        """Store the alerts of these checks."""
        if not alerts:
            return
        names = [alert.check for alert in alerts]
        self.connection.execute(sql.delete(ALERTS).where(ALERTS.c.run == self.run, ALERTS.c.check.in_(names)))
        rows = [{"run": self.run, "check": alert.check, "body": alert.model_dump_json()} for alert in alerts]
        self.connection.execute(sql.insert(ALERTS), rows)

    def incidents(self, limit: int | None = None) -> list[Incident]:
        """Incidents, newest first."""
        query = _rows_of(INCIDENTS, self.run).order_by(INCIDENTS.c.opened.desc(), INCIDENTS.c.id.desc()).limit(limit)
        return self._bodies(Incident, query, INCIDENTS.c.id)

    def open_incidents(self) -> dict[str, Incident]:
        """Incidents that fire, or of which people do not know yet that they are over."""
        query = _rows_of(INCIDENTS, self.run).where(INCIDENTS.c.open)
        return {incident.id: incident for incident in self._bodies(Incident, query, INCIDENTS.c.id)}

    def put_incident(self, incident: Incident) -> None:
        """Store one incident."""
        values = {"open": incident.open, "opened": incident.opened, "body": incident.model_dump_json()}
        self.put(INCIDENTS, {"id": incident.id}, values)

    def executions(self) -> tuple[Execution, ...]:
        """Executions, oldest first."""
        query = _rows_of(EXECUTIONS, self.run).order_by(EXECUTIONS.c.ordinal)
        return tuple(self._bodies(Execution, query, EXECUTIONS.c.id))

    def put_execution(self, execution: Execution) -> None:
        """Store one execution; a new one goes to the end."""
        here = sql.and_(EXECUTIONS.c.run == self.run)
        known = self.connection.scalar(sql.select(EXECUTIONS.c.ordinal).where(here, EXECUTIONS.c.id == execution.id))
        count = self.connection.scalar(sql.select(sql.func.count()).select_from(EXECUTIONS).where(here))
        ordinal = count if known is None else known
        values = {"ordinal": ordinal, "state": execution.state.value, "body": execution.model_dump_json()}
        self.put(EXECUTIONS, {"id": execution.id}, values)

    def decide(self, execution: str, decision: Decision) -> bool:
        """Store a person's decision; False if somebody has decided before."""
        row = {"execution": execution, **decision.model_dump()}
        try:
            with self.connection.begin_nested():
                self.connection.execute(sql.insert(DECISIONS).values(run=self.run, **row))
        except IntegrityError:
            return False
        return True

    def declare(self, declaration: Mapping[str, Any]) -> None:
        """Store a planned change."""
        self.connection.execute(sql.insert(DECLARATIONS).values(run=self.run, body=json.dumps(declaration)))

    def declarations(self) -> tuple[Mapping[str, Any], ...]:
        """The planned changes that were declared beside those of the card."""
        return tuple(json.loads(row.body) for row in self._rows(DECLARATIONS))

    def setting(self, name: str, default: str) -> str:
        """One of the run's settings."""
        here = sql.and_(SETTINGS.c.run == self.run, SETTINGS.c.name == name)
        found = self.connection.scalar(sql.select(SETTINGS.c.value).where(here))
        return default if found is None else found

    def put_setting(self, name: str, value: str) -> None:
        """Keep one of the run's settings."""
        self.put(SETTINGS, {"name": name}, {"value": value})

    def clock(self, now: float) -> float:
        """The time (Unix seconds) by which a lease is judged: of several hosts' clocks it is the server's."""
        if self.connection.dialect.name != "postgresql":
            return now
        return float(self.connection.scalar(sql.select(sql.extract("epoch", sql.func.clock_timestamp()))) or now)

    def take_lease(self, holder: str, now: float, seconds: float) -> bool:
        """Whether `holder` may act for this run until `now` + `seconds`; of several daemons one may.

        A lease ends when it expires, and when its holder is known to be gone.
        """
        ours = sql.or_(LEASE.c.holder == holder, LEASE.c.expires < now)
        if self._put_lease(ours, holder, now + seconds):
            return True
        held = self.connection.scalar(sql.select(LEASE.c.holder).where(LEASE.c.run == self.run))
        if held is not None:
            return is_gone(held) and self._put_lease(LEASE.c.holder == held, holder, now + seconds)
        try:
            with self.connection.begin_nested():
                row = {"run": self.run, "holder": holder, "expires": now + seconds}
                self.connection.execute(sql.insert(LEASE).values(**row))
        except IntegrityError:
            return False
        return True

    def _put_lease(self, where: sql.ColumnElement[bool], holder: str, expires: float) -> bool:
        update = sql.update(LEASE).where(LEASE.c.run == self.run, where).values(holder=holder, expires=expires)
        return bool(self.connection.execute(update).rowcount)

    def release_lease(self, holder: str) -> None:
        """Let another daemon act."""
        self.connection.execute(sql.delete(LEASE).where(LEASE.c.run == self.run, LEASE.c.holder == holder))

    def audit(self, kind: str, payload: Mapping[str, Any], now: float | None = None) -> AuditRow:
        """Append one row to the chain."""
        newest = self.audit_rows(limit=1, newest_first=True)
        seq, previous = (newest[0].seq + 1, newest[0].hash) if newest else (1, GENESIS)
        row = chained(seq, time.time() if now is None else now, kind, payload, previous)
        self.connection.execute(sql.insert(AUDIT).values(run=self.run, **row.columns()))
        return row

    def audit_rows(self, after: int = 0, limit: int | None = None, *, newest_first: bool = False) -> list[AuditRow]:
        """Rows of the audit log with a `seq` above `after`."""
        order = AUDIT.c.seq.desc() if newest_first else AUDIT.c.seq
        query = sql.select(AUDIT).where(AUDIT.c.run == self.run, AUDIT.c.seq > after).order_by(order).limit(limit)
        return [
            AuditRow(row.seq, row.time, row.kind, row.payload, row.previous, row.hash)
            for row in self.connection.execute(query)
        ]
