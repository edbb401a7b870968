"""The experts drop too many tokens.

What it does: takes the median of `moe/drop_rate` (required) over the last `window_records` observations and compares
it with two limits. A median needs more than half of its window, so a single blip never fires and never resolves an
alert.

Why it matters: a dropped token skips its experts and learns nothing from them. On a context extension from 4K to 65K
the drop rate of a large run went from 7 % to 40 %; throughput counts dropped tokens as trained, so it shows nothing.

Warns and turns critical when: warns while the median is above `warn_rate`, critical while it is above
`critical_rate`. A sudden change is found at the fifth record, half the window.

Defaults:

| setting          | default    | source |
| ---------------- | ---------- | --- |
| `warn_rate`      | 0.07       | Marin's alert; its hero run is at 3 % (capacity factor 1.15), with blips to 5 % (marin#8435, #8884) |
| `critical_rate`  | 0.2        | half of the 40 % above; otherwise a guess |
| `window_records` | 10 records | the shortest median that four bad records in a row cannot move |
| `settle_steps`   | 200 steps  | a guess: the rate starts at 10 % and falls to 0 while the balance biases settle (marin#8435, 19 August) |

Does not see: which layer or expert drops (`moe/layers/drop_rate` in the telemetry); imbalance that the capacity still
absorbs (`expert_balance`); anything in the first `settle_steps` steps; a rate below 7 % that climbs slowly.

What to do:

- Meaning: the routers send more tokens to some experts than these can take.
- Impact: quality, not speed: the loss moves little and late.
- Diagnosis: `runwatch status RUN_DIR`; then whether the data or the context length changed at that step, and whether
  the load violation grew with it.
- Mitigation: the plan `retreat_context` shortens the context and raises the capacity factor and the balance rate.
  Declare a planned context extension (`runwatch declare`).
"""

import numpy as np
from pydantic import Field

from runwatch.checks.check import Check, Settings, Verdicts, graded
from runwatch.checks.signals import Signals
from runwatch.checks.windows import rolling_median, usable


class TokenDropSettings(Settings):
    """Limits of the lasting drop rate."""

    warn_rate: float = Field(default=0.07, gt=0, le=1)
    """Ratio. Raise it for a run that is meant to drop more."""
    critical_rate: float = Field(default=0.20, gt=0, le=1)
    """Ratio. Raising it delays the fallback plan."""
    window_records: int = Field(default=10, ge=1, le=500)
    """Observations. A longer window is slower and forgives longer blips."""
    settle_steps: int = Field(default=200, ge=0)
    """Steps from the start of the run that are not judged."""


def evaluate(signals: Signals, settings: TokenDropSettings) -> Verdicts:
    """The median drop rate against its limits; UNKNOWN while the run settles and until half a window is full (T records)."""
    rows, rates = signals.observed("moe/drop_rate"), usable(signals.values("moe/drop_rate"))
    median = rolling_median(rates, settings.window_records, (settings.window_records + 1) // 2)
    critical = median > settings.critical_rate
    known = ~np.isnan(median) & (signals.step[rows] >= settings.settle_steps)
    limit = np.where(critical, settings.critical_rate, settings.warn_rate)
    observed = Verdicts(
        graded(critical, median > settings.warn_rate, known), median, limit, np.zeros(len(rows), np.int8)
    )
    return Verdicts.held(observed, rows, len(signals))


CHECK = Check(
    name="token_drop",
    evaluate=evaluate,
    settings=TokenDropSettings,
    required=("moe/drop_rate",),
    optional=(),
    lookback=lambda settings: settings.window_records,
    messages=("{value:.1%} of the token assignments are dropped (median of the window); the limit is {limit:.0%}.",),
)
