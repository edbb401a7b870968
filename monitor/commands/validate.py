"""`runwatch validate`: every mistake in a run card, or in a whole run directory, with its place and its remedy."""

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from runwatch.monitor.act.directives import receipts_of
from runwatch.monitor.card.run_card import CardError, load_card, remarks
from runwatch.monitor.commands.options import DATA, USAGE, Failure
from runwatch.monitor.read.run_directory import RunReader


@click.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="CARD|RUN_DIR")
def validate(path: Path) -> None:
    """Check a run card, or a run directory with its telemetry and receipts. Names file, line and remedy of every mistake."""
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
        f"{reader.records:,} records, {len(reader.attempts)} attempts, {reader.malformed:,} lines skipped", err=True
    )
    return [str(problem) for problem in (*reader.problems, *receipts.problems.values())]
