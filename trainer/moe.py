"""The mixture-of-experts layer: a router balanced by bias, latent dispatch, capacity with counted drops, shared experts.

What it computes follows the seed run's trainer (marin-community/marin, experiments/grug/moe_hero_ep/model.py); the code is our own.
How tokens reach their experts is an `Exchange`: on one device it is `on_one_device` here, over several that of `parallel.py`.
Shapes: T tokens, D width, L latent width, E experts, K experts a token, F expert width, C slots of an expert.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from runwatch.trainer.config import Model

COMBINE_SUM = 2.5
"""The K combine weights of a token sum to this (the seed run's model.py: sigmoid weights, renormalised)."""

Params = dict[str, Array]


class Choice(NamedTuple):
    """Where the tokens want to go, before any drop."""

    experts: Array  # (T, K) int32
    weights: Array  # (T, K) combine weights
    load: Array  # (E,) assignments per expert, float32
    router_z: Array  # scalar, mean of log(Z)² of the router


Exchange = Callable[[Array, Choice, Params], tuple[Array, Array]]
"""Takes latent tokens (T, L) to their experts and back: their combined outputs (T, L), and how many of T·K were dropped, int32."""


class Stats(NamedTuple):
    """What a layer reports for one batch."""

    dropped: Array  # assignments of T·K for which there was no room, int32
    drop_rate: Array  # the same as a share of T·K
    load: Array  # (E,)
    router_z: Array


def room(wanted: float, limit: int) -> int:
    """`wanted` rows rounded up, at least one and at most `limit`; an infinite wish is the limit."""
    return limit if wanted >= limit else max(1, math.ceil(wanted))


def capacity(factor: float, tokens: int, model: Model) -> int:
    """Slots of one expert for `tokens`: the factor times the even share, rounded up, at most one per token."""
    return room(factor * tokens * model.experts_per_token / model.experts, tokens)


def choose(x: Array, router: Array, bias: Array, model: Model) -> Choice:
    """Choose K experts for each of the tokens x (T, D).

    The bias takes part in the choice only, never in the combine weights, and gets no gradient (loss-free balancing, Wang et al.
    2024, arXiv 2408.15664).
    """
    logits = x.astype(jnp.float32) @ router
    _, experts = jax.lax.top_k(jax.lax.stop_gradient(logits + bias), model.experts_per_token)
    chosen = jax.nn.one_hot(experts, model.experts, dtype=jnp.float32)  # (T, K, E)
    scores = jax.nn.sigmoid(jnp.sum(logits[:, None, :] * chosen, axis=-1))
    weights = COMBINE_SUM * scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-9)
    router_z = jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
    return Choice(experts, weights, jnp.sum(chosen, axis=(0, 1)), router_z)


def rank_in_group(groups: Array, count: int) -> Array:
    """For each of `groups` (N,), 0 … count-1, how many of the same group come before it; (N,) int32."""
    member = jax.nn.one_hot(groups, count, dtype=jnp.int32)
    return jnp.sum((jnp.cumsum(member, axis=0) - member) * member, axis=-1)


def swiglu(x: Array, gate: Array, up: Array, down: Array) -> Array:
    """Gated feed-forward; leading axes of the weights are batch axes (experts)."""
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def with_zero_row(rows: Array) -> Array:
    """Rows (N, L) and one of zeros after them: what the address of a dropped assignment reads."""
    return jnp.concatenate([rows, jnp.zeros((1, rows.shape[-1]), rows.dtype)])


def on_one_device(model: Model, factor: float) -> Exchange:
    """All experts on one device: each takes assignments in token order until its slots are full; the rest is dropped."""

    def exchange(latent: Array, choice: Choice, params: Params) -> tuple[Array, Array]:
        tokens, width = latent.shape
        slots = capacity(factor, tokens, model)
        size = model.experts * slots
        rank = rank_in_group(choice.experts.ravel(), model.experts).reshape(choice.experts.shape)
        kept = rank < slots
        address = jnp.where(kept, choice.experts * slots + rank, size)  # (T, K), `size` when dropped
        source = jnp.repeat(jnp.arange(tokens, dtype=jnp.int32), model.experts_per_token)
        token_of_slot = jnp.full((size + 1,), tokens, jnp.int32).at[address.ravel()].set(source)[:size]
        sent = with_zero_row(latent)[token_of_slot].reshape(model.experts, slots, width)
        back = swiglu(sent, params["expert_gate"], params["expert_up"], params["expert_down"])
        rows = with_zero_row(back.reshape(size, width))[address]
        return jnp.sum(rows * (choice.weights * kept)[..., None], axis=1), jnp.sum(~kept)

    return exchange


def rms_norm(x: Array) -> Array:
    """Root-mean-square norm over the last axis, without gain."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def moe_layer(x: Array, params: Params, bias: Array, model: Model, exchange: Exchange) -> tuple[Array, Stats]:
    """One mixture-of-experts layer over normed tokens x (T, D): shared experts plus routed experts in the latent width."""
    choice = choose(x, params["router"], bias, model)
    routed, dropped = exchange(rms_norm(x @ params["latent_down"]), choice, params)
    shared = swiglu(x, params["shared_gate"], params["shared_up"], params["shared_down"])
    out = routed @ params["latent_up"] + jnp.sum(shared, axis=0)
    return out, Stats(dropped, dropped / choice.experts.size, choice.load, choice.router_z)


def balance(bias: Array, load: Array, rate: Array, limit: float) -> Array:
    """Move each expert's bias by `rate` towards the mean load and clip it to ±`limit`; bias and load are (..., E).

    The sign update of loss-free balancing (arXiv 2408.15664), without auxiliary loss. The clip keeps a runaway bias from hiding
    the router's own choice; its size is reported as moe/router_bias_max.
    """
    mean = jnp.mean(load, axis=-1, keepdims=True)
    return jnp.clip(bias + rate * jnp.sign(mean - load), -limit, limit)
