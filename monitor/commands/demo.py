"""Commands that start the reference trainer, as a process of its own."""

import os
import sys
import time
from pathlib import Path

import click
from rich.console import Console

from runwatch.monitor.commands.options import USAGE, Failure
from runwatch.monitor.drill.demo import demo as play


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def train(arguments: tuple[str, ...]) -> None:
    """Train with the reference trainer (needs the extra `trainer`); takes the trainer's own arguments."""
    os.execv(sys.executable, [sys.executable, "-P", "-m", "runwatch.trainer.train", *arguments])  # noqa: S606 - no shell


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path), required=False)
@click.option("--listen", default="127.0.0.1:9464", metavar="HOST:PORT", help="Where the status page is served.")
def demo(run_dir: Path | None, listen: str) -> None:
    """Train a small mixture of experts, break it, and watch the plan be carried out (under five minutes)."""
    target = run_dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    if target.exists():
        raise Failure(f"{target} exists: name another directory", USAGE)
    sys.exit(play(target, listen, Console()))
