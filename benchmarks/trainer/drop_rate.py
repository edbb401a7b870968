"""How the drop rate grows with the context length when the batch holds fewer, longer sequences, and what pooling does about it.

    python -P benchmarks/trainer/drop_rate.py

One layer routes the same number of tokens, spread over eight devices, at growing context length, and counts who is dropped. Tokens of
one sequence resemble each other, so a device with few sequences asks for few experts. With fixed room for each pair of device and
expert its favourites overflow; in pooled waves (`trainer/parallel.py`, as in training) they take the room that others leave.
The seed run saw 7 % → 40 % on a 4K → 65K extension and about 3 % with pooled waves at capacity factor 1.15 (Marin #8435, #8884).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from runwatch.trainer.config import Model
from runwatch.trainer.moe import Choice, Exchange, balance, choose, on_one_device
from runwatch.trainer.parallel import Layout, exchange

DEVICES, TOKENS, SEEDS = 8, 16_384, 3
CONTEXTS = (32, 128, 512, 2048)
FACTOR = 1.15
MODEL = Model(width=64, experts=32, experts_per_token=4, latent_width=1, expert_width=1)
CORRELATION = 0.5
"""Share of a token's variance that its whole sequence has in common."""
WEIGHTS = {name: jnp.zeros((MODEL.experts, 1, 1)) for name in ("expert_gate", "expert_up", "expert_down")}
Dropped = Callable[[Choice], jax.Array]


def tokens_of(context: int, seed: int) -> jax.Array:
    """Tokens (TOKENS, width) of unit variance, in sequences of `context` with a common part each."""
    random = np.random.default_rng(seed)
    common = np.repeat(random.normal(size=(TOKENS // context, MODEL.width)), context, axis=0)
    own = random.normal(size=(TOKENS, MODEL.width))
    return jnp.asarray(np.sqrt(CORRELATION) * common + np.sqrt(1 - CORRELATION) * own, jnp.float32)


def balanced_bias(router: jax.Array) -> jax.Array:
    """A bias trained to balance on many short sequences, as the run's is before its context grows."""
    bias = jnp.zeros(MODEL.experts)
    load = jax.jit(lambda x, bias: choose(x, router, bias, MODEL).load)
    for step in range(200):
        rate = jnp.asarray(0.01 if step < 150 else 0.001)
        bias = balance(bias, load(tokens_of(16, step), bias), rate, MODEL.router_bias_limit)
    return bias


def dropped_by(way: Exchange) -> Dropped:
    """How many assignments a way of exchange drops."""
    return lambda choice: way(jnp.zeros((len(choice.experts), 1)), choice, WEIGHTS)[1]


def in_cells(choice: Choice) -> jax.Array:
    """Drops with fixed room for each pair of device and expert: every device as if alone."""
    alone = dropped_by(on_one_device(MODEL, FACTOR))
    experts, weights = (x.reshape(DEVICES, -1, MODEL.experts_per_token) for x in (choice.experts, choice.weights))
    return jnp.sum(jax.vmap(lambda e, w: alone(choice._replace(experts=e, weights=w)))(experts, weights))


WAYS: dict[str, Dropped] = {
    "a cell for each device and expert": in_cells,
    **{f"pooled, {w} wave{'s' * (w > 1)}": dropped_by(exchange(MODEL, FACTOR, Layout(DEVICES, w))) for w in (1, 2, 4)},
    "one pool for each expert": dropped_by(on_one_device(MODEL, FACTOR)),
}


def main() -> None:
    """Print a Markdown table, drop rate by context length and way of exchange."""
    router = jax.random.normal(jax.random.key(0), (MODEL.width, MODEL.experts)) / 16
    bias = balanced_bias(router)
    rates = jax.jit(
        lambda x: (
            jnp.stack([way(choose(x, router, bias, MODEL)) for way in WAYS.values()])
            / (TOKENS * MODEL.experts_per_token)
        )
    )
    print("| context | sequences a device | " + " | ".join(WAYS) + " |")
    print("|---" * (2 + len(WAYS)) + "|")
    for context in CONTEXTS:
        mean = np.mean([rates(tokens_of(context, 1000 + seed)) for seed in range(SEEDS)], axis=0)
        cells = " | ".join(f"{rate:.1%}" for rate in mean)
        print(f"| {context} | {TOKENS // DEVICES // context} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
