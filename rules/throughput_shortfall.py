"""The run is too slow for its deadline, or stalls repeatedly.

What it does: fires when the projected end passes the card's deadline even at the optimistic end of the sustained
throughput, when `throughput` has been critical for a set number of records, or when `progress` has been critical for
a set time.

Why it matters: a reserved machine is handed back at its deadline, decayed or not; a run that is stopped in its stable
phase leaves a clearly worse model than the same tokens with a decay (Hägele et al. 2024, arXiv 2405.18392). The seed
run trained at 24M tokens per second and sustained 17M with its pauses: a projection from the peak is a third too
early.

Fires when: as above. The projection is (token budget - tokens) / sustained tokens per second of the newest attempt,
evaluations and saves included, with its 95 % interval. Everywhere in the run.

Defaults:

| setting                | default     | source |
| ---------------------- | ----------- | --- |
| `critical_records`     | 100 records | a guess |
| `stalled_seconds`      | 900 s       | the seed run ends a task after 15 minutes without a loss (marin#7929) |
| `reserve_fraction`     | 0.02        | a guess: the share of the remaining time that is kept for the last checkpoint |
| `min_budget_fraction`  | 0.5         | a guess |
| `min_decay_fraction`   | 0.1         | Hägele et al. 2024 (arXiv 2405.18392) |
| `restart_command`      | none        | from the card |
| `restart_after_stalls` | 2           | a guess |
| `max_executions`       | 3           | a guess |

Does not see: a slow machine without a deadline in the card: `throughput` fires, but there is nothing to re-plan.

The plan: `fit_to_deadline` sets the token budget to what the remaining time allows at the pessimistic end of the
sustained throughput, rounded down to whole checkpoint intervals, and the decay so that it ends there. A stalled run
cannot read directives: at the second stall the daemon runs the `restart_command` of the node's settings (a list of
arguments, no shell); without one, `progress` has paged a person.

What to do:

- Meaning: fewer tokens a second than planned, or none.
- Impact: the budget will not be reached in time.
- Diagnosis: `runwatch status RUN_DIR`: step time against sustained rate tells a slow step from long pauses.
- Mitigation: repair the machine; if that takes longer than the deadline allows, approve the shorter budget.
"""

from dataclasses import dataclass

from pydantic import Field

from runwatch.rules.node import Condition, Node, Proposal, Refusal
from runwatch.rules.plan import PlanRules, Preconditions
from runwatch.rules.schedule import fit_sentences, fitted, forecast, next_step, whole_checkpoints
from runwatch.rules.world import Throughput, World, critical_for

DAY = 86_400.0


class ThroughputShortfallSettings(PlanRules):
    """When it fires, and what the fitted run looks like."""

    max_executions: int = Field(default=3, ge=1)
    critical_records: int = Field(default=100, ge=1)
    """Records for which `throughput` must be critical; raising it waits longer."""
    stalled_seconds: float = Field(default=900.0, gt=0)
    """Seconds for which `progress` must be critical."""
    reserve_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Share of the remaining time that is not planned with."""
    min_budget_fraction: float = Field(default=0.5, gt=0, le=1)
    """Share of the card's token budget below which a person decides."""
    min_decay_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of the new budget that the decay takes at least."""
    restart_command: tuple[str, ...] = ()
    """Program and arguments that restart a stalled run."""
    restart_after_stalls: int = Field(default=2, ge=1)
    """At which stall of the run it is restarted."""


@dataclass(frozen=True)
class Projection:
    """Seconds by which the end of the run passes the deadline (negative: in time), with the 95 % interval."""

    late: float
    optimistic: float
    pessimistic: float


def projection(world: World) -> Projection | None:
    """From sustained throughput; None without a deadline or a rate."""
    rate, deadline = world.throughput, world.planned.deadline
    if deadline is None or rate is None or rate.low <= 0:
        return None
    left, remaining = world.plan.token_budget - world.tokens, deadline - world.now
    return Projection(*(left / speed - remaining for speed in (rate.tokens_per_second, rate.high, rate.low)))


def condition(world: World, settings: ThroughputShortfallSettings) -> Condition:
    """The furthest advanced of the three ways to fall short."""
    ways = (_stalled(world, settings), _late(world), _slow(world, settings))
    return max(ways, key=lambda way: way.progress)


def _stalled(world: World, settings: ThroughputShortfallSettings) -> Condition:
    lasting = critical_for(world.alerts.get("progress"))
    if lasting is None:
        return Condition(0.0, "The run makes progress, and its projected end is before the deadline, if it has one.")
    seconds = max(lasting.time, 0.0)
    reason = f"progress has been critical for {seconds:,.0f} s; the plan needs {settings.stalled_seconds:,.0f} s. "
    return Condition(
        min(1.0, seconds / settings.stalled_seconds), reason + world.alerts["progress"].message, ("progress",)
    )


def _late(world: World) -> Condition:
    """Certain when late even at the fast end of the interval; possible when late at the middle of it."""
    found = projection(world)
    if found is None or found.late <= 0:
        return Condition(0.0, "The projected end is before the deadline, or there is none.")
    reason = (
        f"The projected end is {found.late / DAY:.1f} days past the deadline "
        f"({found.optimistic / DAY:.1f} to {found.pessimistic / DAY:.1f})."
    )
    return Condition(1.0 if found.optimistic > 0 else 0.5, reason)


def _slow(world: World, settings: ThroughputShortfallSettings) -> Condition:
    """A lasting loss of throughput; while the deadline holds all the same, a half."""
    lasting = critical_for(world.alerts.get("throughput"))
    if lasting is None:
        return Condition(0.0, "throughput is not critical.")
    records = lasting.step + 1
    progress = min(1.0, records / settings.critical_records)
    reason = f"throughput has been critical for {records:,} records; the plan needs {settings.critical_records:,}. "
    found = projection(world)
    in_time = found is not None and found.late <= 0
    said = "The deadline still holds." if in_time else world.alerts["throughput"].message
    return Condition(min(progress, 0.5) if in_time else progress, reason + said, ("throughput",))


def propose(world: World, settings: ThroughputShortfallSettings) -> Proposal | Refusal:
    """A restart when the run is stalled, else `fit_to_deadline`."""
    if _stalled(world, settings).progress >= 1:
        return _restart(world, settings)
    rate, deadline = world.throughput, world.planned.deadline
    if deadline is None:
        return Refusal("the card has no deadline to fit the budget to; a person must decide.")
    if rate is None or rate.low <= 0:
        return Refusal("the sustained throughput is not known yet.")
    return _fit(world, settings, rate, deadline)


def _restart(world: World, settings: ThroughputShortfallSettings) -> Proposal | Refusal:
    """Without one nobody is paged: the alert of `progress` has paged already."""
    stalls = world.alerts["progress"].lives
    if not settings.restart_command:
        reason = "a stalled run reads no directives, and no restart_command is set; a person must decide."
        return Refusal(reason, settled=True)
    if stalls < settings.restart_after_stalls:
        reason = f"this is stall {stalls}; the restart comes at stall {settings.restart_after_stalls}."
        return Refusal(reason, settled=True)
    return Proposal((), (f"Run {' '.join(settings.restart_command)}",), command=settings.restart_command)


def _fit(world: World, settings: ThroughputShortfallSettings, rate: Throughput, deadline: float) -> Proposal | Refusal:
    planned = world.planned
    seconds = max(deadline - world.now, 0.0) * (1 - settings.reserve_fraction)
    budget = whole_checkpoints(world.tokens + rate.low * seconds, planned, up=False)
    if budget >= world.plan.token_budget:
        return Refusal("the remaining time is enough for the whole budget; there is nothing to re-plan.")
    if budget < settings.min_budget_fraction * planned.token_budget or budget <= next_step(world):
        share = budget / planned.token_budget
        return Refusal(f"the remaining time is enough for only {share:.0%} of the card's budget; a person must decide.")
    cut, decay = fitted(world, budget, settings.min_decay_fraction)
    sentences = fit_sentences(world, cut, decay)
    paid = f"That is {seconds / DAY:.1f} days at {rate.low:,.0f} tokens per second, the slow end of the range."
    return Proposal(
        (cut, decay),
        (f"{sentences[0]} {paid}", sentences[1]),
        Preconditions(attempt=world.attempt, max_tokens=decay.start_tokens),
        forecast(world, budget),
    )


NODE = Node(
    name="throughput_shortfall",
    plan="fit_to_deadline",
    checks=("throughput", "progress"),
    settings=ThroughputShortfallSettings,
    window=lambda _: (0.0, float("inf")),
    condition=condition,
    propose=propose,
    rank=4,
)
