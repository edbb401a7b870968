"""`runwatch declare`: a planned change is announced, so that checks judge anew from there instead of firing."""

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
    """The checks that judge anew from the declared step on."""
    change = Change(declaration.step, declaration.signals)
    return [name for name, check in all_checks().items() if change.touches(check.signals)]


@click.command("declare")
@run_dir_argument
@click.option("--step", type=click.IntRange(min=0), required=True, help="First step of the change.")
@click.option("--change", "kinds", type=click.Choice(list(CHANGES)), multiple=True, help="What is changed.")
@click.option("--signal", "names", multiple=True, help="A signal, or a family of them, that it moves as well.")
@click.option("--reason", required=True, help="What is changed and why.")
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
    """Announce a planned change at a step: checks that read what it moves judge anew from there on."""
    if not run_dir.is_dir():
        raise Failure(f"{run_dir} is no directory", USAGE)
    signals = tuple(dict.fromkeys([*(signal for kind in kinds for signal in CHANGES[kind]), *names]))
    if not signals:
        raise click.UsageError(f"say what moves: --change ({', '.join(CHANGES)}) or --signal NAME")
    try:
        declaration = Declaration(step=step, signals=signals, reason=reason)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    status = read_status(run_dir)
    click.echo(declare(open_run(run_dir, database), declaration, by, status["run"]["step"] if status else None))
    click.echo(f"Judged anew from there on: {', '.join(rebased(declaration)) or 'no check, since none reads these'}.")
