"""The command line: which command lives where. Nothing is imported before it is run, so `runwatch --help` is quick.

Exit codes: 0 healthy, 1 degraded, 2 critical; 64 and above when the command could not do its work (sysexits.h).
"""

import os
import sys

import click

from runwatch.monitor.commands.options import FAILED, USAGE, Failure, LazyGroup

LAZY = {
    "amend": ("runwatch.monitor.commands.amend:command", "Record who changed the run card after launch, and why."),
    "audit": ("runwatch.monitor.commands.audit:audit", "Print the audit log, or verify its chain of hashes."),
    "backtest": ("runwatch.monitor.commands.backtest:command", "Run the checks over a recorded run."),
    "declare": (
        "runwatch.monitor.commands.declare:command",
        "Declare a planned change, so that the affected checks reset their baseline.",
    ),
    "demo": ("runwatch.monitor.commands.demo:demo", "Train a small model, inject a fault, and watch the plan respond."),
    "drill": (
        "runwatch.monitor.commands.drill:command",
        "Inject faults into a throwaway run and check every step of the response.",
    ),
    "explain": ("runwatch.monitor.commands.explain:command", "Explain a check or risk node, and what to do about it."),
    "ladder": ("runwatch.monitor.commands.ladder:ladder", "Train, fit and register the scaling ladder."),
    "plan": ("runwatch.monitor.commands.plan:plan", "List, preview, approve, reject or disable fallback plans."),
    "report": ("runwatch.monitor.commands.report:report_command", "Write the public page of a run, HTML and Markdown."),
    "signals": ("runwatch.monitor.commands.signals:signals", "List the canonical signals and their aliases."),
    "status": ("runwatch.monitor.commands.status:status", "Show the status of a watched run; exits 0, 1 or 2."),
    "train": ("runwatch.monitor.commands.train:train", "Train with the reference trainer."),
    "validate": ("runwatch.monitor.commands.validate:validate", "Check a run card, or a whole run directory."),
    "watch": ("runwatch.monitor.commands.watch:watch", "Watch a run: check, alert, act, serve metrics and pages."),
}


@click.group(cls=LazyGroup, lazy=LAZY, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="runwatch")
def cli() -> None:
    """Watch a training run, judge it with health checks, and carry out the fallback plans that were written for it."""


def main() -> None:
    """The console script."""
    try:
        result = cli.main(standalone_mode=False)
        sys.exit(result if isinstance(result, int) else 0)
    except click.UsageError as error:
        error.show()
        sys.exit(USAGE)
    except click.ClickException as error:
        error.show()
        sys.exit(error.code if isinstance(error, Failure) else FAILED)
    except click.Abort:
        click.echo("stopped", err=True)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


if __name__ == "__main__":
    main()
