"""What a database that is new, or older than the run, takes over of the one that was lost.

The mirror of the audit log has each execution as it last stood, the kill switch and the declared changes; `control/` has the
directives that were given and their receipts. So no plan is carried out twice, no id is given out twice, and plans that were
disabled stay disabled. The old mirror is kept beside the new one.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from runwatch.monitor.store.audit import AuditRow, read_mirror, set_aside
from runwatch.monitor.store.store import Transaction
from runwatch.rules import Decision, Directive, Execution, ExecutionState, Mark, PlanRules, Receipt, from_control

_CLOSED = {
    ExecutionState.REQUESTED: ExecutionState.UNACKNOWLEDGED,
    ExecutionState.ACKNOWLEDGED: ExecutionState.UNVERIFIED,
}


def take_over_log(tx: Transaction, mirror: Path) -> str | None:
    """Set a mirror that is not of this database aside, once, and take over what it knows; the sentence that says so."""
    try:
        rows = read_mirror(mirror)
    except ValueError as error:  # repaired, not obeyed: the database knows what it holds
        sentence = f"The mirror of the audit log was damaged ({error}); it is kept as {set_aside(mirror).name} and written anew."
        tx.audit("mirror", {"sentence": sentence})
        rows = []
    if rows and tx.audit_rows(after=rows[-1].seq - 1, limit=1) != rows[-1:]:
        mirror.rename(mirror.with_name(f"audit-{rows[-1].seq:08d}-{rows[-1].hash[:8]}.jsonl"))
    aside = max(mirror.parent.glob("audit-*.jsonl"), key=lambda path: path.stat().st_mtime_ns, default=None)
    if aside is None or tx.setting("taken_over", "") == aside.name:
        return None
    executions = _restore(tx, read_mirror(aside))
    tx.put_setting("taken_over", aside.name)
    names = ", ".join(executions) or "none"
    sentence = f"The database is a different one than before. Taken over from {aside.name}: plan executions {names}."
    tx.audit("database", {"sentence": sentence})
    return sentence


def _restore(tx: Transaction, rows: Iterable[AuditRow]) -> list[str]:
    """Executions as they last stood, the kill switch and the declarations of an audit log; the executions' ids."""
    executions: dict[str, Execution] = {}
    for row in rows:
        payload: dict[str, Any] = json.loads(row.payload)
        match row.kind:
            case "plan":
                execution = Execution.model_validate(payload["execution"])
                executions[execution.id] = execution
            case "plans_enabled" | "plans_disabled":
                tx.put_setting("plans_enabled", "true" if row.kind == "plans_enabled" else "false")
            case "decision":
                tx.decide(payload["execution"], _decision(payload, row.time))
            case "declared":
                tx.declare({key: payload[key] for key in ("step", "signals", "reason")})
            case _:
                pass
    for execution in executions.values():
        tx.put_execution(execution)
    return list(executions)


def _decision(payload: Mapping[str, Any], time: float) -> Decision:
    said = {key: payload.get(key, "") for key in ("approved", "by", "reason")}
    return Decision(**said, time=time)


def take_over_control(
    tx: Transaction,
    requests: Mapping[str, Directive],
    receipts: Mapping[str, Receipt],
    rules: Mapping[str, PlanRules],
    now: Mark,
) -> list[str]:
    """Take over the directives of which nothing else is known; a sentence for each. At most the newest is carried on."""
    known = {one.id: one for one in tx.executions()}
    found = [one for one in requests.values() if one.id not in known and one.node in rules]
    busy = any(one.open for one in known.values())
    sentences: list[str] = []
    for directive in sorted(found, key=lambda one: one.created):
        execution = from_control(directive, receipts.get(directive.id), rules[directive.node], now)
        if busy or directive.created < max(one.created for one in found):
            execution = _closed(execution, now)
        tx.put_execution(execution)
        sentences.append(f"{execution.id} ({execution.plan}) is known from control/ only; it is {execution.state}.")
        payload = {"sentence": sentences[-1], "was": None, "execution": execution.model_dump(mode="json")}
        tx.audit("plan", payload, now.time)
    return sentences


def _closed(execution: Execution, now: Mark) -> Execution:
    """One that is not carried on: whether its effect was seen is not looked for again."""
    if not execution.open:
        return execution
    reason = "another plan came after it; its effect is no longer verified."
    return execution.model_copy(update={"state": _CLOSED[execution.state], "ended": now, "reason": reason})
