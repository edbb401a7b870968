"""`runwatch plan preview`: what a node's plan would do, now or at another point of the run, old against new. Nothing is done.

It works from a run directory (the world as the daemon and the telemetry tell it) or from a bare card before anything has been
trained (`--card`: a healthy run at that point, with a checkpoint at every interval).
"""

import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from runwatch.checks import Phase, Signals
from runwatch.monitor.card.context import node_settings
from runwatch.monitor.card.run_card import Card
from runwatch.monitor.report.page import Block, Items, Picture, Section, Table, Text, Verbatim, html
from runwatch.rules import Checkpoint, Forecast, Node, Proposal, Refusal, Throughput, World, all_nodes
from runwatch.rules import preview as make_preview

if TYPE_CHECKING:
    from runwatch.monitor.report.plan_chart import PlanChart


@dataclass(frozen=True)
class Preview:
    """What `node`'s plan would do in `world`."""

    node: Node
    world: World
    proposal: Proposal | Refusal


def preview(node: str, world: World, at: float | None = None) -> Preview:
    """The plan of `node` in `world`, or where the run is `at` this share (0 to 1) of the token budget in force.

    Raises:
        KeyError: there is no such node.
    """
    found = all_nodes()[node]
    there = world if at is None else moved(world, at)
    return Preview(found, there, make_preview(found, there, there.settings[node]))


def moved(world: World, at: float) -> World:
    """The same run at a share of its budget: later with sustained throughput and checkpoints on the way, or earlier."""
    step = math.floor(at * world.plan.token_budget / world.planned.tokens_per_step)
    tokens = float(step * world.planned.tokens_per_step)
    rate = world.throughput.tokens_per_second if world.throughput else None
    seconds = (tokens - world.tokens) / rate if rate else 0.0
    every = world.planned.checkpoint_every_steps
    between = [one for one in range(every, step + 1, every) if one > world.step]
    ahead = [Checkpoint(one, float(one * world.planned.tokens_per_step), world.now + seconds) for one in between]
    return replace(
        world,
        step=step,
        tokens=tokens,
        records=max(0, world.records + step - world.step),
        now=world.now + seconds,
        time=world.time + seconds,
        checkpoints=(*(one for one in world.checkpoints if one.step <= step), *ahead),
    )


def world_of_card(card: Card, now: float, tokens_per_second: float | None = None) -> World:
    """A run that has not begun, at the time `now` (Unix seconds)."""
    planned = card.planned()
    nothing = np.empty(0)
    empty = Signals(
        np.empty(0, np.int32),
        np.empty(0, np.int64),
        nothing,
        nothing,
        np.empty(0, np.int8),
        np.empty(0, np.bool_),
        {},
    )
    rate = None if tokens_per_second is None else Throughput(*[tokens_per_second] * 3)
    return World(
        run=card.run.name,
        now=now,
        attempt="a0001",
        phase=Phase.TRAIN,
        records=0,
        step=0,
        tokens=0.0,
        time=now,
        planned=planned,
        plan=planned.plan_state(),
        recent=empty,
        settings=node_settings(card),
        throughput=rate,
    )


def described(found: Preview) -> list[str]:
    """The preview as lines of text."""
    world = found.world
    share = world.tokens / world.plan.token_budget
    lines = [
        f"{found.node.plan} of {found.node.name} at {world.tokens:,.0f} tokens ({share:.1%} of the budget in force)"
    ]
    if isinstance(found.proposal, Refusal):
        return [*lines, f"It would not be proposed: {found.proposal.reason}"]
    settings = world.settings[found.node.name]
    lines += [f"- {effect}" for effect in found.proposal.effects]
    forecast = found.proposal.forecast
    unknown = "No final loss is predicted: the plan keeps the budget, or no ladder with a formula is registered."
    lines.append(forecast.sentence if forecast else unknown)
    modes = {"observe": "is logged only", "confirm": "requires approval", "auto": "runs automatically"}
    return [*lines, f"In mode {settings.mode} the plan {modes[settings.mode]}."]


def page(found: Preview) -> str:
    """The preview as one HTML file with its picture."""
    title = f"Preview: {found.node.plan} for {found.world.run}"
    first, *rest = described(found)
    blocks: list[Block] = [Text(f"{first}. Nothing has been done."), Items([line.removeprefix("- ") for line in rest])]
    if isinstance(found.proposal, Proposal):
        from runwatch.monitor.report.plan_chart import plan_picture  # noqa: PLC0415 - matplotlib is an extra and slow to import

        alt = (
            "Learning rate, mixture, budget and predicted loss: the plan in force dashed or above, the new plan solid."
        )
        actions = [action.model_dump(mode="json") for action in found.proposal.actions]
        blocks += [
            Picture(plan_picture(chart(found, found.proposal)), alt),
            *_forecast_table(found.proposal.forecast),
            Verbatim("The directive's actions", json.dumps(actions, indent=2)),
        ]
    return html(
        title,
        [Section("What would be done", blocks), Section("The node", [Verbatim(found.node.name, found.node.docs)])],
    )


def _forecast_table(forecast: Forecast | None) -> list[Block]:
    if forecast is None:
        return []
    named = (("in force", forecast.old), ("new", forecast.new))
    rows = [(name, f"{one.loss:.4f}", f"{one.low:.4f}", f"{one.high:.4f}") for name, one in named]
    return [Table(("Plan", "Final loss (nats)", "95 % low", "95 % high"), rows, frozenset({1, 2, 3}))]


def chart(found: Preview, proposal: Proposal) -> "PlanChart":
    """What the picture of the plan shows. Needs matplotlib (extra `plots`)."""
    from runwatch.monitor.report.plan_chart import chart_of  # noqa: PLC0415 - matplotlib is an extra and slow to import

    return chart_of(found.world, found.node.plan, proposal.actions, proposal.forecast)
