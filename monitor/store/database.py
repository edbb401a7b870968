"""Opening the daemon's database: SQLite in the run directory, or PostgreSQL for a fleet; both with one writer a run."""

import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sql
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError, DatabaseError, OperationalError

from runwatch.monitor.store import reading
from runwatch.monitor.store.migrations import migrate, too_new, version
from runwatch.monitor.store.reading import StoreError
from runwatch.monitor.store.schema import AUDIT, LEASE, TABLES

BUSY_SECONDS = 10.0
"""How long a writer waits for another (the command line and the daemon share the file)."""

POSTGRES: Mapping[str, Any] = {
    "connect_timeout": 5,
    "tcp_user_timeout": 20_000,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "options": "-c lock_timeout=10s -c statement_timeout=30s -c idle_in_transaction_session_timeout=10s",
}
"""How long (seconds; `tcp_user_timeout`: milliseconds) a daemon waits for a server that has gone, and the server for a
daemon that stands still inside a transaction: then the next daemon may write. What the URL says goes before."""

_APPEND_ONLY = (
    "CREATE TRIGGER IF NOT EXISTS audit_never_{verb} BEFORE {verb} ON audit "
    "BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END"
)


_APPEND_ONLY_POSTGRES = """
CREATE OR REPLACE FUNCTION runwatch_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'the audit log is append-only' USING ERRCODE = 'integrity_constraint_violation'; END $$;
CREATE TRIGGER audit_never BEFORE UPDATE OR DELETE OR TRUNCATE ON audit
FOR EACH STATEMENT EXECUTE FUNCTION runwatch_append_only()
"""


def open_engine(url: str) -> sql.Engine:
    """The database at an SQLAlchemy URL, with our tables in it.

    Raises:
        StoreError: it cannot be opened, is damaged, or is not ours.
    """
    engine = _sqlite(url) if url.startswith("sqlite") else _server(url)
    try:
        with engine.begin() as connection:
            wait_for_turn(connection, "the tables")
            if engine.dialect.name == "sqlite":
                _check(connection)
            found = _usable(engine, connection)
            TABLES.create_all(connection)
            migrate(connection, found)
            _protect_audit(connection)
    except (DatabaseError, OSError, StoreError) as error:
        engine.dispose()
        raise error if isinstance(error, StoreError) else StoreError(_remedy(engine, error)) from error
    return engine


def open_to_read(url: str) -> sql.Engine:
    """The database at an SQLAlchemy URL, as it is: nothing is created, changed or locked, and no write access is needed.

    Raises:
        StoreError: there is none, or it cannot be read.
    """
    engine = reading.sqlite(url) if url.startswith("sqlite") else _server(url, reading=True)
    try:
        with engine.begin() as connection:
            found = _usable(engine, connection)
    except (DatabaseError, OSError, StoreError) as error:
        engine.dispose()
        raise error if isinstance(error, StoreError) else StoreError(_remedy(engine, error)) from error
    if not found[0]:
        engine.dispose()
        raise StoreError(f"{where(engine)} holds no run: no daemon has used it yet")
    return engine


def _usable(engine: sql.Engine, connection: sql.Connection) -> tuple[int, int]:
    found = version(connection)
    problem = too_new(found)
    if problem is not None:
        raise StoreError(f"cannot use the database {where(engine)}: {problem}")
    return found


def known_run(engine: sql.Engine) -> str | None:
    """The one run that a run directory's own database is about: a card may be renamed, or be unreadable today."""
    if engine.dialect.name != "sqlite":
        return None
    with engine.begin() as connection:
        runs = connection.scalars(sql.select(LEASE.c.run).union(sql.select(AUDIT.c.run))).all()
    return runs[0] if len(runs) == 1 else None


def _check(connection: sql.Connection) -> None:
    damage = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
    if damage != "ok":
        raise DatabaseError(None, None, sqlite3.DatabaseError(f"database disk image is malformed: {damage}"))


def wait_for_turn(connection: sql.Connection, turn: str) -> None:
    """SQLite has one writer; PostgreSQL has one for each `turn` after this, until the transaction ends."""
    if connection.dialect.name == "postgresql":
        connection.execute(sql.select(sql.func.pg_advisory_xact_lock(sql.func.hashtextextended(turn, 0))))


def _protect_audit(connection: sql.Connection) -> None:
    """The database itself refuses to change the audit log."""
    if connection.dialect.name == "sqlite":
        for verb in ("update", "delete"):
            connection.exec_driver_sql(_APPEND_ONLY.format(verb=verb))
    elif connection.dialect.name == "postgresql":
        known = "SELECT 1 FROM pg_trigger WHERE tgname = 'audit_never' AND tgrelid = 'audit'::regclass"
        if connection.exec_driver_sql(known).first() is None:
            connection.exec_driver_sql(_APPEND_ONLY_POSTGRES)


def _server(url: str, *, reading: bool = False) -> sql.Engine:
    """PostgreSQL, or what else SQLAlchemy knows. One idle connection for each daemon: a fleet has many."""
    try:
        parsed = sql.make_url(url.replace("postgres://", "postgresql://", 1))
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        is_postgres = parsed.get_backend_name() == "postgresql"
        given = {name: value for name, value in POSTGRES.items() if is_postgres and name not in parsed.query}
        engine = sql.create_engine(parsed, pool_pre_ping=True, pool_size=1, max_overflow=9, connect_args=given)
        return engine.execution_options(postgresql_readonly=True) if reading and is_postgres else engine
    except ArgumentError as error:
        raise StoreError(f"the database's URL cannot be used: {error}; write postgresql://USER@HOST/NAME") from error
    except ModuleNotFoundError as error:
        raise StoreError(f"{error}; for PostgreSQL: pip install 'runwatch[postgres]'") from error


def _sqlite(url: str) -> sql.Engine:
    path = sql.make_url(url).database or ""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"cannot create {Path(path).parent}: {error.strerror}; make the run directory writable"
        ) from error
    engine = sql.create_engine(url, connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False})

    def set_up(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # transactions begin where we say so, not at the first write
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        record.info["file"] = _identity(path)

    def begin(connection: sql.Connection) -> None:
        if _identity(path) != connection.info["file"]:
            gone = sqlite3.OperationalError(f"{path} was moved or deleted: put it back, or start the daemon again")
            raise OperationalError("BEGIN", None, gone)
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(engine, "connect", set_up)
    event.listen(engine, "begin", begin)
    return engine


def _identity(path: str) -> tuple[int, int] | None:
    """Which file lies at `path`; what is written to one that was deleted would be lost without a word."""
    try:
        found = os.stat(path)  # noqa: PTH116  called for every transaction: os.stat makes no Path
    except OSError:
        return None
    return found.st_dev, found.st_ino


def where(engine: sql.Engine) -> str:
    """The database's place, for people."""
    if engine.dialect.name == "sqlite":
        return (engine.url.database or "").removeprefix("file:").partition("?")[0]
    return engine.url.render_as_string(hide_password=True)


def _remedy(engine: sql.Engine, error: Exception) -> str:
    reason = " ".join(str(getattr(error, "orig", error)).split())
    if "malformed" in reason or "not a database" in reason:
        return (
            f"{where(engine)} is damaged ({reason}): move it aside and start again; alerts are rebuilt from telemetry, and "
            "directives that were applied are known from control/receipts/"
        )
    return f"cannot use the database {where(engine)}: {reason}"
