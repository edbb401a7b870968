"""The training loss has jumped above its own trend.

What it does: extrapolates `train/loss` (required) from the medians of two neighbouring windows that end four records
ago, and compares the excess of the loss over that trend (the residual) with a robust scale of its noise. The limit
learns two things about the noise: how heavy its tail is, and how large odd batches are that are gone in the next
record.

Why it matters: a Llama 3.1 8B run went from 3.39 to 24.82 in two steps and needed 145 to recover (recording
`llama31-8b-spike-24`); a dense 32B run spent about 5 % of its steps in spikes or recovering from them
(marin-community/marin issue 1368).

Warns and turns critical when:

- Warns at the first record whose residual exceeds both `z_limit` sigmas (up to four times as many where the tail is
  heavy, more after odd batches) and `min_jump_nats`; at two records in a row that nearly do; or at five of seven that
  are half-way there (a lasting shift of five sigmas is found within ten records).
- Critical when the loss is still up at the third record, or at the second record of a spike that comes back within
  sixteen.
- Unknown until some thirty losses have been seen, and where the loss is not finite.

Defaults:

| setting         | default   | source |
| --------------- | --------- | --- |
| `z_limit`       | 6 sigmas  | the rule of OLMo-core and MaxText: no false positive in 10,000 steps of normal noise |
| `min_jump_nats` | 0.05 nats | the floor of Marin's loss-spike alert |

A single record needs up to twice `z_limit` until the noise is known to have a light tail: Student's t with 4 degrees of
freedom exceeds 8 robust sigmas about once in 2,000 records and 12 about once in 10,000. The windows, the tail and the
odd batches come from our replay of seventeen recorded runs, in which 46 single steps beyond 8 sigmas of one healthy
run make three warnings.

Does not see: slow drift (`ladder_deviation`), NaN (`finite`), a spike in the first thirty records.

What to do:

- Meaning: an optimizer step or a batch has hurt the model.
- Impact: most spikes heal by themselves in tens to thousands of steps; some never do.
- Diagnosis: did `grad_norm` grow before (the optimizer) or not (the data)? Has this `data/sample_fingerprint` spiked
  before? Does the next evaluation confirm it?
- Mitigation: wait while the loss falls. If it does not recover, the plan `rewind_and_skip` returns to the last good
  checkpoint and skips the batches (`runwatch plan list`).
"""

from typing import NamedTuple

import numpy as np
from pydantic import Field

from runwatch.checks.check import Check, Level, Settings, Verdicts
from runwatch.checks.signals import Signals
from runwatch.checks.windows import (
    Flags,
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

GUARD = 4  # records between a baseline and the record judged: longer than the three that make a spike critical
HALF = 24  # records of each of the two trend windows: one median of 24 has a fourth of the noise's sigma
SCALE = 128  # records of the noise scale, as in OLMo-core
BLOCK = 16  # the tail is read off the maxima of blocks of 16 ...
MEMORY = 384  # ... over this many records, in which odd batches are remembered as well
SHIFT_RECORDS, SHIFT_WINDOW = 5, 7  # so many of so many ...
SHIFT = 0.46  # ... above this share of the limit are a small lasting shift
PRIOR = 2.0  # tail factor of noise of which nothing is known yet; replaced record by record while the memory fills
ALONE, ALONE_MOST = 2.5, 2.0  # a single record's limit grows with the tail so much sooner, up to twice `z_limit`
EARLIEST = 12  # observations that a scale needs: 32 records of history are enough for all (recording of BLOOM)


class LossSpikeSettings(Settings):
    """How far above the trend is too far."""

    z_limit: float = Field(default=6.0, gt=0, le=100)
    """In robust sigmas of the residual. Raise it and small spikes pass, larger ones are found as fast."""
    min_jump_nats: float = Field(default=0.05, gt=0)
    """A jump that matters to anyone. Raise it on runs whose noise is tiny."""


class Noise(NamedTuple):
    """The residual's noise at each of T observations."""

    sigma: Floats
    correlation: Floats
    tail: Floats
    alone: Floats
    """The tail factor for a record that stands alone."""


def evaluate(signals: Signals, settings: LossSpikeSettings) -> Verdicts:
    """Level per record (T); value and limit in nats above the trend. UNKNOWN: no trend or scale yet, or a NaN loss."""
    loss = usable(signals.values("train/loss"))
    expected, recent = trend(loss)
    residual = loss - expected
    noise = measure(loss, residual, settings.min_jump_nats / settings.z_limit)
    z = residual / noise.sigma
    matters = residual > settings.min_jump_nats
    odd_limit, odd = odd_batches(z)
    single_limit = np.maximum(settings.z_limit * noise.alone, odd_limit)
    single = matters & (z > single_limit)
    pair, still = lasting_jumps(z, noise, odd, settings.z_limit)
    correlated = 1.0 + 3.0 * np.maximum(noise.correlation - 0.5, 0.0)
    shift_limit = settings.z_limit * SHIFT * np.sqrt(np.sqrt(noise.tail)) * correlated
    shifted = (
        matters
        & (loss > recent + settings.min_jump_nats)
        & (z > shift_limit)
        & (rolling_count(z > shift_limit, SHIFT_WINDOW) >= SHIFT_RECORDS)
    )
    # Which sentence holds, in the order of its urgency.
    reason = np.select([matters & still, single, matters & pair, shifted], [1, 0, 2, 3], 0).astype(np.int8)
    level = np.where(single | (matters & pair) | shifted, Level.WARN, Level.OK)
    level = np.where(matters & still, Level.CRITICAL, level)
    level = np.where(np.isfinite(z), level, Level.UNKNOWN).astype(np.int8)
    lower = (2 / 3) * settings.z_limit * np.sqrt(noise.tail)
    limit = np.choose(reason, [single_limit, lower, lower, shift_limit]) * noise.sigma
    verdicts = Verdicts(level, residual, np.maximum(limit, settings.min_jump_nats), reason)
    return Verdicts.held(verdicts, signals.observed("train/loss"), len(signals))


def trend(loss: Floats) -> tuple[Floats, Floats]:
    """What the loss should be, and the last window's median, from which that is extrapolated.

    It is not below the minimum of the last records. The slope is never taken as positive (a loss that has begun to rise
    is no trend) and at seven tenths (a falling loss falls ever more slowly; the full slope undershoots by a sigma in
    the first thousand steps of Mixtral's recording).
    """
    middle = rolling_median(loss, HALF, HALF // 3)
    recent, older = lagged(middle, GUARD), lagged(middle, GUARD + HALF)
    slope = np.minimum(np.nan_to_num((recent - older) / HALF), 0.0)
    return np.maximum(recent + 0.7 * slope * (GUARD + HALF / 2), lagged(rolling_min(loss, HALF), 1)), recent


def measure(loss: Floats, residual: Floats, smallest: float) -> Noise:
    """Scale, lag-1 correlation and tail factors of the residual's noise.

    The scale is at most three times that of the steps between neighbours, which a poor trend leaves alone.
    The tail factor (1 to 4) goes by the median of block maxima, 1.7 sigmas in normal noise and 2.2 in Student's t
    of 3 degrees of freedom, whose return level of 4,800 records is 15 sigmas instead of 3.5: about the fifth power.
    `PRIOR` stands for what the memory has not seen yet.
    """
    spread = guarded_scale(residual, SCALE, GUARD, EARLIEST)
    steps = guarded_scale(loss - lagged(loss, 1), SCALE, GUARD, EARLIEST) / np.sqrt(2.0)
    correlation = np.clip(1.0 - (steps / np.maximum(spread, smallest)) ** 2, 0.0, 0.6)
    sigma = np.maximum(np.minimum(spread, 3.0 * steps), smallest)
    z = residual / sigma
    quiet = np.where(rolling_max(np.where(z > 5.0, 1.0, 0.0), 8) > 0, np.nan, z)
    maxima = guarded_baseline(rolling_max(quiet, BLOCK, BLOCK // 2), MEMORY, GUARD, MEMORY // 4)
    known = rolling_count(np.isfinite(lagged(z, GUARD)), MEMORY) / MEMORY
    heaviness = known * (np.nan_to_num(maxima) / 1.8) ** 5 + (1.0 - known) * PRIOR
    tail = np.clip(heaviness, 1.0, 4.0)
    alone = np.maximum(tail, np.clip(ALONE * heaviness, 1.0, ALONE_MOST))
    return Noise(sigma, np.nan_to_num(correlation), tail, alone)


def odd_batches(z: Floats) -> tuple[Floats, Flags]:
    """What a single record must exceed because of odd batches, and whether these are common.

    An odd batch stood alone and was gone in the next record: no spike. A single record must be 1.8 times the largest
    remembered, and more with two or three of them: their tail (a power of about -2.5 in recording
    `gpt2-124m-heavy-tailed-clean`) reaches three to four times the largest of 384 records once in 4,800. With four or
    more a single record must be beyond the 28 sigmas of the oddest batch there; a spike is found at its second.
    """
    before, alone = lagged(z, 1), rolling_count(z > 5.0, 32) <= 2
    gone = (z < 2.0) & (lagged(z, 2) < before / 2) & alone
    largest = np.nan_to_num(rolling_max(np.where(gone, before, np.nan), MEMORY))
    count = rolling_count(gone & (before > 4.0), MEMORY)
    return np.where(count >= 4, 32.0, largest * np.array([1.8, 1.8, 2.5, 3.5])[np.minimum(count, 3)]), count >= 2


def lasting_jumps(z: Floats, noise: Noise, odd: Flags, z_limit: float) -> tuple[Flags, Flags]:
    """Whether two records in a row are up, and whether the third one still is (or two in a second spike within 16).

    What correlated noise keeps of an outlier (`correlation` of it a record) does not count as lasting, nor does what is
    left when three quarters are gone.
    """
    limit = z_limit * np.sqrt(noise.tail)
    fresh = z - np.maximum(noise.correlation, 0.3) * lagged(z, 1)
    pair = lasting(z > limit * 0.93, 2) & (fresh > limit / 2)
    ends = (lagged(z, 2) > limit * 1.4) & (z > limit * 5 / 6) & ~odd
    third = (lasting(z > limit * 2 / 3, 3) | ends) & (rolling_max(z, 3) > limit * 1.05)
    third &= ((fresh > limit / 4) & (z > rolling_max(z, 3) / 4)) | lasting(z > limit * 1.5, 3)
    over = z > limit
    lately = rolling_count(over, 3)
    again = over & (lately >= 2) & (rolling_count(over, 16) > lately)
    return pair, third | again


TREND_REACH = GUARD + 2 * HALF
Z_REACH = TREND_REACH + GUARD + SCALE + 1

CHECK = Check(
    name="loss_spike",
    evaluate=evaluate,
    settings=LossSpikeSettings,
    required=("train/loss",),
    optional=(),
    lookback=lambda _: Z_REACH + MEMORY + 34,
    messages=(
        "The loss is {value:.3f} nats above its trend (limit {limit:.3f}).",
        "The loss is still {value:.3f} nats above its trend at the third record (limit {limit:.3f}).",
        "The loss is {value:.3f} nats above its trend for the second record (limit {limit:.3f}).",
        "The loss was above its trend in five of the last seven records, now by {value:.3f} nats (limit {limit:.3f}).",
    ),
)
