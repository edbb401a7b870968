"""`runwatch amend`: sign a change of the run card."""

from pathlib import Path

import click

from runwatch.monitor.commands.options import DATA, USAGE, Failure, by_option, database_option, run_dir_argument
from runwatch.monitor.commands.store import open_run
from runwatch.monitor.daemon.amendments import AmendError, amend


@click.command("amend")
@run_dir_argument
@by_option
@click.option("--reason", required=True, help="Why; it goes into the audit log and the report.")
@database_option
def command(run_dir: Path, by: str, reason: str, database: str | None) -> None:
    """Sign a change of the run card after launch: edit run.yaml, then record who changed it and why."""
    if not run_dir.is_dir():
        raise Failure(f"{run_dir} is not a directory", USAGE)
    store = open_run(run_dir, database)
    try:
        click.echo(amend(store, run_dir, by, reason))
    except AmendError as error:
        raise Failure(str(error), DATA) from error
    finally:
        store.close()
