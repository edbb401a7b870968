"""How the drop rate grows with the context length when the batch holds fewer, longer sequences, and what pooling does about it.

    python -P benchmarks/trainer/drop_rate.py

One layer routes the same number of tokens, spread over eight devices, at growing context length. Tokens of one sequence resemble each
other, so a device with few sequences asks for few experts. With capacity counted on each device alone its favourites overflow;
with capacity counted over a pool of devices, as in the seed run's pooled waves, they have the room that others leave.
The seed run saw 7 % → 40 % on a 4K → 65K extension and about 3 % with pooled waves at capacity factor 1.15 (Marin #8435, #8884).
"""

import jax
import jax.numpy as jnp
import numpy as np

from runwatch.trainer.config import Model
from runwatch.trainer.moe import balance, capacity, route

DEVICES, TOKENS = 8, 16_384
MODEL = Model(width=64, experts=32, experts_per_token=4, capacity_factor=1.15)
CORRELATION = 0.5
"""Share of a token's variance that its whole sequence has in common."""
POOLS = {"a device": DEVICES, "two devices": DEVICES // 2, "all eight": 1}


def tokens_of(context: int, seed: int) -> jax.Array:
    """Tokens (TOKENS, width) of unit variance, in sequences of `context` with a common part each."""
    random = np.random.default_rng(seed)
    common = np.repeat(random.normal(size=(TOKENS // context, MODEL.width)), context, axis=0)
    own = random.normal(size=(TOKENS, MODEL.width))
    return jnp.asarray(np.sqrt(CORRELATION) * common + np.sqrt(1 - CORRELATION) * own, jnp.float32)


def balanced_bias(router: jax.Array) -> jax.Array:
    """A bias trained to balance on many short sequences, as the run's is before its context grows."""
    bias = jnp.zeros(MODEL.experts)
    for step in range(200):
        load = route(tokens_of(16, step), router, bias, MODEL, TOKENS).load
        bias = balance(bias, load, jnp.asarray(0.01 if step < 150 else 0.001), MODEL.router_bias_limit)
    return bias


def main() -> None:
    """Print a Markdown table, drop rate by context length and pool."""
    router = jax.random.normal(jax.random.key(0), (MODEL.width, MODEL.experts)) / 16
    bias = balanced_bias(router)
    drop = jax.jit(
        lambda x, slots, pools: 1 - jnp.mean(route(x, router, bias, MODEL, slots, pools).kept), static_argnums=(1, 2)
    )
    print("| context | sequences a device | " + " | ".join(f"capacity over {name}" for name in POOLS) + " |")
    print("|---" * (2 + len(POOLS)) + "|")
    for context in (32, 128, 512, 2048):
        rates = []
        for pools in POOLS.values():
            slots = capacity(MODEL.capacity_factor, TOKENS // pools, MODEL)
            rates.append(np.mean([drop(tokens_of(context, 1000 + seed), slots, pools) for seed in range(3)]))
        cells = " | ".join(f"{rate:.1%}" for rate in rates)
        print(f"| {context} | {TOKENS // DEVICES // context} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
