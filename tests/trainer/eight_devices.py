"""Run by test_parallel.py in a process of its own: one model on eight host devices and on one, as JSON on standard output."""

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from runwatch.trainer import model as decoder
from runwatch.trainer.config import Card, Hardware, Model
from runwatch.trainer.parallel import Layout, layout_of

MODEL = Model(
    width=16, layers=2, heads=2, kv_heads=1, head_width=8, global_every=2, window=8, experts=16, experts_per_token=2,
    expert_width=16, shared_experts=1, shared_expert_width=16, latent_width=8,
)  # fmt: skip
SHARDED = layout_of(Card(MODEL, Hardware(devices=8, waves=2)))
ON_ONE = Layout(SHARDED.devices, SHARDED.waves)


def objective(params: Any, bias: jax.Array, tokens: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """Loss of a batch (B, S + 1), and the drops of each layer."""
    logits, stats = decoder.forward(params, bias, tokens[:, :-1], MODEL, 1.15, layout)
    return decoder.losses(logits, stats, tokens[:, 1:], jnp.ones(tokens[:, 1:].shape)).loss, stats.dropped


def run(layout: Layout, seeds: range) -> tuple[list[dict[str, Any]], Any, str]:
    """Loss and drops of a few batches, the gradient of the last, and the compiled program."""
    params, bias = layout.place(decoder.initialise(MODEL, 0)), jnp.zeros((MODEL.layers, MODEL.experts))
    batches = [jnp.asarray(np.random.default_rng(seed).integers(0, 256, (8, 17))) for seed in seeds]
    step = jax.jit(jax.value_and_grad(objective, has_aux=True), static_argnums=3)
    program = step.lower(params, bias, batches[0], layout).compile()
    results = [program(params, bias, tokens) for tokens in batches]
    told = [{"loss": float(loss), "dropped": dropped.tolist()} for (loss, dropped), _ in results]
    return told, results[-1][1], program.as_text()


def main() -> None:
    """Compute and print."""
    sharded, gradient, program = run(SHARDED, range(4))
    on_one, expected, _ = run(ON_ONE, range(4))
    off = {
        name: np.abs(np.asarray(gradient[name]) - expected[name]).max() / np.abs(expected[name]).max()
        for name in expected
    }
    experts = gradient["expert_gate"].addressable_shards
    print(
        json.dumps(
            {
                "sharded": sharded,
                "on_one": on_one,
                "gradient_off": {name: float(value) for name, value in off.items()},
                "experts_of_a_device": [shard.data.shape[1] for shard in experts],
                "exchanges": len(re.findall(r" all-to-all\(", program)),
            }
        )
    )


if __name__ == "__main__":
    main()
