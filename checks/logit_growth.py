"""The logits are growing: the z-loss is above its ceiling, has grown, or drifts steadily upwards.

What it does: looks at `train/z_loss` (required), the mean of log(Z)^2 over the step's tokens before its weight, where
Z is the partition function of the lm head. It compares the value with `ceiling`, and its level (median of 32) with the
lowest level of the last 500 records.

Why it matters: cross-entropy does not see a common shift of all logits, so it drifts unnoticed until bfloat16 (8 bits)
is too coarse for it: at a log Z of 32 neighbouring numbers lie 0.25 apart. A dense 32B run diverged late in its decay
at a low learning rate and was cured by a small z-loss; so was the trouble of Marin's ladder (marin-community/marin
issue 8435; PaLM, 2022, section 5 introduced the term).

Warns and turns critical when:

- Warns at 8 of 10 records above `ceiling`; at a level `growth` times the lowest of 500 records; and when each of the
  last four levels, 128 records apart, is above the one before by more than its noise and the whole rise is 15 %.
- Critical at 8 of 10 records above four times the ceiling, or at `critical_growth` times the lowest level. Growth is
  counted on top of an offset of 10, below which it does no harm.

Defaults:

| setting           | default | source |
| ----------------- | ------- | --- |
| `ceiling`         | 1000    | a log Z of 32: see above |
| `growth`          | 1.5     | a guess; the z-loss of a healthy run moves by less than a tenth within 500 records after its warm-up |
| `critical_growth` | 3       | a guess, on the same grounds |

Does not see: attention logits and router logits (there is no signal for them); a single odd record.

What to do:

- Meaning: the lm head, or the norm before it, drifts.
- Impact: rounding noise in the loss, then a growing gradient norm, then divergence.
- Diagnosis: `optim/grad_norm` (is the share of the lm head growing?), `params/norm`, the z-loss weight in the card.
- Mitigation: raise the z-loss weight (`set_z_loss_weight`) before it shows in the loss; once the run is unstable, the
  plan `rewind_and_skip`.
"""

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from runwatch.checks.check import Check, Level, Settings, Verdicts, graded
from runwatch.checks.signals import Signals
from runwatch.checks.windows import SIGMAS_PER_MAD, Floats, lagged, rolling_count, rolling_median, rolling_min, usable

NAME = "train/z_loss"
OFFSET = 10.0
LEVEL, AGE, MEMORY = 32, 64, 448  # median of 32 against the lowest such median 64 to 511 records ago
LEG, LEGS, LEG_RISE = 128, 3, 1.15


class LogitGrowthSettings(Settings):
    """How large and how much larger."""

    ceiling: float = Field(default=1000.0, gt=0)
    """Of log(Z)^2. Raise it on runs in float32."""
    growth: float = Field(default=1.5, gt=1)
    """Of the level over its lowest of 500 records. Raise it for runs that start far from where they settle."""
    critical_growth: float = Field(default=3.0, gt=1)
    """The same, beyond doubt."""


def evaluate(signals: Signals, settings: LogitGrowthSettings) -> Verdicts:
    """The worst of the three rules per record (T). UNKNOWN: none has enough history, or the z-loss is not finite."""
    z_loss = usable(signals.values(NAME))
    shifted = np.maximum(z_loss, 0.0) + OFFSET
    level = rolling_median(shifted, LEVEL, LEVEL // 2)
    parts = [_over_ceiling(z_loss, settings), _growth(z_loss, level, settings), _drift(z_loss, shifted, level)]
    return Verdicts.held(Verdicts.worst(parts), signals.observed(NAME), len(signals))


def _over_ceiling(z_loss: Floats, settings: LogitGrowthSettings) -> Verdicts:
    over = rolling_count(z_loss > settings.ceiling, 10) >= 8
    far_over = rolling_count(z_loss > 4 * settings.ceiling, 10) >= 8
    level = graded(far_over, over)
    return _verdicts(np.where(np.isnan(lagged(z_loss, 9)), np.nan, z_loss), level, settings.ceiling, 0)


def _growth(z_loss: Floats, level: Floats, settings: LogitGrowthSettings) -> Verdicts:
    growth = level / lagged(rolling_min(level, MEMORY), AGE)
    warn = min(settings.growth, settings.critical_growth)
    found = graded(growth > settings.critical_growth, growth > warn)
    return _verdicts(np.where(np.isnan(z_loss), np.nan, growth), found, warn, 1)


def _drift(z_loss: Floats, shifted: Floats, level: Floats) -> Verdicts:
    noise = SIGMAS_PER_MAD * rolling_median(np.abs(shifted - lagged(level, 1)), LEG, LEVEL) / np.sqrt(LEVEL)
    rises = np.stack([lagged(level, leg * LEG) - lagged(level, (leg + 1) * LEG) for leg in range(LEGS)])
    total = level / lagged(level, LEGS * LEG)
    steady = (rises > 3.0 * noise).all(axis=0) & (total > LEG_RISE)
    return _verdicts(
        np.where(np.isnan(z_loss), np.nan, total), graded(np.zeros(len(level), np.bool_), steady), LEG_RISE, 2
    )


def _verdicts(value: Floats, level: NDArray[np.int8], limit: float, reason: int) -> Verdicts:
    known = np.where(np.isnan(value), np.int8(Level.UNKNOWN), level)
    return Verdicts(known, value, np.full(len(value), limit), np.full(len(value), reason, np.int8))


CHECK = Check(
    name="logit_growth",
    evaluate=evaluate,
    settings=LogitGrowthSettings,
    required=(NAME,),
    optional=(),
    lookback=lambda _: LEVEL + max(MEMORY + AGE, LEGS * LEG + 2, LEG + 2) + 1,
    messages=(
        "The z-loss stays above its ceiling: {value:.4g} (limit {limit:.4g}).",
        "The z-loss is {value:.2f} times its lowest level of the last 500 records (limit {limit:.2f}).",
        "The z-loss has drifted steadily upwards, to {value:.2f} times its level 384 records ago (limit {limit:.2f}).",
    ),
)
