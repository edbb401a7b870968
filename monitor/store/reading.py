"""A run directory's own database, opened to read: by anybody who may read the file, beside a daemon that writes or none.

A write-ahead log is what makes this more than `mode=ro`: a reader of the ordinary kind creates and locks the files beside the
database, and without write access to the folder it cannot open one that its daemon has closed.
"""

import os
import shutil
import sqlite3
import tempfile
import weakref
from pathlib import Path
from typing import Any

import sqlalchemy as sql
from sqlalchemy import event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError


class StoreError(Exception):
    """The database cannot be used; the text says what to do."""


def sqlite(url: str) -> sql.Engine:
    """The SQLite database at an SQLAlchemy URL.

    Raises:
        StoreError: there is none.
    """
    path = Path(make_url(url).database or "")
    if not path.is_file():
        raise StoreError(f"{path} does not exist: no daemon has watched this run yet")
    engine = _engine(path, "mode=ro&readonly_shm=1" if _log(path) else "mode=ro&immutable=1")
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql("SELECT count(*) FROM sqlite_master")
    except OperationalError:
        engine.dispose()
        return _copied(path)  # a log that nobody has open, and that only a writer could take up again
    return engine


def _log(path: Path) -> bool:
    """Whether the write-ahead log holds anything: without one the file alone is the database, and nobody writes."""
    try:
        return os.stat(f"{path}-wal").st_size > 0  # noqa: PTH116  the database's name and a suffix
    except OSError:
        return False


def _copied(path: Path) -> sql.Engine:
    folder = tempfile.mkdtemp(prefix="runwatch-")
    for name in (path.name, f"{path.name}-wal"):
        if (path.parent / name).exists():
            shutil.copy(path.parent / name, folder)
    engine = _engine(Path(folder) / path.name, "mode=rw")
    weakref.finalize(engine, shutil.rmtree, folder, ignore_errors=True)
    return engine


def _engine(path: Path, how: str) -> sql.Engine:
    address = f"file:{path.resolve().as_uri().removeprefix('file://')}?{how}"

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(address, uri=True, timeout=10.0, check_same_thread=False, isolation_level=None)

    engine = sql.create_engine(f"sqlite:///{path}", creator=connect)

    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    event.listen(engine, "begin", begin)
    return engine
