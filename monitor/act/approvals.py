"""What people decide: approval or rejection of proposed plans, the kill switch, planned changes. All of it is audited."""

import time

from runwatch.monitor.card.run_card import Declaration
from runwatch.monitor.store.store import Store
from runwatch.rules import Decision, ExecutionState

DECIDABLE = (ExecutionState.PROPOSED, ExecutionState.APPROVED)


class DecisionError(ValueError):
    """The decision cannot be taken; the text says why."""


def decide(store: Store, execution_id: str, *, approved: bool, by: str, reason: str) -> str:
    """Write a person's decision for the daemon's next tick; the sentence that confirms it.

    Raises:
        DecisionError: there is no such execution, or it can no longer be approved or rejected.
    """
    word = "approved" if approved else "rejected"
    now = time.time()
    with store.transaction() as tx:
        executions = {one.id: one for one in tx.executions()}
        execution = executions.get(execution_id)
        if execution is None:
            waiting = ", ".join(one.id for one in executions.values() if one.open) or "none"
            raise DecisionError(f"there is no plan execution {execution_id}; open ones: {waiting}")
        if execution.state not in DECIDABLE:
            state = execution.state.replace("_", " ")
            raise DecisionError(f"{execution_id} is {state} and can no longer be approved or rejected")
        if not tx.decide(execution_id, Decision(approved=approved, by=by, reason=reason, time=now)):
            raise DecisionError(f"{execution_id} has already been decided; see `runwatch plan list`")
        sentence = f"{execution_id} ({execution.plan}) was {word} by {by}: {reason}"
        payload = {"sentence": sentence, "execution": execution_id, "approved": approved, "by": by, "reason": reason}
        tx.audit("decision", payload, now)
    return sentence


def switch_plans(store: Store, *, enabled: bool, by: str, reason: str) -> str:
    """The kill switch: while plans are disabled no directive is requested. It holds across restarts."""
    sentence = f"Plans were {'enabled' if enabled else 'disabled'} by {by}: {reason}"
    with store.transaction() as tx:
        tx.put_setting("plans_enabled", "true" if enabled else "false")
        tx.audit("plans_enabled" if enabled else "plans_disabled", {"sentence": sentence, "by": by, "reason": reason})
    return sentence


def declare(store: Store, declaration: Declaration, by: str, at_step: int | None = None) -> str:
    """Declare a planned change; the affected checks reset there. One at or before step `at_step` comes after the fact."""
    names = ", ".join(declaration.signals)
    late = at_step is not None and at_step >= declaration.step
    when = f"had changed at step {declaration.step:,} (after the fact: the run is at step {at_step:,})" if late else ""
    sentence = f"{by} declared that {names} {when or f'will change at step {declaration.step:,}'}: {declaration.reason}"
    with store.transaction() as tx:
        tx.declare(declaration.model_dump(mode="json"))
        payload = {"sentence": sentence, "by": by, "late": late, **declaration.model_dump(mode="json")}
        tx.audit("declared", payload)
    return sentence
