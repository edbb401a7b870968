"""The run does not follow its plan.

What it does: compares `optim/learning_rate`, the tokens of a step and `data/mixture/*` (each where present) with the
plan in force, and checks the order of the data: steps and tokens must go up within an attempt, `data/position` by the
same batch each step, also across a resume, and no `data/sample_fingerprint` may come twice. Without `plans` only the
order is judged.

Why it matters: after a resume a loader began again at its first shard; the loss looked better than before, then
collapsed, and 40 % of the planned data was never seen (entrenar#294). Resumes that replay or skip data in silence are
on record for five other trainers (ms-swift#10050, accelerate#2016, Megatron-Bridge#4565, prime-rl#1035, verl#7401).

Warns and turns critical when:

- Learning rate and tokens of a step: warns above `warn_share` off plan for `lasting_records`, critical above
  `critical_share`.
- Mixture: warns when the mean share of the window is `mixture_warn` off plan, critical at `mixture_critical`, both
  widened to five standard errors of the mean.
- Fingerprints: warns at one repeat in the last 64 records, critical at three.
- Position: critical at a record that goes back or stands still; warns at one that skips, critical where it skips more
  than 100 batches.
- Steps or tokens that go back within an attempt: critical at that record. Steps that jump ahead by ten times the usual
  and more than 50: warns. Tokens past the budget: warns.

Defaults:

| setting            | default     | source |
| ------------------ | ----------- | --- |
| `plans`            | none        | from the card and from applied receipts |
| `warn_share`       | 0.02        | a guess: see below |
| `critical_share`   | 0.1         | a guess |
| `lasting_records`  | 3 records   | our choice |
| `mixture_warn`     | 0.02        | a guess |
| `mixture_critical` | 0.1         | a guess |
| mixture window     | 384 rows    | about 200 records at 18 s a step, with their tick rows; the batch quantises the realised share |
| fingerprint memory | 512 records | 52 bits: a chance repeat in 512 once in 10^13 records |

A schedule that is one step off stays far below 2 % outside the warm-up; inside it the plan of one step earlier or later
is accepted too.

Does not see: repeats further apart than 512 records (a second epoch: `ladder_deviation`, low side); the right batch
in the wrong order; anything of the plan where `plans` is empty; a wrong learning rate of one parameter group.

What to do:

- Meaning: the configuration or the order of the data is not what was registered.
- Impact: the result no longer answers the hypothesis; repeated data flatters the loss.
- Diagnosis: which quantity, since which step, and what happened there (a resume, a receipt, a stage)?
- Mitigation: if it was intended, declare it (`runwatch declare`) or change the card. If the data repeats, stop and
  resume from the last checkpoint with the right position.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from runwatch.checks.check import Check, Settings, Verdicts, graded
from runwatch.checks.planned import learning_rate_share
from runwatch.checks.signals import Signals
from runwatch.checks.windows import (
    Floats,
    growth,
    lagged,
    rolling_count,
    rolling_median,
    rolling_min,
    sum_since,
    usable,
)

Rows = NDArray[np.intp]
Judged = tuple[Verdicts, Rows]
"""Verdicts of some observations, and their rows."""
LEARNING_RATE, POSITION, FINGERPRINT, MIXTURE = (
    "optim/learning_rate",
    "data/position",
    "data/sample_fingerprint",
    "data/mixture",
)
MEMORY, REPEATS = 512, 64
MIXTURE_ROWS, MIXTURE_LEAST = 384, 50
TYPICAL = 16
LEAST_JUMP = 50


class PlannedRun(BaseModel):
    """The plan from step `from_step` on, in records written after `from_time`. What is None is not judged.

    The time (Unix seconds) tells the steps that a rewind trains again from those that it left behind.

    The learning rate is either `learning_rate_points`, linear between (tokens, rate), or warmup-stable-decay: linear
    from 0 over `warmup_tokens` to `peak`, then linear from `decay_start_tokens` to `final_fraction` of it at
    `token_budget`, all of it times `lr_scale`. `mixture` holds up to `decay_start_tokens`, `decay_mixture` (if any)
    after it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    from_step: int = 0
    from_time: float | None = None
    token_budget: float | None = Field(default=None, gt=0)
    tokens_per_step: float | None = Field(default=None, gt=0)
    learning_rate_points: tuple[tuple[float, float], ...] | None = None
    peak: float | None = Field(default=None, gt=0)
    warmup_tokens: float = Field(default=0.0, ge=0)
    decay_start_tokens: float | None = Field(default=None, ge=0)
    final_fraction: float = Field(default=0.0, ge=0)
    lr_scale: float = Field(default=1.0, gt=0)
    mixture: Mapping[str, float] | None = None
    decay_mixture: Mapping[str, float] | None = None

    def learning_rate(self, tokens: Floats) -> Floats:
        """The planned rate at `tokens`; NaN where none is planned."""
        if self.learning_rate_points is not None:
            at, rate = np.array(sorted(self.learning_rate_points)).T
            return np.interp(tokens, at, rate)
        if self.peak is None:
            return np.full(len(tokens), np.nan)
        decays = self.decay_start_tokens is not None and self.token_budget is not None
        share = learning_rate_share(
            tokens,
            warmup_tokens=self.warmup_tokens,
            decay_start_tokens=self.decay_start_tokens if decays and self.decay_start_tokens is not None else np.inf,
            token_budget=self.token_budget if decays and self.token_budget is not None else np.inf,
            final_fraction=self.final_fraction,
        )
        return self.lr_scale * self.peak * share

    def share(self, source: str, tokens: Floats) -> Floats:
        """The planned share of `source` at `tokens`; NaN where none is planned."""
        if self.mixture is None:
            return np.full(len(tokens), np.nan)
        stable = self.mixture.get(source, 0.0)
        decay = stable if self.decay_mixture is None else self.decay_mixture.get(source, 0.0)
        start = np.inf if self.decay_start_tokens is None else self.decay_start_tokens
        return np.where(tokens > start, decay, stable)


class PlanConformanceSettings(Settings):
    """The plans, and how far off them is too far."""

    plans: tuple[PlannedRun, ...] = ()
    """From the card and from applied receipts, oldest first; the last that a record has reached holds there."""
    warn_share: float = Field(default=0.02, gt=0)
    """Ratio off plan."""
    critical_share: float = Field(default=0.10, gt=0)
    """Ratio off plan."""
    lasting_records: int = Field(default=3, ge=1, le=64)
    """Records off plan in a row before it counts."""
    mixture_warn: float = Field(default=0.02, gt=0)
    """Share of a source, absolute."""
    mixture_critical: float = Field(default=0.10, gt=0)
    """Share of a source, absolute."""


def evaluate(signals: Signals, settings: PlanConformanceSettings) -> Verdicts:
    """The worst of all judgements; UNKNOWN where a signal, a plan or history is lacking (T records)."""
    trained = np.flatnonzero(signals.trained)
    return Verdicts.worst_held(
        [
            *_order(signals, trained),
            _step_tokens(signals, trained, settings),
            _position(signals),
            _repeats(signals),
            _learning_rate(signals, settings),
            _budget(signals, settings),
            *_mixtures(signals, settings),
        ],
        len(signals),
    )


def _planned(signals: Signals, rows: Rows, settings: PlanConformanceSettings) -> list[tuple[PlannedRun, Rows | slice]]:
    """Each plan with the places in `rows` at which it holds."""
    steps, holds = signals.step[rows], np.full(len(rows), -1)
    for number, plan in enumerate(settings.plans):
        reached = steps >= plan.from_step
        if plan.from_time is not None:
            reached &= ~(signals.time[rows] <= plan.from_time)
        holds[reached] = number
    if len(settings.plans) == 1 and not holds.any():
        return [(settings.plans[0], slice(None))]
    return [(plan, np.flatnonzero(holds == number)) for number, plan in enumerate(settings.plans)]


def _order(signals: Signals, rows: Rows) -> list[Judged]:
    """Steps and tokens within an attempt, and jumps of the step number across attempts too."""
    same = growth(signals.attempt[rows]) == 0
    gained = growth(signals.step[rows])
    back = same & (gained < 0)
    usual = lagged(rolling_median(gained, TYPICAL, 8), 1)
    jump = np.maximum(10 * usual, LEAST_JUMP)
    ahead = gained > jump
    level = graded(back, ahead)
    by_step = _judged(rows, level, gained, np.where(back, 0.0, jump), np.where(back, 0, 1))
    tokens = growth(signals.tokens[rows])
    lost = same & (tokens < 0)
    return [by_step, _judged(rows, graded(lost, lost), tokens, np.zeros(len(rows)), 2)]


def _step_tokens(signals: Signals, rows: Rows, settings: PlanConformanceSettings) -> Judged:
    """Tokens of a step against the plan, or (growth allowed) against the median of the records before."""
    per_step = _growth_per_step(signals, rows, signals.tokens[rows])
    planned = np.full(len(rows), np.nan)
    for plan, where in _planned(signals, rows, settings):
        planned[where] = plan.tokens_per_step or np.nan
    usual = lagged(rolling_median(per_step, TYPICAL, 8), 1)
    own = np.isnan(planned)
    expected = np.where(own, usual, planned)
    expected = np.where(expected > 0, expected, np.nan)  # tokens that stand still say nothing of a step
    off = np.where(own, 1 - per_step / expected, np.abs(per_step / expected - 1))
    return _off_plan(rows, (off, per_step, expected), 3, settings)


def _learning_rate(signals: Signals, settings: PlanConformanceSettings) -> Judged:
    """Distance of the rate from the plan's range over one step to either side, relative to the plan."""
    rows, rate = signals.observed(LEARNING_RATE), usable(signals.values(LEARNING_RATE))
    tokens = signals.tokens[rows]
    step = np.nan_to_num(np.abs(_growth_per_step(signals, rows, tokens)))
    low, high, peak = np.full(len(rows), np.nan), np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    for plan, where in _planned(signals, rows, settings):
        at = tokens[where]
        near = np.stack([plan.learning_rate(at + shift) for shift in (-step[where], 0.0, step[where])])
        low[where], high[where] = near.min(axis=0), near.max(axis=0)
        peak[where] = plan.lr_scale * (
            plan.peak or max((r for _, r in plan.learning_rate_points or ()), default=np.nan)
        )
    nearest = np.clip(rate, low, high)
    off = np.abs(rate - nearest) / np.maximum(nearest, 1e-3 * peak)
    return _off_plan(rows, (off, rate, nearest), 4, settings)


def _off_plan(
    rows: Rows, judged: tuple[Floats, Floats, Floats], reason: int, settings: PlanConformanceSettings
) -> Judged:
    """Verdicts of (share off plan, value, planned value) where it lasts."""
    off, value, planned = judged
    lasting = rolling_min(off, settings.lasting_records, settings.lasting_records)
    critical, warn = lasting > settings.critical_share, lasting > settings.warn_share
    return _judged(rows, graded(critical, warn, ~np.isnan(off)), value, planned, reason)


def _growth_per_step(signals: Signals, rows: Rows, values: Floats) -> Floats:
    """Growth of a cumulative quantity per step; NaN at the first record and where the step does not grow."""
    steps = growth(signals.step[rows])
    return growth(values) / np.where(steps > 0, steps, np.nan)


def _position(signals: Signals) -> Judged:
    """Growth of the position against the usual batch per step or per token, whichever fits better."""
    rows = signals.observed(POSITION)
    position = usable(signals.values(POSITION))
    kept = np.isfinite(position)
    rows, position = rows[kept], position[kept]
    steps = growth(signals.step[rows])
    grown, tokens = growth(position), growth(signals.tokens[rows])
    batch = grown / np.where(steps > 0, steps, np.nan)
    previous, usual = lagged(batch, 1), lagged(rolling_median(batch, TYPICAL, 1), 1)
    per_token = lagged(grown / np.where(tokens > 0, tokens, np.nan), 1)
    expected = np.stack([usual * steps, previous * steps, per_token * tokens])
    excess = _smallest(grown - expected)
    replayed = (grown <= 0) & (steps > 0) | (excess < -0.5)
    skipped = excess > 0.5
    far = excess > 100 * usual
    level = graded(replayed | far, skipped, ~np.isnan(excess))
    return _judged(rows, level, grown, usual * steps, np.where(replayed, 5, 6))


def _smallest(candidates: Floats) -> Floats:
    """Column by column the number nearest to zero; NaN where all are."""
    sizes = np.where(np.isnan(candidates), np.inf, np.abs(candidates))
    nearest = np.take_along_axis(candidates, np.argmin(sizes, axis=0)[None], axis=0)[0]
    return np.where(np.isinf(sizes.min(axis=0)), np.nan, nearest)


def _repeats(signals: Signals) -> Judged:
    """Fingerprints that came before at another step, at most `MEMORY` records ago."""
    values = signals.values(FINGERPRINT)
    rows, told = signals.observed(FINGERPRINT), np.flatnonzero(np.isfinite(values))
    repeated = np.zeros(len(rows), np.bool_)
    if (np.diff(np.sort(values[told])) == 0).any():  # the stable order costs ten times as much as this question
        order = told[np.argsort(values[told], kind="stable")]
        near = np.diff(order) <= MEMORY
        again = near & (np.diff(values[order]) == 0) & (np.diff(signals.step[rows][order]) != 0)
        repeated[order[1:][again]] = True
    count = rolling_count(repeated, REPEATS)
    level = graded(count >= 3, count >= 1)
    limit = np.where(count >= 3, 3.0, 1.0)
    return _judged(rows, level, count.astype(np.float64), limit, 7)


def _budget(signals: Signals, settings: PlanConformanceSettings) -> Judged:
    rows = np.flatnonzero(signals.trained & np.isfinite(signals.tokens))
    limit = np.full(len(rows), np.nan)
    for plan, where in _planned(signals, rows, settings):
        limit[where] = np.nan if plan.token_budget is None else plan.token_budget + 1.5 * (plan.tokens_per_step or 0.0)
    tokens = signals.tokens[rows]
    level = graded(np.zeros(len(rows), np.bool_), tokens > limit, ~np.isnan(limit))
    return _judged(rows, level, tokens, limit, 8)


def _mixtures(signals: Signals, settings: PlanConformanceSettings) -> list[Judged]:
    if not any(plan.mixture for plan in settings.plans):
        return []
    return [_mixture(signals, name, settings) for name in signals.family(MIXTURE)]


def _mixture(signals: Signals, name: str, settings: PlanConformanceSettings) -> Judged:
    """Mean of (share - planned share) over a window of rows, against its limit or five of its standard errors."""
    rows, share = signals.observed(name), usable(signals.values(name))
    planned = np.full(len(rows), np.nan)
    for plan, where in _planned(signals, rows, settings):
        planned[where] = plan.share(name.removeprefix(f"{MIXTURE}/"), signals.tokens[rows][where])
    spread = np.clip(share - planned, -1, 1)
    told_before = np.append(0, np.cumsum(signals.columns[name].present))
    first = told_before[np.maximum(rows - MIXTURE_ROWS + 1, 0)]
    count = sum_since(np.isfinite(spread).astype(np.float64), first)
    enough = np.where(count >= MIXTURE_LEAST, count, np.nan)
    mean = sum_since(spread, first) / enough
    variance = np.maximum(sum_since(spread**2, first) / enough - mean**2, 0)
    error = 5 * np.sqrt(variance / enough)
    warn, critical = np.maximum(settings.mixture_warn, error), np.maximum(settings.mixture_critical, error)
    off = np.abs(mean)
    level = graded(off > critical, off > warn, ~np.isnan(off))
    return _judged(rows, level, off, np.where(off > critical, critical, warn), 9)


def _judged(
    rows: Rows, level: NDArray[np.int8], value: Floats, limit: Floats, reason: int | NDArray[np.int64]
) -> Judged:
    reasons = np.full(len(rows), reason, np.int8) if isinstance(reason, int) else reason.astype(np.int8)
    return Verdicts(level, value, limit, reasons), rows


CHECK = Check(
    name="plan_conformance",
    evaluate=evaluate,
    settings=PlanConformanceSettings,
    required=(),
    optional=(LEARNING_RATE, POSITION, FINGERPRINT, MIXTURE),
    lookback=lambda settings: MEMORY + REPEATS + settings.lasting_records,
    messages=(
        "The step went back by {value:.0f} within an attempt.",
        "The step jumped ahead by {value:.0f}; the limit is {limit:.0f}.",
        "The tokens went back by {value:.0f} within an attempt.",
        "A step trained {value:.0f} tokens; {limit:.0f} were expected.",
        "The learning rate is {value:.4g}; the plan says {limit:.4g}.",
        "The data position advanced by {value:.0f} sequences; {limit:.0f} were expected: data is repeated.",
        "The data position advanced by {value:.0f} sequences; {limit:.0f} were expected: data is skipped.",
        "{value:.0f} of the last 64 batches had been trained on before; the limit is {limit:.0f}.",
        "The run has trained {value:.4g} tokens; the limit is {limit:.4g}, one and a half steps past the budget.",
        "The mean share of a data source is {value:.1%} off plan; the limit is {limit:.1%}.",
    ),
)
