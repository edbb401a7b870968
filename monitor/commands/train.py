"""`runwatch train`: the reference trainer, as a process of its own."""

import os
import sys

import click


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def train(arguments: tuple[str, ...]) -> None:
    """Train with the reference trainer (needs the extra `trainer`); takes the trainer's own arguments."""
    os.execv(sys.executable, [sys.executable, "-P", "-m", "runwatch.trainer.train", *arguments])  # noqa: S606 - no shell
