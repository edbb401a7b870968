"""The decoder: half RoPE with a global layer without position encoding each fourth, QK-norm, mixture-of-experts in every layer.

What it computes follows the seed run's trainer (marin-community/marin, experiments/grug/moe_hero_ep/model.py) without its
gated norms, short convolutions and exclusive attention; the code is our own. Parameters are a flat dict of arrays; those of the
layers are stacked on a first axis, over which `jax.lax.scan` runs.
Shapes: B sequences, S tokens, D width, H heads, G key-value heads, W head width, N layers, V vocabulary, E experts.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from runwatch.trainer.config import Model
from runwatch.trainer.moe import Params, Stats, moe_layer, rms_norm
from runwatch.trainer.parallel import ALONE, Layout, exchange

ROPE_BASE = 10_000.0
INITIAL_STD = 0.5
"""Initial standard deviation times the square root of the width (the seed run's heuristic.py: 0.5/√6144)."""


def shapes(m: Model) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter."""
    n, d, lat, e = m.layers, m.width, m.latent_width, m.experts
    q, kv, sh = m.heads * m.head_width, m.kv_heads * m.head_width, (m.layers, m.shared_experts)
    return {
        "embed": (m.vocabulary_size, d),
        "lm_head": (d, m.vocabulary_size),
        "final_norm": (d,),
        "attention_norm": (n, d),
        "moe_norm": (n, d),
        "query": (n, d, q),
        "key": (n, d, kv),
        "value": (n, d, kv),
        "output": (n, q, d),
        "router": (n, d, e),
        "latent_down": (n, d, lat),
        "latent_up": (n, lat, d),
        "expert_gate": (n, e, lat, m.expert_width),
        "expert_up": (n, e, lat, m.expert_width),
        "expert_down": (n, e, m.expert_width, lat),
        "shared_gate": (*sh, d, m.shared_expert_width),
        "shared_up": (*sh, d, m.shared_expert_width),
        "shared_down": (*sh, m.shared_expert_width, d),
    }


OUTER = ("embed", "lm_head", "final_norm")
"""Parameters outside the stack of layers."""


def initialise(m: Model, seed: int) -> Params:
    """Normal weights of standard deviation 0.5/√width, norm gains of one."""
    keys = jax.random.split(jax.random.key(seed), len(shapes(m)))
    std = INITIAL_STD / math.sqrt(m.width)
    return {
        name: jnp.ones(shape) if name.endswith("norm") else std * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes(m).items(), strict=True)
    }


def count(m: Model) -> tuple[int, int]:
    """Parameters in total, and those active for one token: K of E experts, and no embedding table, which is only looked up."""
    size = {name: math.prod(shape) for name, shape in shapes(m).items()}
    experts = sum(size[f"expert_{part}"] for part in ("gate", "up", "down"))
    total = sum(size.values())
    return total, total - size["embed"] - experts + experts * m.experts_per_token // m.experts


def rotate_half_width(x: Array) -> Array:
    """Half RoPE: rotate the first half of the head width by position, leave the second; x is (B, S, heads, W)."""
    quarter = x.shape[-1] // 4
    frequency = ROPE_BASE ** -(jnp.arange(quarter) / quarter)
    angle = (jnp.arange(x.shape[1])[:, None] * frequency)[None, :, None, :]
    a, b, rest = x[..., :quarter], x[..., quarter : 2 * quarter], x[..., 2 * quarter :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos, rest], axis=-1)


def masks(m: Model, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens a local and a global layer see: causal, and for the local one at most `window` back; both (S, S) bool."""
    distance = np.arange(length)[:, None] - np.arange(length)
    causal = distance >= 0
    return causal & (distance < m.window), causal


def attention(x: Array, params: Params, is_global: Array, m: Model) -> Array:
    """Grouped-query attention over normed x (B, S, D); a global layer sees all before it and knows no positions."""
    batch, length, _ = x.shape
    query = rms_norm((x @ params["query"]).reshape(batch, length, m.heads, m.head_width))
    key = rms_norm((x @ params["key"]).reshape(batch, length, m.kv_heads, m.head_width))
    value = (x @ params["value"]).reshape(batch, length, m.kv_heads, m.head_width)
    query = jnp.where(is_global, query, rotate_half_width(query)) * (m.qk_gain / math.sqrt(m.head_width))
    key = jnp.where(is_global, key, rotate_half_width(key))
    query = query.reshape(batch, length, m.kv_heads, -1, m.head_width)
    scores = jnp.einsum("bsgrw,btgw->bgrst", query, key)
    local, causal = masks(m, length)
    probabilities = jax.nn.softmax(jnp.where(jnp.where(is_global, causal, local), scores, -1e30), axis=-1)
    mixed = jnp.einsum("bgrst,btgw->bsgrw", probabilities, value)
    return mixed.reshape(batch, length, -1) @ params["output"]


FeedForward = Callable[[Array, Params, Array], tuple[Array, Stats]]
"""What follows the attention of a layer: normed tokens (T, D), the layer's parameters and router bias → (T, D) and statistics."""


def forward(
    params: Params, bias: Array, tokens: Array, m: Model, capacity_factor: float, layout: Layout = ALONE
) -> tuple[Array, Stats]:
    """Logits (B, S, V) for tokens (B, S), and the statistics of each layer stacked on a first axis."""
    route = exchange(m, capacity_factor, layout)
    return decode(params, bias, tokens, m, lambda x, p, layer_bias: moe_layer(x, p, layer_bias, m, route), layout)


def decode(
    params: Params, bias: Array, tokens: Array, m: Model, feed_forward: FeedForward, layout: Layout = ALONE
) -> tuple[Array, Stats]:
    """Logits (B, S, V) of the decoder with any feed-forward, and its statistics of each layer stacked on a first axis."""
    batch, length = tokens.shape
    is_global = jnp.arange(m.layers) % m.global_every == m.global_every - 1
    layers = {name: value for name, value in params.items() if name not in OUTER}

    def layer(x: Array, inputs: tuple[Params, Array, Array]) -> tuple[Array, Stats]:
        p, layer_bias, layer_is_global = inputs
        x = layout.spread(x + attention(rms_norm(x) * p["attention_norm"], p, layer_is_global, m))
        normed = layout.spread((rms_norm(x) * p["moe_norm"]).reshape(batch * length, -1))
        out, stats = feed_forward(normed, p, layer_bias)
        return layout.spread(x + out.reshape(x.shape)), stats

    x = layout.spread(rms_norm(params["embed"][tokens]))
    x, stats = jax.lax.scan(layer, x, (layers, bias, is_global))
    return (rms_norm(x) * params["final_norm"]) @ params["lm_head"], stats


class Losses(NamedTuple):
    """Scalars of one batch, and the layers' statistics."""

    loss: Array  # nats per token
    z: Array  # mean of log(Z)², unweighted
    stats: Stats


def losses(logits: Array, stats: Stats, targets: Array, weights: Array) -> Losses:
    """Weighted cross entropy in nats and the squared log-partition; logits (B, S, V), targets and weights (B, S)."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return Losses(jnp.mean((log_z - chosen) * weights), jnp.mean(log_z**2 * weights), stats)
