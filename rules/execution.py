"""One execution of a plan: its states, and everything that is remembered of it."""

from dataclasses import dataclass
from enum import StrEnum

from runwatch.rules.plan import Action, Directive, Mode, PlanRules, Preconditions, Receipt, Record


class ExecutionState(StrEnum):
    """Where an execution is in its life."""

    OBSERVED = "observed"
    PROPOSED = "proposed"
    APPROVED = "approved"
    REQUESTED = "requested"
    ACKNOWLEDGED = "acknowledged"
    VERIFIED = "verified"
    REFUSED = "refused_by_person"
    REJECTED = "rejected"
    EXPIRED = "expired"
    UNACKNOWLEDGED = "unacknowledged"
    UNVERIFIED = "unverified"
    SUPERSEDED = "superseded"
    UNPLANNED = "unplanned"


OPEN = frozenset(
    {ExecutionState.PROPOSED, ExecutionState.APPROVED, ExecutionState.REQUESTED, ExecutionState.ACKNOWLEDGED}
)
"""States in which an execution is under way; at most one execution of a run is."""

ESCALATE = frozenset(
    {
        ExecutionState.REJECTED,
        ExecutionState.EXPIRED,
        ExecutionState.UNACKNOWLEDGED,
        ExecutionState.UNVERIFIED,
        ExecutionState.UNPLANNED,
    }
)
"""Ends that need a person."""

SPENT = frozenset(
    {
        ExecutionState.OBSERVED,
        ExecutionState.REQUESTED,
        ExecutionState.ACKNOWLEDGED,
        ExecutionState.VERIFIED,
        ExecutionState.UNACKNOWLEDGED,
        ExecutionState.UNVERIFIED,
    }
)
"""States that count against the cap: the trainer may have carried the plan out (or would have, in mode observe)."""


class Mark(Record):
    """When something happened: Unix seconds of the daemon, and train records, step and tokens of the run."""

    time: float
    records: int
    step: int
    tokens: float


class Prediction(Record):
    """A final loss in nats with its 95 % interval."""

    loss: float
    low: float
    high: float


class Forecast(Record):
    """Final loss under the plan in force and under the new one."""

    old: Prediction
    new: Prediction

    @property
    def sentence(self) -> str:
        """Both, with their difference and their intervals."""
        old, new = self.old, self.new
        return (
            f"The predicted final loss is {new.loss:.4f} nats (95 %: {new.low:.4f} to {new.high:.4f}), "
            f"{new.loss - old.loss:+.4f} against {old.loss:.4f} ({old.low:.4f} to {old.high:.4f}) under the plan in force."
        )


class Execution(Record):
    """One execution; everything that its directive says is fixed when it is proposed."""

    id: str
    node: str
    plan: str
    mode: Mode
    state: ExecutionState
    evidence: str
    checks: tuple[str, ...]
    """The alerts that justify it: when all of them have resolved, an undecided proposal is withdrawn."""
    actions: tuple[Action, ...]
    effects: tuple[str, ...]
    """A sentence for each action: from what to what, and why so much."""
    command: tuple[str, ...] = ()
    """Instead of actions, for a run that cannot obey: the argv that restarts it."""
    attempt: str
    preconditions: Preconditions
    forecast: Forecast | None = None
    healthy_loss: float | None = None
    """Nats; to this the loss must come back for the run to count as recovered."""
    expires: float
    ack_seconds: float
    verify_records: int
    verify_seconds: float
    proposed: Mark
    decided: Mark | None = None
    requested: Mark | None = None
    acknowledged: Mark | None = None
    ended: Mark | None = None
    by: str | None = None
    reason: str | None = None
    receipt: Receipt | None = None

    @property
    def open(self) -> bool:
        """Whether it is under way."""
        return self.state in OPEN

    @property
    def calls_person(self) -> bool:
        """Whether it pages a person: it went wrong, no plan could be made, or it pauses the run for a person."""
        holds = any(action.action == "pause" for action in self.actions)
        asks = self.state in (ExecutionState.PROPOSED, ExecutionState.REQUESTED)
        return self.state in ESCALATE or (holds and asks)

    @property
    def directive(self) -> Directive:
        """What is written to `control/requests/`; the same for every writing.

        Raises:
            ValueError: it has not been requested.
        """
        if self.requested is None:
            raise ValueError(f"execution {self.id} is {self.state}: it has no directive yet")
        return Directive(
            id=self.id,
            node=self.node,
            plan=self.plan,
            attempt=self.attempt,
            created=self.requested.time,
            expires=self.requested.time + self.ack_seconds,
            evidence=self.evidence,
            preconditions=self.preconditions,
            actions=self.actions,
        )


def from_control(directive: Directive, receipt: Receipt | None, rules: PlanRules, now: Mark) -> Execution:
    """The execution that a request and its receipt tell of, where nothing else is known of it (a lost database)."""
    states = {
        None: ExecutionState.REQUESTED,
        "applied": ExecutionState.ACKNOWLEDGED,
        "rejected": ExecutionState.REJECTED,
    }
    made = now.model_copy(update={"time": directive.created})
    answered = now.model_copy(update={"time": receipt.time}) if receipt else None
    rejected = receipt is not None and receipt.status == "rejected"
    return Execution(
        id=directive.id,
        node=directive.node,
        plan=directive.plan,
        mode=rules.mode,
        state=states[receipt.status if receipt else None],
        evidence=directive.evidence,
        checks=(),
        actions=directive.actions,
        effects=(),
        attempt=directive.attempt,
        preconditions=directive.preconditions,
        expires=directive.expires,
        ack_seconds=max(directive.expires - directive.created, 0.0),
        verify_records=rules.verify_records,
        verify_seconds=rules.verify_seconds,
        proposed=made,
        requested=made,
        acknowledged=None if rejected else answered,
        ended=answered if rejected else None,
        reason=receipt.reason if receipt else None,
        receipt=receipt,
    )


class Decision(Record):
    """A person's decision on a proposal."""

    approved: bool
    by: str
    reason: str
    time: float


@dataclass(frozen=True)
class Event:
    """An execution has changed: the sentence for the audit log and for people; `escalate` pages one."""

    execution: Execution
    was: ExecutionState | None
    sentence: str
    escalate: bool
