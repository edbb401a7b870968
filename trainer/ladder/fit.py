"""The scaling ladder: fit small runs, and predict the loss curve that the main run is held against.

The stable phase of all rungs together is fitted by the surface of `surface.py` over parameters N and tokens t: the course of
constant-rate training, which a warmup-stable-decay schedule makes comparable between budgets (Hägele et al. 2024, arXiv 2405.18392).
On top come what rungs of one data order share (`course.py`), and what the decay gains: the mean course of the rungs' decays, each
counted by its tokens, as the longest come nearest to the main run's. numpy only: a fit needs no extra.

Uncertainty is a bootstrap of residuals with the rungs' design kept (Davison & Hinkley 1997, section 6.3.3): six rungs drawn with
replacement often hold a single size, which says nothing about the exponents; residual courses drawn with replacement always do.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from runwatch.trainer.ladder.course import DECAY_GRID, Shared, course, decay_gain, shared_course
from runwatch.trainer.ladder.rungs import FINAL_SHARE, Floats, LadderError, Rung, Schedule, read_rungs
from runwatch.trainer.ladder.surface import EXPONENTS, SHARPNESS, Points, Surface, fit_surface, grid_fit, improved

BOOTSTRAPS = 200
POINTS = 80
CONFIDENCE = (2.5, 97.5)
LEAST_RUNGS, LEAST_SIZES = 4, 2
BETWEEN_RUNGS = 3
"""E, A and alpha are told by differences between rungs: n rungs leave n - 3 degrees of freedom, and residuals are widened for it."""
LEAST_LOSS = 1e-4
"""The band's lower side stays above this: a loss is above 0."""
PINNED = 1e-3
"""Nats: an irreducible loss, or a fall, below this is none."""


@dataclass(frozen=True)
class Fit:
    """The fitted ladder.

    `shared` is what the data order adds; `gain` is what the decay gains over its course (0 to 1 in steps of 0.1); `resampled` are
    surfaces and gains fitted to resampled residuals; `misfit` is the standard deviation of the stretches about all that, in nats,
    before the decay and within it.
    """

    rungs: tuple[Rung, ...]
    surface: Surface
    shared: Shared
    gain: Floats
    resampled: tuple[tuple[Surface, Floats], ...]
    misfit: tuple[float, float]

    def at(self, parameters: float, tokens: Floats, schedule: Schedule) -> Floats:
        """Expected loss at `tokens` of a run of this size under this schedule."""
        return course(self.surface, self.gain, self.shared, parameters, tokens, schedule)

    def curve(self, parameters: float, schedule: Schedule) -> dict[str, list[float]]:
        """Tokens, loss, and the 95 % band of a run of this size, from three warm-ups to the end of the budget."""
        decay = schedule.decay_start_tokens + (schedule.token_budget - schedule.decay_start_tokens) * DECAY_GRID
        stable = np.geomspace(min(schedule.settled, schedule.token_budget / 2), schedule.token_budget, POINTS)
        tokens = np.unique(np.round(np.append(stable, decay[decay >= stable[0]])))
        loss = self.at(parameters, tokens, schedule)
        samples = np.stack([course(*one, self.shared, parameters, tokens, schedule) for one in self.resampled])
        low, high = np.percentile(samples - np.median(samples, axis=0), CONFIDENCE, axis=0)
        spread = 1.96 * np.where(tokens > schedule.decay_start_tokens, self.misfit[1], self.misfit[0])
        if loss.min() <= LEAST_LOSS:
            raise LadderError(f"the fit predicts a loss of {loss.min():.3f}: these rungs cannot be extrapolated so far")
        return {
            "tokens": tokens.tolist(),
            "loss": _rounded(loss),
            "low": _rounded(np.maximum(loss - np.hypot(low, spread), LEAST_LOSS)),
            "high": _rounded(loss + np.hypot(high, spread)),
        }

    def final_loss(self, parameters: float, schedule: Schedule) -> float:
        """Predicted mean over the last 5 % of a run."""
        end = np.linspace(1 - FINAL_SHARE, 1.0, 11) * schedule.token_budget
        return float(np.mean(self.at(parameters, end, schedule)))

    def formula(self, parameters: float, schedule: Schedule) -> dict[str, float]:
        """E + A / N^alpha + B / D^beta at the end of runs near this one: what plans compare budgets with.

        Where p is above 1 it is the closest sum over budgets down to a tenth, most of all for runs of this size.
        """
        if self.surface.sharpness == SHARPNESS[0] and self.surface.irreducible > self.gain[-1]:
            near = replace(self.surface, irreducible=self.surface.irreducible - float(self.gain[-1]))
        else:
            near = self._summed(parameters, schedule.token_budget)
        return {name: round(value, 5) for name, value in asdict(near).items() if name != "sharpness"}

    def _summed(self, parameters: float, token_budget: float) -> Surface:
        sizes = np.geomspace(min(rung.parameters for rung in self.rungs), parameters, 4)
        budgets = np.geomspace(token_budget / 10, token_budget, 8)
        size, tokens = (grid.ravel() for grid in np.meshgrid(sizes, budgets))
        loss = np.maximum(self.surface.at(size, tokens) - self.gain[-1], LEAST_LOSS)
        points = Points(size, tokens, loss, np.where(size >= sizes[-1], 10.0, 1.0))
        return improved(points, grid_fit(points), sharp=False)

    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % interval of each coefficient of the surface."""
        bounds = np.percentile([astuple(surface) for surface, _ in self.resampled], CONFIDENCE, axis=0)
        names = asdict(self.surface)
        return {name: (float(low), float(high)) for name, low, high in zip(names, *bounds, strict=True)}

    def _falls(self) -> tuple[float, float]:
        """How much the surface falls, in nats, from the smallest rung to the largest and from the shortest to the longest."""
        sizes = np.array([rung.parameters for rung in self.rungs], np.float64)
        tokens = _lengths(self.rungs)
        by_size = self.surface.at(sizes.min(), tokens.max()) - self.surface.at(sizes.max(), tokens.max())
        by_tokens = self.surface.at(sizes.max(), tokens.min()) - self.surface.at(sizes.max(), tokens.max())
        return float(by_size), float(by_tokens)

    def remarks(self) -> tuple[str, ...]:
        """What to know before this fit is trusted."""
        surface, sizes = self.surface, len({rung.parameters for rung in self.rungs})
        edges = (float(EXPONENTS[0]), float(EXPONENTS[-1]))
        named = (("parameter", surface.parameter_exponent, "sizes"), ("token", surface.token_exponent, "budgets"))
        found = [
            f"the {name} exponent lies at the edge of what is tried ({value:.3g}): these rungs do not determine it; "
            f"add rungs of other {remedy}"
            for name, value, remedy in named
            if not edges[0] * 1.001 < value < edges[1] / 1.001
        ]
        if surface.irreducible < PINNED:
            found.append("the irreducible loss is pinned at 0: the rungs do not bend yet; add larger or longer ones")
        if any(share < PINNED for share in self._falls()):
            found.append("the loss does not fall with size, or not with tokens: the rungs contradict the formula")
        if len(self.rungs) < 5 or sizes < 3:
            found.append(f"{len(self.rungs)} rungs of {sizes} sizes are few: five rungs of three sizes are usual")
        return tuple(found)


def _rounded(values: Floats) -> list[float]:
    return [float(value) for value in np.round(values, 5)]


def fit(rungs: Sequence[Rung], seed: int = 0, bootstraps: int = BOOTSTRAPS) -> Fit:
    """Fit the ladder, with its uncertainty.

    Raises:
        LadderError: fewer than four rungs, or all of one size.
    """
    sizes = len({rung.parameters for rung in rungs})
    if len(rungs) < LEAST_RUNGS or sizes < LEAST_SIZES:
        raise LadderError(
            f"{len(rungs)} rungs of {sizes} sizes cannot be fitted: {LEAST_RUNGS} rungs of {LEAST_SIZES} sizes are the "
            "least, five of three sizes are usual; train more with `runwatch ladder train`"
        )
    points = _points(rungs)
    surface = fit_surface(points)
    shared = shared_course(rungs, surface)
    gains = np.stack([decay_gain(rung, surface) for rung in rungs])
    gain = np.average(gains, axis=0, weights=_lengths(rungs))
    widening = float(np.sqrt(len(rungs) / (len(rungs) - BETWEEN_RUNGS)))
    residual = widening * (points.loss - surface.at(points.size, points.tokens) - shared.at(points.tokens))
    misfit = float(np.sqrt(np.average(residual**2, weights=points.weight)))
    random = np.random.default_rng(seed)
    resampled = tuple(_resample(rungs, points, surface, residual, gains, random) for _ in range(bootstraps))
    fitted = Fit(tuple(rungs), surface, shared, gain, resampled, (misfit, misfit))
    return replace(fitted, misfit=(misfit, max(misfit, widening * _decay_misfit(fitted))))


def _decay_misfit(fitted: Fit) -> float:
    """Standard deviation of the decays' stretches about the fit, each rung counted by its tokens: their data are not averaged out."""
    decays = [(rung, rung.decay()) for rung in fitted.rungs if len(rung.decay())]
    squares = [
        np.mean((rows[:, 1] - fitted.at(rung.parameters, rows[:, 0], rung.schedule)) ** 2) for rung, rows in decays
    ]
    return float(np.sqrt(np.average(squares, weights=_lengths([rung for rung, _ in decays])))) if decays else 0.0


def _points(rungs: Sequence[Rung]) -> Points:
    """All stable stretches; each rung has the same weight in all."""
    parts = [(rung, rung.stable()) for rung in rungs]
    size = np.concatenate([np.full(len(stable), float(rung.parameters)) for rung, stable in parts])
    rows = np.concatenate([stable for _, stable in parts])
    weight = np.concatenate([stable[:, 3] / stable[:, 3].sum() for _, stable in parts])
    return Points(size, rows[:, 0], rows[:, 1], weight)


def _resample(
    rungs: Sequence[Rung],
    points: Points,
    surface: Surface,
    residual: Floats,
    gains: Floats,
    random: np.random.Generator,
) -> tuple[Surface, Floats]:
    """A fit to the surface with the residual courses of rungs drawn with replacement, stretched to each rung's own course."""
    ends = np.cumsum([len(rung.stable()) for rung in rungs])
    courses = np.split(residual - np.average(residual, weights=points.weight), ends[:-1])
    drawn = random.integers(0, len(rungs), len(rungs))
    through = [_log_share(rung.stable()[:, 0]) for rung in rungs]
    noise = [np.interp(at, through[one], courses[one]) for at, one in zip(through, drawn, strict=True)]
    loss = surface.at(points.size, points.tokens) + np.concatenate(noise)
    fitted = improved(
        replace(points, loss=np.maximum(loss, LEAST_LOSS)), surface, sharp=surface.sharpness > SHARPNESS[0]
    )
    return fitted, np.average(gains[drawn], axis=0, weights=_lengths(rungs)[drawn])


def _lengths(rungs: Sequence[Rung]) -> Floats:
    return np.array([rung.tokens for rung in rungs], np.float64)


def _log_share(tokens: Floats) -> Floats:
    """Where each of rising `tokens` lies between the first (0) and the last (1), in logarithms."""
    logs = np.log(tokens)
    return (logs - logs[0]) / (logs[-1] - logs[0])


@dataclass(frozen=True)
class HeldOut:
    """The largest rung, predicted from others. Losses in nats; `inside` is the share of its course inside the 95 % band."""

    rung: str
    predicted: float
    measured: float
    inside: float

    @property
    def error(self) -> float:
        """Measured less predicted, in nats."""
        return self.measured - self.predicted


def hold_out(rungs: Sequence[Rung], bootstraps: int = BOOTSTRAPS) -> HeldOut:
    """Fit without the rung of the most compute (N times D) and predict it.

    Rungs of its size and seed are left out too: a shorter run of the same seed is the beginning of the same course.

    Raises:
        LadderError: what is left cannot be fitted.
    """
    largest = max(rungs, key=lambda rung: rung.parameters * rung.tokens)
    told = (largest.parameters, largest.seed)
    fitted = fit(
        [one for one in rungs if one is not largest and (one.seed is None or (one.parameters, one.seed) != told)],
        bootstraps=bootstraps,
    )
    curve: dict[str, Any] = fitted.curve(largest.parameters, largest.schedule)
    rows = largest.settled()
    low, high = (np.interp(rows[:, 0], curve["tokens"], curve[side]) for side in ("low", "high"))
    inside = np.mean((low <= rows[:, 1]) & (rows[:, 1] <= high))
    predicted = fitted.final_loss(largest.parameters, largest.schedule)
    return HeldOut(largest.name, predicted, largest.final_loss, float(inside))


FILE_VERSION = 1
FIGURE_POINTS = 100


@dataclass(frozen=True)
class Target:
    """The run that a fit is asked about: its active parameters and its schedule."""

    parameters: int
    schedule: Schedule


def document(fitted: Fit, held: HeldOut | None = None, target: Target | None = None) -> dict[str, Any]:
    """The fit file: all that is drawn, printed or registered of a fit; `docs/ladder.md` names every key."""
    return {
        "version": FILE_VERSION,
        "surface": asdict(fitted.surface),
        "intervals": fitted.intervals(),
        "decay_gain": fitted.gain.tolist(),
        "misfit": list(fitted.misfit),
        "shared": float(fitted.shared.nats.std()) if fitted.shared.nats.any() else 0.0,
        "rungs": [_rung_of(fitted, rung) for rung in fitted.rungs],
        "warnings": list(fitted.remarks()),
        "held_out": None if held is None else {**asdict(held), "error": held.error},
        "prediction": None if target is None else _prediction(fitted, target),
    }


def _rung_of(fitted: Fit, rung: Rung) -> dict[str, Any]:
    tokens = np.geomspace(rung.schedule.settled, rung.tokens, FIGURE_POINTS)
    means = {name: rung.stable_mean(name) for name in rung.trends}
    return {
        "name": rung.name,
        "parameters": rung.parameters,
        "tokens": rung.tokens,
        "loss": rung.final_loss,
        "fitted": fitted.final_loss(rung.parameters, rung.schedule),
        "course": rung.settled()[:, :2].tolist(),
        "fitted_course": np.column_stack([tokens, fitted.at(rung.parameters, tokens, rung.schedule)]).tolist(),
        "trends": {name: mean for name, mean in means.items() if np.isfinite(mean)},
    }


def _prediction(fitted: Fit, target: Target) -> dict[str, Any]:
    return {
        "parameters": target.parameters,
        **asdict(target.schedule),
        "formula": fitted.formula(target.parameters, target.schedule),
        "curve": fitted.curve(target.parameters, target.schedule),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit the rungs of a file and print the fit file; 65 and a sentence where they cannot be fitted."""
    parser = argparse.ArgumentParser(prog="runwatch.trainer.ladder.fit", description="Fit the rungs of a ladder.")
    parser.add_argument("rungs", type=Path, metavar="RUNGS.json")
    parser.add_argument("--held-out", action="store_true", help="also fit without the largest rung, and predict it")
    parser.add_argument("--seed", type=int, help="of the run to predict: rungs of another seed saw other data")
    parser.add_argument(
        "--predict", type=int, nargs=4, metavar="N", help="parameters, token budget, end of warm-up, start of the decay"
    )
    parser.add_argument("--bootstraps", type=int, default=BOOTSTRAPS, help="resampled fits behind each interval")
    given = parser.parse_args(arguments)
    try:
        rungs = read_rungs(given.rungs)
        held = hold_out(rungs, given.bootstraps) if given.held_out else None
        if given.seed is not None:
            rungs = [one if one.seed == given.seed else replace(one, seed=None) for one in rungs]
        target = Target(given.predict[0], Schedule(*given.predict[1:])) if given.predict else None
        found = document(fit(rungs, bootstraps=given.bootstraps), held, target)
    except LadderError as error:
        print(error, file=sys.stderr)
        return 65
    json.dump(found, sys.stdout, allow_nan=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
