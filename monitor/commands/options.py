"""What commands share: a group that imports a command only when it is run, exit codes, the RUN_DIR argument."""

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import click

USAGE, DATA, UNAVAILABLE, FAILED = 64, 65, 69, 70
"""Exit codes of sysexits.h: a wrong command line, input that cannot be used, nothing to ask, a failure of our own."""

EXITS = {"healthy": 0, "degraded": 1, "critical": 2}
"""Exit codes by the health of a run."""

by_option = click.option("--by", required=True, default=lambda: os.environ.get("USER"), help="Your name [your login].")
database_option = click.option("--database", metavar="URL", help="The --database of `runwatch watch`, if it has one.")
run_dir_argument = click.argument("run_dir", type=click.Path(path_type=Path), metavar="RUN_DIR")


class Failure(click.ClickException):
    """The command could not do its work; `code` is the exit code."""

    def __init__(self, message: str, code: int = DATA) -> None:
        super().__init__(message)
        self.code = code


class LazyGroup(click.Group):
    """`lazy` maps a command's name to `module:attribute` and the line that `--help` shows for it."""

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = dict(lazy or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command, loaded or not."""
        return sorted({*super().list_commands(ctx), *self.lazy})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now if need be."""
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self.lazy[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in `--help`, without importing anything."""
        rows = [(name, self._line(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _line(self, ctx: click.Context, name: str) -> str:
        if name in self.lazy:
            return self.lazy[name][1]
        command = super().get_command(ctx, name)
        return command.get_short_help_str(limit=100) if command else ""
