"""MuonH for matrices, AdamH for the language-model head, Adam for the rest, as optax transformations; closed-form rates.

MuonH and AdamH are hyperball steps: along the direction by `learning_rate` times the matrix's norm, then back onto the sphere of
that norm, so that the norm never changes (marin-community/marin, experiments/grug/moe_hero_ep: optimizer.py, adamh.py,
grugmuon_hero.py; the code is our own). The learning rate is an argument of `update`, so that a directive changes it without a
new compilation.
"""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from runwatch.trainer.moe import Params

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Quintic coefficients of Muon (Jordan et al. 2024), which drive every singular value to about one."""
NEWTON_SCHULZ_STEPS = 5
BETA1 = 0.9062
MUONH_OVER_ADAM = 13 / 3
MAX_LEARNING_RATE = 0.05


class Rates(NamedTuple):
    """Hyperparameters of the optimizer for one compute budget."""

    muonh: float
    adam: float
    epsilon: float
    beta2: float
    lm_head: Literal["adamh", "adam"] = "adamh"


def closed_form(tokens: int, tokens_per_step: int, width: int) -> Rates:
    """Learning rates, epsilon and beta2 from the budget (marin heuristic.py, refit of issue #5951, R² 0.996).

    Adam 0.06602 · tokens^-0.395 · width^-0.150 · √(tokens a step), at most 0.05; MuonH 13/3 of it; epsilon
    9.676e-18 · √steps; beta2 0.999^(tokens a step / 131,072), within 0.95 … 0.9999.
    """
    adam = min(MAX_LEARNING_RATE, 0.06602 * tokens**-0.395 * width**-0.150 * math.sqrt(tokens_per_step))
    muonh = min(MAX_LEARNING_RATE, MUONH_OVER_ADAM * adam)
    epsilon = 9.676e-18 * math.sqrt(tokens / tokens_per_step)
    beta2 = min(0.9999, max(0.95, 0.999 ** (tokens_per_step / 131_072)))
    return Rates(muonh, adam, epsilon, beta2)


def newton_schulz(x: Array) -> Array:
    """Push the singular values of each matrix in the last two axes towards one."""
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[-2] > x.shape[-1]
    x = jnp.swapaxes(x, -1, -2) if tall else x
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-8)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ jnp.swapaxes(x, -1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return jnp.swapaxes(x, -1, -2) if tall else x


def hyperball(param: Array, direction: Array, learning_rate: Array) -> Array:
    """The update that moves each matrix along `direction` by `learning_rate` of its norm and keeps the norm."""

    def norm(x: Array) -> Array:
        return jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True))

    radius = norm(param)
    moved = param - learning_rate * direction * radius / jnp.maximum(norm(direction), 1e-10)
    return moved * (radius / jnp.maximum(norm(moved), 1e-10)) - param


def muonh() -> optax.GradientTransformationExtraArgs:
    """Nesterov momentum, orthogonalised, as a hyperball step."""

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        learning_rate: Array = extra["learning_rate"]
        state = jax.tree.map(lambda m, g: MOMENTUM * m + g, state, updates)
        directions = jax.tree.map(lambda m, g: newton_schulz(MOMENTUM * m + g), state, updates)
        return jax.tree.map(lambda p, d: hyperball(p, d, learning_rate), params, directions), state

    return optax.GradientTransformationExtraArgs(init, update)


def adam(rates: Rates, *, hyperball_step: bool) -> optax.GradientTransformationExtraArgs:
    """Adam; as a hyperball step at the full learning rate (AdamH), or plain at the Adam share of it."""
    inner = optax.scale_by_adam(BETA1, rates.beta2, rates.epsilon)
    share = rates.adam / rates.muonh

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        learning_rate: Array = extra["learning_rate"]
        directions, state = inner.update(updates, state, params)
        if hyperball_step:
            return jax.tree.map(lambda p, d: hyperball(p, d, learning_rate), params, directions), state
        return jax.tree.map(lambda d: -share * learning_rate * d, directions), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def group(name: str, lm_head: str = "adamh") -> str:
    """The optimizer group of a parameter."""
    if name == "lm_head":
        return lm_head
    return "adam" if name in ("embed", "router") or name.endswith("norm") else "muonh"


def optimizer(rates: Rates, params: Params) -> optax.GradientTransformationExtraArgs:
    """The three groups together; `update` takes `learning_rate`, that of MuonH."""
    transforms: dict[Any, optax.GradientTransformation] = {
        "muonh": muonh(),
        "adamh": adam(rates, hyperball_step=True),
        "adam": adam(rates, hyperball_step=False),
    }
    return optax.partition(transforms, {name: group(name, rates.lm_head) for name in params})
