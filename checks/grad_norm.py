"""The gradient norm has exploded, keeps growing or stays above its ceiling, or optimizer steps are being skipped.

What it does: judges the logarithm of `optim/grad_norm` (its noise is right-skewed) against the median of its own last
64 records behind a guard gap, its level against the lowest level of the last 500 records, and the norm itself against
`ceiling`. It also counts `optim/skipped_step` over the last 50 steps. Either signal is enough.

Why it matters: BLOOM's norm went 0.24, 0.95, 2.4, 16, 145, 960 in six steps while the loss still looked fine, four
steps before the loss spiked (BigScience chronicles, 2022-04-12). Marin's ladder found runs in trouble above 4, cured
by z-loss (marin-community/marin issue 8435).

Warns and turns critical when:

- Warns at one record of `outlier_ratio` times the baseline and 6 sigmas; at the second record in a row that is up and
  reaches the ratio's 0.62nd power (6.4 of 20) and 5 sigmas; and at three in a row that are twice the baseline.
- Warns at a level 1.75 times the lowest of the last 500 records (3 times where these span more than 5,000 steps), at 8
  of 10 records above `ceiling`, and at `skipped_steps` in 50 steps.
- Critical at three records in a row of which one reaches the 0.62nd power; at a level `critical_growth` times the
  lowest; at 52 of 64 records above the ceiling; and at more than three times `skipped_steps` in 50 steps. The first 100
  records of skipped steps only settle the loss scale and are not judged.

Defaults:

| setting             | default    | source |
| ------------------- | ---------- | --- |
| `outlier_ratio`     | 20         | our GPT-2 and WMT recordings: isolated blips of 3 to 19 times leave no mark on the loss |
| `critical_growth`   | 4          | a guess; Marin's norm doubled over 40,000 steps without harm (marin-community/marin issue 9148) |
| `ceiling`           | 4          | marin-community/marin issue 8435 |
| `ceiling_from_step` | 1000 steps | healthy runs start at a norm of 15 |
| `skipped_steps`     | 3 in 50    | Marin's alert (3 in 15 minutes of 18 s steps); healthy fp16 loss scaling skips pairs every 100 steps |

Does not see: growth slower than about twofold in 500 records, which is normal (norms peak at 25 to 40 % of a run); NaN
(`finite`).

What to do:

- Meaning: one update is far larger than those before it, or the updates keep growing.
- Impact: clipping bounds the size of a step, not its direction; loss spikes follow within steps.
- Diagnosis: isolated and without a mark on the loss: an odd batch. Lasting: look at `train/z_loss`, the learning rate
  and the share of the lm head.
- Mitigation: together with `loss_spike` or `logit_growth`, the plan `rewind_and_skip`. For slow growth, raise the
  z-loss weight or lower the learning rate.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from runwatch.checks.check import Check, Level, Settings, Verdicts, graded
from runwatch.checks.signals import Signals
from runwatch.checks.windows import (
    Floats,
    guarded_baseline,
    guarded_scale,
    lagged,
    lasting,
    rolling_count,
    rolling_max,
    rolling_median,
    rolling_min,
    usable,
)

NORM, SKIPPED = "optim/grad_norm", "optim/skipped_step"
BASELINE, SCALE, GUARD, EARLIEST = 64, 128, 4, 12
RECENT, AGE, MEMORY = 32, 96, 416  # median of 32 against the lowest such median 96 to 511 records ago
SKIP_STEPS = 50
SMALLEST = 0.05  # floor of the log norm's sigma: a run's noise is 0.06 to 0.3


class GradNormSettings(Settings):
    """How large, how fast, how often."""

    outlier_ratio: float = Field(default=20.0, gt=1, le=1e6)
    """One record this many times the baseline warns. Raise it on runs with many odd batches."""
    critical_growth: float = Field(default=4.0, gt=1, le=1e6)
    """The norm's level over its lowest of 500 records. Raise it and slow explosions are found later."""
    ceiling: float = Field(default=4.0, gt=0)
    """A norm that no healthy run of this family keeps."""
    ceiling_from_step: int = Field(default=1000, ge=0)
    """The ceiling counts from this step on: after the warm-up."""
    skipped_steps: int = Field(default=3, ge=1, le=25)
    """So many skipped in 50 steps warn, three times as many and one are critical."""


def evaluate(signals: Signals, settings: GradNormSettings) -> Verdicts:
    """The worst of the four rules per record (T). UNKNOWN: none has enough history yet."""
    norms = signals.observed(NORM)
    parts = [(rule, norms) for rule in _norm(signals, settings)]
    return Verdicts.worst_held([*parts, (_skipped(signals, settings), signals.observed(SKIPPED))], len(signals))


def _norm(signals: Signals, settings: GradNormSettings) -> list[Verdicts]:
    norm = usable(signals.values(NORM))
    log_norm = np.log(np.maximum(norm, 1e-12))
    steps = signals.step[signals.observed(NORM)]
    return [
        _outlier(norm, log_norm, settings),
        _growth(log_norm, steps, settings),
        _over_ceiling(norm, steps, settings),
    ]


def _outlier(norm: Floats, log_norm: Floats, settings: GradNormSettings) -> Verdicts:
    baseline = guarded_baseline(log_norm, BASELINE, GUARD, EARLIEST)
    residual = log_norm - baseline
    sigma = np.maximum(guarded_scale(residual, SCALE, GUARD, EARLIEST), SMALLEST)
    alone = np.maximum(np.log(settings.outlier_ratio), 6.0 * sigma)
    with_others = np.maximum(0.62 * np.log(settings.outlier_ratio), 5.0 * sigma)
    up = residual > np.maximum(np.log(2.0), 3.5 * sigma)
    pair, third = lasting(up, 2), lasting(up, 3)
    exploding = third & (rolling_max(residual - with_others, 3) > 0)
    warned = third | (pair & (residual > with_others)) | (residual > alone)
    level = graded(exploding, warned)
    limit = np.exp(baseline + np.select([third, pair], [np.maximum(np.log(2.0), 3.5 * sigma), with_others], alone))
    return _verdicts(np.where(np.isnan(sigma), np.nan, norm), level, limit, np.where(third, 1, 0))


def _growth(log_norm: Floats, steps: NDArray[np.int64], settings: GradNormSettings) -> Verdicts:
    recent = rolling_median(log_norm, RECENT, RECENT // 2)
    lowest = lagged(rolling_min(recent, MEMORY), AGE)
    coarse = steps - lagged(steps.astype(np.float64), MEMORY) > 5000
    warn = np.minimum(np.where(coarse, 3.0, 1.75), settings.critical_growth)
    growth = np.exp(np.minimum(recent - lowest, 60.0))
    level = graded(growth > settings.critical_growth, growth > warn)
    return _verdicts(growth, level, warn, 2)


def _over_ceiling(norm: Floats, steps: NDArray[np.int64], settings: GradNormSettings) -> Verdicts:
    over = (norm > settings.ceiling) & (steps >= settings.ceiling_from_step)
    lately = rolling_count(over, 10) >= 8
    long = rolling_count(over, 64) >= 52
    level = graded(long, lately)
    return _verdicts(np.where(np.isnan(lagged(norm, 9)), np.nan, norm), level, settings.ceiling, 3)


def _skipped(signals: Signals, settings: GradNormSettings) -> Verdicts:
    """Steps of the n-th newest skip against the newest record: within 50 steps and 50 records, n were skipped."""
    rows, skips = signals.observed(SKIPPED), np.nan_to_num(signals.values(SKIPPED))
    times = np.clip(skips, 0, 3 * settings.skipped_steps + 1).astype(np.int64)
    records = np.arange(len(rows))
    skipped = np.repeat(records, times)
    so_far = np.searchsorted(skipped, records, side="right")
    count = np.zeros(len(rows))
    for nth in range(1, min(3 * settings.skipped_steps + 1, len(skipped)) + 1):
        which = so_far - nth
        at = skipped[np.maximum(which, 0)]
        near = (records - at < SKIP_STEPS) & (signals.step[rows] - signals.step[rows[at]] < SKIP_STEPS)
        count += (which >= 0) & near
    level = graded(count > 3 * settings.skipped_steps, count >= settings.skipped_steps)
    value = np.where(records >= 2 * SKIP_STEPS, count, np.nan)
    return _verdicts(value, level, settings.skipped_steps, 4)


def _verdicts(value: Floats, level: NDArray[np.int8], limit: Floats | float, reason: NDArray[Any] | int) -> Verdicts:
    known = np.where(np.isnan(value), np.int8(Level.UNKNOWN), level)
    everywhere = np.ones(len(value))
    return Verdicts(known, value, everywhere * limit, (everywhere * reason).astype(np.int8))


CHECK = Check(
    name="grad_norm",
    evaluate=evaluate,
    settings=GradNormSettings,
    required=(NORM, SKIPPED),
    optional=(),
    lookback=lambda _: max(BASELINE + SCALE + 2 * GUARD + 3, RECENT + MEMORY + AGE + 1),
    messages=(
        "The gradient norm is {value:.3g} (limit {limit:.3g}, from its own baseline).",
        "The gradient norm is {value:.3g}, far above its baseline for the third record in a row (limit {limit:.3g}).",
        "The gradient norm has grown {value:.2f} times over its lowest of the last 500 records (limit {limit:.2f}).",
        "The gradient norm stays above its ceiling: {value:.3g} (limit {limit:.3g}).",
        "{value:.0f} of the last 50 optimizer steps were skipped (limit {limit:.0f}).",
    ),
)
