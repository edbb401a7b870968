"""`runwatch status`: the status document in the terminal."""

import json
import sys
import time
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live

from runwatch.monitor.commands.options import EXITS, UNAVAILABLE, Failure, run_dir_argument
from runwatch.monitor.show.status import Status, StatusError, read_status
from runwatch.monitor.show.terminal import render

OLD_SECONDS = 30.0
"""A status older than this is out of date."""


def _watched(run_dir: Path) -> Status:
    try:
        found = read_status(run_dir)
    except StatusError as error:
        raise Failure(str(error), UNAVAILABLE) from error
    if found is None:
        what = "has not been watched yet" if run_dir.is_dir() else "does not exist"
        raise Failure(f"{run_dir} {what}; start `runwatch watch {run_dir}`", UNAVAILABLE)
    return found


def silence(status: Status, now: float) -> str | None:
    """How long ago the daemon last reported, where that is too long; a finished run needs no daemon."""
    age = now - float(status["daemon"]["tick"])
    if age <= OLD_SECONDS or status["run"]["phase"] == "finished":
        return None
    return f"The daemon last reported {_ago(age)} ago; this is the status at that time."


def _ago(seconds: float) -> str:
    """A time span in its largest unit, such as `72 days`."""
    for name, size in (("day", 86_400.0), ("hour", 3_600.0), ("minute", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {name}s"
    return f"{seconds:.0f} s"


@click.command()
@run_dir_argument
@click.option("--json", "as_json", is_flag=True, help="Print the whole document, as /api/status serves it.")
@click.option("--watch", "follow", is_flag=True, help="Stay, and show each change.")
def status(run_dir: Path, as_json: bool, follow: bool) -> None:
    """Show the status of the run in RUN_DIR. Exits with 0 healthy, 1 degraded or not watched any more, 2 critical."""
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
