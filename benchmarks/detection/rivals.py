"""The rules that people use today, written from their published descriptions, each with its source.

A rival maps a run's signals to alarms per row by rule, as runwatch does. They get the kindest reading: a step that an
optimizer would skip counts as an alarm, every rule of a set may speak for any incident, and constants that were set for
one run are moved to the scale of ours (stated where it is done).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scoring import Levels

from runwatch.checks import Level, Phase, Signals

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Rival:
    """A set of rules that people use, and where they are published."""

    name: str
    source: str
    judge: Callable[[Signals], Levels]
    answers: Mapping[str, tuple[str, ...]]
    """For which of our checks each of its rules speaks: an alarm counts as detection for those only."""


LOSS = ("loss_spike", "ladder_deviation")
ANSWERS: Mapping[str, tuple[str, ...]] = {
    "train/loss": (*LOSS, "finite"),
    "optim/grad_norm": ("grad_norm", "loss_spike", "finite"),
    "loss spike": (*LOSS, "finite"),
    "loss jump": LOSS,
    "high loss": LOSS,
    "loss": LOSS,
    "NaN monitor": ("finite",),
    "grad norm": ("grad_norm", "loss_spike", "finite"),
    "stall": ("progress",),
    "telemetry gone": ("progress",),
    "steps skipped": ("grad_norm",),
    "token drops": ("token_drop", "expert_balance"),
    "router entropy": ("expert_balance",),
    "router bias": ("expert_balance",),
    "throughput": ("throughput",),
    "mfu": ("throughput",),
    "eval": ("eval_regression",),
    "LossNotFinite": ("finite",),
    "LossHigh": LOSS,
    "GradNormHigh": ("grad_norm", "loss_spike"),
    "TokenDropHigh": ("token_drop", "expert_balance"),
    "MfuLow": ("throughput",),
    "NoStep": ("progress",),
    "RunSilent": ("progress",),
    "CheckpointOld": ("checkpoint", "progress"),
    "Restarting": ("progress", "checkpoint"),
}


def _spread(flags: Flags, rows: NDArray[np.intp], length: int) -> NDArray[np.int8]:
    """Alarms of the observations at `rows`, held until the next observation."""
    level = np.zeros(length, np.int8)
    if len(rows):
        last = np.searchsorted(rows, np.arange(length), side="right") - 1
        level[:] = np.where((last >= 0) & flags[np.maximum(last, 0)], Level.CRITICAL, Level.OK)
    return level


def _observed(signals: Signals, name: str) -> tuple[NDArray[np.intp], Floats, NDArray[np.intp]]:
    """Rows and values of a signal, and for each the place of its attempt's first observation."""
    rows, values = signals.observed(name), signals.values(name)
    attempt = signals.attempt[rows]
    starts = np.flatnonzero(np.diff(attempt, prepend=-1))
    begin = starts[np.searchsorted(starts, np.arange(len(rows)), side="right") - 1] if len(rows) else starts
    return rows, values, begin


def _window(values: Floats, low: NDArray[np.intp], high: NDArray[np.intp]) -> tuple[Floats, Floats]:
    """Mean and standard deviation of values[low:high]; NaN where the window is empty or not all finite."""
    finite = np.isfinite(values)
    count, bad = (high - low).astype(np.float64), np.concatenate([[0], np.cumsum(~finite)])
    centred = np.where(finite, values - np.median(values[finite]) if finite.any() else 0.0, 0.0)
    first = np.concatenate([[0.0], np.cumsum(centred)])
    second = np.concatenate([[0.0], np.cumsum(centred**2)])
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = (first[high] - first[low]) / count
        variance = (second[high] - second[low] - count * mean**2) / (count - 1)
    mean += np.median(values[finite]) if finite.any() else 0.0
    poisoned = (bad[high] - bad[low]) > 0
    return np.where(poisoned, np.nan, mean), np.where(poisoned, np.nan, np.sqrt(np.maximum(variance, 0)))


def skip_step(signals: Signals) -> Levels:
    """Skip when the loss or the gradient norm exceeds mean + 6 sigma of the last 128; from the 64th step on.

    A NaN fails every comparison, so it and the 128 steps after it are skipped. The window begins anew in each attempt.
    """
    levels: dict[str, NDArray[np.int8]] = {}
    for name in ("train/loss", "optim/grad_norm"):
        rows, values, begin = _observed(signals, name)
        at = np.arange(len(rows))
        mean, sigma = _window(values, np.maximum(begin, at - 128), at)
        with np.errstate(invalid="ignore"):
            within = values - mean <= 6 * sigma
        levels[name] = _spread(~within & (at - begin >= 63), rows, len(signals))
    return levels


def kill_loss_spike(signals: Signals) -> Levels:
    """Five losses in a row at twice the mean of the last 100, or half of them above the cap; NaN by NaNMonitor.

    The window is the smallest that the callback takes (by default it has 5 % of the run: 20,000 records here, which no
    excerpt would fill); the cap is 10, as the first window of a run with this vocabulary gives.
    """
    rows, values, begin = _observed(signals, "train/loss")
    at = np.arange(len(rows))
    mean, _ = _window(values, np.maximum(begin, at - 100), at)
    full = at - begin >= 100
    with np.errstate(invalid="ignore"):
        outlier = full & (values >= 2 * mean)
    lasting = np.convolve(outlier, np.ones(5))[: len(rows)] >= 5
    high = np.convolve(values > 10.0, np.ones(100))[: len(rows)] >= 50
    return {
        "loss spike": _spread(lasting, rows, len(signals)),
        "high loss": _spread(high & (at - begin >= 200), rows, len(signals)),
        "NaN monitor": _spread(np.isnan(values), rows, len(signals)),
    }


def zclip(signals: Signals) -> Levels:
    """A gradient norm more than 2.5 sigma above its moving average (0.97), which takes in what was clipped."""
    rows, values, begin = _observed(signals, "optim/grad_norm")
    clipped = np.zeros(len(rows), np.bool_)
    for start in np.unique(begin).tolist():
        stop = int(np.searchsorted(begin, start, side="right"))
        clipped[start:stop] = _clipped(values[start:stop])
    return {"grad norm": _spread(clipped, rows, len(signals))}


def _clipped(values: Floats) -> Flags:
    flags = np.zeros(len(values), np.bool_)
    if len(values) <= 25:
        return flags
    mean, variance = float(values[:25].mean()), float(values[:25].var())
    for row, value in enumerate(values[25:].tolist(), start=25):
        sigma = variance**0.5
        z = (value - mean) / (sigma + 1e-6)
        if z > 2.5:
            flags[row] = True
            value = mean + 2.5 * sigma / (z / 2.5)  # noqa: PLW2901 - what was clipped enters the average
        mean = 0.97 * mean + 0.03 * value
        variance = 0.97 * variance + 0.03 * (value - mean) ** 2
    return flags


def cusum(signals: Signals) -> Levels:
    """Page's one-sided sum of the loss, standardised by the last 128: slack 0.5 sigma, limit 8 sigma, then anew."""
    rows, values, begin = _observed(signals, "train/loss")
    at = np.arange(len(rows))
    mean, sigma = _window(values, np.maximum(begin, at - 128), at)
    with np.errstate(invalid="ignore", divide="ignore"):
        z = np.where(at - begin >= 64, np.nan_to_num((values - mean) / sigma, posinf=0.0, neginf=0.0), 0.0)
    flags, total = np.zeros(len(rows), np.bool_), 0.0
    for row, score in enumerate(z.tolist()):
        total = max(0.0, total + score - 0.5)
        if total > 8:
            flags[row], total = True, 0.0
    return {"loss": _spread(flags, rows, len(signals))}


@dataclass(frozen=True)
class Clock:
    """A rule evaluator that looks once a minute, as Grafana and Prometheus do."""

    signals: Signals
    minutes: Floats

    @staticmethod
    def over(signals: Signals) -> "Clock":
        """Minutes from the first to the last row."""
        return Clock(signals, np.arange(signals.time[0], signals.time[-1] + 60, 60.0))

    def series(self, name: str) -> tuple[Floats, Floats]:
        """Times and values of a signal."""
        return self.signals.time[self.signals.observed(name)], self.signals.values(name)

    def newest(self, name: str, fresh: float = 900.0) -> Floats:
        """The newest value at each minute; NaN when it is older than `fresh` seconds."""
        times, values = self.series(name)
        last = np.searchsorted(times, self.minutes, side="right") - 1
        if not len(times):
            return np.full(len(self.minutes), np.nan)
        old = self.minutes - times[np.maximum(last, 0)] > fresh
        return np.where((last < 0) | old, np.nan, values[np.maximum(last, 0)])

    def share(self, name: str, low: float, window: float) -> tuple[Floats, Floats]:
        """Share of samples below `low` in the last `window` seconds, and how many samples there are."""
        times, values = self.series(name)
        total = np.concatenate([[0], np.cumsum(values < low)])
        first, last = (np.searchsorted(times, self.minutes - back, side="right") for back in (window, 0.0))
        count = (last - first).astype(np.float64)
        return (total[last] - total[first]) / np.maximum(count, 1), count

    def raised(self, condition: Flags, pending: int) -> NDArray[np.int8]:
        """Alarms per row: the condition held at `pending` + 1 evaluations in a row."""
        held = np.convolve(condition, np.ones(pending + 1))[: len(condition)] > pending
        last = np.searchsorted(self.minutes, self.signals.time, side="right") - 1
        return np.where(held[np.maximum(last, 0)], Level.CRITICAL, Level.OK).astype(np.int8)

    def since(self, times: Floats) -> Floats:
        """Seconds since the newest of `times` (or since the first row)."""
        last = np.searchsorted(times, self.minutes, side="right") - 1
        if not len(times):
            return self.minutes - self.minutes[0]
        return self.minutes - np.where(last < 0, self.minutes[0], times[np.maximum(last, 0)])


def marin(signals: Signals) -> Levels:
    """Marin's hero-run rules: looked at each minute, pending for five.

    Moved to our scale: router-bias limit (the card's 8 in place of 400), entropy as a share of ln E (5.92 of 5.951).
    `task_retried` is information there and left out.
    """
    clock = Clock.over(signals)
    spike, jump = _floors(clock)
    train = signals.phase == Phase.TRAIN
    written = ~signals.tick
    state = np.searchsorted(signals.time, clock.minutes, side="right") - 1
    training, finished = train[state], (signals.phase == Phase.FINISHED)[state]
    no_step = clock.since(signals.time[written & train])
    slow, samples = clock.share("throughput/tokens_per_second", 2.0e6, 900)
    weak, rated = clock.share("throughput/mfu", 0.15, 900)
    evaluated, losses = clock.series("eval/loss")
    worse = evaluated[1:][np.diff(losses) > 0]
    newest = clock.since(evaluated) if len(evaluated) else np.full(len(clock.minutes), np.inf)
    skipped, steps = clock.series("optim/skipped_step")
    rules = {
        "stall": np.where(training, no_step > 900, ~finished & (no_step > 2700)),
        "telemetry gone": ~finished & (clock.since(signals.time[written]) > 600),
        "loss spike": spike,
        "loss jump": jump & ~spike,
        "grad norm": training & (clock.newest("optim/grad_norm") > 2.0),
        "steps skipped": _recent(clock, skipped[steps > 0], 900) >= 3,
        "token drops": training & (clock.newest("moe/drop_rate") > 0.07),
        "router entropy": training & (clock.newest("moe/load_entropy") < 5.92 / 5.951),
        "router bias": training & (np.abs(clock.newest("moe/router_bias_max")) > 8),
        "throughput": (samples >= 10) & (slow > 0.5),
        "mfu": (rated >= 10) & (weak > 0.5),
        "eval": (newest < 1800) & (np.abs(newest - clock.since(worse)) < 1) & (len(worse) > 0),
    }
    return {rule: clock.raised(condition, 5) for rule, condition in rules.items()}


def _recent(clock: Clock, times: Floats, window: float) -> NDArray[np.intp]:
    first, last = (np.searchsorted(times, clock.minutes - back, side="right") for back in (window, 0.0))
    return last - first


def _floors(clock: Clock) -> tuple[Flags, Flags]:
    """The five-minute floor of the loss against the 55 minutes before it, within the newest attempt."""
    rows, values, begin = _observed(clock.signals, "train/loss")
    times = clock.signals.time[rows]
    high, middle, low = (np.searchsorted(times, clock.minutes - back, side="right") for back in (0, 300, 3600))
    attempt = begin[np.clip(high - 1, 0, None)]
    middle, low = np.maximum(middle, attempt), np.maximum(low, attempt)
    enough = (middle - low >= 20) & (high - middle >= 5)
    recent, before = _minimum(values, middle, high), _minimum(values, low, middle)
    mean, sigma = _window(values, low, middle)
    with np.errstate(invalid="ignore"):
        spike = enough & ((recent > mean + np.maximum(0.05, 6 * sigma)) | ~np.isfinite(mean))
        return spike, enough & (recent > before + 1.0)


def _minimum(values: Floats, low: NDArray[np.intp], high: NDArray[np.intp]) -> Floats:
    """Minimum of values[low:high]; meaningless where the window is empty."""
    pairs = np.column_stack([low, np.maximum(high, low + 1)]).ravel()
    return np.minimum.reduceat(np.append(values, [np.inf, np.inf]), np.minimum(pairs, len(values)))[::2]


def prometheus(signals: Signals) -> Levels:
    """Fixed thresholds as one writes them in a Prometheus rule file, with `for`; limits fit this run's plan."""
    clock = Clock.over(signals)
    written = ~signals.tick
    train = written & (signals.phase == Phase.TRAIN)
    starts = signals.time[np.flatnonzero(np.diff(signals.attempt)) + 1]
    saved = signals.time[signals.observed("checkpoint/step")]
    rules = {
        "LossNotFinite": (~np.isfinite(clock.newest("train/loss", np.inf)), 0),
        "LossHigh": (clock.newest("train/loss") > 4.0, 5),
        "GradNormHigh": (clock.newest("optim/grad_norm") > 2.0, 5),
        "TokenDropHigh": (clock.newest("moe/drop_rate") > 0.07, 10),
        "MfuLow": (clock.newest("throughput/mfu") < 0.15, 15),
        "NoStep": (clock.since(signals.time[train]) > 900, 5),
        "RunSilent": (clock.since(signals.time[written]) > 600, 5),
        "CheckpointOld": (clock.since(saved) > 7200, 0),
        "Restarting": (_recent(clock, starts, 7200) >= 3, 0),
    }
    return {rule: clock.raised(condition, pending) for rule, (condition, pending) in rules.items()}


def marin_without_eval(signals: Signals) -> Levels:
    """The same without "any evaluation worse than the one before", which fires at every second one of a flat loss."""
    return {rule: level for rule, level in marin(signals).items() if rule != "eval"}


MARIN = "marin-community/marin, docs/ops/hero-run-health-alerts.md and training-loss-spike-alert.md"
RIVALS = (
    Rival(
        "mean + 6 sigma of 128", "allenai/OLMo-core, optim/skip_step.py; also Levanter and MaxText", skip_step, ANSWERS
    ),
    Rival("2 x window mean", "mosaicml/llm-foundry, KillLossSpike; Composer, NaNMonitor", kill_loss_spike, ANSWERS),
    Rival("Marin's alerts", MARIN, marin, ANSWERS),
    Rival("Marin's, no eval rule", MARIN, marin_without_eval, ANSWERS),
    Rival("EMA z > 2.5", "ZClip, arXiv 2504.02507; bluorion-com/ZClip, zclip.py", zclip, ANSWERS),
    Rival("plain CUSUM", "Page, Biometrika 41 (1954), with k = 0.5 and h = 8", cusum, ANSWERS),
    Rival("fixed thresholds", "prometheus.io, alerting rules with `for`; limits ours", prometheus, ANSWERS),
)
