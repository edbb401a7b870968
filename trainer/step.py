"""One training step and one evaluation as jitted functions; all scalars of a step leave the device as one packed vector.

Learning rate, z-loss weight and balance rate are arguments of the step, so a directive that changes them compiles nothing; capacity
factor and context length fix shapes, and new shapes cost one compilation.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from runwatch.trainer.config import Model
from runwatch.trainer.model import Losses, forward, initialise, losses
from runwatch.trainer.moe import Params, Stats, balance
from runwatch.trainer.optim import Rates, optimizer
from runwatch.trainer.parallel import ALONE, Layout

SCALARS = (
    "train/loss",
    "train/z_loss",
    "optim/grad_norm",
    "optim/skipped_step",
    "params/norm",
    "moe/drop_rate",
    "moe/load_max_vio",
    "moe/load_entropy",
    "moe/dead_experts",
    "moe/router_bias_max",
    "moe/router_z_loss",
)
LAYERS = ("drop_rate", "load_max_vio", "load_entropy", "router_bias_max")
"""Per-layer detail, emitted at an interval as lists moe/layers/…"""


class State(NamedTuple):
    """What training changes on the device."""

    params: Params
    optimizer: Any
    router_bias: Array  # (layers, experts)


class Knobs(NamedTuple):
    """Traced scalars of a step."""

    learning_rate: float
    z_loss_weight: float
    balance_rate: float


def initial_state(model: Model, rates: Rates, seed: int) -> State:
    """Fresh parameters, zero moments, zero biases."""
    params = initialise(model, seed)
    return State(params, optimizer(rates, params).init(params), jnp.zeros((model.layers, model.experts)))


def _norm(tree: Any) -> Array:
    return jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(tree)))


def _pack(out: Losses, grad_norm: Array, skipped: Array, params: Params, bias: Array) -> Array:
    """The scalars, then the four per-layer lists, as one float32 vector."""
    load = out.stats.load
    mean = jnp.mean(load, axis=-1)
    share = load / jnp.sum(load, axis=-1, keepdims=True)
    entropy = -jnp.sum(jnp.where(share > 0, share * jnp.log(share), 0.0), axis=-1) / jnp.log(load.shape[-1])
    vio = (jnp.max(load, axis=-1) - mean) / mean
    layer_bias = jnp.max(jnp.abs(bias), axis=-1)
    scalars = [
        out.loss,
        out.z,
        grad_norm,
        skipped,
        _norm(params),
        jnp.mean(out.stats.drop_rate),
        jnp.max(vio),
        jnp.min(entropy),
        jnp.sum(load == 0),
        jnp.max(layer_bias),
        jnp.mean(out.stats.router_z),
    ]
    return jnp.concatenate(
        [jnp.stack([s.astype(jnp.float32) for s in scalars]), out.stats.drop_rate, vio, entropy, layer_bias]
    )


Network = Callable[[Params, Array, Array], tuple[Array, Stats]]
"""Parameters, router bias and tokens (B, S) → logits (B, S, V) and the statistics of the layers."""


def make_step(model: Model, rates: Rates, capacity_factor: float, layout: Layout = ALONE) -> jax.stages.Wrapped:
    """The jitted step of the mixture of experts, spread over the devices of `layout`."""
    network = functools.partial(forward, m=model, capacity_factor=capacity_factor, layout=layout)
    return step_of(network, model, rates, layout)


def step_of(network: Network, model: Model, rates: Rates, layout: Layout = ALONE) -> jax.stages.Wrapped:
    """The jitted step of any network: state, knobs, tokens (B, S+1) uint8, loss weights (B, S) → new state, packed vector.

    A step whose loss or gradient is not finite is reported as it is and leaves the state unchanged (optim/skipped_step 1).
    """

    def objective(params: Params, bias: Array, knobs: Knobs, tokens: Array, weights: Array) -> tuple[Array, Losses]:
        logits, stats = network(params, bias, tokens[:, :-1].astype(jnp.int32))
        out = losses(logits, stats, tokens[:, 1:].astype(jnp.int32), weights)
        router_z = model.router_z_loss_weight * jnp.mean(stats.router_z)
        return out.loss + knobs.z_loss_weight * out.z + router_z, out

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: State, knobs: Knobs, tokens: Array, weights: Array) -> tuple[State, Array]:
        grads, out = jax.grad(objective, has_aux=True)(state.params, state.router_bias, knobs, tokens, weights)
        grad_norm = _norm(grads)
        transform = optimizer(rates, state.params)
        updates, moments = transform.update(grads, state.optimizer, state.params, learning_rate=knobs.learning_rate)
        bias = balance(state.router_bias, out.stats.load, jnp.asarray(knobs.balance_rate), model.router_bias_limit)
        good = jnp.isfinite(out.loss) & jnp.isfinite(grad_norm)
        params: Any = optax.apply_updates(state.params, updates)
        new = State(params, moments, bias)
        kept = layout.pin(jax.tree.map(lambda a, b: jnp.where(good, a, b), new, state))
        return kept, _pack(out, grad_norm, ~good, kept.params, kept.router_bias)

    return step


def make_evaluation(model: Model, layout: Layout = ALONE) -> jax.stages.Wrapped:
    """The jitted held-out loss of a batch (B, S+1), without drops: capacity would make it depend on the batch (Marin #8862)."""

    @jax.jit
    def evaluate(params: Params, bias: Array, tokens: Array) -> Array:
        logits, stats = forward(params, bias, tokens[:, :-1].astype(jnp.int32), model, math.inf, layout)
        targets = tokens[:, 1:].astype(jnp.int32)
        return losses(logits, stats, targets, jnp.ones(targets.shape)).loss

    return evaluate


def unpack(vector: Any, layers: int) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The scalars and the per-layer lists of a packed vector on the host."""
    values = vector.tolist()
    lists = values[len(SCALARS) :]
    scalars: dict[str, float] = dict(zip(SCALARS, values, strict=False))
    return scalars, {f"moe/layers/{name}": lists[i * layers : (i + 1) * layers] for i, name in enumerate(LAYERS)}
