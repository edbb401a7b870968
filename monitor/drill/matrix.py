"""The matrix of a drill: fault by link, in the terminal, as JSON and as a self-contained page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table as TerminalTable

from runwatch.monitor.drill.links import Drill, Found, Link, delay, first_alerts, links, missing
from runwatch.monitor.report.page import Block, Items, Section, Table, Text, Tone, html

SCHEMA = 1
MARKS = {"seen": "yes", "missing": "MISSING", "not expected": "-"}
STYLES = {"seen": "green", "missing": "bold red", "not expected": "dim"}
COLUMNS = ("detected", "delay", "alert", "node", "plan", "directive", "applied", "verified", "recovered", "held")


@dataclass(frozen=True)
class Drilled:
    """One drill that was run, and how long it took."""

    drill: Drill
    found: Found
    seconds: float
    error: str = ""
    """Why it could not be run to its end; empty when it was."""

    @property
    def held(self) -> bool:
        """Whether it was run and every expected link was seen."""
        return not self.error and not self.missing

    @property
    def missing(self) -> list[Link]:
        """The expected links that were not seen."""
        return missing(self.drill, self.found)


def document(drilled: Sequence[Drilled], notes: Sequence[str], seconds: float) -> dict[str, Any]:
    """The whole matrix as JSON; delays in steps, tokens and seconds, null where nothing was expected or detected."""
    return {
        "version": SCHEMA,
        "held": all(one.held for one in drilled),
        "seconds": round(seconds, 1),
        "notes": list(notes),
        "drills": [_drill(one) for one in drilled],
    }


def _drill(one: Drilled) -> dict[str, Any]:
    late = delay(one.drill, one.found)
    return {
        "name": one.drill.name,
        "what": one.drill.what,
        "seconds": round(one.seconds, 1),
        "held": one.held,
        "error": one.error,
        "first": sorted({alarm.check for alarm in first_alerts(one.found)}),
        "alarms": sorted({alarm.check for alarm in one.found.incidents}),
        "delay": None if late is None else {"steps": late.steps, "tokens": late.tokens, "seconds": late.seconds},
        "executions": [{"id": e.id, "plan": e.plan, "state": e.state.value} for e in one.found.executions],
        "links": [{"name": x.name, "state": x.state, "detail": x.detail} for x in links(one.drill, one.found)],
    }


def table(drilled: Sequence[Drilled]) -> TerminalTable:
    """The matrix for a terminal."""
    shown = TerminalTable(title="Fault by link")
    for name in ("fault", *COLUMNS):
        shown.add_column(name, no_wrap=name in {"fault", "delay"})
    for one in drilled:
        shown.add_row(one.drill.name, *(f"[{STYLES[state]}]{text}[/]" for text, state in cells(one)))
    return shown


def cells(one: Drilled) -> list[tuple[str, str]]:
    """Text and state of each of `COLUMNS`."""
    by_name = {link.name: link for link in links(one.drill, one.found)}
    found: list[tuple[str, str]] = [(_text(by_name[name]), by_name[name].state) for name in COLUMNS if name in by_name]
    late = delay(one.drill, one.found)
    found.insert(
        1, (f"{late.steps:,} steps, {late.tokens:,.0f} tokens" if late else "-", "seen" if late else "not expected")
    )
    return [*found, ("yes" if one.held else "no", "seen" if one.held else "missing")]


def _text(link: Link) -> str:
    if link.state == "seen" and link.name in {"detected", "node", "plan"}:
        return link.detail
    return MARKS[link.state]


def sentences(drilled: Sequence[Drilled]) -> list[str]:
    """A line for each missing link, and for each drill that could not be run."""
    said: list[str] = []
    for one in drilled:
        if one.error:
            said.append(f"{one.drill.name} could not be run: {one.error}")
        else:
            said += [f"{one.drill.name}: {link.name} is missing: {link.detail}" for link in one.missing]
    return said


TONED: Mapping[str, Tone] = {"seen": "good", "missing": "critical"}


def page(drilled: Sequence[Drilled], notes: Sequence[str], seconds: float) -> str:
    """The matrix as one HTML file that loads nothing."""
    broken = sentences(drilled)
    verdict = f"Expected but missing: {len(broken)}." if broken else "Every expected step was seen."
    shown = [cells(one) for one in drilled]
    rows = [
        (one.drill.name, one.drill.what, *(text for text, _ in row)) for one, row in zip(drilled, shown, strict=True)
    ]
    tones: dict[tuple[int, int], Tone] = {
        (y, x): TONED.get(state.split()[0], "quiet")
        for y, row in enumerate(shown)
        for x, (_, state) in enumerate(row, 2)
    }
    blocks: list[Block] = [
        Text(f"{verdict} {len(drilled)} drills in {seconds:.0f} s.", "critical" if broken else "good")
    ]
    blocks += [Items(broken)] if broken else []
    blocks.append(Table(("fault", "what is done", *COLUMNS), rows, tones=tones))
    return html("Drill by runwatch", [Section("Fault by link", blocks), Section("How the drills ran", [Items(notes)])])
