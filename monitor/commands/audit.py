"""`runwatch audit`: print the audit log, and verify its chain of hashes."""

import time
from pathlib import Path
from typing import Any

import click

from runwatch.monitor.commands.options import Failure, database_option, run_dir_argument
from runwatch.monitor.commands.store import read_run
from runwatch.monitor.store import audit as chain


@click.group()
def audit() -> None:
    """Print or verify the audit log: every decision, append-only, each row sealed with a hash."""


@audit.command()
@run_dir_argument
@database_option
def verify(run_dir: Path, database: str | None) -> None:
    """Check that no row was changed, removed or inserted, in the database and in its mirror."""
    with read_run(run_dir, database).transaction() as tx:
        rows = tx.audit_rows()
    mirror = run_dir / ".runwatch" / "audit.jsonl"
    try:
        copied = chain.read_mirror(mirror)
    except ValueError as error:
        raise Failure(str(error)) from error
    found = chain.broken(rows) or _differ(rows, copied, mirror)
    if found:
        raise Failure(found)
    head = f"; head {rows[-1].hash}" if rows else ""
    click.echo(f"{len(rows):,} rows are intact and in order{head}")


@audit.command()
@run_dir_argument
@database_option
def show(run_dir: Path, database: str | None) -> None:
    """Print the log, oldest first."""
    with read_run(run_dir, database).transaction() as tx:
        for row in tx.audit_rows():
            at = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(row.time))
            click.echo(f"{row.seq:>6}  {at}  {row.kind:<14} {row.sentence}")


def _differ(rows: list[Any], copied: list[Any], mirror: Path) -> str | None:
    for row, copy in zip(rows, copied, strict=False):
        if row != copy:
            return f"{mirror}: row {row.seq} differs from the database"
    if len(copied) > len(rows):
        return f"{mirror} has {len(copied)} rows, the database {len(rows)}: rows were removed from the database"
    return None
