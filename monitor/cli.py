"""The command line: which command lives where. Nothing is imported before it is run, so `runwatch --help` is quick.

Exit codes: 0 healthy, 1 degraded, 2 critical; 64 and above when the command could not do its work (sysexits.h).
"""

import os
import sys

import click

from runwatch.monitor.commands.options import FAILED, USAGE, Failure, LazyGroup

LAZY = {
    "amend": ("runwatch.monitor.commands.amend:command", "Say who changed the run card after launch, and why."),
    "audit": ("runwatch.monitor.commands.audit:audit", "Verify the audit log's chain of hashes."),
    "backtest": ("runwatch.monitor.commands.backtest:command", "What the checks would have said of a run on disk."),
    "declare": (
        "runwatch.monitor.commands.declare:command",
        "Announce a planned change, so that checks re-base there.",
    ),
    "demo": ("runwatch.monitor.commands.demo:demo", "Train, break it, and watch the plan be carried out."),
    "drill": ("runwatch.monitor.commands.drill:command", "Break a run of its own and see that every link holds."),
    "explain": ("runwatch.monitor.commands.explain:command", "What a check or risk node does, why, and what to do."),
    "ladder": ("runwatch.monitor.commands.ladder:ladder", "Train, fit and register the scaling ladder."),
    "plan": ("runwatch.monitor.commands.plan:plan", "Fallback plans: list, preview, approve, reject, switch off."),
    "report": ("runwatch.monitor.commands.report:report_command", "The public page of a run, as HTML and as Markdown."),
    "signals": ("runwatch.monitor.commands.signals:signals", "The canonical signals and what others call them."),
    "status": ("runwatch.monitor.commands.status:status", "How a watched run stands; exits 0, 1 or 2."),
    "train": ("runwatch.monitor.commands.train:train", "Train with the reference trainer."),
    "validate": ("runwatch.monitor.commands.validate:validate", "Check a run card, or a whole run directory."),
    "watch": ("runwatch.monitor.commands.watch:watch", "Watch a run: judge, tell, direct, serve metrics and pages."),
}


@click.group(cls=LazyGroup, lazy=LAZY, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="runwatch")
def cli() -> None:
    """Watch a training run, judge it with twelve checks, and carry out the plans that were written down with it."""


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
