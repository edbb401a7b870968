"""What checks and nodes are told of the run card, and of the directives that have changed the plan since.

A card's `checks` and `nodes` sections hold settings; curves, plans and limits come from its other sections. Settings
that the card gives itself win.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runwatch.checks import Change, Settings, all_checks
from runwatch.checks import plan_conformance as conformance
from runwatch.checks.ladder_deviation import Curve
from runwatch.monitor.card.run_card import Card, Declaration
from runwatch.rules import Action, Execution, PlanRules, Receipt, all_nodes
from runwatch.rules.plan import Rewind


@dataclass(frozen=True)
class Applied:
    """A directive that the trainer has applied: its receipt and its actions."""

    receipt: Receipt
    actions: tuple[Action, ...]

    @property
    def names(self) -> frozenset[str]:
        """The names of its actions."""
        return frozenset(action.action for action in self.actions)

    @property
    def from_step(self) -> int:
        """The first step under the new plan: right after the boundary, or right after the checkpoint of a rewind."""
        rewinds = [action.checkpoint_step for action in self.actions if isinstance(action, Rewind)]
        return (rewinds[0] if rewinds else self.receipt.step) + 1


def applied(executions: Iterable[Execution]) -> tuple[Applied, ...]:
    """The executions that the trainer has applied, oldest first."""
    found = [
        Applied(execution.receipt, execution.actions)
        for execution in executions
        if execution.receipt is not None and execution.receipt.status == "applied"
    ]
    return tuple(sorted(found, key=lambda one: one.receipt.time))


def node_settings(card: Card) -> dict[str, PlanRules]:
    """The settings of every node."""
    return {name: node.settings.model_validate(card.nodes.get(name, {})) for name, node in all_nodes().items()}


def check_settings(
    card: Card, directives: Sequence[Applied] = (), declared: Sequence[Declaration] = ()
) -> dict[str, Settings]:
    """The settings of every check; `directives` are those applied so far, oldest first, `declared` beside those of the card."""
    moved = sorted((*card.declarations, *declared), key=lambda one: one.step)
    context: Mapping[str, dict[str, Any]] = {
        "ladder_deviation": {"curves": _curves(card, directives, moved)},
        "plan_conformance": {"plans": _plans(card, directives, moved)},
        "checkpoint": {"interval_steps": card.plan.checkpoint.every_steps},
        "expert_balance": {"router_bias_limit": card.model.router_bias_limit},
    }
    return {
        name: check.settings.model_validate({**context.get(name, {}), **card.checks.get(name, {})})
        for name, check in all_checks().items()
    }


def _curves(card: Card, directives: Sequence[Applied], declared: Sequence[Declaration]) -> tuple[Curve, ...]:
    """The registered curve, up to where a directive or a declared change has made another run of it.

    Other data or another context length has another loss at once; another decay has it from its start on.
    """
    if card.ladder is None:
        return ()
    curve = card.ladder.curve
    registered = Curve(tokens=curve.tokens, loss=curve.loss, low=curve.low, high=curve.high)
    ends = [
        one.from_step
        if one.names & {"set_data_mixture", "set_context_length"}
        else _step_after(card, one.receipt.after.decay_start_tokens)
        for one in directives
        if one.names & {"set_data_mixture", "set_context_length", "set_lr_decay"}
    ]
    ends += [one.step for one in declared if _touches(one, "train/loss") or _touches(one, "data/mixture")]
    return (registered, Curve(from_step=min(ends))) if ends else (registered,)


def _step_after(card: Card, tokens: int) -> int:
    """The first step that begins at or past so many tokens."""
    return tokens // card.plan.tokens_per_step + 1


def _touches(one: Declaration, signal: str) -> bool:
    return Change(one.step, one.signals).touches((signal,))


def _plans(
    card: Card, directives: Sequence[Applied], declared: Sequence[Declaration]
) -> tuple[conformance.PlannedRun, ...]:
    """The plan of the card and of every directive and declaration, each from its step on.

    A rewind ends those that began after it, for the records that follow it. What a declaration moves is not judged from
    there on, until a directive sets it: the declaration says that it will change, not to what.
    """
    plan, rate = card.planned(), card.plan.learning_rate
    first = conformance.PlannedRun(
        token_budget=plan.token_budget,
        tokens_per_step=plan.tokens_per_step,
        peak=rate.peak,
        warmup_tokens=rate.warmup_fraction * plan.token_budget,
        decay_start_tokens=plan.plan_state().decay_start_tokens,
        final_fraction=rate.final_fraction,
        mixture=plan.stable_mixture,
        decay_mixture=plan.decay_mixture,
    )
    plans, waiting = [first], list(declared)
    for one in directives:
        while waiting and waiting[0].step <= one.from_step:
            plans.append(_unplanned(plans[-1], waiting.pop(0)))
        plans.append(_replanned(plans[-1], one))
    for left in waiting:
        plans.append(_unplanned(plans[-1], left))
    return tuple(plans)


def _unplanned(plan: conformance.PlannedRun, declaration: Declaration) -> conformance.PlannedRun:
    """The plan without what a declaration moves."""
    update: dict[str, Any] = {"from_step": declaration.step}
    if _touches(declaration, "data/mixture"):
        update |= {"mixture": None, "decay_mixture": None}
    if _touches(declaration, "optim/learning_rate"):
        update |= {"peak": None}
    return plan.model_copy(update=update)


def _replanned(plan: conformance.PlannedRun, directive: Applied) -> conformance.PlannedRun:
    after = directive.receipt.after
    update: dict[str, Any] = {
        "from_step": directive.from_step,
        "from_time": directive.receipt.time if "rewind" in directive.names else plan.from_time,
        "token_budget": after.token_budget,
        "decay_start_tokens": after.decay_start_tokens,
        "final_fraction": after.final_fraction,
        "lr_scale": after.lr_scale,
    }
    if "set_data_mixture" in directive.names:
        # Shares that a directive has set stay: the decay no longer moves them.
        update |= {"mixture": after.mixture, "decay_mixture": None}
    return plan.model_copy(update=update)


TOUCHES: Mapping[str, tuple[str, ...]] = {
    "set_token_budget": ("plan/token_budget",),
    "set_lr_decay": ("plan/decay_start_tokens", "optim/learning_rate"),
    "set_data_mixture": ("data/mixture", "train/loss"),
    "rewind": ("data/position", "data/sample_fingerprint"),
    "scale_lr": ("plan/lr_scale", "optim/learning_rate"),
    "set_z_loss_weight": ("train/z_loss",),
    "set_capacity_factor": ("moe", "throughput"),
    "set_balance_rate": ("moe",),
    "set_context_length": ("train/loss", "optim/grad_norm", "moe", "throughput", "data"),
}
"""The signals that each action affects; checks that read them reset their baseline there."""


DECAY_TOUCHES = ("data/mixture", "train/loss", "eval/loss")
"""The signals that move at the start of the decay where it has a mixture of its own."""


def changes(card: Card, directives: Sequence[Applied] = (), declared: Sequence[Declaration] = ()) -> tuple[Change, ...]:
    """Planned changes by step: the decay's mixture, those of the card and of `runwatch declare`, and applied directives."""
    found = [Change(one.step, one.signals, one.reason) for one in (*card.declarations, *declared)]
    decay = _decay_step(card, directives)
    if decay is not None:
        found.append(Change(decay, DECAY_TOUCHES, "the mixture of the decay"))
    for one in directives:
        signals = sorted({signal for action in one.names for signal in TOUCHES.get(action, ())})
        if signals:
            found.append(Change(one.from_step, tuple(signals), f"directive {one.receipt.id}"))
    return tuple(sorted(found, key=lambda change: change.step))


def _decay_step(card: Card, directives: Sequence[Applied]) -> int | None:
    """The first step on the decay's mixture; None where it has none, or a directive has set the mixture before."""
    planned = card.planned()
    if planned.decay_mixture == planned.stable_mixture:
        return None
    step = _step_after(card, planned.plan_state().decay_start_tokens)
    for one in directives:
        if step < one.from_step:
            break
        if "set_data_mixture" in one.names:
            return None
        step = max(one.from_step, _step_after(card, one.receipt.after.decay_start_tokens))
    return step
