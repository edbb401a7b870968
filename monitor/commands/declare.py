"""`runwatch declare`: a planned change is declared, so that the affected checks reset their baseline instead of firing."""

from collections.abc import Mapping
from pathlib import Path

import click

from runwatch.checks import Change, all_checks
from runwatch.monitor.act.approvals import declare
from runwatch.monitor.card.context import TOUCHES
from runwatch.monitor.card.run_card import Declaration
from runwatch.monitor.commands.options import USAGE, Failure, by_option, database_option, run_dir_argument
from runwatch.monitor.commands.store import open_run
from runwatch.monitor.show.status import read_status

CHANGES: Mapping[str, tuple[str, ...]] = {
    "mixture": TOUCHES["set_data_mixture"],
    "context": TOUCHES["set_context_length"],
    "rewind": (*TOUCHES["rewind"], "train/loss"),
    "transport": ("throughput",),
    "learning-rate": TOUCHES["scale_lr"],
}
"""The changes that people plan most, and the signals that each moves."""


def rebased(declaration: Declaration) -> list[str]:
    """The checks that reset their baseline at the declared step."""
    change = Change(declaration.step, declaration.signals)
    return [name for name, check in all_checks().items() if change.touches(check.signals)]


@click.command("declare")
@run_dir_argument
@click.option("--step", type=click.IntRange(min=0), required=True, help="First step of the change.")
@click.option("--change", "kinds", type=click.Choice(list(CHANGES)), multiple=True, help="What changes.")
@click.option("--signal", "names", multiple=True, help="Another signal, or a family of signals, that it affects.")
@click.option("--reason", required=True, help="What changes and why.")
@by_option
@database_option
def command(
    run_dir: Path,
    step: int,
    kinds: tuple[str, ...],
    names: tuple[str, ...],
    reason: str,
    by: str,
    database: str | None,
) -> None:
    """Declare a planned change at a step: checks that read what it affects reset their baseline there."""
    if not run_dir.is_dir():
        raise Failure(f"{run_dir} is not a directory", USAGE)
    signals = tuple(dict.fromkeys([*(signal for kind in kinds for signal in CHANGES[kind]), *names]))
    if not signals:
        raise click.UsageError(f"say what it affects: --change ({', '.join(CHANGES)}) or --signal NAME")
    try:
        declaration = Declaration(step=step, signals=signals, reason=reason)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    status = read_status(run_dir)
    click.echo(declare(open_run(run_dir, database), declaration, by, status["run"]["step"] if status else None))
    click.echo(f"Checks that reset there: {', '.join(rebased(declaration)) or 'none, since no check reads these'}.")
