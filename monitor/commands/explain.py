"""`runwatch explain`: the page of a check or node, in the terminal or as Markdown."""

from pathlib import Path

import click

from runwatch.monitor.card.run_card import nearest
from runwatch.monitor.commands.options import USAGE, Failure
from runwatch.monitor.show.explain import explanation, markdown, names


@click.command("explain")
@click.argument("name", required=False)
@click.option("--all", "every", is_flag=True, help="Explain every check and node.")
@click.option("--write", type=click.Path(path_type=Path, file_okay=False), help="Write Markdown pages into a folder.")
def command(name: str | None, every: bool, write: Path | None) -> None:
    """Explain a check or a risk node: what it does, why, and what to do when it fires."""
    if bool(name) == every:
        raise click.UsageError(f"give one name, or --all; the names are {', '.join(names())}")
    for one in [name] if name else names():
        text = explanation(one)
        if text is None:
            raise Failure(f"there is no check or node {one}{nearest(one, names())}", USAGE)
        if write is None:
            click.echo(f"{one}\n\n{text}\n")
        else:
            write.mkdir(parents=True, exist_ok=True)
            (write / f"{one}.md").write_text(markdown(one), encoding="utf-8")
