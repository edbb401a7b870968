"""Rungs: the finished small runs of a scaling ladder, as `runwatch ladder train` writes them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SETTLED_WARMUPS = 3.0
"""The curve begins at three warm-ups: before that the loss tells of the warm-up, not of the scale."""
LEAST_STRETCHES = 3
FINAL_SHARE = 0.05
"""A final loss is the mean over the last 5 % of a run (as the trainer's ladder writes it)."""
TRENDS = ("grad_norm", "drop_rate")


class LadderError(ValueError):
    """Rungs that cannot be fitted, or a card that may not be changed; the message says what to do."""


@dataclass(frozen=True)
class Schedule:
    """What the curve of a run depends on besides its size; all in tokens."""

    token_budget: int
    warmup_tokens: int
    decay_start_tokens: int

    @property
    def settled(self) -> float:
        """Where the curve begins."""
        return max(1.0, SETTLED_WARMUPS * self.warmup_tokens)


@dataclass(frozen=True)
class Rung:
    """One finished small run.

    `course` has a row [tokens, loss, standard deviation, records] per stretch, shape (P, 4); `trends` the same of other signals.
    """

    name: str
    parameters: int
    tokens: int
    warmup_tokens: int
    decay_start_tokens: int
    final_loss: float
    course: Floats
    trends: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    seed: int | None = None
    """Runs of one seed see the same data in the same order; unknown: None."""

    @property
    def schedule(self) -> Schedule:
        """The rung's own."""
        return Schedule(self.tokens, self.warmup_tokens, self.decay_start_tokens)

    def settled(self) -> Floats:
        """The stretches after the warm-up, decay included."""
        return self.course[self.course[:, 0] >= self.schedule.settled]

    def stable(self) -> Floats:
        """The stretches between warm-up and decay."""
        return self.settled()[self.settled()[:, 0] <= self.decay_start_tokens]

    def decay(self) -> Floats:
        """The stretches of the decay."""
        return self.course[self.course[:, 0] > self.decay_start_tokens]

    def stable_mean(self, trend: str) -> float:
        """Mean of a trend over the second half of the stable phase; NaN where the rung has none."""
        rows = self.trends.get(trend, np.empty((0, 4)))
        rows = rows[(rows[:, 0] >= self.decay_start_tokens / 2) & (rows[:, 0] <= self.decay_start_tokens)]
        return float(np.average(rows[:, 1], weights=rows[:, 3])) if len(rows) else float("nan")


def read_rungs(path: Path) -> list[Rung]:
    """Rungs as the trainer's ladder writes them.

    Raises:
        LadderError: the file is missing, no JSON, lacks a field, or holds a value that no run can have.
    """
    remedy = "`runwatch ladder train --write` makes such a file"
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["rungs"]
    except OSError as error:
        raise LadderError(f"{path}: {error.strerror}; {remedy}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise LadderError(f"{path}: not a file of rungs ({error!r}); {remedy}") from error
    if not isinstance(entries, list):
        raise LadderError(f"{path}: `rungs` must be a list; {remedy}")
    rungs = [_told(path, number, entry) for number, entry in enumerate(entries, 1)]
    names = [rung.name for rung in rungs]
    if len(set(names)) < len(names):
        raise LadderError(f"{path}: two rungs have one name; give each its own")
    return rungs


def _told(path: Path, number: int, entry: Any) -> Rung:
    try:
        return _rung(entry)
    except KeyError as error:
        raise LadderError(f"{path}: rung {number} lacks {error}; train it again") from error
    except (ValueError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise LadderError(f"{path}: rung {number}: {error}; train it again, or take it out of the file") from error


def _rung(entry: Mapping[str, Any]) -> Rung:
    rung = Rung(
        name=str(entry["name"]),
        parameters=int(entry["parameters"]),
        tokens=int(entry["tokens"]),
        warmup_tokens=int(entry["warmup_tokens"]),
        decay_start_tokens=int(entry["decay_start_tokens"]),
        final_loss=float(entry["final_loss"]),
        course=_rows(entry["name"], "curve", entry["curve"]),
        trends={name: _rows(entry["name"], name, entry[name]) for name in TRENDS if name in entry},
        seed=None if entry.get("seed") is None else int(entry["seed"]),
    )
    for holds, rule in _rules(rung):
        if not holds():
            raise ValueError(f"{rung.name}: {rule}")
    return rung


def _rows(rung: str, name: str, rows: Any) -> Floats:
    found = np.array(rows, np.float64)
    if found.ndim != 2 or found.shape[1] != 4 or not np.isfinite(found).all():
        raise ValueError(f"{rung}: {name} must have finite rows [tokens, mean, deviation, records]")
    return found


def _rules(rung: Rung) -> tuple[tuple[Callable[[], bool], str], ...]:
    """What must hold of every rung; later rules may rely on earlier ones."""
    course = rung.course
    return (
        (lambda: rung.parameters > 0, "parameters must be above 0"),
        (
            lambda: 0 <= rung.warmup_tokens <= rung.decay_start_tokens <= rung.tokens,
            "warm-up, decay and end must follow",
        ),
        (lambda: 0 < rung.final_loss < float("inf"), "final_loss must be a number above 0"),
        (lambda: bool((np.diff(course[:, 0]) > 0).all()), "the curve's tokens must rise"),
        (lambda: bool((course[:, 1] > 0).all()), "the curve's losses must be above 0"),
        (lambda: bool((course[:, 3] >= 1).all()), "each stretch of the curve must have at least one record"),
        (
            lambda: len(rung.stable()) >= LEAST_STRETCHES,
            f"{len(rung.stable())} stretches lie between three warm-ups and the decay, {LEAST_STRETCHES} are the least: train longer",
        ),
    )
