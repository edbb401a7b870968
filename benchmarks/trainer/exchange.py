"""Bytes that a training step exchanges between the devices of the experts, with and without the latent width.

    python -P benchmarks/trainer/exchange.py [--devices 8 --waves 2 --json]

Counted where they arise: in the traced program of a step's loss and gradient (forward and backward pass of all layers), each `all_to_all`
by the shape of its buffer without the part that stays, times the rounds of the loops around it. Nothing is computed, so that the reference
card can be counted too. Without the latent width tokens travel as wide as the model is. Prints a Markdown table; activations are float32.
`--devices` counts the CPU card alone, spread so.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import AxisType

from runwatch.trainer import model as decoder
from runwatch.trainer.config import Card, Model, read_card
from runwatch.trainer.parallel import AXIS, Layout

CARDS = Path(decoder.__file__).parent / "cards"
RACK = (64, 3, 1024)
"""The seed run's rack: 64 devices, three waves, 1,024 sequences of its 11,264 (moe_hero_ep/README.md)."""


def transfers(jaxpr: Jaxpr, rounds: int = 1) -> Iterator[tuple[str, int]]:
    """Every `all_to_all` of a program: its type and the bytes in its buffers over all rounds."""
    for equation in jaxpr.eqns:
        inner = rounds * int(equation.params.get("length", 1)) if equation.primitive.name == "scan" else rounds
        if equation.primitive.name == "all_to_all":
            for value in equation.invars:
                yield value.aval.dtype.name, rounds * math.prod(value.aval.shape) * value.aval.dtype.itemsize
        for part in jaxprs_in_params(equation.params):
            yield from transfers(part, inner)


def exchanged(model: Model, layout: Layout, factor: float, batch: tuple[int, int]) -> dict[str, int]:
    """Bytes by type that a device sends to others for the loss and gradient of a batch (sequences, tokens)."""

    def loss(params: Any, bias: jax.Array, tokens: jax.Array) -> jax.Array:
        logits, stats = decoder.forward(params, bias, tokens, model, factor, layout)
        return decoder.losses(logits, stats, tokens, jnp.ones(batch)).loss

    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in decoder.shapes(model).items()}
    bias = jax.ShapeDtypeStruct((model.layers, model.experts), jnp.float32)
    program = jax.make_jaxpr(jax.value_and_grad(loss))(params, bias, jax.ShapeDtypeStruct(batch, jnp.int32))
    total: dict[str, int] = {}
    for kind, size in transfers(program.jaxpr):
        total[kind] = total.get(kind, 0) + size * (layout.devices - 1) // layout.devices
    return total


def rows(name: str, card: Card, devices: int, waves: int, sequences: int) -> list[dict[str, Any]]:
    """The card as it is, and with tokens that travel as wide as the model is."""
    mesh = jax.make_mesh((devices,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[:devices])
    layout, model = Layout(devices, waves, mesh), card.model
    found = []
    for width in (model.width, model.latent_width):
        changed = dataclasses.replace(model, latent_width=width)
        sizes = exchanged(changed, layout, model.capacity_factor, (sequences, card.plan.context_length))
        place = {"card": name, "devices": devices, "waves": waves, "width": width}
        found.append({**place, "tokens": sizes["float32"], "addresses": sizes["int32"], "bytes": sum(sizes.values())})
    return found


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int)
    parser.add_argument("--waves", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.devices or RACK[0])
    cpu, reference = (read_card(CARDS / f"{name}.yaml") for name in ("cpu", "reference-535b"))
    table = rows("cpu", cpu, args.devices or 8, args.waves, cpu.plan.sequences_per_step)
    if not args.devices:
        table += rows("reference-535b, a rack", reference, *RACK)
    if args.json:
        print(json.dumps(table))
        return
    print(
        "| card | devices | waves | width exchanged | sent by a device a step, GB | of it addresses | share of full width |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    for number, row in enumerate(table):
        full = table[number // 2 * 2]["bytes"]
        sizes = f"{row['bytes'] / 1e9:,.4g} | {row['addresses'] / row['bytes']:.2%} | {row['bytes'] / full:.3f}"
        print(f"| {row['card']} | {row['devices']} | {row['waves']} | {row['width']} | {sizes} |")


if __name__ == "__main__":
    main()
