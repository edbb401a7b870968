"""`runwatch plan`: list fallback plans, approve or reject a proposal, disable them all."""

from pathlib import Path

import click

from runwatch.monitor.act.approvals import DecisionError, decide, switch_plans
from runwatch.monitor.commands.options import USAGE, Failure, LazyGroup, by_option, database_option, run_dir_argument
from runwatch.monitor.commands.store import open_run, read_run
from runwatch.monitor.store.store import Store
from runwatch.rules import Execution

reason_option = click.option("--reason", required=True, help="Why; recorded in the audit log.")


LAZY = {
    "preview": ("runwatch.monitor.commands.preview:preview_command", "Show what a node's plan would do now, or later.")
}


@click.group(cls=LazyGroup, lazy=LAZY)
def plan() -> None:
    """List, preview, approve, reject or disable fallback plans."""


@plan.command("list")
@run_dir_argument
@database_option
def list_executions(run_dir: Path, database: str | None) -> None:
    """List every execution of a plan, newest first."""
    with read_run(run_dir, database).transaction() as tx:
        executions, enabled = tx.executions(), tx.setting("plans_enabled", "true") == "true"
    if not enabled:
        click.echo("Plans are disabled: nothing is requested until `runwatch plan enable`.\n")
    if not executions:
        click.echo("No plan has been proposed.")
    for execution in reversed(executions):
        click.echo(described(execution))


def described(execution: Execution) -> str:
    """An execution with its evidence, for a person who decides."""
    lines = [f"{execution.id}  {execution.plan}  {execution.state.replace('_', ' ')}  ({execution.mode})"]
    lines += [f"  {execution.reason}"] if execution.reason and execution.reason != execution.evidence else []
    lines += [f"  evidence: {execution.evidence}", *(f"  - {effect}" for effect in execution.effects)]
    if execution.command:
        lines.append(f"  command: {' '.join(execution.command)}")
    if execution.forecast:
        lines.append(f"  {execution.forecast.sentence}")
    return "\n".join(lines)


@plan.command()
@run_dir_argument
@click.argument("execution_id", metavar="ID")
@by_option
@reason_option
@database_option
def approve(run_dir: Path, execution_id: str, by: str, reason: str, database: str | None) -> None:
    """Approve a proposed plan."""
    _decide(open_run(run_dir, database), execution_id, approved=True, by=by, reason=reason)


@plan.command()
@run_dir_argument
@click.argument("execution_id", metavar="ID")
@by_option
@reason_option
@database_option
def reject(run_dir: Path, execution_id: str, by: str, reason: str, database: str | None) -> None:
    """Reject a proposed plan."""
    _decide(open_run(run_dir, database), execution_id, approved=False, by=by, reason=reason)


def _decide(store: Store, execution_id: str, *, approved: bool, by: str, reason: str) -> None:
    with store.transaction() as tx:
        found = next((one for one in tx.executions() if one.id == execution_id), None)
    if found is not None:
        click.echo(described(found))
    try:
        click.echo(decide(store, execution_id, approved=approved, by=by, reason=reason))
    except DecisionError as error:
        raise Failure(str(error), USAGE) from error


@plan.command()
@run_dir_argument
@by_option
@reason_option
@database_option
def disable(run_dir: Path, by: str, reason: str, database: str | None) -> None:
    """Disable all plans (kill switch): no directive is requested until they are enabled again, also after a restart."""
    click.echo(switch_plans(open_run(run_dir, database), enabled=False, by=by, reason=reason))


@plan.command()
@run_dir_argument
@by_option
@reason_option
@database_option
def enable(run_dir: Path, by: str, reason: str, database: str | None) -> None:
    """Enable plans again."""
    click.echo(switch_plans(open_run(run_dir, database), enabled=True, by=by, reason=reason))
