"""`runwatch plan preview`: what a node's plan would do; nothing is carried out."""

import sys
import time
from pathlib import Path

import click

from runwatch.monitor.card.run_card import CardError, load_card, nearest
from runwatch.monitor.commands.options import DATA, UNAVAILABLE, USAGE, Failure, database_option
from runwatch.monitor.read.sources import SourceError
from runwatch.monitor.report.preview import Preview, chart, described, page, preview, world_of_card
from runwatch.monitor.report.recorded_run import gather
from runwatch.monitor.store.store import StoreError
from runwatch.rules import Proposal, Refusal, World, all_nodes

NOT_PROPOSED = 1
"""Exit code when the plan would not be proposed."""


@click.command("preview")
@click.argument("words", nargs=-1, required=True, metavar="[RUN_DIR] NODE")
@click.option("--at", "share", metavar="PERCENT", help="At this share of the token budget in force, such as 12%.")
@click.option("--card", type=click.Path(path_type=Path), help="Use a run card instead of a run directory.")
@click.option("--tokens-per-second", "rate", type=click.FloatRange(min=0, min_open=True), help="Speed, with --card.")
@click.option("--png", "png_file", type=click.Path(path_type=Path), help="Write the picture as PNG.")
@click.option("--html", "html_file", type=click.Path(path_type=Path), help="Write a page with the picture.")
@database_option
def preview_command(
    words: tuple[str, ...],
    share: str | None,
    card: Path | None,
    rate: float | None,
    png_file: Path | None,
    html_file: Path | None,
    database: str | None,
) -> None:
    """Show what NODE's plan would do now, or at another point of the run; nothing is carried out.

    RUN_DIR is the current directory unless given. Exits with 1 when the plan would not be proposed, and says why.
    """
    *before, node = words
    if len(before) > (1 if card is None else 0):
        raise click.UsageError("write RUN_DIR NODE, or NODE with --card CARD")
    if node not in all_nodes():
        raise Failure(f"there is no node {node}{nearest(node, all_nodes())}", USAGE)
    at = None if share is None else fraction(share)
    world = _world_of_run(Path(*before), database) if card is None else _world_of_card(card, rate)
    found = preview(node, world, at)
    for line in described(found):
        click.echo(line)
    _write(found, png_file, html_file)
    if isinstance(found.proposal, Refusal):
        sys.exit(NOT_PROPOSED)


def fraction(share: str) -> float:
    """A share such as `12%` or `0.12`.

    Raises:
        click.UsageError: it is not a share, or not between 0 and 100 %.
    """
    try:
        value = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
    except ValueError as error:
        raise click.UsageError(f"--at {share}: write a share such as 12% or 0.12") from error
    if not 0 <= value <= 1:
        raise click.UsageError(f"--at {share}: a share must be between 0 and 100%")
    return value


def _world_of_card(card: Path, rate: float | None) -> World:
    try:
        return world_of_card(load_card(card), time.time(), rate)
    except CardError as error:
        raise Failure(str(error), DATA) from error


def _world_of_run(run_dir: Path, database: str | None) -> World:
    if not run_dir.is_dir():
        raise Failure(f"{run_dir} is not a directory", USAGE)
    try:
        world = gather(run_dir, database).world
    except (SourceError, StoreError) as error:
        raise Failure(str(error), DATA) from error
    if world is None:
        why = "no plan can be made without a valid run.yaml and telemetry; see `runwatch validate`"
        raise Failure(f"{run_dir}: {why}, or preview the card alone with --card", UNAVAILABLE)
    return world


def _write(found: Preview, png_file: Path | None, html_file: Path | None) -> None:
    try:
        if png_file is not None and isinstance(found.proposal, Proposal):
            from runwatch.monitor.report.plan_chart import plan_png  # noqa: PLC0415 - matplotlib is an extra and slow to import

            png_file.write_bytes(plan_png(chart(found, found.proposal)))
            click.echo(f"Wrote {png_file}", err=True)
        if html_file is not None:
            html_file.write_text(page(found), encoding="utf-8")
            click.echo(f"Wrote {html_file}", err=True)
    except ImportError as error:
        raise Failure(
            "The picture needs matplotlib; install the extra: pip install 'runwatch[plots]'.", UNAVAILABLE
        ) from error
    except OSError as error:
        raise Failure(f"{error.filename}: {error.strerror}", USAGE) from error
