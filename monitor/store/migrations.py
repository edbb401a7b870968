"""The schema's version, and how a database of an earlier release becomes one of this release.

A change of tables is a function at the end of `MIGRATIONS`; the tables of `schema.py` are always those of the newest version.
What is stored as JSON needs none: unknown keys are left out and missing ones have their defaults.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sqlalchemy as sql

from runwatch.monitor.store.schema import OUTBOX, VERSION


@dataclass(frozen=True)
class Migration:
    """One step of the schema. A release that knows `readable_by` or a later version can still work on the result."""

    version: int
    readable_by: int
    change: Callable[[sql.Connection], object]


def _wait_without_end(connection: sql.Connection) -> None:
    """Pages that version 1 gave up (4xx, a deadline of a day) wait again: since version 2 a page is sent until taken."""
    given_up = (OUTBOX.c.state == "failed", OUTBOX.c.kind.like("incident_%"))
    resolved = sql.select(OUTBOX.c.subject).where(OUTBOX.c.kind == "incident_resolved")
    still = OUTBOX.c.subject.not_in(resolved)
    connection.execute(
        sql.update(OUTBOX).where(*given_up, still).values(state="refused", deadline=OUTBOX.c.deadline + 30 * 86_400)
    )


MIGRATIONS: Sequence[Migration] = (
    Migration(1, 1, lambda _: None),  # release 0.1.0, which wrote no version
    Migration(2, 1, _wait_without_end),
)
NEWEST = MIGRATIONS[-1].version


def version(connection: sql.Connection) -> tuple[int, int]:
    """The schema's version and the oldest version that can work on it; 1 where none is written, 0 of an empty database."""
    inspected = sql.inspect(connection)
    if inspected.has_table(VERSION.name):
        row = connection.execute(sql.select(VERSION)).first()
        if row is not None:
            return row.version, row.readable_by
    return (1, 1) if inspected.has_table(OUTBOX.name) else (0, 0)


def too_new(found: tuple[int, int]) -> str | None:
    """Why a database of this version cannot be used by this release, or None."""
    if found[1] <= NEWEST:
        return None
    return (
        f"its schema has version {found[0]} and needs a release that knows version {found[1]}; this one knows {NEWEST}. "
        "Install that release again, or give this one a database of its own"
    )


def migrate(connection: sql.Connection, found: tuple[int, int]) -> None:
    """Bring a database to the newest version, in the caller's transaction; one of a later release stays as it is."""
    if found[0] > NEWEST:
        return
    if found[0]:  # a new database begins at the newest version
        for migration in MIGRATIONS[found[0] :]:
            migration.change(connection)
    if found[0] < NEWEST:
        connection.execute(sql.delete(VERSION))
        connection.execute(sql.insert(VERSION).values(version=NEWEST, readable_by=MIGRATIONS[-1].readable_by))
