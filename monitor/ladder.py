"""The scaling ladder: fit small runs, and register the loss curve that the main run is held against.

The stable phase of all rungs together is fitted by L(N, t) = E + A / N^alpha + B / t^beta over parameters N and tokens t (the
form of Hoffmann et al. 2022, arXiv 2203.15556, here over the course of constant-rate training, which a warmup-stable-decay
schedule makes comparable between budgets: Hägele et al. 2024, arXiv 2405.18392). What the decay gains on top is the mean course
of the rungs' decays. Uncertainty comes from refitting on resampled rungs. numpy only: the daemon never loads scipy.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

Floats = NDArray[np.float64]

EXPONENTS = np.geomspace(0.05, 1.6, 36)
SETTLED_WARMUPS = 3.0
"""The curve begins at three warm-ups: before that the loss tells of the warm-up, not of the scale."""
BOOTSTRAPS = 200
POINTS = 80
CONFIDENCE = (2.5, 97.5)


class LadderError(ValueError):
    """Rungs that cannot be fitted or a card that may not be changed; the message says what to do."""


@dataclass(frozen=True)
class Rung:
    """One finished small run. `course` has a row [tokens, loss, standard deviation, records] per stretch (P, 4)."""

    name: str
    parameters: int
    tokens: int
    warmup_tokens: int
    decay_start_tokens: int
    final_loss: float
    course: Floats

    def stable(self) -> Floats:
        """The stretches between warm-up and decay."""
        tokens = self.course[:, 0]
        return self.course[(tokens >= SETTLED_WARMUPS * self.warmup_tokens) & (tokens <= self.decay_start_tokens)]

    def decay(self) -> Floats:
        """The stretches of the decay."""
        return self.course[self.course[:, 0] > self.decay_start_tokens]


@dataclass(frozen=True)
class Surface:
    """E + A / N^alpha + B / t^beta."""

    irreducible: float
    parameter_scale: float
    parameter_exponent: float
    token_scale: float
    token_exponent: float

    def at(self, parameters: float | Floats, tokens: float | Floats) -> Floats:
        """Expected loss in nats at N parameters and t tokens."""
        by_size = self.parameter_scale * np.asarray(parameters, np.float64) ** -self.parameter_exponent
        by_tokens = self.token_scale * np.asarray(tokens, np.float64) ** -self.token_exponent
        return self.irreducible + by_size + by_tokens


@dataclass(frozen=True)
class Schedule:
    """What the curve of a run depends on besides its size; tokens."""

    token_budget: int
    warmup_tokens: int
    decay_start_tokens: int


@dataclass(frozen=True)
class Fit:
    """The fitted ladder: stable surface, gain of the decay over its course (0 to 1 in steps of 0.1), and resampled fits of both."""

    rungs: tuple[Rung, ...]
    surface: Surface
    gain: Floats
    resampled: tuple[tuple[Surface, Floats], ...]
    misfit: float

    def curve(self, parameters: float, schedule: Schedule) -> dict[str, list[float]]:
        """Tokens, loss, and the 95 % band of a run of this size, from three warm-ups to the end of the budget."""
        first = SETTLED_WARMUPS * schedule.warmup_tokens
        tokens = np.geomspace(max(first, 1.0), schedule.token_budget, POINTS)
        tokens = np.unique(
            np.append(
                tokens, schedule.decay_start_tokens + (schedule.token_budget - schedule.decay_start_tokens) * DECAY_GRID
            )
        )
        loss = _course(self.surface, self.gain, parameters, tokens, schedule)
        samples = np.stack([_course(surface, gain, parameters, tokens, schedule) for surface, gain in self.resampled])
        low, high = np.percentile(samples - np.median(samples, axis=0), CONFIDENCE, axis=0)
        spread = 1.96 * self.misfit
        return {
            "tokens": [float(round(value)) for value in tokens],
            "loss": _rounded(loss),
            "low": _rounded(loss - np.hypot(low, spread)),
            "high": _rounded(loss + np.hypot(high, spread)),
        }

    def final_formula(self) -> dict[str, float]:
        """The surface with the decay's whole gain taken off: L(N, D) at the end of a run."""
        return {
            "irreducible": round(self.surface.irreducible - float(self.gain[-1]), 5),
            "parameter_scale": round(self.surface.parameter_scale, 5),
            "parameter_exponent": round(self.surface.parameter_exponent, 5),
            "token_scale": round(self.surface.token_scale, 5),
            "token_exponent": round(self.surface.token_exponent, 5),
        }


DECAY_GRID = np.linspace(0.0, 1.0, 11)


def _rounded(values: Floats) -> list[float]:
    return [float(value) for value in np.round(values, 5)]


def _course(surface: Surface, gain: Floats, parameters: float, tokens: Floats, schedule: Schedule) -> Floats:
    span = max(1, schedule.token_budget - schedule.decay_start_tokens)
    through = np.clip((tokens - schedule.decay_start_tokens) / span, 0.0, 1.0)
    return surface.at(parameters, tokens) - np.interp(through, DECAY_GRID, gain)


def read_rungs(path: Path) -> list[Rung]:
    """Rungs as the trainer's ladder writes them.

    Raises:
        LadderError: the file is missing, no JSON, or lacks a field.
    """
    try:
        document = json.loads(path.read_text())
        return [_rung(entry) for entry in document["rungs"]]
    except OSError as error:
        raise LadderError(f"{path}: {error.strerror}; train the rungs with `runwatch ladder train`") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise LadderError(
            f"{path}: not a file of rungs ({error!r}); `runwatch ladder train --write` makes one"
        ) from error


def _rung(entry: Mapping[str, Any]) -> Rung:
    course = np.array(entry["curve"], np.float64)
    if course.ndim != 2 or course.shape[1] != 4 or not np.isfinite(course).all():
        raise ValueError(f"the curve of {entry['name']} must have finite rows [tokens, loss, deviation, records]")
    return Rung(
        name=str(entry["name"]),
        parameters=int(entry["parameters"]),
        tokens=int(entry["tokens"]),
        warmup_tokens=int(entry["warmup_tokens"]),
        decay_start_tokens=int(entry["decay_start_tokens"]),
        final_loss=float(entry["final_loss"]),
        course=course,
    )


def fit(rungs: Sequence[Rung], seed: int = 0) -> Fit:
    """Fit the ladder, with its uncertainty.

    Raises:
        LadderError: fewer than three rungs, or all of one size.
    """
    if len(rungs) < 3 or len({rung.parameters for rung in rungs}) < 2:
        raise LadderError(
            f"{len(rungs)} rungs of {len({rung.parameters for rung in rungs})} sizes: three of two sizes are the least"
        )
    surface = fit_surface(*_points(rungs))
    gain = _gain(rungs, surface)
    misfit = float(np.std([_offset(rung, surface) for rung in rungs], ddof=1))
    random = np.random.default_rng(seed)
    resampled = [one for _ in range(BOOTSTRAPS) if (one := _resample(rungs, random)) is not None]
    return Fit(tuple(rungs), surface, gain, tuple(resampled), misfit)


def _offset(rung: Rung, surface: Surface) -> float:
    """Mean distance of a rung's stable phase from the surface, in nats."""
    stable = rung.stable()
    return float(np.average(stable[:, 1] - surface.at(rung.parameters, stable[:, 0]), weights=stable[:, 3]))


def _resample(rungs: Sequence[Rung], random: np.random.Generator) -> tuple[Surface, Floats] | None:
    """A fit on rungs drawn with replacement; None where all drawn rungs have one size."""
    drawn = [rungs[index] for index in random.integers(0, len(rungs), len(rungs))]
    if len({rung.parameters for rung in drawn}) < 2:
        return None
    surface = fit_surface(*_points(drawn), exponents=EXPONENTS[::3])
    return surface, _gain(drawn, surface)


def _points(rungs: Sequence[Rung]) -> tuple[Floats, Floats, Floats, Floats]:
    """Sizes, tokens, losses and weights of all stable stretches; each rung has the same weight in all."""
    parts = [(rung, rung.stable()) for rung in rungs]
    size = np.concatenate([np.full(len(stable), float(rung.parameters)) for rung, stable in parts])
    rows = np.concatenate([stable for _, stable in parts])
    weight = np.concatenate([stable[:, 3] / stable[:, 3].sum() for _, stable in parts])
    return size, rows[:, 0], rows[:, 1], weight


def fit_surface(size: Floats, tokens: Floats, loss: Floats, weight: Floats, exponents: Floats = EXPONENTS) -> Surface:
    """Weighted least squares with nonnegative E, A and B, over a grid of exponents; all arrays of shape (P,)."""
    alpha, beta = (grid.ravel() for grid in np.meshgrid(exponents, exponents, indexing="ij"))
    scale_n, scale_t = np.exp(np.mean(np.log(size))), np.exp(np.mean(np.log(tokens)))
    by_size = (size[None, :] / scale_n) ** -alpha[:, None]
    by_tokens = (tokens[None, :] / scale_t) ** -beta[:, None]
    features = np.stack([np.ones_like(by_size), by_size, by_tokens], axis=-1)  # (G, P, 3)
    coefficients, error = _nonnegative(features, loss, weight)
    best = int(np.argmin(error))
    e, a, b = coefficients[best]
    return Surface(
        float(e),
        float(a * scale_n ** alpha[best]),
        float(alpha[best]),
        float(b * scale_t ** beta[best]),
        float(beta[best]),
    )


def _nonnegative(features: Floats, loss: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """For each of G feature matrices (G, P, 3) the nonnegative coefficients (G, 3) of least squared error (G,).

    With three coefficients every set of nonzero ones can be tried.
    """
    gram = np.einsum("gpi,p,gpj->gij", features, weight, features, optimize=True) + 1e-12 * np.eye(3)
    moment = np.einsum("gpi,p->gi", features, weight * loss, optimize=True)
    total = float(np.sum(weight * loss * loss))
    best = np.zeros(moment.shape)
    best_error = np.full(len(moment), np.inf)
    for chosen in (list(one) for count in (3, 2, 1) for one in combinations(range(3), count)):
        solved = np.zeros(moment.shape)
        solved[:, chosen] = np.linalg.solve(gram[:, chosen][:, :, chosen], moment[:, chosen, None])[..., 0]
        error = total - np.sum(solved * moment, axis=1)
        better = (solved >= 0).all(axis=1) & (error < best_error)
        best[better], best_error[better] = solved[better], error[better]
    return best, best_error


def _gain(rungs: Sequence[Rung], surface: Surface) -> Floats:
    """What the decay gains over the extrapolated stable phase, along its course (11 values from 0 on), mean over the rungs."""
    gains: list[Floats] = []
    for rung in rungs:
        decay = rung.decay()
        if len(decay) < 2:
            continue
        through = (decay[:, 0] - rung.decay_start_tokens) / (rung.tokens - rung.decay_start_tokens)
        gained = surface.at(rung.parameters, decay[:, 0]) + _offset(rung, surface) - decay[:, 1]
        design = np.stack([through, through**2], axis=1) * np.sqrt(decay[:, 3])[:, None]
        linear, square = np.linalg.lstsq(design, gained * np.sqrt(decay[:, 3]), rcond=None)[0]
        gains.append(linear * DECAY_GRID + square * DECAY_GRID**2)
    return np.mean(gains, axis=0) if gains else np.zeros(len(DECAY_GRID))


def register(
    card_path: Path, rungs_path: Path, parameters: int, schedule: Schedule, *, replace: bool = False
) -> dict[str, Any]:
    """Write the predicted curve with its band into the run card; everything else in the card stays as it is, comments too.

    Raises:
        LadderError: the card is registered already, and `replace` (an amendment, which the caller logs) is not given.
    """
    text = card_path.read_text()
    if "ladder" in (yaml.safe_load(text) or {}):
        if not replace:
            raise LadderError(f"{card_path} holds a registered curve; amend it with --amend --by NAME --reason TEXT")
        text = text[: text.index("\nladder:") + 1]
    section = section_of(fit(read_rungs(rungs_path)), rungs_path, parameters, schedule)
    written = yaml.safe_dump({"ladder": section}, sort_keys=False, default_flow_style=None, width=140)
    card_path.write_text(f"{text.rstrip()}\n{written}")
    return section


def section_of(fitted: Fit, rungs_path: Path, parameters: int, schedule: Schedule) -> dict[str, Any]:
    """The card's `ladder` section: date, hash, the rungs and what they predict."""
    rungs = [
        {"name": rung.name, "parameters": rung.parameters, "tokens": rung.tokens, "loss": round(rung.final_loss, 5)}
        for rung in fitted.rungs
    ]
    body = {
        "rungs": rungs,
        "formula": fitted.final_formula(),
        "curve": fitted.curve(parameters, schedule),
    }
    source = hashlib.sha256(rungs_path.read_bytes() + json.dumps(body, sort_keys=True).encode()).hexdigest()
    return {"registered": datetime.now(UTC).replace(microsecond=0), "hash": f"sha256:{source}", **body}
