"""The mixture-of-experts layer: a router balanced by bias, latent dispatch, capacity with counted drops, shared experts.

What it computes follows the seed run's trainer (marin-community/marin, experiments/grug/moe_hero_ep/model.py); the code is our own.
Shapes: T tokens, D width, L latent width, E experts, K experts a token, F expert width, C slots of an expert.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from runwatch.trainer.config import Model

COMBINE_SUM = 2.5
"""The K combine weights of a token sum to this (the seed run's model.py: sigmoid weights, renormalised)."""

Params = dict[str, Array]


class Routing(NamedTuple):
    """Where each of the T·K assignments goes."""

    experts: Array  # (T, K) int32
    weights: Array  # (T, K) combine weights, before drops
    slots: Array  # (T, K) int32 position in the expert buffers (pool, expert, slot), or the buffers' size if dropped
    kept: Array  # (T, K) bool
    load: Array  # (E,) assignments per expert before drops, float32
    router_z: Array  # scalar, mean of log(Z)² of the router


class Stats(NamedTuple):
    """What a layer reports for one batch."""

    drop_rate: Array
    load: Array  # (E,)
    router_z: Array


def capacity(model_factor: float, tokens: int, model: Model) -> int:
    """Slots of one expert for a pool of `tokens`: the factor times the even share, rounded up, at most one per token."""
    return min(tokens, max(1, math.ceil(model_factor * tokens * model.experts_per_token / model.experts)))


def route(x: Array, router: Array, bias: Array, model: Model, slots_per_expert: int, pools: int = 1) -> Routing:
    """Choose experts and slots for tokens x of shape (T, D).

    The bias takes part in the choice only, never in the combine weights, and gets no gradient (loss-free balancing, Wang et al.
    2024, arXiv 2408.15664). Within each of `pools` consecutive groups of tokens an expert takes assignments in token order until
    its slots are full; the rest is dropped.
    """
    logits = x.astype(jnp.float32) @ router
    _, experts = jax.lax.top_k(jax.lax.stop_gradient(logits + bias), model.experts_per_token)
    chosen = jax.nn.one_hot(experts, model.experts, dtype=jnp.float32)  # (T, K, E)
    scores = jax.nn.sigmoid(jnp.sum(logits[:, None, :] * chosen, axis=-1))
    weights = COMBINE_SUM * scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-9)
    flat = chosen.reshape(pools, -1, model.experts)
    rank = jnp.sum((jnp.cumsum(flat, axis=1) - flat) * flat, axis=-1).reshape(experts.shape).astype(jnp.int32)
    kept = rank < slots_per_expert
    pool = (jnp.arange(x.shape[0], dtype=jnp.int32) // (x.shape[0] // pools))[:, None]
    address = (pool * model.experts + experts) * slots_per_expert + rank
    slots = jnp.where(kept, address, pools * model.experts * slots_per_expert)
    router_z = jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
    return Routing(experts, weights, slots, kept, jnp.sum(chosen, axis=(0, 1)), router_z)


def swiglu(x: Array, gate: Array, up: Array, down: Array) -> Array:
    """Gated feed-forward; leading axes of the weights are batch axes (experts)."""
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def routed_experts(
    x: Array, params: Params, routing: Routing, model: Model, slots_per_expert: int, pools: int = 1
) -> Array:
    """Dispatch latent tokens (T, L) to their experts and combine; dropped assignments add nothing."""
    tokens, latent = x.shape
    size = pools * model.experts * slots_per_expert
    source = jnp.repeat(jnp.arange(tokens, dtype=jnp.int32), model.experts_per_token)
    token_of_slot = jnp.full((size + 1,), tokens, jnp.int32).at[routing.slots.ravel()].set(source)[:size]
    padded = jnp.concatenate([x, jnp.zeros((1, latent), x.dtype)])
    sent = padded[token_of_slot].reshape(pools, model.experts, slots_per_expert, latent)
    back = jax.vmap(lambda s: swiglu(s, params["expert_gate"], params["expert_up"], params["expert_down"]))(sent)
    rows = jnp.concatenate([back.reshape(size, latent), jnp.zeros((1, latent), x.dtype)])[routing.slots]
    return jnp.sum(rows * (routing.weights * routing.kept)[..., None], axis=1)


def rms_norm(x: Array) -> Array:
    """Root-mean-square norm over the last axis, without gain."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def moe_layer(
    x: Array, params: Params, bias: Array, model: Model, slots_per_expert: int, pools: int = 1
) -> tuple[Array, Stats]:
    """One mixture-of-experts layer over normed tokens x (T, D): shared experts plus routed experts in the latent width."""
    routing = route(x, params["router"], bias, model, slots_per_expert, pools)
    latent = rms_norm(x @ params["latent_down"])
    routed = routed_experts(latent, params, routing, model, slots_per_expert, pools) @ params["latent_up"]
    shared = swiglu(x, params["shared_gate"], params["shared_up"], params["shared_down"])
    drop_rate = 1 - jnp.mean(routing.kept.astype(jnp.float32))
    return routed + jnp.sum(shared, axis=0), Stats(drop_rate, routing.load, routing.router_z)


def balance(bias: Array, load: Array, rate: Array, limit: float) -> Array:
    """Move each expert's bias by `rate` towards the mean load and clip it to ±`limit`; bias and load are (..., E).

    The sign update of loss-free balancing (arXiv 2408.15664), without auxiliary loss. The clip keeps a runaway bias from hiding
    the router's own choice; its size is reported as moe/router_bias_max.
    """
    mean = jnp.mean(load, axis=-1, keepdims=True)
    return jnp.clip(bias + rate * jnp.sign(mean - load), -limit, limit)
