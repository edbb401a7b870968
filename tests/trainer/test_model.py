"""Each part of the model against a plain NumPy reference, written with loops."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runwatch.trainer import model as decoder
from runwatch.trainer import moe, optim
from runwatch.trainer.config import Model, read_card

SMALL = Model(
    width=16, layers=2, heads=4, kv_heads=2, head_width=8, global_every=2, window=3, experts=4, experts_per_token=2,
    expert_width=8, shared_experts=2, shared_expert_width=8, latent_width=8,
)  # fmt: skip
REFERENCE = read_card(Path(decoder.__file__).parent / "cards" / "reference-535b.yaml")


layer_of_experts = jax.jit(moe.moe_layer, static_argnums=(3, 4))


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def one_layer(seed: int = 0) -> dict[str, np.ndarray]:
    shapes = decoder.shapes(SMALL)
    return {
        name: random(*shape[1:], seed=seed + n)
        for n, (name, shape) in enumerate(shapes.items())
        if name not in decoder.OUTER
    }


def all_parameters() -> dict[str, jax.Array]:
    return {
        name: jnp.asarray(random(*shape, seed=n)) / 4 for n, (name, shape) in enumerate(decoder.shapes(SMALL).items())
    }


def np_norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def np_swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    g = x @ gate
    return (g / (1 + np.exp(-g)) * (x @ up)) @ down


def np_moe(x: np.ndarray, p: dict[str, np.ndarray], bias: np.ndarray, slots: int) -> tuple[np.ndarray, int, np.ndarray]:
    """One token after the other: choose by biased logits, weigh by sigmoid, drop where the expert is full."""
    m, out, dropped, load = SMALL, np.zeros_like(x), 0, np.zeros(SMALL.experts)
    for t, token in enumerate(x):
        logits = token @ p["router"]
        chosen = np.argsort(-(logits + bias), kind="stable")[: m.experts_per_token]
        scores = 1 / (1 + np.exp(-logits[chosen]))
        latent, routed = np_norm(token @ p["latent_down"]), np.zeros(m.latent_width)
        for expert, score in zip(chosen, scores, strict=True):
            load[expert] += 1
            if load[expert] > slots:
                dropped += 1
                continue
            weights = (p[f"expert_{part}"][expert] for part in ("gate", "up", "down"))
            routed += 2.5 * score / scores.sum() * np_swiglu(latent, *weights)
        out[t] = routed @ p["latent_up"]
        for s in range(m.shared_experts):
            out[t] += np_swiglu(token, p["shared_gate"][s], p["shared_up"][s], p["shared_down"][s])
    return out, dropped, load


@pytest.mark.parametrize(("factor", "slots"), [(2.0, 16), (9 / 8, 9), (0.5, 4), (1 / 8, 1)])
def test_a_layer_of_experts_drops_and_adds_as_a_loop_over_tokens_does(factor: float, slots: int) -> None:
    params, x, bias = one_layer(), random(16, SMALL.width, seed=5), random(SMALL.experts, seed=6)
    expected, dropped, load = np_moe(x, params, bias, slots)
    out, stats = layer_of_experts(x, params, bias, SMALL, moe.on_one_device(SMALL, factor))
    np.testing.assert_allclose(out, expected, rtol=2e-3, atol=2e-3)
    np.testing.assert_array_equal(stats.load, load)
    assert (int(stats.dropped), float(stats.drop_rate)) == (dropped, dropped / 32)


def test_without_room_every_assignment_beyond_capacity_is_dropped_and_counted() -> None:
    """Sixteen equal tokens all want the same two experts; three slots each leave 26 of 32 assignments dropped."""
    x = np.repeat(random(1, SMALL.width), 16, axis=0)
    _, stats = layer_of_experts(x, one_layer(), np.zeros(4, np.float32), SMALL, moe.on_one_device(SMALL, 3 / 8))
    assert int(stats.dropped) == 26


@pytest.mark.parametrize(
    ("factor", "tokens", "slots"), [(1.0, 16, 8), (1.15, 16, 10), (4.0, 16, 16), (0.01, 16, 1), (math.inf, 16, 16)]
)
def test_capacity_is_the_factor_times_the_even_share_rounded_up(factor: float, tokens: int, slots: int) -> None:
    assert moe.capacity(factor, tokens, SMALL) == slots


def test_balance_lifts_the_bias_of_idle_experts_and_clips_it() -> None:
    bias, load = jnp.array([0.0, 0.0, 0.095, -0.095]), jnp.array([10.0, 0.0, 0.0, 10.0])
    np.testing.assert_allclose(moe.balance(bias, load, jnp.asarray(0.01), 0.1), [-0.01, 0.01, 0.1, -0.1], atol=1e-7)


def test_the_bias_gets_no_gradient() -> None:
    params, x, everyone = one_layer(), random(16, SMALL.width), moe.on_one_device(SMALL, math.inf)
    gradient = jax.jit(jax.grad(lambda b: jnp.sum(moe.moe_layer(x, params, b, SMALL, everyone)[0])))(jnp.zeros(4))
    np.testing.assert_array_equal(gradient, np.zeros(4))


def np_attention(x: np.ndarray, p: dict[str, np.ndarray], *, is_global: bool) -> np.ndarray:
    """Position by position and head by head."""
    m, length = SMALL, len(x)
    q = np_norm((x @ p["query"]).reshape(length, m.heads, m.head_width))
    k = np_norm((x @ p["key"]).reshape(length, m.kv_heads, m.head_width))
    v = (x @ p["value"]).reshape(length, m.kv_heads, m.head_width)
    if not is_global:
        quarter = m.head_width // 4
        for rows in (q, k):
            for t in range(length):
                for i in range(quarter):
                    angle = t * 10_000.0 ** (-i / quarter)
                    a, b = rows[t, :, i].copy(), rows[t, :, quarter + i].copy()
                    rows[t, :, i] = a * math.cos(angle) - b * math.sin(angle)
                    rows[t, :, quarter + i] = a * math.sin(angle) + b * math.cos(angle)
    out = np.zeros((length, m.heads, m.head_width))
    for h in range(m.heads):
        shared = h // (m.heads // m.kv_heads)
        for t in range(length):
            first = 0 if is_global else max(0, t - m.window + 1)
            scores = m.qk_gain * k[first : t + 1, shared] @ q[t, h] / math.sqrt(m.head_width)
            share = np.exp(scores - scores.max())
            out[t, h] = share / share.sum() @ v[first : t + 1, shared]
    return out.reshape(length, -1) @ p["output"]


@pytest.mark.parametrize("is_global", [False, True])
def test_attention_rotates_half_the_head_locally_and_knows_no_positions_globally(is_global: bool) -> None:
    params, x = one_layer(), random(10, SMALL.width, seed=9)
    got = jax.jit(decoder.attention, static_argnums=3)(x[None], params, is_global, SMALL)[0]
    np.testing.assert_allclose(got, np_attention(x, params, is_global=is_global), rtol=2e-3, atol=2e-3)


def test_no_logit_depends_on_a_later_token() -> None:
    params, bias = all_parameters(), np.zeros((2, 4), np.float32)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 12)))
    run = jax.jit(lambda t: decoder.forward(params, bias, t, SMALL, 4.0)[0])
    changed = tokens.at[:, 8:].set(7)
    np.testing.assert_allclose(run(tokens)[:, :8], run(changed)[:, :8], rtol=1e-4, atol=1e-5)


def test_loss_and_squared_log_partition_match_their_definition() -> None:
    logits, targets = random(1, 3, 5), np.array([[0, 4, 2]])
    log_z = np.log(np.exp(logits).sum(-1))
    nats = log_z - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    stats = moe.Stats(jnp.zeros(2, int), jnp.zeros(2), jnp.zeros((2, 4)), jnp.zeros(2))
    out = decoder.losses(jnp.asarray(logits), stats, jnp.asarray(targets), jnp.ones((1, 3)))
    assert float(out.loss) == pytest.approx(nats.mean(), rel=1e-5)
    assert float(out.z) == pytest.approx((log_z**2).mean(), rel=1e-5)


def test_the_reference_model_has_535_billion_parameters_and_23_billion_active() -> None:
    """Counted from the shapes by hand, and by tracing the initialiser without memory."""
    total, active = decoder.count(REFERENCE.model)
    traced = jax.eval_shape(lambda: decoder.initialise(REFERENCE.model, 0))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(traced)) == total
    assert total == pytest.approx(535e9, rel=0.002)
    assert active == pytest.approx(23e9, rel=0.03)


def test_newton_schulz_drives_every_singular_value_towards_one() -> None:
    for shape in [(3, 12, 20), (20, 12)]:
        singular = np.linalg.svd(jax.jit(optim.newton_schulz)(random(*shape)), compute_uv=False)
        assert (singular > 0.6).all()
        assert (singular < 1.25).all()


def test_a_hyperball_step_turns_a_matrix_by_the_learning_rate_and_keeps_its_norm() -> None:
    param, direction = random(3, 8, 6), random(3, 8, 6, seed=1)
    moved = param + np.asarray(optim.hyperball(jnp.asarray(param), jnp.asarray(direction), jnp.asarray(0.1)))
    for before, after, way in zip(param, moved, direction, strict=True):
        radius = np.linalg.norm(before)
        straight = before - 0.1 * way * radius / np.linalg.norm(way)
        np.testing.assert_allclose(after, straight * radius / np.linalg.norm(straight), rtol=1e-4, atol=1e-5)
        assert np.linalg.norm(after) == pytest.approx(radius, rel=1e-5)


def test_closed_form_rates_of_the_reference_run() -> None:
    """18.75T tokens at 46.1M a step and width 6144, by the formulas worked out by hand."""
    assert (REFERENCE.plan.token_budget, REFERENCE.plan.tokens_per_step) == (18_750_000_000_000, 46_137_344)
    rates = optim.closed_form(18_750_000_000_000, 46_137_344, 6144)
    adam = 0.06602 * 18.75e12**-0.395 * 6144**-0.150 * math.sqrt(46_137_344)
    assert rates.adam == pytest.approx(adam)
    assert rates.muonh == pytest.approx(min(0.05, 13 / 3 * adam))
    assert rates.beta2 == 0.95
    assert rates.epsilon == pytest.approx(9.676e-18 * math.sqrt(18.75e12 / 46_137_344))
    assert optim.closed_form(2_000_000, 1024, 64).beta2 == 0.9999


def test_every_parameter_has_the_group_of_the_seed_run_and_matrices_keep_their_norm() -> None:
    params = all_parameters()
    groups = {name: optim.group(name) for name in params}
    assert {name for name, group in groups.items() if group == "adamh"} == {"lm_head"}
    assert {name for name, group in groups.items() if group == "adam"} == {
        "embed", "router", "final_norm", "attention_norm", "moe_norm",
    }  # fmt: skip
    transform = optim.optimizer(optim.closed_form(10**6, 1024, 16), params)
    grads = {name: jnp.asarray(random(*value.shape, seed=n)) for n, (name, value) in enumerate(params.items())}
    updates, _ = jax.jit(transform.update)(grads, transform.init(params), params, learning_rate=0.05)
    for name, param in params.items():
        norms = [np.linalg.norm(a, axis=(-2, -1)) for a in (param, param + updates[name])] if param.ndim > 1 else []
        if groups[name] != "adam":
            np.testing.assert_allclose(*norms, rtol=1e-5)
