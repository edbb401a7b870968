"""`runwatch demo`: what runwatch does, in a few minutes."""

import sys
import time
from pathlib import Path

import click
from rich.console import Console

from runwatch.monitor.commands.options import USAGE, Failure
from runwatch.monitor.drill.demo import demo as play


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path), required=False)
@click.option("--listen", default="127.0.0.1:9464", metavar="HOST:PORT", help="Where to serve the status page.")
def demo(run_dir: Path | None, listen: str) -> None:
    """Train a small mixture of experts, inject a fault, and watch the plan respond (under five minutes)."""
    target = run_dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    if target.exists():
        raise Failure(f"{target} already exists: name another directory", USAGE)
    sys.exit(play(target, listen, Console()))
