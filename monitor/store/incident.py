"""An incident: one life of an alert, the same record live, in a backtest and on every page."""

from typing import Any, Literal

from pydantic import model_validator

from runwatch.rules import Moment
from runwatch.rules.plan import Record

Severity = Literal["warning", "critical"]

_RENAMED = {"told": "notified", "told_at": "notified_at", "words": "notified_text"}
"""Names that fields have in databases of the releases before."""


class Incident(Record):
    """One life of an alert.

    `severity`, `what`, `value` and `limit` are of one record, the worst. `since` is the first bad record, `critical` the
    first critical one, `last` the newest bad one. `resolution` says what resolved it. Times in Unix seconds; `notified`
    is the state and severity that people were last notified of, at `notified_at` and in the words of `notified_text`.
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
    critical: Moment | None = None
    last: Moment
    opened: float
    resolved: float | None = None
    resolution: str = ""
    notified: str | None = None
    notified_at: float = 0.0
    notified_text: str = ""

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, stored: Any) -> Any:
        return {_RENAMED.get(key, key): value for key, value in stored.items()} if isinstance(stored, dict) else stored

    @property
    def open(self) -> bool:
        """Whether there may still be something to notify of."""
        return self.state == "firing" or (self.notified is not None and self.notified != self.standing)

    @property
    def sentence(self) -> str:
        """Its state in a sentence, for the audit log."""
        if self.state == "resolved":
            return f"{self.id} is resolved (it was {self.severity}). {self.resolution}".rstrip()
        return f"{self.id} is firing ({self.severity}): {self.what}"

    @property
    def said(self) -> str:
        """What a message says of it: what is wrong at its worst or, once resolved, what resolved it."""
        if self.state == "firing" or not self.resolution:
            return self.what
        return f"{self.resolution} At its worst: {self.what}"

    @property
    def standing(self) -> str:
        """State and severity: what people should know."""
        return f"{self.state} {self.severity}"
