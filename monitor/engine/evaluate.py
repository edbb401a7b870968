"""New rows and the look-back before them to verdicts of all checks, with a check that raises kept apart."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from runwatch.checks import Change, Check, Settings, Signals, Verdicts, judge
from runwatch.monitor.engine.context import needed_rows

log = logging.getLogger(__name__)

SLACK_ROWS = 512
"""Rows that may pile up before the context is cut again."""


@dataclass(frozen=True)
class Judged:
    """Verdicts of a block by check, and why a check has none."""

    verdicts: Mapping[str, Verdicts] = field(default_factory=dict[str, Verdicts])
    errors: Mapping[str, str] = field(default_factory=dict[str, str])


class LiveJudge:
    """All checks over a run as it grows.

    `context` are the accepted rows that a check may still look at. After a resume from an earlier step that can be rows
    from long ago: `history` gives all accepted rows again.
    """

    def __init__(self, checks: Mapping[str, Check], context: Signals, history: Callable[[], Signals]) -> None:
        self.checks = checks
        self.context = context
        self.rows = context
        """Context and the block that was judged last."""
        self.errors: dict[str, str] = {}
        self._joined: tuple[Signals, Signals] | None = None
        self._history = history
        self._trimmed = False
        self._size_when_cut = 0

    def judge(self, block: Signals, settings: Mapping[str, Settings], changes: Sequence[Change]) -> Judged:
        """Verdicts of every row of `block`, which follows the accepted rows."""
        self.rows, self._joined = self.context, None
        if not len(block):
            return Judged()
        if self._trimmed and _begins_attempt(self.context, block):
            self.context, self._trimmed = self._history(), False
        self.rows = Signals.concatenate([self.context, block])
        self._joined = (block, self.rows)
        judged = self._judged(self.rows, settings, changes, len(self.context))
        self.errors = dict(judged.errors)
        return judged

    def again(self, count: int, settings: Mapping[str, Settings], changes: Sequence[Change]) -> Judged:
        """Verdicts of the last `count` accepted rows, which were judged before."""
        return self._judged(self.context, settings, changes, max(0, len(self.context) - count))

    def _judged(self, rows: Signals, settings: Mapping[str, Settings], changes: Sequence[Change], known: int) -> Judged:
        verdicts: dict[str, Verdicts] = {}
        errors: dict[str, str] = {}
        for name, check in self.checks.items():
            try:
                verdicts[name] = judge(check, rows, settings[name], changes, known=known)
            except Exception as error:  # one check must not take the others with it
                log.exception("the check %s raised", name)
                errors[name] = f"{type(error).__name__}: {error}"
        return Judged(verdicts, errors)

    def accept(self, block: Signals, settings: Mapping[str, Settings], changes: Sequence[Change]) -> None:
        """`block` is judged and stored: it becomes context, and what nobody looks at any more goes."""
        if len(block):
            known, joined = self._joined or (None, self.context)
            self.context = joined if block is known else Signals.concatenate([self.context, block])
        self.rows, self._joined = self.context, None
        if len(self.context) > self._size_when_cut + SLACK_ROWS and _trains(self.context):
            rows = needed_rows(self.context, self.checks, settings, changes)
            self._trimmed = self._trimmed or len(rows) < len(self.context)
            self.context = self.context.take(rows)
            self._size_when_cut = len(rows)


def _begins_attempt(context: Signals, block: Signals) -> bool:
    return bool(len(context)) and int(block.attempt.max()) > int(context.attempt.max())


def _trains(context: Signals) -> bool:
    """Whether the newest attempt has trained: before that it is not known to which step it goes back."""
    newest = context.attempt == context.attempt.max()
    return bool(np.any(newest & context.trained))
