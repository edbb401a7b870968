"""The page of a check or node: its docstring, as `runwatch explain`, as a runbook, as Markdown in `docs/runbooks/`."""

import re
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from runwatch.checks import all_checks
from runwatch.checks.signals import FAMILIES, VOCABULARY
from runwatch.monitor.card.run_card import nearest
from runwatch.monitor.commands.options import USAGE, Failure
from runwatch.rules import all_nodes

HEADING = re.compile(r"^([A-Z][A-Za-z ]+):\s*(\w?)", re.MULTILINE)


def names() -> list[str]:
    """Everything that has a page: the checks, then the nodes."""
    return [*all_checks(), *all_nodes()]


def explanation(name: str) -> str | None:
    """The docstring of a check or node, or None."""
    found = all_checks().get(name) or all_nodes().get(name)
    return found.docs if found else None


def markdown(name: str) -> str:
    """The runbook page: the docstring's own words, its headings as headings."""
    text = explanation(name) or ""
    kind = "Check" if name in all_checks() else "Risk node"
    body = HEADING.sub(lambda found: f"## {found[1]}\n\n{found[2].upper()}", text)
    source = f"{'checks' if kind == 'Check' else 'rules'}/{name}.py"
    return (
        f"# {kind} `{name}`\n\n{body.rstrip()}\n\nMade from the docstring of `{source}`: `runwatch explain {name}`.\n"
    )


@click.command("explain")
@click.argument("name", required=False)
@click.option("--all", "every", is_flag=True, help="Every check and node.")
@click.option("--write", type=click.Path(path_type=Path, file_okay=False), help="Write Markdown pages into a folder.")
def command(name: str | None, every: bool, write: Path | None) -> None:
    """What a check or a risk node does, why, and what to do when it fires."""
    if bool(name) == every:
        raise click.UsageError(f"give one name, or --all; names are {', '.join(names())}")
    for one in [name] if name else names():
        text = explanation(one)
        if text is None:
            raise Failure(f"there is no check or node {one}{nearest(one, names())}", USAGE)
        if write is None:
            click.echo(f"{one}\n\n{text}\n")
        else:
            write.mkdir(parents=True, exist_ok=True)
            (write / f"{one}.md").write_text(markdown(one), encoding="utf-8")


@click.command()
def signals() -> None:
    """The canonical signals, their units, and what other trainers call them."""
    table = Table("signal", "unit", "meaning", "also read from", box=None)
    for signal in VOCABULARY.values():
        table.add_row(signal.name, signal.unit, signal.meaning, ", ".join(signal.aliases))
    for signal in FAMILIES.values():
        table.add_row(f"{signal.name}/…", signal.unit, signal.meaning, "")
    Console(width=None if sys.stdout.isatty() else 200).print(table)
