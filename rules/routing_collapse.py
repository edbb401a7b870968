"""The router no longer spreads tokens over its experts.

What it does: fires when `token_drop` or `expert_balance` has been critical for a set number of records without a
break.

Why it matters: a dropped token is trained on without its experts, and an expert without tokens stops learning. On a
context extension from 4K to 65K the drop rate went from 7 % to 40 % and the extension had to be taken back (design of
runwatch, from the seed run's predecessors); 3 % is normal at a capacity factor of 1.15.

Fires when: `token_drop` or `expert_balance` is critical for `critical_records` without a break of more than five
records. Everywhere in the run.

Defaults:

| setting               | default     | source |
| --------------------- | ----------- | --- |
| `critical_records`    | 50 records  | a guess; the first hundred steps of a healthy run drop 10 % for a moment (marin#8435) |
| `context_lengths`     | none        | back to the card's context length, or to half of it when that is in force |
| `min_context_length`  | 16 tokens   | a guess |
| `capacity_increase`   | 1.25        | a guess: see `max_capacity_factor` |
| `max_capacity_factor` | 2           | GShard (Lepikhin et al. 2020, arXiv 2006.16668) trains at 2, the seed run at 1.15 |
| `balance_increase`    | 2           | a guess |
| `max_balance_rate`    | 0.1         | a guess; DeepSeek-V3 (arXiv 2412.19437) uses a rate of 0.001 |
| `max_executions`      | 2           | a guess |
| `verify_records`      | 200 records | a guess |

Does not see: a router that is unbalanced below the limits of the checks; loss spikes that come of it (`instability`).

The plan: `retreat_context` goes back to the next shorter context length (shorter sequences repeat themselves less, so
fewer of their tokens want the same expert at once), raises the capacity factor so that fewer tokens are dropped
meanwhile, and raises the rate at which the router bias evens out the load. It counts as recovered when neither check
is critical any more.

What to do:

- Meaning: routing has collapsed, mostly after a change of context, data or transport.
- Impact: the experts learn from fewer tokens; throughput may fall too.
- Diagnosis: was a change made shortly before (`runwatch status RUN_DIR`)? `moe/layers/*` tells the layer.
- Mitigation: approve the retreat; then extend the context again in smaller steps.
"""

from pydantic import Field

from runwatch.rules.execution import Execution
from runwatch.rules.node import Condition, Node, Proposal, Refusal
from runwatch.rules.plan import (
    Action,
    PlanRules,
    Preconditions,
    SetBalanceRate,
    SetCapacityFactor,
    SetContextLength,
)
from runwatch.rules.world import World, critical_for

CHECKS = ("token_drop", "expert_balance")


class RoutingCollapseSettings(PlanRules):
    """When it fires, and how far it retreats."""

    max_executions: int = Field(default=2, ge=1)
    verify_records: int = Field(default=200, ge=1)
    critical_records: int = Field(default=50, ge=1)
    """Records for which a check must be critical; raising it waits longer."""
    context_lengths: tuple[int, ...] = ()
    """Lengths in tokens to which the run may go back."""
    min_context_length: int = Field(default=16, ge=1)
    """Tokens; no retreat goes below."""
    capacity_increase: float = Field(default=1.25, ge=1)
    max_capacity_factor: float = Field(default=2.0, gt=0)
    """What the capacity factor is multiplied by, and where that ends."""
    balance_increase: float = Field(default=2.0, ge=1)
    max_balance_rate: float = Field(default=0.1, gt=0)
    """What the rate of the router-bias update is multiplied by, and where that ends."""


def condition(world: World, settings: RoutingCollapseSettings) -> Condition:
    """The share of the required records for which the longer of the two has been critical."""
    lasting = {name: found for name in CHECKS if (found := critical_for(world.alerts.get(name))) is not None}
    if not lasting:
        return Condition(0.0, "token_drop and expert_balance are not critical.")
    longest = max(lasting, key=lambda name: lasting[name].step)
    records = lasting[longest].step + 1
    reason = f"{longest} has been critical for {records:,} records; the plan needs {settings.critical_records:,}. "
    progress = min(1.0, records / settings.critical_records)
    return Condition(progress, reason + world.alerts[longest].message, tuple(lasting))


def propose(world: World, settings: RoutingCollapseSettings) -> Proposal | Refusal:
    """`retreat_context`: those of its three parts that still have room."""
    plan = world.plan
    context = _context(world, settings)
    capacity = min(plan.capacity_factor * settings.capacity_increase, settings.max_capacity_factor)
    balance = min(plan.balance_rate * settings.balance_increase, settings.max_balance_rate)
    found: list[tuple[Action, str]] = []
    if context is not None:
        sentence = f"Context length from {plan.context_length:,} back to {context:,} tokens."
        found.append((SetContextLength(tokens=context), sentence))
    if capacity > plan.capacity_factor:
        found.append((SetCapacityFactor(factor=capacity), _up("Capacity factor", plan.capacity_factor, capacity)))
    if balance > plan.balance_rate:
        found.append((SetBalanceRate(rate=balance), _up("Balance rate", plan.balance_rate, balance)))
    if not found:
        return Refusal("context length, capacity factor and balance rate are at their bounds; a person must decide.")
    actions, sentences = tuple(action for action, _ in found), tuple(sentence for _, sentence in found)
    return Proposal(actions, sentences, Preconditions(attempt=world.attempt))


def _context(world: World, settings: RoutingCollapseSettings) -> int | None:
    """The next shorter length into which a step's tokens divide."""
    now, card = world.plan.context_length, world.planned.context_length
    lengths = settings.context_lengths or ((card,) if card < now else (now // 2,))
    step = world.planned.tokens_per_step
    shorter = [length for length in lengths if settings.min_context_length <= length < now and step % length == 0]
    return max(shorter, default=None)


def _up(what: str, old: float, new: float) -> str:
    return f"{what} from {old:g} up to {new:g}."


def recovered(execution: Execution, world: World) -> bool | None:
    """Whether neither check is critical any more, judged on records since the plan took effect."""
    applied = execution.receipt.time if execution.receipt else float("inf")
    judged = [world.alerts[name] for name in CHECKS if name in world.alerts]
    if not any(alert.at is not None and alert.at.time > applied for alert in judged):
        return None
    return all(critical_for(alert) is None for alert in judged)


NODE = Node(
    name="routing_collapse",
    plan="retreat_context",
    checks=CHECKS,
    settings=RoutingCollapseSettings,
    window=lambda _: (0.0, float("inf")),
    condition=condition,
    propose=propose,
    rank=3,
    recovered=recovered,
)
