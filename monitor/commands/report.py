"""`runwatch report`: the public page of a run, as one HTML file that needs nothing else and as Markdown for an issue comment."""

from collections.abc import Mapping
from pathlib import Path

import click

from runwatch.monitor.commands.options import DATA, UNAVAILABLE, USAGE, Failure, database_option, run_dir_argument
from runwatch.monitor.read.sources import SourceError
from runwatch.monitor.report.page import html, markdown
from runwatch.monitor.report.recorded_run import Dossier, gather
from runwatch.monitor.report.sections import sections
from runwatch.monitor.store.store import StoreError


class ReportError(RuntimeError):
    """The page cannot be made; the text names the remedy."""


def report(run_dir: Path, out_html: Path | None, out_markdown: Path | None, database: str | None = None) -> None:
    """Write the page of a run that is in flight or over, watched or not; None leaves a version out.

    Raises:
        ReportError: matplotlib is missing.
        SourceError: there is no telemetry that can be read.
        StoreError: the database cannot be used.
    """
    dossier = gather(run_dir, database)
    page = sections(dossier, _pictures(dossier) if out_html else {})
    title = f"Run {dossier.remembered.run}"
    if out_html is not None:
        _write(out_html, html(title, page))
    if out_markdown is not None:
        _write(out_markdown, markdown(title, page))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _pictures(dossier: Dossier) -> Mapping[str, str]:
    try:
        from runwatch.monitor.report.run_charts import run_pictures  # noqa: PLC0415 - matplotlib is an extra and slow to import
    except ImportError as error:
        remedy = "The page needs plots; install the extra: pip install 'runwatch[plots]'. --markdown alone needs none."
        raise ReportError(remedy) from error
    return run_pictures(dossier)


@click.command("report")
@run_dir_argument
@click.option("--html", "html_file", type=click.Path(path_type=Path), help="[RUN_DIR/.runwatch/report.html]")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="[RUN_DIR/.runwatch/report.md]")
@database_option
def report_command(run_dir: Path, html_file: Path | None, markdown_file: Path | None, database: str | None) -> None:
    """The public page of the run in RUN_DIR: what was registered, what fired, what was decided and what came of it.

    Written as one HTML file and as Markdown for an issue comment; with one of the options, only that one.
    """
    if not run_dir.is_dir():
        raise Failure(f"{run_dir} is no directory", USAGE)
    if html_file is None and markdown_file is None:
        html_file, markdown_file = run_dir / ".runwatch" / "report.html", run_dir / ".runwatch" / "report.md"
    try:
        report(run_dir, html_file, markdown_file, database)
    except ReportError as error:
        raise Failure(str(error), UNAVAILABLE) from error
    except (SourceError, StoreError) as error:
        raise Failure(str(error), DATA) from error
    for path in (html_file, markdown_file):
        if path is not None:
            click.echo(f"Wrote {path}", err=True)
