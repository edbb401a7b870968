"""`runwatch ladder`: train small runs, fit them, register what they predict for the main run, and draw it."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from runwatch.monitor.card.ladder_fit import HeldOut, LadderError, LadderFit, fit_rungs
from runwatch.monitor.card.ladder_section import Change, launched, prepare, verify, write
from runwatch.monitor.card.run_card import CardError
from runwatch.monitor.commands.options import UNAVAILABLE, USAGE, Failure
from runwatch.monitor.commands.store import open_run
from runwatch.monitor.read.sources import SourceError

SYMBOLS = {
    "irreducible": "E",
    "parameter_scale": "A",
    "parameter_exponent": "alpha",
    "token_scale": "B",
    "token_exponent": "beta",
    "sharpness": "p",
}
WANTED_ERROR, WANTED_INSIDE = 0.02, 0.9
"""What a ladder should reach on a held-out rung: nats at its end, and the share of its course inside the 95 % band."""

path_type = click.Path(path_type=Path)
rungs_argument = click.argument("rungs", type=path_type, metavar="RUNGS.json")


@click.group()
def ladder() -> None:
    """Train small runs of the same recipe and predict from them, before launch, the loss of the main run."""


@ladder.command(
    short_help="Train the rungs with the reference trainer.",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def train(arguments: tuple[str, ...]) -> None:
    """Train the rungs with the reference trainer (needs the extra `trainer`); takes its arguments, see --help."""
    os.execv(sys.executable, [sys.executable, "-P", "-m", "runwatch.trainer.ladder.train", *arguments])  # noqa: S606 - no shell


@ladder.command("fit", short_help="Fit the rungs: formula, intervals, residuals.")
@rungs_argument
@click.option("--held-out", "held_out", is_flag=True, help="Also fit without the largest rung, and predict it.")
@click.option("--json", "json_file", type=path_type, metavar="FILE", help="Write the fit to FILE as JSON.")
def fit_command(rungs: Path, held_out: bool, json_file: Path | None) -> None:
    """Fit the rungs: the formula with its 95 % intervals, and how far each rung is from it."""
    try:
        fitted = fit_rungs(rungs, *(("--held-out",) if held_out else ()))
    except LadderError as error:
        raise Failure(str(error)) from error
    for line in described(fitted):
        click.echo(line)
    for remark in fitted.warnings:
        click.echo(f"warning: {remark}", err=True)
    if json_file is not None:
        json_file.write_text(fitted.model_dump_json(indent=2) + "\n", encoding="utf-8")


def described(fitted: LadderFit) -> list[str]:
    """A fit, described for people."""
    sharp = fitted.surface["sharpness"] > 1
    formula = "E + ((A / N^alpha)^p + (B / t^beta)^p)^(1/p)" if sharp else "E + A / N^alpha + B / t^beta"
    lines = [f"Loss at N parameters and t tokens, at constant rate: {formula}"]
    for name, (low, high) in fitted.intervals.items():
        if name != "sharpness" or sharp:
            lines.append(f"  {SYMBOLS[name]:<6}{fitted.surface[name]:>14.6g}   ({low:.4g} to {high:.4g})")
    stable, decay = fitted.misfit
    lines.append(
        f"The decay lowers the loss by {fitted.decay_gain[-1]:.4f} nats at its end; the rungs scatter by {stable:.4f} nats around "
        f"the fit, and by {decay:.4f} within their decay."
    )
    if fitted.shared:
        lines.append(
            f"The data order that the rungs share moves the loss of all sizes alike, by {fitted.shared:.4f} nats."
        )
    lines.append(f"\n{'rung':<16}{'parameters':>14}{'tokens':>18}{'final loss':>12}{'fitted':>10}{'residual':>10}")
    for rung in fitted.rungs:
        numbers = f"{rung.loss:>12.4f}{rung.fitted:>10.4f}{rung.loss - rung.fitted:>+10.4f}"
        lines.append(f"{rung.name:<16}{rung.parameters:>14,}{rung.tokens:>18,}{numbers}")
    return lines if fitted.held_out is None else [*lines, "", _held_sentence(fitted.held_out)]


def _held_sentence(held: HeldOut) -> str:
    reached = abs(held.error) <= WANTED_ERROR and held.inside >= WANTED_INSIDE
    return (
        f"Held out: {held.rung} ended at {held.measured:.4f}, {held.error:+.4f} nats from the {held.predicted:.4f} that the "
        f"other rungs predict; {held.inside:.0%} of its course lies inside the 95 % band. The goal of {WANTED_ERROR} nats and "
        f"{WANTED_INSIDE:.0%} is {'met' if reached else 'missed'}."
    )


@ladder.command("register", short_help="Write the predicted curve into a run card.")
@rungs_argument
@click.option("--card", type=path_type, required=True, metavar="run.yaml", help="The card to write the curve into.")
@click.option("--amend", is_flag=True, help="Change a registered curve, or register after launch; this is logged.")
@click.option("--by", metavar="NAME", help="Who amends it.")
@click.option("--reason", metavar="TEXT", help="Why; recorded in the card and the audit log.")
@click.option(
    "--run", "run_dir", type=path_type, metavar="RUN_DIR", help="The run whose audit log to use [the card's]."
)
@click.option("--database", metavar="URL", help="As given to `runwatch watch`.")
def register_command(
    rungs: Path,
    card: Path,
    amend: bool,
    by: str | None,
    reason: str | None,
    run_dir: Path | None,
    database: str | None,
) -> None:
    """Write the predicted curve with its band into a run card, before launch. Nothing else in the card changes."""
    if amend and not (by and reason):
        raise Failure("--amend needs --by NAME and --reason TEXT: an amendment records who and why", USAGE)
    try:
        change = Change(by, reason) if amend and by and reason else None
        section, remarks = prepare(card, rungs, change)
        if change is None:
            write(card, section)
        else:
            _amend(card, section, change, run_dir, database)
    except (LadderError, CardError) as error:
        raise Failure(str(error)) from error
    except OSError as error:
        raise Failure(f"{error.filename}: {error.strerror}") from error
    curve = section["curve"]
    last = f"{curve['loss'][-1]:.4f} ({curve['low'][-1]:.4f} to {curve['high'][-1]:.4f})"
    click.echo(f"{card}: registered {section['hash']}\nPredicted at {curve['tokens'][-1]:,.0f} tokens: {last}.")
    for remark in remarks:
        click.echo(f"warning: {remark}", err=True)


def _amend(card: Path, section: dict[str, Any], change: Change, run_dir: Path | None, database: str | None) -> None:
    """Change the card inside the transaction that logs it: neither comes without the other."""
    home = run_dir or (card.parent if launched(card) or (card.parent / ".runwatch").is_dir() else None)
    if home is None:
        write(card, section)
        return
    if not home.is_dir():
        raise Failure(f"{home} is not a directory", USAGE)
    store = open_run(home, database)
    sentence = f"{change.by} amended the ladder's registered curve: {change.reason}"
    was = section["amendments"][-1]["was"]
    payload = {"sentence": sentence, "by": change.by, "reason": change.reason, "was": was, "hash": section["hash"]}
    try:
        with store.transaction() as tx:
            tx.audit("ladder", payload)
            write(card, section)
    finally:
        store.close()


@ladder.command("verify", short_help="Verify that a registered curve is unchanged.")
@rungs_argument
@click.option("--card", type=path_type, required=True, metavar="run.yaml", help="The card that holds the curve.")
def verify_command(rungs: Path, card: Path) -> None:
    """Verify that a registered curve and its rungs are unchanged since registration; exits with 1 if not."""
    try:
        unchanged = verify(card, rungs)
    except LadderError as error:
        raise Failure(str(error)) from error
    if not unchanged:
        raise Failure(f"{card}: the hash does not match: the section or {rungs} was changed after registration", 1)
    click.echo(f"{card}: unchanged since registration")


@ladder.command("show", short_help="Draw rungs, fit, prediction and a live run.")
@rungs_argument
@click.option("--run", "run_dir", type=path_type, metavar="RUN_DIR", help="Draw this run and its registered curve too.")
@click.option("--png", type=path_type, metavar="FILE", help="Write the picture as PNG.")
@click.option("--html", type=path_type, metavar="FILE", help="Write one page with picture and table.")
def show_command(rungs: Path, run_dir: Path | None, png: Path | None, html: Path | None) -> None:
    """Draw the rungs, the fit, the prediction with its band, the live run, and grad norm and drop rate over scale."""
    try:
        fitted = fit_rungs(rungs)
        lines = described(fitted)
        for line in () if png or html else lines:
            click.echo(line)
        if png or html:
            _draw(fitted, lines, run_dir, png, html)
    except (LadderError, CardError, SourceError) as error:
        raise Failure(str(error)) from error
    except OSError as error:
        raise Failure(f"{error.filename}: {error.strerror}") from error


def _draw(fitted: LadderFit, lines: list[str], run_dir: Path | None, png: Path | None, html: Path | None) -> None:
    if find_spec("matplotlib") is None:
        raise Failure("pictures need matplotlib: pip install 'runwatch[plots]'", UNAVAILABLE)
    from runwatch.monitor.report.ladder_figures import live_run, page, picture  # noqa: PLC0415 - matplotlib is an extra

    figure = picture(fitted, None if run_dir is None else live_run(run_dir))
    if png:
        figure.savefig(png, dpi=130)
        click.echo(f"Wrote {png}")
    if html:
        html.write_text(page(figure, lines), encoding="utf-8")
        click.echo(f"Wrote {html}")
