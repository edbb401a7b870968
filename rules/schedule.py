"""Budget arithmetic of plans: whole steps and checkpoints, a decay that ends with the budget, the predicted loss."""

import math

from runwatch.checks.planned import registered_loss
from runwatch.rules.execution import Forecast, Prediction
from runwatch.rules.plan import PlanState, SetLrDecay, SetTokenBudget
from runwatch.rules.world import Curve, PlannedRun, World


def next_step(world: World) -> int:
    """Tokens at the next step boundary: no plan can act earlier."""
    step = world.planned.tokens_per_step
    return (int(world.tokens) // step + 1) * step


def whole_checkpoints(tokens: float, planned: PlannedRun, *, up: bool) -> int:
    """`tokens` rounded to a multiple of the checkpoint interval, so that the run ends with a checkpoint."""
    interval = planned.checkpoint_every_steps * planned.tokens_per_step
    # Rounded first: a product such as 0.1 * 30 must not become one interval more by its last bit.
    intervals = round(tokens / interval, 9)
    return (math.ceil(intervals) if up else math.floor(intervals)) * interval


def fitted(world: World, budget: int, min_decay_fraction: float) -> tuple[SetTokenBudget, SetLrDecay]:
    """A budget and the decay that ends there.

    The decay takes the card's share of the new budget, or `min_decay_fraction` of it where that is more, and begins at
    a whole step, at the next one at the earliest.
    """
    planned = world.planned
    share = max(planned.decay_fraction, min_decay_fraction)
    start = math.floor(round(budget * (1 - share) / planned.tokens_per_step, 9)) * planned.tokens_per_step
    return (
        SetTokenBudget(tokens=budget),
        SetLrDecay(start_tokens=max(start, next_step(world)), final_fraction=world.plan.final_fraction),
    )


def fit_sentences(world: World, budget: SetTokenBudget, decay: SetLrDecay) -> tuple[str, str]:
    """What changes, from what to what."""
    old = world.plan
    share, decaying = budget.tokens / world.planned.token_budget, 1 - decay.start_tokens / budget.tokens
    total = f"Token budget from {old.token_budget:,} to {budget.tokens:,} tokens ({share:.0%} of the card's)."
    start = f"Learning-rate decay from {decay.start_tokens:,} tokens on (was {old.decay_start_tokens:,})"
    return total, f"{start}, over {decaying:.0%} of the budget, to {decay.final_fraction:g} of the peak."


def curve_in_force(planned: PlannedRun, plan: PlanState) -> Curve | None:
    """The loss that the plan in force lets expect; None while the plan is the card's, or no ladder with a formula is registered.

    The registered curve up to the new decay, and from there a straight line in log loss to the predicted end: what lies between
    nobody has registered. The band widens from the one to the other.
    """
    registered, end = planned.curve, predicted_loss(planned, plan.token_budget)
    declared = planned.plan_state()
    same = (plan.token_budget, plan.decay_start_tokens) == (declared.token_budget, declared.decay_start_tokens)
    if same or registered is None or end is None:
        return None
    start = min(plan.decay_start_tokens, declared.decay_start_tokens)
    tokens = [at for at in registered.tokens if at < start]
    if start >= registered.tokens[0]:
        tokens.append(float(start))
    loss, low, high = registered_loss(registered, tokens).tolist()
    return Curve(
        tokens=(*tokens, float(plan.token_budget)),
        loss=(*loss, end.loss),
        low=(*low, end.low),
        high=(*high, end.high),
    )


def forecast(world: World, budget: int) -> Forecast | None:
    """Predicted final loss under the budget in force and under `budget`; None without a fitted ladder."""
    old, new = predicted_loss(world.planned, world.plan.token_budget), predicted_loss(world.planned, budget)
    return Forecast(old=old, new=new) if old and new else None


def predicted_loss(planned: PlannedRun, budget: float) -> Prediction | None:
    """Final loss of a run of `budget` tokens that ends with a full decay.

    The registered curve says where the planned budget ends; the token term of the ladder's formula (B / D^b of Hoffmann
    et al. 2022, arXiv 2203.15556) says how much a different budget adds. The relative 95 % band is that of the
    curve's end.
    """
    formula, curve = planned.formula, planned.curve
    if formula is None or curve is None:
        return None
    loss, low, high = map(float, registered_loss(curve, min(planned.token_budget, curve.tokens[-1])))
    more = formula.token_scale * (budget**-formula.token_exponent - planned.token_budget**-formula.token_exponent)
    return Prediction(loss=loss + more, low=(loss + more) * low / loss, high=(loss + more) * high / loss)
