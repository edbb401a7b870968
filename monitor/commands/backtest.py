"""`runwatch backtest`: the verdicts of the checks on a recorded run, in the terminal, as JSON, as a page."""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
import orjson
import yaml
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from runwatch.checks import Change, Level, Settings, all_checks
from runwatch.monitor.card.context import Applied, changes, check_settings
from runwatch.monitor.card.run_card import CardError, load_card
from runwatch.monitor.engine.backtest import Result, backtest, level_of, steps_of
from runwatch.monitor.read.sources import Naming, Source, SourceError, load
from runwatch.rules.plan import Directive, Receipt

USAGE, DATA = 64, 65
"""Exit codes of sysexits.h: a wrong command line, and data that cannot be read."""

STYLES = {Level.WARN: "yellow", Level.CRITICAL: "bold red"}
POLL_SECONDS = 1.0
PIPED_WIDTH = 160


@click.command("backtest")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=click.Path(path_type=Path))
@click.option("--map", "maps", multiple=True, metavar="OURS=THEIRS", help="Read a canonical signal from a column.")
@click.option("--unit", "units", multiple=True, metavar="SIGNAL=UNIT", help="percent, ratio, ms, s or a factor.")
@click.option("--card", type=click.Path(path_type=Path), help="Run card [run.yaml of a run directory].")
@click.option("--set", "overrides", multiple=True, metavar="CHECK.SETTING=VALUE", help="Change one setting.")
@click.option("--json", "json_file", is_flag=False, flag_value="-", metavar="[FILE]", help="JSON to FILE or stdout.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a self-contained page with plots.")
@click.option("--follow", is_flag=True, help="Follow a run that is still being written; stop with Ctrl-C.")
def command(
    sources: tuple[Path, ...],
    maps: tuple[str, ...],
    units: tuple[str, ...],
    card: Path | None,
    overrides: tuple[str, ...],
    json_file: str | None,
    html: Path | None,
    follow: bool,
) -> None:
    """Run the checks over recorded runs: run directories, CSV, JSONL, W&B, TensorBoard, trainer_state.json, text logs.

    Exits with 0 without incidents, 1 after warnings, 2 after a critical incident, 64 or more on wrong use.
    """
    try:
        naming = Naming.parse(maps, units)
        if follow:
            settings, planned = context(sources[0], card, overrides)
            sys.exit(int(follow_source(sources, naming, settings, planned)))
        results = run(sources, naming, card, overrides)
    except (SourceError, CardError) as error:
        _fail(str(error), DATA if isinstance(error, CardError) else USAGE)
    if json_file is not None:
        _write_json(results, json_file)
    if json_file != "-":
        for result in results:
            show(result, Console(width=None if sys.stdout.isatty() else PIPED_WIDTH), Console(stderr=True))
    if html is not None:
        _write_page(results, html)
    sys.exit(max((max(int(result.worst), 0) for result in results), default=0))


def run(
    paths: Sequence[Path], naming: Naming | None = None, card: Path | None = None, overrides: Sequence[str] = ()
) -> list[Result]:
    """Backtest each of `paths`, with progress on a terminal.

    Raises:
        SourceError: a source, or a word of `overrides`, cannot be read.
        CardError: the card has mistakes.
    """
    results: list[Result] = []
    console = Console(stderr=True)
    with console.status("reading") as status:
        for path in paths:
            settings, planned = context(path, card, overrides)
            name = path.name

            def reading(count: int, name: str = name) -> None:
                status.update(f"{name}: {count:,} records read")

            def judging(check: str, name: str = name) -> None:
                status.update(f"{name}: judging {check}")

            results.append(backtest(load(path, naming, reading), settings, planned, judging))
    return results


def context(path: Path, card: Path | None, overrides: Sequence[str]) -> tuple[Mapping[str, Settings], Sequence[Change]]:
    """Settings and planned changes: defaults, then the card with the directives of its run, then `--set`."""
    own = path / "run.yaml"
    chosen = card or (own if own.is_file() else None)
    if chosen is None:
        return _overridden({name: check.settings() for name, check in all_checks().items()}, overrides), ()
    declared = load_card(chosen)
    directives = applied_directives(path)
    return _overridden(check_settings(declared, directives), overrides), changes(declared, directives)


def applied_directives(run_dir: Path) -> tuple[Applied, ...]:
    """The directives that the trainer has applied, oldest first; files that cannot be read are left out."""
    found: list[Applied] = []
    for path in sorted((run_dir / "control" / "receipts").glob("*.json")):
        try:
            receipt = Receipt.model_validate_json(path.read_bytes())
            directive = Directive.model_validate_json((run_dir / "control" / "requests" / path.name).read_bytes())
        except (OSError, ValidationError):
            continue
        if receipt.status == "applied":
            found.append(Applied(receipt, directive.actions))
    return tuple(sorted(found, key=lambda one: one.receipt.time))


def _overridden(settings: Mapping[str, Settings], words: Sequence[str]) -> dict[str, Settings]:
    changed = dict(settings)
    for word in words:
        target, equals, text = word.partition("=")
        name, dot, key = target.partition(".")
        if not equals or not dot or name not in changed:
            raise SourceError(f"--set {word}: write CHECK.SETTING=VALUE; checks are {', '.join(changed)}.")
        try:
            changed[name] = type(changed[name]).model_validate({**dict(changed[name]), key: yaml.safe_load(text)})
        except (ValidationError, yaml.YAMLError) as error:
            known = ", ".join(type(changed[name]).model_fields) or "none"
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else "the value is not YAML"
            raise SourceError(f"--set {word}: {why}. Settings of {name}: {known}.") from error
    return changed


def show(result: Result, out: Console, err: Console) -> None:
    """The table of incidents on `out`; warnings about the source on `err`."""
    for warning in result.loaded.warnings:
        err.print(warning, style="yellow", markup=False, highlight=False, soft_wrap=True)
    loaded = result.loaded
    attempts = len(loaded.attempts)
    heading = f"{loaded.source}: {loaded.records:,} records, {attempts} attempt{'s' * (attempts != 1)}"
    if result.incidents:
        out.print(_table(result, heading))
    else:
        out.print(f"{heading}, no incidents.", markup=False, highlight=False, soft_wrap=True)
    if result.unknown_checks:
        unknown = f"Not judged, their signals are missing: {', '.join(result.unknown_checks)}."
        out.print(unknown, markup=False, highlight=False, soft_wrap=True, style="dim")


def _table(result: Result, heading: str) -> Table:
    table = Table(title=Text(heading), title_justify="left", title_style="")
    for name in ("#", "check", "steps", "value", "limit", "level", "what"):
        right = name in ("#", "steps", "value", "limit")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "what")
    for number, one in enumerate(result.incidents, start=1):
        cells = (str(number), one.check, steps_of(one), f"{one.value:.4g}", f"{one.limit:.4g}")
        level = level_of(one)
        table.add_row(*cells, Text(level.name.lower(), STYLES[level]), Text(one.what))
    return table


def _write_json(results: Sequence[Result], target: str) -> None:
    objects = [{"source": result.loaded.source, **result.as_json()} for result in results]
    whole: Any = results[0].as_json() if len(results) == 1 else objects
    text = orjson.dumps(whole, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    if target == "-":
        sys.stdout.buffer.write(text)
    else:
        Path(target).write_bytes(text)


def _write_page(results: Sequence[Result], target: Path) -> None:
    try:
        from runwatch.monitor.report.backtest_page import backtest_page  # noqa: PLC0415 - matplotlib is an extra and slow to import
    except ImportError:
        _fail("The page needs matplotlib; install the extra: pip install 'runwatch[plots]'.", USAGE)
    target.write_text(backtest_page(results), encoding="utf-8")
    Console(stderr=True).print(f"Wrote {target}", markup=False, highlight=False)


def follow_source(
    sources: Sequence[Path], naming: Naming, settings: Mapping[str, Settings], planned: Sequence[Change]
) -> Level:
    """Judge one growing source as it grows, and say when an incident opens, turns critical or resolves."""
    from runwatch.monitor.engine.follow import Following  # noqa: PLC0415 - the live path is needed here only

    if len(sources) != 1:
        raise SourceError("--follow takes exactly one source.")
    following = Following(Source(sources[0], naming), settings, planned)
    console = Console()
    try:
        while not following.finished:
            for line in following.poll(time.time()):
                console.print(line, markup=False, highlight=False)
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        console.print("stopped")
    return following.worst


def _fail(message: str, code: int) -> NoReturn:
    Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)
