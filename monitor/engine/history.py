"""What is remembered of a run to be drawn: a signal in a few hundred buckets (two become one when there are too many)."""

import math
from dataclasses import dataclass

from runwatch.checks import Signals
from runwatch.monitor.engine.evaluate import Judged

MOST_BUCKETS = 600
SPARKLINE = 120
"""Newest values that are kept of each check."""


@dataclass
class Bucket:
    """Some records in a row: last step and tokens, sum and count of the values, smallest and largest."""

    step: int
    tokens: float
    total: float
    count: int
    low: float
    high: float

    def take_in(self, other: "Bucket") -> None:
        """Make one of this and the next bucket."""
        self.step, self.tokens = other.step, other.tokens
        self.total, self.count = self.total + other.total, self.count + other.count
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)

    @property
    def mean(self) -> float:
        """Mean of its values; NaN if one is."""
        return self.total / self.count


class SignalHistory:
    """One signal, in buckets of equal length."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.buckets: list[Bucket] = []
        self._width = 1

    def add(self, signals: Signals) -> None:
        """Take in the observations of further rows; a step seen before drops what came from it on."""
        rows = signals.observed(self.name)
        values = signals.values(self.name)
        for step, tokens, value in zip(signals.step[rows], signals.tokens[rows], values, strict=True):
            self._add_one(Bucket(int(step), float(tokens), float(value), 1, float(value), float(value)))

    def _add_one(self, new: Bucket) -> None:
        buckets = self.buckets
        while buckets and buckets[-1].step >= new.step:
            buckets.pop()
        if buckets and buckets[-1].count < self._width:
            buckets[-1].take_in(new)
            return
        buckets.append(new)
        if len(buckets) > MOST_BUCKETS:
            for left, right in zip(buckets[::2], buckets[1::2], strict=False):
                left.take_in(right)
            self.buckets = buckets[::2]
            self._width *= 2

    def column(self, field: str) -> list[float | None]:
        """One field of every bucket; not finite is None."""
        return [finite(getattr(bucket, field)) for bucket in self.buckets]


class RunHistory:
    """What the status page draws of the past: the loss, the held-out loss, and the newest values of each check."""

    def __init__(self) -> None:
        self.loss, self.evaluation = SignalHistory("train/loss"), SignalHistory("eval/loss")
        self.sparklines: dict[str, list[float]] = {}

    def add(self, signals: Signals, judged: Judged) -> None:
        """Take in further rows and the verdicts of the newest of them."""
        self.loss.add(signals)
        self.evaluation.add(signals)
        for name, verdicts in judged.verdicts.items():
            recorded = ~signals.tick[len(signals) - len(verdicts) :]
            newest = [*self.sparklines.get(name, []), *map(float, verdicts.value[recorded][-SPARKLINE:])]
            self.sparklines[name] = newest[-SPARKLINE:]


def finite(value: float | None) -> float | None:
    """A number for JSON: None where it is not finite."""
    return None if value is None or not math.isfinite(value) else float(value)


def latest(signals: Signals) -> dict[str, float]:
    """The newest value of every signal, NaN and infinity included."""
    return {name: float(signals.values(name)[-1]) for name in signals.columns if signals.has(name)}
