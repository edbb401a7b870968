"""The course of a run on top of the loss surface: what rungs of one data order share, and what the decay gains.

Runs of one seed see the same sequences at the same tokens, and a stretch of hard sequences lifts the loss of every size alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from runwatch.trainer.ladder.rungs import FINAL_SHARE, Floats, Rung, Schedule
from runwatch.trainer.ladder.surface import Surface

DECAY_GRID = np.linspace(0.0, 1.0, 11)
LEAST_GAIN = 0.5
"""What is shared is used where it halves the squared residuals of sizes that it was not taken from."""


@dataclass(frozen=True)
class Shared:
    """What the data order adds to the loss of every size in the stable phase: nats at some tokens, both (P,); 0 beyond the last."""

    tokens: Floats = field(default_factory=lambda: np.ones(1))
    nats: Floats = field(default_factory=lambda: np.zeros(1))

    def at(self, tokens: Floats) -> Floats:
        """Linear in log tokens."""
        return np.interp(np.log(tokens), np.log(self.tokens), self.nats, right=0.0)


def course(
    surface: Surface, gain: Floats, shared: Shared, parameters: float, tokens: Floats, schedule: Schedule
) -> Floats:
    """Expected loss at `tokens` of a run of this size under this schedule."""
    span = max(1, schedule.token_budget - schedule.decay_start_tokens)
    through = (tokens - schedule.decay_start_tokens) / span
    decayed = -np.interp(through, DECAY_GRID, gain)
    return surface.at(parameters, tokens) + np.where(through > 0, decayed, shared.at(tokens))


def shared_course(rungs: Sequence[Rung], surface: Surface) -> Shared:
    """The mean residual of the rungs at each number of tokens; nothing where their seeds differ, or where it does not earn its place."""
    sizes = {rung.parameters for rung in rungs}
    if len({rung.seed for rung in rungs}) > 1 or rungs[0].seed is None or len(sizes) < 2:
        return Shared()
    squares = np.zeros(2)
    for size in sizes:
        others = _mean_residual([rung for rung in rungs if rung.parameters != size], surface)
        for rung in rungs:
            if rung.parameters == size:
                tokens, residual = _residual(rung, surface)
                squares += np.mean(residual**2), np.mean((residual - others.at(tokens)) ** 2)
    return _mean_residual(rungs, surface) if squares[1] < LEAST_GAIN * squares[0] else Shared()


def _residual(rung: Rung, surface: Surface) -> tuple[Floats, Floats]:
    tokens, loss = rung.stable()[:, :2].T
    return tokens, loss - surface.at(rung.parameters, tokens)


def _mean_residual(rungs: Sequence[Rung], surface: Surface) -> Shared:
    """At each of the rungs' tokens the mean over the rungs whose stable phase reaches there."""
    courses = [_residual(rung, surface) for rung in rungs]
    tokens = np.unique(np.concatenate([at for at, _ in courses]))
    values = [np.interp(np.log(tokens), np.log(at), left, left=np.nan, right=np.nan) for at, left in courses]
    return Shared(tokens, np.nanmean(values, axis=0))


def decay_gain(rung: Rung, surface: Surface) -> Floats:
    """How far a rung's decay lies below the surface, along the decay (11 values), as a line through its stretches and its final loss.

    It need not begin at 0: with the decay the mixture of the data may change, and with it the loss.
    """
    decay = rung.decay()
    span = max(1, rung.tokens - rung.decay_start_tokens)
    if not len(decay) or span == 1:
        return np.zeros(len(DECAY_GRID))
    last = (1 - FINAL_SHARE / 2) * rung.tokens
    tokens, loss = np.append(decay[:, 0], last), np.append(decay[:, 1], rung.final_loss)
    root = np.sqrt(np.append(decay[:, 3], FINAL_SHARE * rung.tokens / span * decay[:, 3].sum()))
    through = (tokens - rung.decay_start_tokens) / span
    gained = surface.at(rung.parameters, tokens) - loss
    constant, slope = np.linalg.lstsq(np.stack([root, root * through], axis=1), root * gained, rcond=None)[0]
    return constant + slope * DECAY_GRID
