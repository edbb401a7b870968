"""The page of a backtest: pictures, incidents, and what each check that fired means. Needs matplotlib (extra `plots`)."""

from collections.abc import Callable, Sequence

from runwatch.checks import all_checks
from runwatch.monitor.engine.backtest import Result, level_of, steps_of
from runwatch.monitor.report.figures import loss_picture, strips_picture
from runwatch.monitor.report.page import Block, Picture, Section, Table, Text, Verbatim, html
from runwatch.monitor.store.incident import Incident


def backtest_page(results: Sequence[Result], progress: Callable[[str], None] = lambda _: None) -> str:
    """One HTML page with everything in it. Opens offline."""
    sections: list[Section] = []
    for result in results:
        progress(result.loaded.source)
        sections.append(_section(result))
    return html(f"Backtest of {', '.join(result.loaded.source for result in results)}", sections)


def _section(result: Result) -> Section:
    loaded = result.loaded
    unknown = ", ".join(result.unknown_checks)
    summary = f"{loaded.records:,} records, {len(loaded.attempts)} attempts, {len(result.incidents)} incidents."
    blocks: list[Block] = [
        Text(summary + (f" Not judged, their signals are missing: {unknown}." if unknown else "")),
        Picture(loss_picture(result), "Loss over the run with its trend; flagged ranges are shaded."),
        Picture(strips_picture(loaded.signals, result.verdicts), "Level of each check over the records."),
        *_incidents(result.incidents),
        *(Text(warning, "warning") for warning in loaded.warnings),
    ]
    return Section(loaded.source, blocks)


def _incidents(incidents: Sequence[Incident]) -> list[Block]:
    if not incidents:
        return [Text("No incidents.", "good")]
    head = ("Check", "Level", "Steps", "Value", "Limit", "What")
    fired = sorted({incident.check for incident in incidents})
    return [
        Table(head, [_row(incident) for incident in incidents], frozenset({2, 3, 4})),
        *(Verbatim(f"What {check} means and what to do", all_checks()[check].docs) for check in fired),
    ]


def _row(one: Incident) -> tuple[str, ...]:
    level = "warning" if level_of(one).name == "WARN" else level_of(one).name.lower()
    return one.check, level, steps_of(one), f"{one.value:.4g}", f"{one.limit:.4g}", one.what
