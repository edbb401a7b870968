"""A held-out loss is worse than the evaluations before it, or worse than projected.

What it does: compares `eval/loss` (required) with the median of the three evaluations before it, with that of eight
earlier ones, and with `projection` where the card has one. It judges at the evaluation itself; between evaluations the
last verdict holds.

Why it matters: the held-out loss is what the run is for. In recording `llama31-8b-two-spikes` the evaluation of step
2112 stood at 4.665 after 3.540, in the middle of a spike from which the model then recovered; a run that does not
recover is lost. Marin's alert of the same name went blind when its signal was renamed (marin-community/marin issue
8862).

Warns and turns critical when:

- Warns at an evaluation more than `min_rise_nats` (and 6 sigmas of the changes between evaluations, at most three
  times as much) above the median of the three before it; at the third in a row above the median of eight earlier ones
  by a fifth of that and 2 sigmas; and when two in a row are above the projection by `min_rise_nats`.
- Critical when three in a row (one or two may lie in a spike that heals) are ten times `min_rise_nats` above the median
  of eight, or when two are five times above the projection.
- Unknown until the fourth evaluation.

Defaults:

| setting         | default   | source |
| --------------- | --------- | --- |
| `min_rise_nats` | 0.05 nats | 186 evaluations of OLMo 2 7B and those of three GPT-2 runs never rise by more than 0.012 |
| `projection`    | none      | (tokens, loss) points from the card, straight in log loss over log tokens |

Does not see: a run that stops improving (`ladder_deviation`); a change of the evaluation set (declare it).

What to do:

- Meaning: the weights got worse, or the evaluation changed.
- Impact: a checkpoint from now is worse than its predecessor: do not publish it or branch from it.
- Diagnosis: did `loss_spike` fire within this interval? Then wait for the next evaluation. Training loss unchanged and
  held-out loss up: over-fitting, repeated data, or another evaluation set.
- Mitigation: after a spike that does not recover, the plan `rewind_and_skip`; otherwise pause the run and look.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from runwatch.checks.check import Check, Level, Settings, Verdicts
from runwatch.checks.planned import along
from runwatch.checks.signals import Signals
from runwatch.checks.windows import (
    SIGMAS_PER_MAD,
    Floats,
    lagged,
    lasting,
    rolling_median,
    usable,
)

NAME = "eval/loss"
BEFORE, LONG, SCALE = 3, 8, 16


class EvalRegressionSettings(Settings):
    """How much worse is worse."""

    min_rise_nats: float = Field(default=0.05, gt=0)
    """Raise it for small or noisy evaluation sets."""
    projection: tuple[tuple[float, float], ...] = ()
    """(tokens, loss) in ascending order of tokens."""

    @field_validator("projection")
    @classmethod
    def _ascending(cls, points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        if any(later[0] <= earlier[0] for earlier, later in pairwise(points)):
            raise ValueError("tokens of a projection must ascend")
        if any(loss <= 0 for _, loss in points):
            raise ValueError("losses of a projection must be positive")
        return points


def evaluate(signals: Signals, settings: EvalRegressionSettings) -> Verdicts:
    """Level per record (T), held between evaluations. UNKNOWN before the fourth, or where it is not finite."""
    rows = signals.observed(NAME)
    loss = usable(signals.values(NAME))
    parts = [_against_trend(loss, settings), _against_projection(loss, signals.tokens[rows], settings)]
    return Verdicts.held(Verdicts.worst(parts), rows, len(signals))


def _against_trend(loss: Floats, settings: EvalRegressionSettings) -> Verdicts:
    usual = lagged(rolling_median(loss, BEFORE, BEFORE), 1)
    change = loss - lagged(loss, 1)
    unusual = np.abs(change - rolling_median(change, SCALE, 2))
    sigma = SIGMAS_PER_MAD * lagged(rolling_median(unusual, SCALE, 2), 1) / np.sqrt(2.0)
    limit = settings.min_rise_nats * np.clip(6.0 * np.nan_to_num(sigma) / settings.min_rise_nats, 1.0, 3.0)
    rise = loss - usual
    above = loss - lagged(rolling_median(loss, LONG, BEFORE), 2)
    slow_limit = limit / 5 + 2.0 * np.nan_to_num(sigma)
    third = lasting(above > slow_limit, 3)
    again = lasting(above > 10 * settings.min_rise_nats, 3)
    level = np.select([again, (rise > limit) | third], [Level.CRITICAL, Level.WARN], Level.OK)
    slow = (third | again) & (rise <= limit)
    value, shown = np.where(slow, above, rise), np.where(slow, slow_limit, limit)
    return _verdicts(np.where(np.isnan(rise), np.nan, value), level, shown, np.where(slow, 1, 0))


def _against_projection(loss: Floats, tokens: Floats, settings: EvalRegressionSettings) -> Verdicts:
    if not settings.projection:
        return Verdicts.unknown(len(loss))
    at, projected = zip(*settings.projection, strict=True)
    above = loss - along(at, projected, tokens)
    far = lasting(above > 5 * settings.min_rise_nats, 2)
    level = np.select([far, lasting(above > settings.min_rise_nats, 2)], [Level.CRITICAL, Level.WARN], Level.OK)
    return _verdicts(above, level, settings.min_rise_nats, 2)


def _verdicts(value: Floats, level: NDArray[Any], limit: Floats | float, reason: NDArray[Any] | int) -> Verdicts:
    known = np.where(np.isnan(value), Level.UNKNOWN, level).astype(np.int8)
    everywhere = np.ones(len(value))
    return Verdicts(known, value, everywhere * limit, (everywhere * reason).astype(np.int8))


CHECK = Check(
    name="eval_regression",
    evaluate=evaluate,
    settings=EvalRegressionSettings,
    required=(NAME,),
    optional=(),
    lookback=lambda _: max(2 * SCALE + 2, LONG + 5),
    messages=(
        "The held-out loss is {value:.3f} nats above the evaluations before it (limit {limit:.3f}).",
        "The held-out loss is {value:.3f} nats above the earlier ones for the third evaluation in a row (limit {limit:.3f}).",
        "The held-out loss is {value:.3f} nats above its projection (limit {limit:.3f}).",
    ),
)
