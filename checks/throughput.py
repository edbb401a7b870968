"""The run trains more slowly than it should.

What it does: judges the speed by `throughput/tokens_per_second`, by `throughput/mfu`, and by the tokens of a step (or
one step, where tokens are unknown) over `throughput/step_time`, each where present. It compares the median of the last
`window_records` observations with a declared floor and with the best recent median of the run itself. Where
observations are far apart, two in a row decide. It also counts slow steps, and follows the speed over four stretches
of its memory to find a gradual decline. The first `warm_up_steps` steps of each attempt are not judged.

Why it matters: every step of one 220-minute job of a DeepSeek-V3-like run took 41 % longer, with a spotless loss
(recording `deepseekv3-proxy-h100-slow-job`). A mixture-of-experts run that was twice as slow as the one before it
from its first step on looked normal to itself: only a declared floor tells (recording
`nanochat-moe-fp8-experts-slow`).

Warns and turns critical when:

- Floor: critical while the median is below `tokens_per_second_floor` or `mfu_floor`.
- Own best: warns while the median is `warn_drop` below the run's own best, critical at `critical_drop`. Two
  observations in a row that are 32 steps apart or more count as much.
- Tail: warns when more than `slow_share` of the last 128 steps took half as long again as the median of the 16 around
  them.
- Decline: warns when the speed fell by more than `decline` in each of four consecutive stretches of 96 observations.

Defaults:

| setting                   | default    | source |
| ------------------------- | ---------- | --- |
| `tokens_per_second_floor` | none       | from the card; Marin alerts below 2.0M tokens/s: see below |
| `mfu_floor`               | none       | from the card; Marin alerts below 15 % MFU: see below |
| `warn_drop`               | 0.2        | recording `deepseekv3-proxy-h100-slow-job` lost 29 % of its speed |
| `critical_drop`           | 0.5        | recording `gpt3-15b-h100-slow-windows` lost 76 %: see below |
| `window_records`          | 16 records | eight slow ones in a row are needed: see below |
| `warm_up_steps`           | 64 steps   | nanochat recompiles for 60 |
| `slow_share`              | 0.1        | fourteen recordings stay below 0.05: see below |
| `decline`                 | 0.005      | a guess: 2 % in 384 records is 20 % in 4,000 |

Marin's two alerts need more than half of 15 minutes with at least 10 samples. The GPT-3 recording also lost 6 % for
8,600 steps, which is no more than a warning. With `window_records` of 16 the first step after a restart, an evaluation
inside a step every 250, and the 14 steps of 13 to 50 s of a shared node never warn. With `slow_share` of 0.1 a node
that delays every sixth step is found in some 70 steps.

Does not see: a run that is slow from its first step on without a floor; a hang (`progress`); a decline slower than
`decline` in 96 observations; a slow attempt in its first 64 steps; anything more than 448 observations back.

What to do:

- Meaning: the same step takes longer.
- Impact: the deadline, not the model.
- Diagnosis: did it begin with an attempt (a bad node), at a step (data, sequence length, recompilation) or gradually
  (storage, heat, memory)? Only the tail of step times, or all steps?
- Mitigation: restart without the slow node. The plan `fit_to_deadline` re-plans budget and decay to what the remaining
  time allows.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from runwatch.checks.check import Check, Level, Settings, Verdicts, graded
from runwatch.checks.signals import Signals
from runwatch.checks.windows import (
    Flags,
    Floats,
    growth,
    lagged,
    rolling_count,
    rolling_max,
    rolling_median,
    rolling_sum,
    usable,
)

Rows = NDArray[np.intp]
Judged = tuple[Verdicts, Rows]
"""Verdicts of some observations, and their rows."""
TOKENS, MFU, STEP_TIME = "throughput/tokens_per_second", "throughput/mfu", "throughput/step_time"
BEST = 448
"""Observations over which the best level is remembered: a lasting slowness becomes its own normal only after them."""
FAR_STEPS = 32
STRETCHES, STRETCH = 4, 96
SLOW_WINDOW, SLOW = 128, 1.5
UNITS = ((",.0f", "tokens/s"), (".1%", "MFU"), (",.0f", "tokens/s by step time"), (".3g", "steps/s by step time"))
"""How a speed is written: the number's format and its unit."""
SENTENCES = 3
"""Messages of each unit."""
TAIL = SENTENCES * len(UNITS)
"""The message of the step-time tail, after those."""


class ThroughputSettings(Settings):
    """Floors from the card, and drops against the run's own best."""

    tokens_per_second_floor: float | None = Field(default=None, gt=0)
    """Tokens/s; none by default."""
    mfu_floor: float | None = Field(default=None, gt=0, le=1)
    """Ratio; none by default."""
    warn_drop: float = Field(default=0.2, gt=0, lt=1)
    """Ratio under the run's own best. Raise it on a shared machine."""
    critical_drop: float = Field(default=0.5, gt=0, lt=1)
    """Ratio under the run's own best."""
    window_records: int = Field(default=16, ge=4, le=64)
    """Observations. A longer window is slower and forgives longer blips."""
    warm_up_steps: int = Field(default=64, ge=0, le=128)
    """Steps of each attempt that are not judged."""
    slow_share: float = Field(default=0.1, gt=0, le=1)
    """Ratio of slow steps that warns."""
    decline: float = Field(default=0.005, gt=0, lt=1)
    """Ratio by which each stretch is slower than the one before. Raise it where other work takes the machine."""


def evaluate(signals: Signals, settings: ThroughputSettings) -> Verdicts:
    """The worst of the three speeds and of the step-time tail; UNKNOWN through the warm-up (T records)."""
    warm = _warm(signals, settings)
    rate = _told(0, _speed(signals, warm, TOKENS, settings.tokens_per_second_floor, settings))
    mfu = _told(1, _speed(signals, warm, MFU, settings.mfu_floor, settings))
    return Verdicts.worst_held([rate, mfu, *_step_time(signals, warm, settings)], len(signals))


def _warm(signals: Signals, settings: ThroughputSettings) -> Flags:
    """Rows that are `warm_up_steps` or more into their attempt."""
    change = np.flatnonzero(np.diff(signals.attempt, prepend=-1))
    if not len(change):
        return np.zeros(0, np.bool_)
    since = signals.step[change][np.searchsorted(change, np.arange(len(signals)), side="right") - 1]
    return signals.step - since >= settings.warm_up_steps


def _speed(signals: Signals, warm: Flags, name: str, floor: float | None, settings: ThroughputSettings) -> Judged:
    rows, values = signals.observed(name), usable(signals.values(name))
    speed = np.where(warm[rows], values, np.nan)
    return _against_limits(signals, rows, speed, _median(speed, settings), floor, settings)


def _step_time(signals: Signals, warm: Flags, settings: ThroughputSettings) -> list[Judged]:
    rows, seconds = signals.observed(STEP_TIME), usable(signals.values(STEP_TIME))
    speed = _work(signals, rows) / np.where(seconds > 1e-9, seconds, np.nan)
    speed = np.where(warm[rows], speed, np.nan)
    median = _median(speed, settings)
    unit = np.where(np.isfinite(signals.tokens[rows]), 2, 3)
    return [
        _told(unit, _against_limits(signals, rows, speed, median, None, settings)),
        _tail(rows, speed, median, settings),
    ]


def _told(unit: int | NDArray[np.int64], judged: Judged) -> Judged:
    """With the messages of that unit in `UNITS`, of each observation or of all."""
    verdicts, rows = judged
    return replace(verdicts, reason=(verdicts.reason + unit * SENTENCES).astype(np.int8)), rows


def _median(speed: Floats, settings: ThroughputSettings) -> Floats:
    return rolling_median(speed, settings.window_records, 10)


def _work(signals: Signals, rows: Rows) -> Floats:
    """Tokens per step at each observation; 1 where tokens are not told, NaN where they or the steps do not grow."""
    tokens = signals.tokens[rows]
    steps = growth(signals.step[rows])
    grown = growth(tokens)
    told = np.where((steps > 0) & (grown > 0), grown / np.where(steps > 0, steps, 1), np.nan)
    return np.where(np.isfinite(tokens), told, 1.0)


def _against_limits(
    signals: Signals, rows: Rows, speed: Floats, median: Floats, floor: float | None, settings: ThroughputSettings
) -> Judged:
    best = lagged(rolling_max(median, BEST), 1)
    far = signals.step[rows] - lagged(signals.step[rows].astype(np.float64), 1) >= FAR_STEPS
    pair = np.where(far, np.maximum(speed, lagged(speed, 1)), np.inf)
    now = np.fmin(median, np.where(np.isnan(best), np.inf, pair))
    warn, critical = best * (1 - settings.warn_drop), best * (1 - settings.critical_drop)
    level = graded(now <= critical, now <= warn)
    typical = _typical(median)
    declining = (level == Level.OK) & _declines(typical, settings.decline)
    level[declining] = Level.WARN
    limit = np.where(level == Level.CRITICAL, critical, np.where(declining, lagged(typical, STRETCH), warn))
    reason = np.where(declining, 2, 1)
    if floor is not None:
        under = median < floor
        level, limit, reason = (
            np.where(under, Level.CRITICAL, level),
            np.where(under, floor, limit),
            np.where(under, 0, reason),
        )
    level = np.where(np.isnan(median), np.int8(Level.UNKNOWN), level).astype(np.int8)
    value = np.where(reason == 2, typical, np.where(np.isfinite(now), now, median))
    return Verdicts(level, value, limit, reason.astype(np.int8)), rows


def _typical(median: Floats) -> Floats:
    """Geometric mean of the medians of a stretch."""
    logs = np.log(np.maximum(median, 1e-30))
    count = rolling_count(~np.isnan(median), STRETCH)
    return np.exp(rolling_sum(logs, STRETCH) / np.where(count == STRETCH, count, np.nan))


def _declines(typical: Floats, decline: float) -> Flags:
    """Whether the speed fell by more than `decline` in each of the last four stretches."""
    levels = [lagged(typical, STRETCH * back) for back in range(STRETCHES + 1)]
    falls = [newer < older * (1 - decline) for newer, older in pairwise(levels)]
    return np.logical_and.reduce(falls)


def _tail(rows: Rows, speed: Floats, typical: Floats, settings: ThroughputSettings) -> Judged:
    share = rolling_count(speed * SLOW < typical, SLOW_WINDOW) / SLOW_WINDOW
    slow = share > settings.slow_share
    level = graded(np.zeros(len(rows), np.bool_), slow, ~np.isnan(typical))
    size = len(rows)
    return Verdicts(level, share, np.full(size, settings.slow_share), np.full(size, TAIL, np.int8)), rows


def _messages() -> Iterator[str]:
    for form, unit in UNITS:
        value, limit = f"{{value:{form}}} {unit}", f"{{limit:{form}}}"
        yield f"The speed is {value}; the declared floor is {limit}."
        yield f"The speed is {value}; the limit is {limit}, from the run's own recent best."
        yield f"The speed has been falling for 384 records, to {value}; it was {limit} 96 records ago."
    yield "{value:.0%} of the last 128 steps took half as long again as the median around them; the limit is {limit:.0%}."


CHECK = Check(
    name="throughput",
    evaluate=evaluate,
    settings=ThroughputSettings,
    required=(TOKENS, MFU, STEP_TIME),
    optional=(),
    lookback=lambda settings: (
        max(BEST, (STRETCHES + 1) * STRETCH) + settings.window_records + settings.warm_up_steps + 2
    ),
    messages=tuple(_messages()),
)
