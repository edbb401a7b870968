"""Commands that ask a run something: status, validate, audit."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from runwatch.monitor.act.directives import receipts_of
from runwatch.monitor.card.run_card import CardError, load_card, remarks
from runwatch.monitor.commands.options import DATA, UNAVAILABLE, USAGE, Failure, database_option, run_dir_argument
from runwatch.monitor.daemon.service import EXITS, open_run
from runwatch.monitor.read.run_directory import RunReader
from runwatch.monitor.show.status import Status
from runwatch.monitor.show.terminal import render
from runwatch.monitor.store import audit as chain

OLD_SECONDS = 30.0
"""A status older than this is not the daemon's word of now."""


def read_status(run_dir: Path) -> Status | None:
    """The newest status document; None when no daemon has watched this run yet.

    Raises:
        Failure: it cannot be read.
    """
    path = run_dir / ".runwatch" / "status.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise Failure(f"{path} cannot be read ({error}); the daemon's next tick writes it anew", UNAVAILABLE) from error


def _watched(run_dir: Path) -> Status:
    found = read_status(run_dir)
    if found is None:
        what = "has not been watched yet" if run_dir.is_dir() else "does not exist"
        raise Failure(f"{run_dir} {what}; start `runwatch watch {run_dir}`", UNAVAILABLE)
    return found


def silence(status: Status, now: float) -> str | None:
    """That the daemon is silent, and since when; a run that has finished needs none."""
    age = now - float(status["daemon"]["tick"])
    if age <= OLD_SECONDS or status["run"]["phase"] == "finished":
        return None
    return f"The daemon has been silent for {age:,.0f} s: this is how the run stood then."


@click.command()
@run_dir_argument
@click.option("--json", "as_json", is_flag=True, help="The whole document, as /api/status serves it.")
@click.option("--watch", "follow", is_flag=True, help="Stay, and show each change.")
def status(run_dir: Path, as_json: bool, follow: bool) -> None:
    """How the run in RUN_DIR stands. Exits with 0 healthy, 1 degraded or nobody watching, 2 critical."""
    found = _watched(run_dir)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if as_json:
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
    elif follow:
        found = _follow(run_dir, found, console)
    else:
        console.print(found["sentence"], highlight=False)
        console.print(render(found))
    silent = silence(found, time.time())
    if silent:
        click.echo(silent, err=True)
    sys.exit(max(EXITS[found["health"]], 1 if silent else 0))


def _follow(run_dir: Path, found: Status, console: Console) -> Status:
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        try:
            while found["run"]["phase"] != "finished":
                live.update(render(found), refresh=True)
                time.sleep(1.0)
                found = _watched(run_dir)
        except KeyboardInterrupt:
            pass
    console.print(render(found))
    return found


@click.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="CARD|RUN_DIR")
def validate(path: Path) -> None:
    """Check a run card; of a run directory also its telemetry and receipts. Every mistake with file, line and remedy."""
    if not path.exists():
        raise Failure(f"{path} does not exist", USAGE)
    console = Console(stderr=True, soft_wrap=True)
    mistakes = _card_mistakes(path / "run.yaml" if path.is_dir() else path)
    if path.is_dir():
        mistakes += _run_mistakes(path)
    for mistake in mistakes:
        console.print(Text(mistake))
    if mistakes:
        sys.exit(DATA)
    click.echo(f"{path} is valid")


def _card_mistakes(path: Path) -> list[str]:
    try:
        card = load_card(path)
    except CardError as error:
        return [str(mistake) for mistake in error.mistakes]
    for remark in remarks(card):
        click.echo(f"{path}: remark: {remark}", err=True)
    return []


def _run_mistakes(run_dir: Path) -> list[str]:
    reader = RunReader(run_dir)
    reader.read(float("-inf"))
    receipts = receipts_of(run_dir)
    receipts.read()
    click.echo(
        f"{reader.records:,} records, {len(reader.attempts)} attempts, {reader.malformed:,} lines left out", err=True
    )
    return [str(problem) for problem in (*reader.problems, *receipts.problems.values())]


def _require_run(run_dir: Path) -> None:
    if not run_dir.is_dir():
        raise Failure(f"{run_dir} is no directory", USAGE)


@click.group()
def audit() -> None:
    """The audit log: every decision, append-only and sealed row by row."""


@audit.command()
@run_dir_argument
@database_option
def verify(run_dir: Path, database: str | None) -> None:
    """Check that no row was changed, removed or inserted, in the database and in its mirror."""
    _require_run(run_dir)
    with open_run(run_dir, database).transaction() as tx:
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
    click.echo(f"{len(rows):,} rows are whole and in order{head}")


@audit.command()
@run_dir_argument
@database_option
def show(run_dir: Path, database: str | None) -> None:
    """Print the log, oldest first."""
    _require_run(run_dir)
    with open_run(run_dir, database).transaction() as tx:
        for row in tx.audit_rows():
            at = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(row.time))
            click.echo(f"{row.seq:>6}  {at}  {row.kind:<14} {row.sentence}")


def _differ(rows: list[Any], copied: list[Any], mirror: Path) -> str | None:
    for row, copy in zip(rows, copied, strict=False):
        if row != copy:
            return f"{mirror}: row {row.seq} is not what the database holds"
    if len(copied) > len(rows):
        return f"{mirror} has {len(copied)} rows, the database {len(rows)}: rows were removed from the database"
    return None
