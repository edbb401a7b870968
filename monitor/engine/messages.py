"""Messages about plans."""

from collections.abc import Mapping

from runwatch.monitor.engine.tick import Tick
from runwatch.monitor.notify import Kind, Message, PlanPayload
from runwatch.rules import Execution, ExecutionState
from runwatch.rules.carry_out import told


def plan_message(tick: Tick, execution: Execution) -> Message:
    """What is proposed, or what happened to an execution; the same state has the same key."""
    kind: Kind = "plan_proposed" if execution.state is ExecutionState.PROPOSED else "plan_updated"
    body = plan_payload(tick.run, tick.directory, tick.links, execution)
    key = f"{tick.run}/{execution.id}/{execution.state.value}"
    return Message(key, kind, execution.id, tick.run, tick.now, dict(body), plan_text(body))


def plan_payload(run: str, directory: str, links: Mapping[str, str], execution: Execution) -> PlanPayload:
    """The execution as the notifiers get it."""
    verb = f"{directory} {execution.id} --by NAME --reason TEXT"
    return {
        "id": execution.id,
        "run": run,
        "node": execution.node,
        "plan": execution.plan,
        "mode": execution.mode,
        "state": execution.state.value,
        "severity": "critical" if execution.calls_person else "warning",
        "summary": told(execution),
        "evidence": execution.evidence,
        "actions": [action.model_dump(mode="json") for action in execution.actions],
        "effects": list(execution.effects),
        "step": execution.proposed.step,
        "tokens": execution.proposed.tokens,
        "proposed": execution.proposed.time,
        "expires": execution.expires if execution.state is ExecutionState.PROPOSED else None,
        "by": execution.by,
        "reason": execution.reason,
        "commands": {
            "approve": f"runwatch plan approve {verb}",
            "reject": f"runwatch plan reject {verb}",
            "preview": f"runwatch plan preview {directory} {execution.node}",
        },
        "links": {"runbook": f"{links['status']}runbooks/{execution.node}", **links},
    }


def plan_text(plan: PlanPayload) -> str:
    """The whole message as plain text."""
    lines = [f"{plan['run']}: {plan['summary']}", f"Evidence: {plan['evidence']}"]
    lines += [f"- {effect}" for effect in plan["effects"]]
    if plan["state"] == ExecutionState.PROPOSED:
        lines += [plan["commands"]["approve"], plan["commands"]["reject"]]
    return "\n".join(lines)
