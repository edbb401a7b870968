"""The public page of a run, as one HTML file that needs nothing else and as Markdown for an issue comment."""

from collections.abc import Mapping
from pathlib import Path

from runwatch.monitor.report.page import html, markdown
from runwatch.monitor.report.recorded_run import RecordedRun, gather
from runwatch.monitor.report.sections import sections


class ReportError(RuntimeError):
    """The page cannot be made; the text names the remedy."""


def report(run_dir: Path, out_html: Path | None, out_markdown: Path | None, database: str | None = None) -> None:
    """Write the page of a run that is in flight or over, watched or not; None leaves a version out.

    Raises:
        ReportError: matplotlib is missing.
        SourceError: there is no telemetry that can be read.
        StoreError: the database cannot be used.
    """
    recorded = gather(run_dir, database)
    page = sections(recorded, _pictures(recorded) if out_html else {})
    title = f"Run {recorded.remembered.run}"
    if out_html is not None:
        _write(out_html, html(title, page))
    if out_markdown is not None:
        _write(out_markdown, markdown(title, page))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _pictures(recorded: RecordedRun) -> Mapping[str, str]:
    try:
        from runwatch.monitor.report.run_charts import run_pictures  # noqa: PLC0415 - matplotlib is an extra and slow to import
    except ImportError as error:
        remedy = "The page needs plots; install the extra: pip install 'runwatch[plots]'. --markdown alone needs none."
        raise ReportError(remedy) from error
    return run_pictures(recorded)
