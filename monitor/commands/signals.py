"""`runwatch signals`: the vocabulary."""

import sys

import click
from rich.console import Console
from rich.table import Table

from runwatch.checks.signals import FAMILIES, VOCABULARY


@click.command()
def signals() -> None:
    """List the canonical signals, their units, and their names in other trainers."""
    table = Table("signal", "unit", "meaning", "also read from", box=None)
    for signal in VOCABULARY.values():
        table.add_row(signal.name, signal.unit, signal.meaning, ", ".join(signal.aliases))
    for signal in FAMILIES.values():
        table.add_row(f"{signal.name}/…", signal.unit, signal.meaning, "")
    Console(width=None if sys.stdout.isatty() else 200).print(table)
