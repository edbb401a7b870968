"""`runwatch plan`: look at fallback plans, decide on what waits, switch them off."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from runwatch.monitor.approvals import DecisionError, decide, switch_plans
from runwatch.monitor.card import nearest
from runwatch.monitor.config import DaemonConfig
from runwatch.monitor.lazy import UNAVAILABLE, USAGE, Failure, by_option, database_option, run_dir_argument
from runwatch.monitor.outbox import Outbox
from runwatch.monitor.service import open_run
from runwatch.monitor.store import Store
from runwatch.monitor.watch import Watch
from runwatch.rules import Execution, Refusal, all_nodes
from runwatch.rules import preview as make_preview

reason_option = click.option("--reason", required=True, help="Why; it goes into the audit log.")


@click.group()
def plan() -> None:
    """Fallback plans: what was proposed and done, what would be done, and your decision."""


def _store(run_dir: Path, database: str | None) -> Store:
    if not run_dir.is_dir():
        raise Failure(f"{run_dir} is no directory", USAGE)
    return open_run(run_dir, database)


@plan.command("list")
@run_dir_argument
@database_option
def list_executions(run_dir: Path, database: str | None) -> None:
    """Every execution of a plan, newest first."""
    with _store(run_dir, database).transaction() as tx:
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
        lines.append(f"  {_forecast(execution.forecast)}")
    return "\n".join(lines)


def _forecast(forecast: Any) -> str:
    old, new = forecast.old, forecast.new
    return (
        f"predicted final loss: {new.loss:.4f} ({new.low:.4f} to {new.high:.4f}); "
        f"under the plan in force {old.loss:.4f} ({old.low:.4f} to {old.high:.4f})"
    )


@plan.command()
@run_dir_argument
@click.argument("execution_id", metavar="ID")
@by_option
@reason_option
@database_option
def approve(run_dir: Path, execution_id: str, by: str, reason: str, database: str | None) -> None:
    """Let a proposed plan be carried out."""
    _decide(_store(run_dir, database), execution_id, approved=True, by=by, reason=reason)


@plan.command()
@run_dir_argument
@click.argument("execution_id", metavar="ID")
@by_option
@reason_option
@database_option
def reject(run_dir: Path, execution_id: str, by: str, reason: str, database: str | None) -> None:
    """Turn a proposed plan down."""
    _decide(_store(run_dir, database), execution_id, approved=False, by=by, reason=reason)


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
    """Kill switch: no directive is requested until plans are enabled again, also after a restart."""
    click.echo(switch_plans(_store(run_dir, database), enabled=False, by=by, reason=reason))


@plan.command()
@run_dir_argument
@by_option
@reason_option
@database_option
def enable(run_dir: Path, by: str, reason: str, database: str | None) -> None:
    """Let plans be carried out again."""
    click.echo(switch_plans(_store(run_dir, database), enabled=True, by=by, reason=reason))


@plan.command()
@run_dir_argument
@click.argument("node")
@click.option("--at", "share", metavar="PERCENT", help="At this share of the token budget in force, such as 12%.")
@database_option
def preview(run_dir: Path, node: str, share: str | None, database: str | None) -> None:
    """What NODE's plan would do now, or at another point of the run; nothing is done."""
    found = all_nodes().get(node)
    if found is None:
        raise Failure(f"there is no node {node}{nearest(node, all_nodes())}", USAGE)
    store = _store(run_dir, database)
    world = Watch(run_dir, store, Outbox(store, {}), DaemonConfig(), "preview").world(time.time())
    if world is None:
        raise Failure(
            "no plan can be made without a valid run.yaml and telemetry; see `runwatch validate`", UNAVAILABLE
        )
    if share is not None:
        world = replace(world, tokens=_fraction(share) * world.plan.token_budget)
    proposal = make_preview(found, world, world.settings[node])
    if isinstance(proposal, Refusal):
        raise Failure(f"{found.plan} would not be proposed: {proposal.reason}", 1)
    click.echo(f"{found.plan} at {world.tokens:,.0f} tokens:")
    for effect in proposal.effects:
        click.echo(f"- {effect}")
    if proposal.forecast:
        click.echo(_forecast(proposal.forecast))


def _fraction(share: str) -> float:
    try:
        value = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
    except ValueError as error:
        raise click.UsageError(f"--at {share}: write a share such as 12% or 0.12") from error
    if not 0 <= value <= 1:
        raise click.UsageError(f"--at {share}: a share lies between 0 and 100%")
    return value
