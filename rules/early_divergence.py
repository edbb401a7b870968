"""Early in the run, the loss has left the curve that was registered for it.

What it does: inside the first 25 % of the token budget, waits until `ladder_deviation` has been critical for a set
share of the budget without a break, or until `instability` has rewound as often as it may and the run is still
unstable. Then it fires.

Why it matters: a loss that is off its ladder in the first quarter does not come back by waiting: the smaller rungs
show what a healthy run of this recipe does at these tokens. What is left of the budget buys a worse model than
planned, at the full price. The seed run registered its projection before launch for this very reason (marin#8435:
deviation from the ladder prompts an early look at dynamics).

Fires when: `ladder_deviation` is critical for `critical_fraction` of the token budget (breaks of up to five records do
not count), or `instability` is exhausted; only before `window_fraction` of the budget in force.

Defaults:

| setting               | default | source |
| --------------------- | ------- | --- |
| `window_fraction`     | 0.25    | the definition of the node |
| `critical_fraction`   | 0.005   | a guess: 1,000 steps of 200,000, longer than any spike of the recordings, short against the window |
| `budget_fraction`     | 0.5     | a guess, the owner's to make: see below |
| `min_budget_fraction` | 0.3     | a guess |
| `max_budget_fraction` | 0.8     | a guess |
| `min_decay_fraction`  | 0.1     | Hägele et al. 2024 (arXiv 2405.18392): shorter decays lose quality, 10 to 20 % is enough |
| `mixture_to_decay`    | on      | the shorter run ends with the data that the decay was planned with |

With the exponent 0.28 of Hoffmann et al. 2022 (arXiv 2203.15556), half of the tokens makes the token term of the loss
21 % larger.

Does not see: a run without a registered curve (`runwatch ladder register`); a divergence after the window, which is
an incident of `ladder_deviation` for a person; NaN and spikes (`instability`).

The plan: `shorten_budget` cuts the token budget to the fraction of the card's budget that the settings name, never
less than leaves room for the shortest allowed decay, rounded up to a whole number of checkpoint intervals; starts the
learning-rate decay so that it ends there; and moves the data mixture to its decay-phase shares. So the run ends soon,
with a decayed model that can be compared with the ladder, and the rest of the compute is free for the next attempt.
The proposal shows the final loss that the ladder predicts for the old and for the new budget. After the window it is
rejected, by the trainer too (`max_tokens` in the directive).

What to do:

- Meaning: this recipe does not scale as its ladder said, or something is broken.
- Impact: the final loss will miss the registered one.
- Diagnosis: `runwatch status RUN_DIR` shows the checks that agree: a wrong learning rate in `plan_conformance`, bad
  data in the mixture, routing in `expert_balance`.
- Mitigation: `runwatch plan preview RUN_DIR early_divergence`, then approve; or reject with a reason when the cause is
  known and a rewind can cure it.
"""

import math

from pydantic import Field, model_validator

from runwatch.rules import instability
from runwatch.rules.node import Condition, Node, Proposal, Refusal
from runwatch.rules.plan import Action, PlanRules, Preconditions, SetDataMixture, SetTokenBudget
from runwatch.rules.schedule import fit_sentences, fitted, forecast, next_step, whole_checkpoints
from runwatch.rules.world import World, critical_for


class EarlyDivergenceSettings(PlanRules):
    """When it fires, and what the shortened run looks like."""

    window_fraction: float = Field(default=0.25, gt=0, le=0.25)
    """Share of the token budget after which the node is out of its window."""
    critical_fraction: float = Field(default=0.005, gt=0, lt=0.25)
    """Share of the token budget for which the deviation must be critical; raising it waits longer."""
    budget_fraction: float = Field(default=0.5, gt=0, lt=1)
    """Share of the card's token budget that is left."""
    min_budget_fraction: float = Field(default=0.3, gt=0, lt=1)
    max_budget_fraction: float = Field(default=0.8, gt=0, lt=1)
    """Bounds of the new budget after rounding, as shares of the card's."""
    min_decay_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of the new budget that the decay takes at least."""
    mixture_to_decay: bool = True
    """Whether the data mixture moves to its decay-phase shares."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "EarlyDivergenceSettings":
        if not self.min_budget_fraction <= self.budget_fraction <= self.max_budget_fraction:
            raise ValueError("budget_fraction must lie between min_budget_fraction and max_budget_fraction")
        return self


def condition(world: World, settings: EarlyDivergenceSettings) -> Condition:
    """The share of the required tokens for which the loss has been off the curve; 1 as well when rewinding is over."""
    if instability.handed_on(world):
        reason = f"instability has rewound {instability.rewinds(world)} times and the run is still unstable."
        return Condition(1.0, reason, ("finite", "loss_spike"))
    lasting = critical_for(world.alerts.get("ladder_deviation"))
    if lasting is None:
        return Condition(0.0, "ladder_deviation is not critical.")
    needed = settings.critical_fraction * world.planned.token_budget
    tokens = lasting.tokens if math.isfinite(lasting.tokens) else lasting.step * world.planned.tokens_per_step
    lasted = f"ladder_deviation has been critical for {tokens:,.0f} tokens ({lasting.step:,} steps)"
    reason = f"{lasted}; the plan needs {needed:,.0f}."
    message = world.alerts["ladder_deviation"].message
    return Condition(min(1.0, tokens / needed), f"{reason} {message}", ("ladder_deviation",))


def propose(world: World, settings: EarlyDivergenceSettings) -> Proposal | Refusal:
    """`shorten_budget`, or why there is nothing to shorten."""
    planned = world.planned
    wanted = max(settings.budget_fraction * planned.token_budget, next_step(world) / (1 - settings.min_decay_fraction))
    low, high = (share * planned.token_budget for share in (settings.min_budget_fraction, settings.max_budget_fraction))
    budget = whole_checkpoints(min(max(wanted, low), high), planned, up=True)
    if budget >= min(world.plan.token_budget, planned.token_budget):
        return Refusal(
            f"a budget of {budget:,} tokens, the nearest whole number of checkpoint intervals, is not shorter than the "
            f"{world.plan.token_budget:,} in force."
        )
    cut, decay = fitted(world, budget, settings.min_decay_fraction)
    if decay.start_tokens > budget * (1 - settings.min_decay_fraction) + planned.tokens_per_step:
        return Refusal(
            f"a budget of {budget:,} tokens leaves too few for a decay that starts at {decay.start_tokens:,}."
        )
    actions: tuple[Action, ...] = (cut, decay)
    effects: tuple[str, ...] = fit_sentences(world, cut, decay)
    if settings.mixture_to_decay and dict(planned.decay_mixture) != dict(world.plan.mixture):
        actions += (SetDataMixture(shares=dict(planned.decay_mixture)),)
        effects += (_mixture_sentence(world),)
    return Proposal(actions, effects, _preconditions(world, cut, settings), forecast(world, budget))


def exhausted(world: World, settings: EarlyDivergenceSettings) -> Proposal | Refusal:
    """The plan has been carried out as often as allowed: nothing is left to do."""
    del world
    return Refusal(f"the budget has been shortened {settings.max_executions} times, the most allowed.", settled=True)


def _preconditions(world: World, cut: SetTokenBudget, settings: EarlyDivergenceSettings) -> Preconditions:
    """Only in this attempt and before the window ends: the trainer is held to it as well."""
    last = min(int(settings.window_fraction * world.plan.token_budget), cut.tokens)
    return Preconditions(attempt=world.attempt, min_tokens=0, max_tokens=last)


def _mixture_sentence(world: World) -> str:
    old, new = world.plan.mixture, world.planned.decay_mixture
    moves = (f"{name} {old.get(name, 0.0):.2f} to {share:.2f}" for name, share in sorted(new.items()))
    return f"Data mixture to its decay-phase shares: {', '.join(moves)}."


NODE = Node(
    name="early_divergence",
    plan="shorten_budget",
    checks=("ladder_deviation", *instability.NODE.checks),
    settings=EarlyDivergenceSettings,
    window=lambda settings: (0.0, settings.window_fraction),
    condition=condition,
    propose=propose,
    rank=2,
    exhausted=exhausted,
)
