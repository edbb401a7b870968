"""Makes the status document of `monitor/show/status.py` from what a tick knows."""

import math
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from runwatch.checks import Check, Level, Phase, all_checks
from runwatch.checks.planned import LossCurve, registered_loss
from runwatch.monitor.engine.history import RunHistory, finite, latest
from runwatch.monitor.engine.tick import Tick
from runwatch.monitor.show.status import (
    AuditStatus,
    CheckStatus,
    ConditionStatus,
    Health,
    IncidentStatus,
    LossSeries,
    NodeStatus,
    PlanStatus,
    RunFacts,
    Status,
)
from runwatch.monitor.store.audit import AuditRow
from runwatch.monitor.store.incident import Incident
from runwatch.rules import Alert, AlertState, Execution, NodeVerdict, all_nodes
from runwatch.rules.schedule import curve_in_force

LEVELS = {Level.UNKNOWN: "unknown", Level.OK: "ok", Level.WARN: "warning", Level.CRITICAL: "critical"}
MARKS = ("proposed", "decided", "requested", "acknowledged", "ended")


def build_status(
    tick: Tick,
    history: RunHistory,
    *,
    number: int,
    incidents: Sequence[Incident],
    audit: Sequence[AuditRow],
    check_errors: Mapping[str, str],
    conditions: Sequence[ConditionStatus],
    daemon: Mapping[str, Any],
) -> Status:
    """The whole document after a tick; `number` is its version, `check_errors` are those of the newest records.

    `incidents` and rows of the `audit` log are the newest, newest first; `daemon` is what the daemon says of itself.
    """
    run = run_facts(tick)
    health = _health(tick, conditions)
    return {
        "schema": 1,
        "version": number,
        "health": health,
        "sentence": _sentence(run, tick, conditions, health),
        "run": run,
        "loss": _loss(tick, history),
        "checks": [_check(tick, history, check, check_errors.get(check.name)) for check in all_checks().values()],
        "nodes": [_node(tick, verdict) for verdict in tick.nodes],
        "plans_enabled": tick.state.plans_enabled,
        "plans": [_plan(execution) for execution in reversed(tick.state.executions)],
        "incidents": [_incident(incident) for incident in incidents],
        "audit": [_audit(row) for row in audit],
        "conditions": list(conditions),
        "daemon": {"version": version("runwatch"), "pid": os.getpid(), **daemon},
    }


def curve_at(curve: LossCurve, tokens: float) -> dict[str, float]:
    """The registered loss and its band at `tokens`; empty outside the curve."""
    loss, low, high = map(float, registered_loss(curve, tokens))
    return {"loss": loss, "low": low, "high": high} if np.isfinite(loss) else {}


def run_facts(tick: Tick) -> RunFacts:
    """What is being trained and how far it is."""
    rows, card, world = tick.rows, tick.rulebook.card, tick.world
    empty = not len(rows)
    tokens = None if empty else finite(rows.tokens[-1])
    budget = world.plan.token_budget if world else None
    rate = world.throughput.tokens_per_second if world and world.throughput else None
    time = None if empty else finite(rows.time[~rows.tick][-1]) if (~rows.tick).any() else None
    left = None if budget is None or tokens is None else max(0.0, budget - tokens)
    return {
        "name": tick.run,
        "directory": tick.directory,
        "hypothesis": card.run.hypothesis if card else "",
        "owner": card.run.owner if card else "",
        "links": dict(card.run.links) if card else {},
        "attempt": "" if empty else tick.attempts[int(rows.attempt[-1])],
        "attempts": len(tick.attempts),
        "phase": "init" if empty else Phase(int(rows.phase[-1])).name.lower(),
        "step": 0 if empty else int(rows.step[-1]),
        "tokens": tokens,
        "token_budget": budget,
        "declared_budget": card.plan.token_budget if card else None,
        "fraction": None if budget is None or tokens is None else tokens / budget,
        "time": time,
        "tokens_per_second": rate,
        "eta": None if left is None or not rate or time is None else time + left / rate,
        "latest": {name: finite(value) for name, value in latest(rows).items()},
    }


def _health(tick: Tick, conditions: Sequence[ConditionStatus]) -> Health:
    firing = [alert for alert in tick.state.alerts.values() if alert.state is AlertState.FIRING]
    if any(alert.severity is Level.CRITICAL for alert in firing):
        return "critical"
    return "degraded" if firing or conditions else "healthy"


def _sentence(run: RunFacts, tick: Tick, conditions: Sequence[ConditionStatus], health: Health) -> str:
    if not run["attempts"]:
        return "No telemetry yet."
    share = "" if run["fraction"] is None else f" ({run['fraction']:.1%} of the token budget)"
    tokens = "" if run["tokens"] is None else f", {run['tokens']:,.0f} tokens{share}"
    firing = sorted(name for name, alert in tick.state.alerts.items() if alert.state is AlertState.FIRING)
    alerts = f"firing: {', '.join(firing)}" if firing else "no check is firing"
    problems = f"{len(conditions)} problem{'s' * (len(conditions) > 1)} of its own"
    trouble = f"; the daemon reports {problems}" if conditions else ""
    open_plan = next((one for one in tick.state.executions if one.open), None)
    plan = f"; {open_plan.id} ({open_plan.plan}) is {open_plan.state}" if open_plan else ""
    where = "finished" if run["phase"] == "finished" else f"in {run['phase']}"
    return f"{health.capitalize()}, {where} at step {run['step']:,}{tokens}: {alerts}{plan}{trouble}."


def _loss(tick: Tick, history: RunHistory) -> LossSeries:
    ladder = tick.rulebook.card.ladder if tick.rulebook.card else None
    curve = ladder.curve if ladder else None
    loss, evaluation = history.loss, history.evaluation
    planned = curve_in_force(tick.world.planned, tick.world.plan) if tick.world else None
    return {
        "steps": [bucket.step for bucket in loss.buckets],
        "tokens": loss.column("tokens"),
        "loss": loss.column("mean"),
        "low": loss.column("low"),
        "high": loss.column("high"),
        "eval_tokens": evaluation.column("tokens"),
        "eval_loss": evaluation.column("mean"),
        "curve_tokens": list(curve.tokens) if curve else [],
        "curve": list(curve.loss) if curve else [],
        "curve_low": list(curve.low) if curve else [],
        "curve_high": list(curve.high) if curve else [],
        "plan_tokens": list(planned.tokens) if planned else [],
        "plan_curve": list(planned.loss) if planned else [],
    }


def _check(tick: Tick, history: RunHistory, check: Check, error: str | None) -> CheckStatus:
    alert = tick.state.alerts.get(check.name) or Alert(check=check.name)
    since = alert.since if alert.alive else None
    return {
        "name": check.name,
        "summary": check.docs.partition("\n")[0],
        "level": LEVELS[alert.level],  # type: ignore[typeddict-item] # pyright: ignore[reportReturnType]
        "alert": alert.state.value,
        "severity": LEVELS[alert.severity],  # type: ignore[typeddict-item] # pyright: ignore[reportReturnType]
        "value": finite(alert.value),
        "limit": finite(alert.limit),
        "message": alert.message if alert.alive else "",
        "since_step": since.step if since else None,
        "since_tokens": finite(since.tokens) if since else None,
        "since_time": finite(since.time) if since else None,
        "sparkline": [finite(value) for value in history.sparklines.get(check.name, [])],
        "error": error,
    }


def _node(tick: Tick, verdict: NodeVerdict) -> NodeStatus:
    node = all_nodes()[verdict.node]
    settings = tick.rulebook.nodes.get(verdict.node) or node.settings()
    begin, end = node.window(settings)
    return {
        "name": verdict.node,
        "plan": verdict.plan,
        "summary": node.docs.partition("\n")[0],
        "mode": settings.mode,
        "state": verdict.state.value,
        "reason": verdict.reason,
        "progress": verdict.progress if math.isfinite(verdict.progress) else 0.0,
        "window": (begin, min(end, 1.0)),
    }


def _plan(execution: Execution) -> PlanStatus:
    marks = [(name, getattr(execution, name)) for name in MARKS]
    history = [{"event": name, **mark.model_dump(mode="json")} for name, mark in marks if mark is not None]
    return {
        "id": execution.id,
        "node": execution.node,
        "plan": execution.plan,
        "mode": execution.mode,
        "state": execution.state.value,
        "evidence": execution.evidence,
        "effects": list(execution.effects),
        "actions": [action.model_dump(mode="json") for action in execution.actions],
        "by": execution.by,
        "reason": execution.reason,
        "expires": execution.expires,
        "history": history,
        "open": execution.open,
        "forecast": execution.forecast.model_dump(mode="json") if execution.forecast else None,
    }


def _incident(incident: Incident) -> IncidentStatus:
    return {
        "id": incident.id,
        "check": incident.check,
        "severity": incident.severity,
        "state": incident.state,
        "what": incident.what,
        "value": finite(incident.value),
        "limit": finite(incident.limit),
        "resolution": incident.resolution,
        "opened": incident.opened,
        "resolved": incident.resolved,
        "since_step": incident.since.step,
        "since_tokens": finite(incident.since.tokens),
        "last_step": incident.last.step,
    }


def _audit(row: AuditRow) -> AuditStatus:
    return {"seq": row.seq, "time": row.time, "kind": row.kind, "sentence": row.sentence}
