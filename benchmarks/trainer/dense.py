"""A training step of the mixture of experts beside one of a plain dense model with as many active parameters.

    python -P benchmarks/trainer/dense.py [--rounds 60]

Both have the same attention, embedding, head, optimizers and batch; the dense one has one SwiGLU in place of router, latent projections,
routed and shared experts, wide enough for the same active parameters, so that 6·N·D is the same. Steps alternate in one process, so
that what else the machine does meets both. Prints a Markdown table: medians over the rounds, and the median of the paired ratios.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from runwatch.trainer import model as decoder
from runwatch.trainer.config import Model, read_card
from runwatch.trainer.moe import Params, Stats, swiglu
from runwatch.trainer.optim import Rates, closed_form, optimizer
from runwatch.trainer.step import Knobs, State, initial_state, make_step, step_of

CPU = read_card(Path(decoder.__file__).parent / "cards" / "cpu.yaml")
SHAPES = {
    "the CPU card": (CPU.model, 8),
    "four times as wide, 32 experts": (
        dataclasses.replace(
            CPU.model, width=256, head_width=64, experts=32, experts_per_token=4, expert_width=128,
            shared_expert_width=128, latent_width=128,
        ),
        8,
    ),
}  # fmt: skip
LENGTH, WARMUP = 128, 3
ROUTED = ("router", "latent", "expert", "shared")
Step = Callable[[], None]


def dense_shapes(m: Model) -> dict[str, tuple[int, ...]]:
    """The decoder's parameters with one feed-forward a layer for all that is routed or shared."""
    shapes = {name: shape for name, shape in decoder.shapes(m).items() if not name.startswith(ROUTED)}
    common = sum(int(np.prod(shape)) for name, shape in shapes.items() if name != "embed")
    hidden = round((decoder.count(m)[1] - common) / (3 * m.layers * m.width))
    wide = (m.layers, m.width, hidden)
    return {**shapes, "gate": wide, "up": wide, "down": (m.layers, hidden, m.width)}


def dense_feed_forward(x: jax.Array, params: Params, bias: jax.Array) -> tuple[jax.Array, Stats]:
    """Every token through the same matrices; nothing is routed, so nothing dropped."""
    nothing = jnp.zeros(())
    return swiglu(x, params["gate"], params["up"], params["down"]), Stats(
        nothing, nothing, jnp.ones_like(bias), nothing
    )


def stepper(step: Any, state: State, batch: tuple[np.ndarray, np.ndarray]) -> Step:
    """A function that takes one step and waits for its result."""
    box = [state]

    def run() -> None:
        box[0], packed = step(box[0], Knobs(0.01, 1e-4, 0.01), *batch)
        packed.block_until_ready()

    return run


def pair(m: Model, rates: Rates, batch: tuple[np.ndarray, np.ndarray]) -> dict[str, tuple[int, Step]]:
    """Both models' active parameters and steps."""
    shapes, keys = dense_shapes(m), iter(jax.random.split(jax.random.key(0), 32))
    params = {
        name: jnp.ones(shape) if name.endswith("norm") else jax.random.normal(next(keys), shape) / 2 / m.width**0.5
        for name, shape in shapes.items()
    }
    state = State(params, optimizer(rates, params).init(params), jnp.zeros((m.layers, m.experts)))
    network = functools.partial(decoder.decode, m=m, feed_forward=dense_feed_forward)
    active = sum(int(np.prod(shape)) for name, shape in shapes.items() if name != "embed")
    mixture = stepper(make_step(m, rates, m.capacity_factor), initial_state(m, rates, 0), batch)
    return {
        "mixture of experts": (decoder.count(m)[1], mixture),
        "dense": (active, stepper(step_of(network, m, rates), state, batch)),
    }


def seconds(steps: list[Step], rounds: int) -> np.ndarray:
    """Times of the steps, taken in turn; shape (rounds, steps)."""
    taken = np.empty((rounds + WARMUP, len(steps)))
    for times in taken:
        for n, step in enumerate(steps):
            began = time.perf_counter()
            step()
            times[n] = time.perf_counter() - began
    return taken[WARMUP:]


def main() -> None:
    """Run both shapes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    print("| shape | model | active parameters | step, ms | tokens/s | time of the mixture / dense |")
    print("|---|---|---:|---:|---:|---:|")
    for name, (m, sequences) in SHAPES.items():
        random = np.random.default_rng(0)
        batch = (random.integers(0, 256, (sequences, LENGTH + 1), np.uint8), np.ones((sequences, LENGTH), np.float32))
        models = pair(m, closed_form(CPU.plan.token_budget, sequences * LENGTH, m.width), batch)
        taken = seconds([step for _, step in models.values()], rounds)
        ratio = f"{np.median(taken[:, 0] / taken[:, 1]):.2f}"
        for (kind, (active, _)), spent in zip(models.items(), np.median(taken, axis=0), strict=True):
            cell = ratio if kind != "dense" else "1"
            print(
                f"| {name} | {kind} | {active:,} | {spent * 1e3:.1f} | {sequences * LENGTH / spent:,.0f} | {cell} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
