"""The loss has left the curve that was registered for it, upwards or suspiciously downwards.

What it does: subtracts from `train/loss` (required) the curve registered before launch, interpolated linearly in log
loss over log tokens. A cumulative sum of the residual, whose limit allows for autocorrelated noise, finds small lasting
shifts; the band of the curve finds large ones. Where no curve applies (none registered, tokens unknown or outside it),
the check judges the run's own trend instead: a lasting rise above its lowest level, or a sudden drop to a new low
within twenty records.

Why it matters: a run that will miss its projection shows it in the first tenth of its budget, when there is something
left to save. A loss that is too low is no good news either: a loader that restarted at shard 1 made a loss look better
until it collapsed (entrenar issue 294), and a fine-tune drops by 0.05 to 0.09 nats at each repeated epoch (recording
`mistral-7b-finetune-epoch-repeats`).

Warns and turns critical when:

- Warns when the cumulative sum of residuals passes its limit, either way (after 320 records, so that a warm-up is
  forgotten), and at five records mostly outside the band widened by `margin_nats` (by 2.5 sigmas where the noise is
  larger, at most 0.3, and by that until 17 records tell the noise).
- Warns without a curve at a level 0.12 nats above the lowest of 256 records, or at a drop of 0.035 nats that lasts 6
  records.
- Critical when above the widened band for `lasting_steps`, and without a curve at 0.5 nats above the lowest level for
  64 records. Low is never critical: it is no reason to shorten a run.

Defaults:

| setting          | default   | source |
| ---------------- | --------- | --- |
| `curves`         | none      | from the run card (`runwatch ladder register`) |
| `min_shift_nats` | 0.03 nats | twice what evaluations of OLMo 2 7B rise by chance; found within some 30 records at noise of 0.02 |
| `margin_nats`    | 0.05 nats | as `min_jump_nats` of `loss_spike` |
| `lasting_steps`  | 50 steps  | the spikes of the Llama recordings recede sooner |

Does not see: a curve that is itself wrong (it warns as long as the curve is off by more than half of `min_shift_nats`);
steps before the curve's first point; a spike (`loss_spike`).

What to do:

- Meaning: too high: the run learns less per token than its ladder did. Too low: it trains on data that it has seen
  before, or that leaked.
- Impact: the projected final loss is out of reach, or is not what it claims to be.
- Diagnosis: the rungs at the same fraction of tokens, the learning rate, `data/position` and the mixture; if too low,
  repeated fingerprints in `plan_conformance`.
- Mitigation: if too high inside the first quarter of the budget, the plan `shorten_budget`. Declare a planned change
  of the mixture (`runwatch declare`), so that the affected checks reset their baseline.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from runwatch.checks.check import Check, Level, Settings, Verdicts, graded
from runwatch.checks.planned import registered_loss
from runwatch.checks.signals import Signals
from runwatch.checks.windows import (
    SIGMAS_PER_MAD,
    Flags,
    Floats,
    cusum,
    guarded_baseline,
    lagged,
    lasting,
    rolling_count,
    rolling_median,
    rolling_min,
    rolling_sum,
    usable,
)

MEAN, SCALE, MEMORY = 16, 256, 256
SETTLED = 320  # observations before which no sum is trusted
LEVEL, STAIR, BEFORE = 12, 20, 64  # a stair: the median of 12 falls within 20, against the falls of the 64 before


class Curve(BaseModel):
    """A registered curve from a step on: loss and 95 % band at some numbers of tokens; empty: none from there on."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    from_step: int = 0
    tokens: tuple[float, ...] = ()
    loss: tuple[float, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    @model_validator(mode="after")
    def _same_lengths(self) -> "Curve":
        if not len(self.tokens) == len(self.loss) == len(self.low) == len(self.high):
            raise ValueError("tokens, loss, low and high of a curve must have the same length")
        if any(later <= earlier for earlier, later in pairwise(self.tokens)):
            raise ValueError("tokens of a curve must ascend")
        if any(value <= 0 for value in (*self.loss, *self.low, *self.high)):
            raise ValueError("losses of a curve must be positive")
        return self


class LadderDeviationSettings(Settings):
    """How far off the curve is too far."""

    curves: tuple[Curve, ...] = ()
    """In ascending order of `from_step`; the last one reached holds."""
    min_shift_nats: float = Field(default=0.03, gt=0)
    """The smallest lasting shift to find. Raise it where the curve is less exact than half of this."""
    margin_nats: float = Field(default=0.05, ge=0)
    """How far outside the curve's band is beyond doubt."""
    lasting_steps: int = Field(default=50, ge=1)
    """So long above the band is critical. Raise it on runs whose spikes take long to heal."""


def evaluate(signals: Signals, settings: LadderDeviationSettings) -> Verdicts:
    """Level per record (T); value and limit in nats off the curve, or off the own trend. UNKNOWN: neither is there."""
    rows = signals.observed("train/loss")
    loss = usable(signals.values("train/loss"))
    band = _registered(signals, settings.curves)
    on_curve = np.isfinite(band[0])
    if len(rows) and on_curve.all():
        judged = _against_curve(loss, band, signals.step[rows].astype(np.float64), settings)
        return Verdicts.held(judged, rows, len(signals))
    parts: list[Verdicts] = []
    if on_curve.any():
        parts.append(_against_curve(loss, band, signals.step[rows].astype(np.float64), settings))
    if not on_curve.all():
        parts.append(_against_own_trend(loss))
    chosen = np.where(on_curve, 0, len(parts) - 1) * len(rows) + np.arange(len(rows))
    return Verdicts.held(Verdicts.concatenate(parts).take(chosen), rows, len(signals))


def _registered(signals: Signals, curves: Sequence[Curve]) -> Floats:
    """Expected loss, low and high end of its band (3 x observations of the loss); NaN where no curve holds."""
    rows = signals.observed("train/loss")
    steps, tokens = signals.step[rows], signals.tokens[rows]
    result = np.full((3, len(rows)), np.nan)
    for curve in curves:
        here = steps >= curve.from_step
        result[:, here] = registered_loss(curve, tokens[here]) if curve.tokens else np.nan
    return result


def _against_curve(loss: Floats, band: Floats, steps: Floats, settings: LadderDeviationSettings) -> Verdicts:
    expected, low, high = band
    residual = loss - expected
    bounded = np.clip(residual, -1.0, 1.0)
    mean, long_mean = rolling_sum(bounded, MEAN) / MEAN, rolling_sum(bounded, 4 * MEAN) / (4 * MEAN)
    slack = np.maximum(settings.min_shift_nats / 2, (high - low) / 16)
    sigma, variance = _noise(residual, mean)
    settled = np.isfinite(lagged(loss, SETTLED))  # the noise of a warm-up would outlast its own limit
    limit = np.where(settled, np.maximum(7.0 * variance / slack, 10.0 * slack), np.inf)
    cut = np.maximum(4.0 * sigma, 2.0 * slack)  # outliers do not add up
    tame = np.clip(residual, -cut, cut)
    up = (cusum(tame - slack, MEMORY) > limit) & ((mean > slack) | (long_mean > 0.6 * slack))
    down = (cusum(-tame - slack, MEMORY) > limit) & ((mean < -slack) | (long_mean < -0.6 * slack))
    noise = np.where(np.isnan(sigma), 0.3, np.minimum(2.5 * np.sqrt(variance), 0.3))  # unknown noise may be large
    margin = np.fmax(settings.margin_nats, noise)
    over, under = loss - high - margin, low - margin - loss
    above, below = _mostly_positive(over), _mostly_positive(under)
    lasts = _lasts(above | (over > 0.5), steps, settings.lasting_steps)
    level = graded(lasts, above | below | up | down)
    reason = np.select([lasts, above, below, up, down], [0, 0, 1, 2, 3], 0)
    edge = np.select([reason == 0, reason == 1], [high + margin, low - margin], expected)
    shown = np.where(reason <= 1, edge - expected, np.where(reason == 2, slack, -slack))
    return _verdicts(np.where(reason <= 1, residual, mean), level, shown, reason, np.isfinite(residual))


def _noise(residual: Floats, mean: Floats) -> tuple[Floats, Floats]:
    """Sigma of the residual's noise per record, and the long-run variance per record (with autocorrelation).

    Both from differences, of neighbours and of neighbouring means of 16, which a constant offset leaves alone. With
    long-run variance v, a sum with drift -slack that has begun passes 7 v / slack with a chance of exp(-14) (Siegmund,
    Sequential Analysis, 1985).
    """
    sigma = _spread(residual - lagged(residual, 1), SCALE) / np.sqrt(2.0)
    blocks = _spread(mean - lagged(mean, MEAN), SCALE)
    return sigma, np.fmax(sigma**2, blocks**2 * MEAN / 2)


def _spread(values: Floats, window: int) -> Floats:
    return SIGMAS_PER_MAD * rolling_median(np.abs(values), window, MEAN)


def _mostly_positive(excess: Floats) -> Flags:
    """Whether the median of the last five is above zero: three of them, where all five are told."""
    if len(excess) <= 5 or np.isnan(excess).any():
        return rolling_median(excess, 5, 3) > 0
    first = rolling_median(excess[:4], 5, 3) > 0
    return np.concatenate([first, rolling_count(excess > 0, 5)[4:] >= 3])


def _lasts(flags: Flags, steps: Floats, wanted: int) -> Flags:
    """Whether a flag has been set for `wanted` steps or 64 records without a break, the first such step included."""
    before = np.maximum.accumulate(np.where(flags, -1, np.arange(len(flags))))
    records = np.arange(len(flags)) - before
    since = steps - steps[np.maximum(before, 0)]
    return flags & ((records >= 64) | (since >= wanted))


def _against_own_trend(loss: Floats) -> Verdicts:
    smooth = rolling_median(loss, 32, 16)
    rise = smooth - lagged(rolling_min(smooth, MEMORY, 32), 32)
    lasts = lasting(rise > 0.5, 64)
    fall, fall_limit = _stair(loss)
    stair = lasting(fall > fall_limit, 6)
    level = np.select([lasts, (rise > 0.12) | stair], [Level.CRITICAL, Level.WARN], Level.OK)
    reason = np.where(stair & ~(rise > 0.12), 5, 4)
    value, limit = np.where(reason == 5, -fall, rise), np.where(reason == 5, -fall_limit, 0.12)
    return _verdicts(value, level, limit, reason, np.isfinite(rise) & np.isfinite(loss))


def _stair(loss: Floats) -> tuple[Floats, Floats]:
    """How far the loss has fallen within a few records more than it usually does, to a new low; and the limit of it."""
    smooth = rolling_median(loss, LEVEL, LEVEL // 2)
    step = lagged(smooth, STAIR) - smooth
    usual = guarded_baseline(step, BEFORE, STAIR, BEFORE // 2)
    scale = SIGMAS_PER_MAD * guarded_baseline(np.abs(step - usual), BEFORE, STAIR, BEFORE // 2)
    new_low = lagged(rolling_min(smooth, 128), STAIR) - smooth
    return np.minimum(step - usual, new_low), np.maximum(0.035, 4.5 * scale)


def _verdicts(value: Floats, level: NDArray[np.int8], limit: Floats, reason: Floats, known: Flags) -> Verdicts:
    return Verdicts(np.where(known, level, Level.UNKNOWN).astype(np.int8), value, limit, reason.astype(np.int8))


CHECK = Check(
    name="ladder_deviation",
    evaluate=evaluate,
    settings=LadderDeviationSettings,
    required=("train/loss",),
    optional=(),
    lookback=lambda _: max(MEMORY + MEAN * 2 + 2, 32 + MEMORY + 32 + 64, LEVEL + STAIR * 3 + BEFORE * 2 + 6) + 2,
    messages=(
        "The loss is {value:+.3f} nats off its registered curve, above the band (limit {limit:+.3f}).",
        "The loss is {value:+.3f} nats off its registered curve, below the band (limit {limit:+.3f}): repeated data?",
        "The loss has stayed {value:+.3f} nats above its registered curve (tolerance {limit:+.3f}).",
        "The loss has stayed {value:+.3f} nats below its registered curve (tolerance {limit:+.3f}): repeated data?",
        "The loss is {value:+.3f} nats above its lowest level of the last 256 records (limit {limit:+.3f}).",
        "The loss dropped suddenly, {value:+.3f} nats beyond its usual fall (limit {limit:+.3f}): repeated or leaked data?",
    ),
)
