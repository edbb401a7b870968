"""The record of an incident: what is stored of one life of an alert, and read by everything that shows it."""

from typing import Literal

from runwatch.rules import Moment
from runwatch.rules.plan import Record

Severity = Literal["warning", "critical"]


class Incident(Record):
    """One life of an alert.

    Times in Unix seconds; `told` is the state and severity that people know of, `words` what they read of it at `told_at`.
    """

    id: str
    check: str
    state: Literal["firing", "resolved"]
    severity: Severity
    change: str
    what: str
    value: float
    limit: float
    since: Moment
    last: Moment
    opened: float
    resolved: float | None = None
    told: str | None = None
    told_at: float = 0.0
    words: str = ""

    @property
    def open(self) -> bool:
        """Whether there may still be something to tell of it."""
        return self.state == "firing" or (self.told is not None and self.told != self.standing)

    @property
    def sentence(self) -> str:
        """How it stands, for the audit log."""
        if self.state == "resolved":
            return f"{self.id} is resolved (it was {self.severity})."
        return f"{self.id} is firing ({self.severity}): {self.what}"

    @property
    def standing(self) -> str:
        """What people should know."""
        return f"{self.state} {self.severity}"
