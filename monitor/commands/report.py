"""`runwatch report`: the public page of a run."""

from pathlib import Path

import click

from runwatch.monitor.commands.options import DATA, UNAVAILABLE, USAGE, Failure, database_option, run_dir_argument
from runwatch.monitor.read.sources import SourceError
from runwatch.monitor.report.run_page import ReportError, report
from runwatch.monitor.store.store import StoreError


@click.command("report")
@run_dir_argument
@click.option(
    "--html", "html_file", type=click.Path(path_type=Path), help="[RUN_DIR's name.html, in the current directory]"
)
@click.option(
    "--markdown", "markdown_file", type=click.Path(path_type=Path), help="[RUN_DIR's name.md, in the current directory]"
)
@database_option
def report_command(run_dir: Path, html_file: Path | None, markdown_file: Path | None, database: str | None) -> None:
    """Write the public page of the run in RUN_DIR: what was registered, what fired, what was decided, and the outcome.

    It comes as one HTML file and as Markdown for an issue comment; with one of the options, only that one.
    """
    if not run_dir.is_dir():
        raise Failure(f"{run_dir} is not a directory", USAGE)
    if html_file is None and markdown_file is None:
        name = run_dir.resolve().name  # the run directory is read, and may be another's
        html_file, markdown_file = Path(f"{name}.html"), Path(f"{name}.md")
    try:
        report(run_dir, html_file, markdown_file, database)
    except ReportError as error:
        raise Failure(str(error), UNAVAILABLE) from error
    except OSError as error:
        raise Failure(f"{error.filename}: {error.strerror}; name another place with --html and --markdown") from error
    except (SourceError, StoreError) as error:
        raise Failure(str(error), DATA) from error
    for path in (html_file, markdown_file):
        if path is not None:
            click.echo(f"Wrote {path}", err=True)
