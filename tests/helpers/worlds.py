"""Worlds for tests: a healthy run of 3,000 steps, and what can be done to it.

A step has 1,000 tokens and takes one second, so step, time and thousands of tokens agree. A checkpoint lies at every
100 steps.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from runwatch.checks import Column, Level, Phase, Signals
from runwatch.rules import (
    Alert,
    AlertState,
    BadRecord,
    Checkpoint,
    Curve,
    Execution,
    Formula,
    Moment,
    PlannedRun,
    PlanRules,
    PlanState,
    Receipt,
    World,
    all_nodes,
)
from runwatch.rules.plan import Action

START = 1.79e9
STEP = 1_000
BUDGET = 3_000_000
PLANNED = PlannedRun(
    token_budget=BUDGET,
    tokens_per_step=STEP,
    sequences_per_step=10,
    context_length=100,
    warmup_fraction=0.02,
    decay_fraction=0.2,
    final_fraction=0.05,
    stable_mixture={"code": 0.5, "docs": 0.3, "prose": 0.2},
    decay_mixture={"code": 0.2, "docs": 0.3, "prose": 0.5},
    checkpoint_every_steps=100,
    capacity_factor=1.15,
    balance_rate=0.01,
    z_loss_weight=1e-4,
    formula=Formula(1.2, 10.0, 0.3, 100.0, 0.3),
    curve=Curve((0.0, float(BUDGET)), (5.5, 2.5), (5.4, 2.4), (5.6, 2.6)),
)


FIELDS = {
    "set_token_budget": {"token_budget": "tokens"},
    "set_lr_decay": {"decay_start_tokens": "start_tokens", "final_fraction": "final_fraction"},
    "set_data_mixture": {"mixture": "shares"},
    "set_capacity_factor": {"capacity_factor": "factor"},
    "set_balance_rate": {"balance_rate": "rate"},
    "set_context_length": {"context_length": "tokens"},
    "set_z_loss_weight": {"z_loss_weight": "weight"},
}
"""What of the plan in force each action sets, by the action's own field."""
NUMBERS = ("z_loss_weight", "capacity_factor", "balance_rate", "context_length")
"""What of the plan in force each train record carries beside budget, decay and scale."""


def settings(**changed: Mapping[str, Any]) -> dict[str, PlanRules]:
    """The settings of every node, some changed."""
    return {name: node.settings(**changed.get(name, {})) for name, node in all_nodes().items()}


def telemetry(step: int, plan: PlanState | None = None, attempt: int = 0, position: int | None = None) -> Signals:
    """The last 200 train rows up to `step` under `plan` (the declared one by default)."""
    plan = plan or PLANNED.plan_state()
    steps = np.arange(max(1, step - 199), step + 1)
    tokens = steps * float(STEP)
    through = np.clip((tokens - plan.decay_start_tokens) / (plan.token_budget - plan.decay_start_tokens), 0, 1)
    columns = {
        "train/loss": 2.5 + 0.02 * np.sin(steps),
        "optim/learning_rate": 0.01 * plan.lr_scale * (1 - (1 - plan.final_fraction) * through),
        "plan/token_budget": np.full(len(steps), float(plan.token_budget)),
        "plan/decay_start_tokens": np.full(len(steps), float(plan.decay_start_tokens)),
        "plan/lr_scale": np.full(len(steps), plan.lr_scale),
        **{f"plan/{name}": np.full(len(steps), float(getattr(plan, name))) for name in NUMBERS},
        "data/position": (steps - step) * 10.0 + (step * 10 if position is None else position),
        **{f"data/mixture/{name}": np.full(len(steps), share) for name, share in plan.mixture.items()},
    }
    return Signals(
        attempt=np.full(len(steps), attempt, np.int32),
        step=steps,
        tokens=tokens,
        time=START + steps,
        phase=np.full(len(steps), Phase.TRAIN, np.int8),
        tick=np.zeros(len(steps), np.bool_),
        columns={name: Column(values, np.ones(len(steps), np.bool_)) for name, values in columns.items()},
    )


def world(step: int = 600, **changed: Any) -> World:
    """A healthy run at `step`."""
    healthy = World(
        run="toy",
        now=START + step,
        attempt="a0001",
        phase=Phase.TRAIN,
        records=step,
        step=step,
        tokens=float(step * STEP),
        time=START + step,
        planned=PLANNED,
        plan=PLANNED.plan_state(),
        recent=telemetry(step),
        settings=settings(),
        checkpoints=tuple(Checkpoint(at, float(at * STEP), START + at) for at in range(100, step + 1, 100)),
    )
    return replace(healthy, **changed)


def moment(step: int, attempt: int = 0) -> Moment:
    """The record of a step."""
    return Moment(attempt=attempt, step=step, tokens=float(step * STEP), time=START + step)


def alert(check: str, since: int, at: int, severity: Level = Level.CRITICAL, attempt: int = 0) -> Alert:
    """An alert that has been bad without a break from step `since` to step `at`."""
    critical = moment(since, attempt) if severity is Level.CRITICAL else None
    return Alert(
        check=check,
        state=AlertState.FIRING,
        severity=severity,
        worst=BadRecord(level=severity, value=1.0, limit=0.5, message=f"{check} is bad."),
        level=severity,
        message=f"{check} is bad.",
        at=moment(at, attempt),
        since=moment(since, attempt),
        fired=moment(since, attempt),
        critical_since=critical,
        last_bad=moment(at, attempt),
        lives=1,
    )


def resolved(check: str, at: int) -> Alert:
    """An alert that is over."""
    return Alert(check=check, level=Level.OK, at=moment(at), lives=1)


def alerts(*found: Alert) -> dict[str, Alert]:
    """By check."""
    return {one.check: one for one in found}


def diverged(step: int = 600, **changed: Any) -> World:
    """Off the registered curve for the last 100 steps, long enough for `early_divergence`."""
    found = alerts(alert("ladder_deviation", step - 100, step))
    return world(step, **{"alerts": found, "settings": settings(early_divergence={"mode": "auto"}), **changed})


def later(before: World, steps: int, **changed: Any) -> World:
    """The same run, that many steps on."""
    step = before.step + steps
    kept = replace(
        before,
        now=before.now + steps,
        records=before.records + steps,
        step=step,
        tokens=float(step * STEP),
        time=START + step,
        recent=telemetry(step, before.plan, int(before.recent.attempt[-1])),
    )
    return replace(kept, **changed)


def applied(execution: Execution, at: World, after: PlanState, status: str = "applied") -> Receipt:
    """The trainer's receipt for `execution`, at the step of `at`."""
    return Receipt(
        id=execution.id,
        status="rejected" if status == "rejected" else "applied",
        reason="its own reason" if status == "rejected" else None,
        attempt=at.attempt,
        step=at.step,
        tokens=int(at.tokens),
        time=at.time + 0.5,
        before=at.plan,
        after=after,
    )


def after_actions(plan: PlanState, actions: tuple[Action, ...]) -> PlanState:
    """The plan in force after the actions that change it."""
    update: dict[str, Any] = {}
    for action in actions:
        if action.action == "scale_lr":
            update["lr_scale"] = plan.lr_scale * action.factor
        elif action.action in FIELDS:
            given = action.model_dump()
            update |= {key: given[name] for key, name in FIELDS[action.action].items()}
        elif action.action == "pause":
            update["paused"] = True
    return plan.model_copy(update=update)
