"""The loss as a surface over parameters N and tokens t, and its fit to points, in numpy alone.

    L(N, t) = E + ((A / N^alpha)^p + (B / t^beta)^p)^(1/p)

With p = 1 this is Hoffmann et al. 2022 (arXiv 2203.15556); with E = 0 it is equation 1.5 of Kaplan et al. 2020 (arXiv 2001.08361),
in which the scarcer of the two, parameters or tokens, rules. Small rungs need a p above 1: a small model stops learning from more
tokens sooner than a sum of the two terms can say.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from runwatch.trainer.ladder.rungs import Floats

EXPONENTS = np.geomspace(0.05, 1.6, 24)
"""What is tried; the first and the last are bounds."""
LEAST_GAIN = 0.5
"""A free p must halve the squared error of p = 1, or p stays 1: one more parameter has to earn its place."""
SHARPNESS = (1.0, 8.0)
STARTS = ((2.0, 0.3), (4.0, 0.03))
"""Where the search for p begins: p, and E as a share of the lowest loss."""
ITERATIONS = 60
ENOUGH = 1e-7
"""Share of the squared error: a step that gains less ends the search."""


@dataclass(frozen=True)
class Surface:
    """E + ((A / N^alpha)^p + (B / t^beta)^p)^(1/p)."""

    irreducible: float
    parameter_scale: float
    parameter_exponent: float
    token_scale: float
    token_exponent: float
    sharpness: float = 1.0

    def at(self, parameters: float | Floats, tokens: float | Floats) -> Floats:
        """Expected loss in nats at N parameters and t tokens."""
        by_size = self.parameter_scale * np.asarray(parameters, np.float64) ** -self.parameter_exponent
        by_tokens = self.token_scale * np.asarray(tokens, np.float64) ** -self.token_exponent
        return self.irreducible + (by_size**self.sharpness + by_tokens**self.sharpness) ** (1 / self.sharpness)


@dataclass(frozen=True)
class Points:
    """What is fitted: sizes, tokens, losses in nats, and weights, all of shape (P,)."""

    size: Floats
    tokens: Floats
    loss: Floats
    weight: Floats

    def error(self, surface: Surface) -> float:
        """Weighted sum of squared residuals."""
        return float(np.sum(self.weight * (self.loss - surface.at(self.size, self.tokens)) ** 2))


def fit_surface(points: Points) -> Surface:
    """Weighted least squares with E, A and B of 0 or more, and with p = 1 unless another p halves the squared error."""
    summed = improved(points, grid_fit(points), sharp=False)
    scales = (summed.parameter_scale, summed.parameter_exponent, summed.token_scale, summed.token_exponent)
    lowest = float(points.loss.min())
    starts = [Surface(share * lowest, *scales, sharpness) for sharpness, share in STARTS]
    free = min((improved(points, start, sharp=True) for start in starts), key=points.error)
    return free if points.error(free) < LEAST_GAIN * points.error(summed) - _ROUNDING else summed


_ROUNDING = 1e-9
"""Squared nats: below this an error is rounding."""


def improved(points: Points, start: Surface, *, sharp: bool) -> Surface:
    """The least-squares surface near `start` (Levenberg-Marquardt in logarithms of the coefficients); p is free where `sharp`."""
    middle = (float(np.mean(np.log(points.size))), float(np.mean(np.log(points.tokens))))
    free = 6 if sharp else 5
    low, high = _bounds(float(points.loss.min()))
    theta = np.clip(_packed(start, middle), low, high)
    root = np.sqrt(points.weight)

    def residual(values: Floats) -> Floats:
        return root * (points.loss - _unpacked(values, middle).at(points.size, points.tokens))

    here, damping = residual(theta), 1e-2
    for _ in range(ITERATIONS):
        slope = _jacobian(residual, theta, here, free)
        gram = slope.T @ slope
        step = np.linalg.solve(gram + damping * np.diag(np.diag(gram) + 1e-12), -slope.T @ here)
        trial = np.clip(theta + np.pad(step, (0, 6 - free)), low, high)
        there = residual(trial)
        if there @ there < here @ here:
            done = here @ here - there @ there < ENOUGH * (here @ here)
            theta, here, damping = trial, there, max(damping / 5, 1e-12)
            if done:
                break
        else:
            damping *= 4
            if damping > 1e8:
                break
    return _unpacked(theta, middle)


def _jacobian(residual: Callable[[Floats], Floats], theta: Floats, here: Floats, free: int) -> Floats:
    """Finite differences, (P, free)."""
    steps = 1e-6 * np.eye(len(theta))[:free]
    return np.stack([(residual(theta + step) - here) / 1e-6 for step in steps], axis=1)


def _bounds(lowest: float) -> tuple[Floats, Floats]:
    """Of the six logarithms; E is below the lowest loss."""
    low, high = np.log(EXPONENTS[[0, -1]])
    p_low, p_high = np.log(SHARPNESS)
    return (
        np.array([-12.0, -12.0, low, -12.0, low, p_low]),
        np.array([np.log(lowest), 12.0, high, 12.0, high, p_high]),
    )


def _packed(surface: Surface, middle: tuple[float, float]) -> Floats:
    """Logarithms of E, A / N0^alpha, alpha, B / t0^beta, beta and p, with N0 and t0 in the middle of the points."""
    a = np.log(max(surface.parameter_scale, 1e-300)) - surface.parameter_exponent * middle[0]
    b = np.log(max(surface.token_scale, 1e-300)) - surface.token_exponent * middle[1]
    exponents = np.log([surface.parameter_exponent, surface.token_exponent])
    return np.array(
        [np.log(max(surface.irreducible, 1e-6)), a, exponents[0], b, exponents[1], np.log(surface.sharpness)]
    )


def _unpacked(theta: Floats, middle: tuple[float, float]) -> Surface:
    e, a, alpha, b, beta, p = (float(value) for value in theta)
    alpha, beta = float(np.exp(alpha)), float(np.exp(beta))
    scales = float(np.exp(a + alpha * middle[0])), float(np.exp(b + beta * middle[1]))
    return Surface(float(np.exp(e)), scales[0], alpha, scales[1], beta, float(np.exp(p)))


def grid_fit(points: Points, exponents: Sequence[float] | Floats = EXPONENTS) -> Surface:
    """The best sum (p = 1) with nonnegative E, A and B over a grid of exponents."""
    alpha, beta = (grid.ravel() for grid in np.meshgrid(exponents, exponents, indexing="ij"))
    scale_n, scale_t = np.exp(np.mean(np.log(points.size))), np.exp(np.mean(np.log(points.tokens)))
    by_size = (points.size[None, :] / scale_n) ** -alpha[:, None]
    by_tokens = (points.tokens[None, :] / scale_t) ** -beta[:, None]
    features = np.stack([np.ones_like(by_size), by_size, by_tokens], axis=-1)  # (G, P, 3)
    coefficients, error = _nonnegative(features, points.loss, points.weight)
    at = int(np.argmin(error))
    e, a, b = (float(value) for value in coefficients[at])
    n, t = float(alpha[at]), float(beta[at])
    return Surface(e, float(a * scale_n**n), n, float(b * scale_t**t), t)


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
