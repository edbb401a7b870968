"""The picture of a plan: learning rate, mixture, budget and predicted loss, old against new. Needs matplotlib (extra `plots`)."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from runwatch.checks.planned import learning_rate_share, registered_loss
from runwatch.monitor.report.figures import svg
from runwatch.monitor.report.run_charts import (
    CRITICAL,
    DIM,
    GOOD,
    INK,
    REGISTERED,
    STYLE,
    TREND,
    WARNING,
    Floats,
    amount,
    registered,
    themed,
)
from runwatch.rules import Action, Curve, Forecast, PlanState, Prediction, World
from runwatch.rules.plan import Rewind, ScaleLr, SetDataMixture, SetLrDecay, SetTokenBudget

OLD, NEW = DIM, TREND


@dataclass(frozen=True)
class PlanChart:
    """What a plan's picture shows, old first and new second.

    `rates` are (tokens, share of the peak), `budgets` (decay start, budget) in tokens, `predictions` (loss, low, high) in
    nats. `mixtures` are shares by source, under the words that say from when on.
    """

    title: str
    now: float
    rates: tuple[tuple[Floats, Floats], tuple[Floats, Floats]]
    mixtures: Mapping[str, Mapping[str, float]]
    budgets: tuple[tuple[float, float], tuple[float, float]]
    curve: Curve | None
    predictions: tuple[tuple[float, float, float], tuple[float, float, float]] | None


def chart_of(world: World, plan: str, actions: Sequence[Action], forecast: Forecast | None) -> PlanChart:
    """The picture of what `actions` would make of the plan in force in `world`."""
    old, new = world.plan, plan_after(world.plan, actions)
    back = [one.checkpoint_step * world.planned.tokens_per_step for one in actions if isinstance(one, Rewind)]
    begin = float(min([*back, world.tokens]))
    fixed = any(isinstance(one, SetDataMixture) for one in actions)
    return PlanChart(
        title=f"{plan} at {amount(world.tokens)} tokens",
        now=world.tokens,
        rates=(_rate(world, old, 0.0), _rate(world, new, begin)),
        mixtures={**_mixtures(world, old, "in force"), **_mixtures(world, new, "new", fixed=fixed)},
        budgets=((old.decay_start_tokens, old.token_budget), (new.decay_start_tokens, new.token_budget)),
        curve=world.planned.curve,
        predictions=None if forecast is None else (_bounds(forecast.old), _bounds(forecast.new)),
    )


def _mixtures(world: World, plan: PlanState, name: str, *, fixed: bool = False) -> dict[str, Mapping[str, float]]:
    """The shares now and, unless a directive has set them (`fixed`, or before), in the decay."""
    declared = dict(plan.mixture) == dict(world.planned.stable_mixture) and not fixed
    if not declared or dict(world.planned.decay_mixture) == dict(plan.mixture):
        return {f"{name}, to the end": plan.mixture}
    return {f"{name}, now": plan.mixture, f"{name}, in the decay": world.planned.decay_mixture}


def _bounds(prediction: Prediction) -> tuple[float, float, float]:
    return prediction.loss, prediction.low, prediction.high


def plan_after(plan: PlanState, actions: Sequence[Action]) -> PlanState:
    """The plan in force once the trainer has applied `actions`, as far as a picture shows it."""
    update: dict[str, object] = {}
    for action in actions:
        match action:
            case SetTokenBudget():
                update["token_budget"] = action.tokens
            case SetLrDecay():
                update |= {"decay_start_tokens": action.start_tokens, "final_fraction": action.final_fraction}
            case SetDataMixture():
                update["mixture"] = action.shares
            case ScaleLr():
                update["lr_scale"] = plan.lr_scale * action.factor
            case _:
                pass
    return plan.model_copy(update=update)


def _rate(world: World, plan: PlanState, begin: float) -> tuple[Floats, Floats]:
    """Share of the peak learning rate at its corners from `begin` on: warmup, stable, linear decay (docs/run-directory.md)."""
    warmup = world.planned.warmup_fraction * world.planned.token_budget
    corners = np.unique(np.array([begin, warmup, plan.decay_start_tokens, plan.token_budget], np.float64))
    tokens = corners[(corners >= begin) & (corners <= plan.token_budget)]
    share = learning_rate_share(
        tokens,
        warmup_tokens=warmup,
        decay_start_tokens=plan.decay_start_tokens,
        token_budget=plan.token_budget,
        final_fraction=plan.final_fraction,
    )
    return tokens, plan.lr_scale * share


def plan_picture(chart: PlanChart) -> str:
    """Learning rate, mixture, budget and predicted loss, old against new."""
    return themed(lambda: svg(_plan_figure(chart)))


def plan_png(chart: PlanChart) -> bytes:
    """The same as a PNG on white."""
    buffer = io.BytesIO()
    with mpl.rc_context({**STYLE, "figure.facecolor": "white", "savefig.facecolor": "white"}):
        _plan_figure(chart).savefig(buffer, format="png", dpi=140, metadata={"Software": None})
    return buffer.getvalue()


def _plan_figure(chart: PlanChart) -> Figure:
    figure = Figure(figsize=(10.5, 6.8), layout="constrained")
    figure.suptitle(chart.title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    panels: Any = figure.subplots(2, 2)
    _mixture_panel(panels[0, 1], chart)
    over_tokens = {panels[0, 0]: _rate_panel, panels[1, 0]: _budget_panel, panels[1, 1]: _loss_panel}
    for axes, draw in over_tokens.items():
        draw(axes, chart)
        axes.axvline(chart.now, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
        axes.set_xlim(0, 1.12 * max(budget for _, budget in chart.budgets))
        axes.xaxis.set_major_formatter(amount)
        axes.set_xlabel("tokens (dotted: here)")
    return figure


def _rate_panel(axes: Any, chart: PlanChart) -> None:
    axes.set_title("Learning rate (share of the peak)")
    axes.plot(*chart.rates[0], color=OLD, linewidth=1.3, linestyle=(0, (4, 3)), label="plan in force")
    axes.plot(*chart.rates[1], color=NEW, linewidth=1.9, label="new plan")
    axes.set_ylim(0, 1.3 * max(float(rate.max()) for _, rate in chart.rates))
    axes.legend(loc="upper right", ncols=2)


SOURCES = (TREND, REGISTERED, GOOD, CRITICAL, WARNING, INK)


def _mixture_panel(axes: Any, chart: PlanChart) -> None:
    """A bar for each stretch, a piece of it for each source; the smallest pieces have no room for their share."""
    axes.set_title("Data mixture")
    sources = sorted({source for shares in chart.mixtures.values() for source in shares})
    for height, shares in enumerate(chart.mixtures.values()):
        left = 0.0
        for number, source in enumerate(sources):
            share = shares.get(source, 0.0)
            label = source if height == 0 else None
            axes.barh(height, share, 0.55, left, color=SOURCES[number % len(SOURCES)], alpha=0.55, label=label)
            if share >= 0.06:
                axes.annotate(f"{share:.0%}", (left + share / 2, height), ha="center", va="center")
            left += share
    axes.set_yticks(range(len(chart.mixtures)), list(chart.mixtures))
    axes.set(ylim=(len(chart.mixtures) - 0.4, -1.1), xlim=(0, 1))
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.legend(loc="upper left", ncols=6)


def _budget_panel(axes: Any, chart: PlanChart) -> None:
    axes.set_title("Token budget (dark: decay)")
    for height, (decay, budget), colour in zip((1, 0), chart.budgets, (OLD, NEW), strict=True):
        axes.barh(height, decay, height=0.5, color=colour, alpha=0.45)
        axes.barh(height, budget - decay, left=decay, height=0.5, color=colour)
        place = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(amount(budget), (budget, height), color=INK, **place)
    axes.set_yticks((1, 0), ("in force", "new"))
    axes.set_ylim(-0.6, 1.6)


def _loss_panel(axes: Any, chart: PlanChart) -> None:
    axes.set_title("Loss that the ladder predicts for a healthy run (nats)")
    if chart.curve is None or chart.predictions is None:
        words = "No final loss is predicted:\n" + (
            "this plan leaves the budget as it is." if chart.curve else "no ladder is registered."
        )
        axes.annotate(words, (0.95, 0.95), xycoords="axes fraction", ha="right", va="top", color=DIM)
    if chart.curve is None:
        return
    registered(axes, chart.curve)
    if chart.predictions is not None:
        _predictions(axes, chart, chart.curve, chart.predictions)
    shown = np.maximum(np.array([0.03, 1.0]) * chart.curve.tokens[-1], chart.curve.tokens[0])
    heights = registered_loss(chart.curve, shown)[1:].ravel()
    heights = np.append(heights, [bound for one in chart.predictions or () for bound in one])
    axes.set_ylim(heights.min() - 0.1 * np.ptp(heights), heights.max() + 0.05 * np.ptp(heights))


def _predictions(axes: Any, chart: PlanChart, curve: Curve, predictions: Sequence[tuple[float, float, float]]) -> None:
    for (loss, low, high), (_, budget), colour in zip(predictions, chart.budgets, (OLD, NEW), strict=True):
        bounds = np.array([[loss - low], [high - loss]])
        axes.errorbar([budget], [loss], yerr=bounds, color=colour, marker="o", markersize=5, capsize=4, linewidth=1.5)
    decay, budget = chart.budgets[1]
    begin = max(decay, chart.now, curve.tokens[0])
    ends = [begin, budget], [float(registered_loss(curve, begin)[0]), predictions[1][0]]
    axes.plot(*ends, color=NEW, linewidth=1.9, label="new plan's decay")
    axes.legend(loc="upper right")
