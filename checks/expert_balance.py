"""The load of the experts is out of balance.

What it does: judges the median of the last `window_records` observations of `moe/load_max_vio`, `moe/load_entropy`,
`moe/dead_experts` and `moe/router_bias_max` (each where present) against absolute limits and against the best recent
level of the run itself. Imbalance is read off the entropy as its deficit, 1 - entropy. The bias may grow in proportion
to the steps, as it does while every update still points the same way.

Why it matters: an expert that is never chosen is never trained, one that is always chosen overflows, and the loss
shows neither: only its load told a model with one live expert from a healthy one (tt-metal#42869). Marin's hero run
pages on router entropy and on the router bias, beside its loss alerts.

Warns and turns critical when:

- Violation: warns above `violation_limit` and twice its best level, critical above twice the limit and four times the
  best level.
- Entropy: warns when the deficit is above 0.0052 and three times its best level (or the entropy is below
  `entropy_floor`); critical above 0.05 and eight times, and always below 0.5.
- Dead experts: warns when at least one more is dead throughout the window than at best, critical at `dead_critical`
  more.
- Bias: warns above `router_bias_limit`, or above twice its best level; critical above twice the limit or four times
  the best level.

Defaults:

| setting                   | default    | source |
| ------------------------- | ---------- | --- |
| `window_records`          | 16 records | our choice: it takes eight bad ones in a row |
| `settle_steps`            | 200 steps  | routing starts unbalanced, see `token_drop` |
| `violation_limit`         | 1          | a guess: the busiest expert has twice its share |
| `entropy_floor`           | none       | from the card |
| `dead_critical`           | 16 experts | a guess |
| `router_bias_limit`       | none       | from the card; Marin alerts at 400 |
| entropy deficit, warns    | 0.0052     | 1 - 5.92 / ln 384, Marin's alert on the router entropy of 384 experts |
| entropy deficit, critical | 0.05       | a guess |
| entropy, always critical  | 0.5        | fewer experts in effect than the square root of their number |
| times the best level      | 2, 3, 4, 8 | guesses: see below |
| bias not judged below     | 1          | router scores are of that order |

In recording `moe-softk-droprate-tiny` the coefficient of variation of the load moves by a factor of 1.7; its square,
which the deficit follows, by 3.

Does not see: which expert (`moe/layers/*` in the telemetry); dropped tokens (`token_drop`); imbalance that was there
from the first step, below the absolute limits; a best level older than some 480 observations.

What to do:

- Meaning: the routers no longer spread the tokens.
- Impact: parameters idle, capacity overflows, and tokens are dropped later.
- Diagnosis: one layer or all of them (`moe/layers/*`)? Did the data, the context or the balance rate change? Does the
  bias still move?
- Mitigation: the plan `retreat_context` shortens the context and raises the capacity factor and the balance rate.
"""

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from runwatch.checks.check import Check, Settings, Verdicts, graded
from runwatch.checks.signals import Signals
from runwatch.checks.windows import Floats, lagged, rolling_median, rolling_min, usable

Rows = NDArray[np.intp]
Judged = tuple[Verdicts, Rows]
"""Verdicts of some observations, and their rows."""

VIOLATION, ENTROPY, DEAD, BIAS = "moe/load_max_vio", "moe/load_entropy", "moe/dead_experts", "moe/router_bias_max"
BEST = 448
"""Observations over which the best level is remembered: a lasting fault becomes its own normal only after them."""
GROWTH_FLOOR = 1.0


class ExpertBalanceSettings(Settings):
    """Limits of lasting imbalance."""

    window_records: int = Field(default=16, ge=1, le=64)
    """Observations. A longer window is slower and forgives longer blips."""
    settle_steps: int = Field(default=200, ge=0)
    """Steps from the start of the run that are not judged."""
    violation_limit: float = Field(default=1.0, gt=0)
    """(max - mean) / mean. Warns above it, critical above twice it."""
    entropy_floor: float | None = Field(default=None, ge=0, le=1)
    """Share of ln E below which it warns whatever the run's own level; none by default."""
    dead_critical: int = Field(default=16, ge=1)
    """Experts, all layers, dead through the whole window."""
    router_bias_limit: float | None = Field(default=None, gt=0)
    """Magnitude, from the card. Without it only growth is judged."""


def evaluate(signals: Signals, settings: ExpertBalanceSettings) -> Verdicts:
    """The worst of four judgements; UNKNOWN while the run settles and until half a window is full (T records)."""
    parts = (_violation, _entropy, _dead, _bias)
    return Verdicts.worst_held([judged for part in parts for judged in part(signals, settings)], len(signals))


def _violation(signals: Signals, settings: ExpertBalanceSettings) -> list[Judged]:
    rows, values = signals.observed(VIOLATION), usable(signals.values(VIOLATION))
    now, best = _levels(signals, rows, values, settings)
    warn = np.maximum(settings.violation_limit, 2 * best)
    critical = np.maximum(2 * settings.violation_limit, 4 * best)
    return [_verdicts(signals, rows, now, warn, critical, reason=0, settings=settings)]


def _entropy(signals: Signals, settings: ExpertBalanceSettings) -> list[Judged]:
    rows, values = signals.observed(ENTROPY), usable(signals.values(ENTROPY))
    now, best = _levels(signals, rows, 1 - values, settings)
    floor = np.inf if settings.entropy_floor is None else 1 - settings.entropy_floor
    warn = np.minimum(np.maximum(0.0052, 3 * best), floor)
    critical = np.minimum(np.maximum(0.05, 8 * best), 0.5)
    deficit, _ = _verdicts(signals, rows, now, np.minimum(warn, critical), critical, reason=1, settings=settings)
    return [(Verdicts(deficit.level, 1 - deficit.value, 1 - deficit.limit, deficit.reason), rows)]


def _dead(signals: Signals, settings: ExpertBalanceSettings) -> list[Judged]:
    rows, values = signals.observed(DEAD), usable(signals.values(DEAD))
    lasting = rolling_min(values, settings.window_records, (settings.window_records + 1) // 2)
    settled = np.where(signals.step[rows] < settings.settle_steps, np.nan, lasting)
    best = np.nan_to_num(_best(settled, settings))
    critical = best + settings.dead_critical - 0.5
    return [_verdicts(signals, rows, lasting, best, critical, reason=2, settings=settings)]


def _bias(signals: Signals, settings: ExpertBalanceSettings) -> list[Judged]:
    rows, values = signals.observed(BIAS), usable(signals.values(BIAS))
    steps = np.maximum(signals.step[rows], 1).astype(np.float64)
    now = rolling_median(np.abs(values), settings.window_records, (settings.window_records + 1) // 2)
    settled = np.where(steps < settings.settle_steps, np.nan, now)
    straight = 1.25 * _best(settled / steps, settings) * steps
    growth = np.maximum(GROWTH_FLOOR, np.nan_to_num(np.maximum(2 * _best(settled, settings), straight), nan=np.inf))
    limit = np.inf if settings.router_bias_limit is None else settings.router_bias_limit
    absolute = _verdicts(
        signals, rows, now, np.full(len(now), limit), np.full(len(now), 2 * limit), reason=3, settings=settings
    )
    return [absolute, _verdicts(signals, rows, now, growth, 2 * growth, reason=4, settings=settings)]


def _levels(signals: Signals, rows: Rows, values: Floats, settings: ExpertBalanceSettings) -> tuple[Floats, Floats]:
    """The median of each window, and the lowest such median of the settled past (0 where there is none)."""
    now = rolling_median(values, settings.window_records, (settings.window_records + 1) // 2)
    settled = np.where(signals.step[rows] < settings.settle_steps, np.nan, now)
    return now, np.nan_to_num(_best(settled, settings), nan=np.inf)


def _best(levels: Floats, settings: ExpertBalanceSettings) -> Floats:
    return lagged(rolling_min(levels, BEST), settings.window_records)


def _verdicts(
    signals: Signals,
    rows: Rows,
    now: Floats,
    warn: Floats,
    critical: Floats,
    *,
    reason: int,
    settings: ExpertBalanceSettings,
) -> Judged:
    known = ~np.isnan(now) & (signals.step[rows] >= settings.settle_steps)
    far = now > critical
    limit = np.where(far, critical, warn)
    return Verdicts(graded(far, now > warn, known), now, limit, np.full(len(rows), reason, np.int8)), rows


CHECK = Check(
    name="expert_balance",
    evaluate=evaluate,
    settings=ExpertBalanceSettings,
    required=(VIOLATION, ENTROPY, DEAD, BIAS),
    optional=(),
    lookback=lambda settings: BEST + 2 * settings.window_records,
    messages=(
        "The busiest expert of the worst layer is above the mean load by {value:.2f} times the mean; the limit is {limit:.2f}.",
        "The load entropy of the worst layer is {value:.4f} of its maximum; the limit is {limit:.4f}.",
        "{value:.0f} experts get no tokens; the limit is {limit:.0f}.",
        "The largest router bias is {value:.2f}; the limit is {limit:.2f}.",
        "The largest router bias has grown to {value:.2f}; the limit is {limit:.2f}, from its own past.",
    ),
)
