"""Expert parallelism: each device holds its share of the experts, and tokens travel to them in waves of all-to-all.

The rule of who is dropped is that of the seed run's pooled-wave transport (marin-community/marin,
lib/levanter/src/levanter/grug/_moe/ep_fixed_pooled_wave_all_to_all.py, pull requests #8289 and #8347); the code is our own. Buffers
have fixed shapes, so there is room for `capacity_factor` times the even share at two gates:

1. *Sender.* In a wave a device may send so many rows to another device, whichever of that device's experts they are for: the
   room is pooled over the experts. A device's assignments to one target are dealt out to the waves in turn, in token order.
2. *Receiver.* In a wave an expert takes so many rows, whichever device they come from: the room is pooled over the senders, who are
   served in turn, so that the last of them does not bear all drops.

The transport before it had fixed room for each pair of sender and expert, which overflows as soon as the tokens of a device
resemble each other. More waves need smaller buffers at a time, and split the pools.

Shapes: P devices, W waves, t tokens of a device, K experts a token, e = E / P experts of a device, L latent width, R rows of a pool.
"""

import contextlib
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from runwatch.trainer.config import Card, CardError, Model
from runwatch.trainer.moe import (
    Choice,
    Exchange,
    Params,
    capacity,
    on_one_device,
    rank_in_group,
    room,
    swiglu,
    with_zero_row,
)

AXIS = "devices"
MATRICES = ("expert_gate", "expert_up", "expert_down")


@dataclass(frozen=True)
class Layout:
    """Over how many devices the experts are spread, and in how many waves tokens reach them.

    Without a mesh the parts of all devices are computed on one, with the same drops: the reference that a sharded run must equal.
    """

    devices: int = 1
    waves: int = 1
    mesh: Mesh | None = None

    def place(self, state: Any) -> Any:
        """Put a tree onto the mesh: experts on their devices, all else on every device."""
        return state if self.mesh is None else jax.device_put(state, self._shardings(self.mesh, state))

    def pin(self, state: Any) -> Any:
        """Keep a tree where `place` puts it, inside a jitted function: else the compiler may move it and the next call compiles anew."""
        return (
            state if self.mesh is None else jax.lax.with_sharding_constraint(state, self._shardings(self.mesh, state))
        )

    def spread(self, rows: Array) -> Array:
        """Spread the first axis over the devices, if it divides."""
        if self.mesh is None or rows.shape[0] % self.devices:
            return rows
        return jax.lax.with_sharding_constraint(rows, NamedSharding(self.mesh, Spec(AXIS)))

    @staticmethod
    def _shardings(mesh: Mesh, state: Any) -> Any:
        """Parameters of experts, and their moments, have layers first and experts second."""

        def sharding(path: Any, _: Any) -> NamedSharding:
            of_experts = any(getattr(part, "key", None) in MATRICES for part in path)
            return NamedSharding(mesh, Spec(None, AXIS) if of_experts else Spec())

        return jax.tree_util.tree_map_with_path(sharding, state)


ALONE = Layout()


def layout_of(card: Card) -> Layout:
    """The layout that the card asks for, over this process's devices; on a CPU they are made, if no JAX function has run yet.

    Raises:
        CardError: experts or tokens do not divide by the devices, or there are fewer of these.
    """
    devices, waves, plan = card.hardware.devices, card.hardware.waves, card.plan
    held_out = plan.eval.sequences * plan.context_length
    for name, count in (
        ("model.experts", card.model.experts),
        ("tokens a step", plan.tokens_per_step),
        ("tokens of an eval", held_out),
    ):
        if count % devices:
            raise CardError(f"hardware.devices: {count} {name} cannot be spread evenly over {devices} devices")
    if devices == 1:
        return Layout(1, waves)
    with contextlib.suppress(RuntimeError):  # JAX has started: it has what it has
        jax.config.update("jax_num_cpu_devices", devices)
    if jax.device_count() < devices:
        raise CardError(f"hardware.devices: {devices} are asked for, and JAX has {jax.device_count()} here; lower it")
    mesh = jax.make_mesh((devices,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[:devices])
    return Layout(devices, waves, mesh)


class Rows(NamedTuple):
    """The fixed sizes of the buffers of one wave."""

    pool: int  # from one device to another
    slots: int  # of one expert


def rows_of(factor: float, tokens: int, model: Model, layout: Layout) -> Rows:
    """Buffer sizes for `tokens` of a device: the factor times the even share, and never more than can come."""
    local, chosen = model.experts // layout.devices, model.experts_per_token
    even = factor * tokens * chosen / layout.waves
    most = -(-tokens * min(chosen, local) // layout.waves)
    pool = room(even / layout.devices, most)
    return Rows(pool, room(even / local, min(tokens, pool) * layout.devices))


def buffers(factor: float, tokens: int, model: Model, layout: Layout) -> tuple[int, ...]:
    """What a capacity factor fixes of the program for a batch of `tokens`: two factors with the same buffers share it."""
    alone = layout.devices == layout.waves == 1
    return (capacity(factor, tokens, model),) if alone else rows_of(factor, tokens // layout.devices, model, layout)


def exchange(model: Model, factor: float, layout: Layout) -> Exchange:
    """How tokens reach their experts under `layout`."""
    if layout.devices == layout.waves == 1:
        return on_one_device(model, factor)

    def run(latent: Array, choice: Choice, params: Params) -> tuple[Array, Array]:
        sizes = rows_of(factor, latent.shape[0] // layout.devices, model, layout)
        part = functools.partial(_part, sizes=sizes, layout=layout)
        inputs = (latent, choice.experts, choice.weights, *(params[name] for name in MATRICES))
        if layout.mesh is None:
            out, dropped = jax.vmap(part, axis_name=AXIS)(
                *(x.reshape(layout.devices, -1, *x.shape[1:]) for x in inputs)
            )
        else:
            out, dropped = jax.shard_map(part, mesh=layout.mesh, in_specs=Spec(AXIS), out_specs=Spec(AXIS))(*inputs)
        return out.reshape(latent.shape), jnp.sum(dropped)

    return run


def _part(
    latent: Array, experts: Array, weights: Array, gate: Array, up: Array, down: Array, *, sizes: Rows, layout: Layout
) -> tuple[Array, Array]:
    """One device's part of the exchange: its tokens (t, L), choices and weights (t, K), experts (e, …) → outputs (t, L), drops (1,)."""
    tokens, width = latent.shape
    local, size = gate.shape[0], layout.waves * layout.devices * sizes.pool
    target, expert = experts.ravel() // local, experts.ravel() % local
    place = rank_in_group(target, layout.devices)
    wave, row = place % layout.waves, place // layout.waves
    sent = row < sizes.pool
    address = jnp.where(sent, (wave * layout.devices + target) * sizes.pool + row, size)  # (t·K,), `size` when dropped
    source = jnp.arange(experts.size, dtype=jnp.int32) // experts.shape[1]
    token_of_row = jnp.full((size + 1,), tokens, jnp.int32).at[address].set(source)[:size]
    expert_of_row = jnp.full((size + 1,), local, jnp.int32).at[address].set(expert)[:size]  # `local` for an empty row
    shape = (layout.waves, layout.devices, sizes.pool)
    outgoing = (with_zero_row(latent)[token_of_row].reshape(*shape, width), expert_of_row.reshape(shape))
    one_wave = functools.partial(_wave, matrices=(gate, up, down), slots=sizes.slots)
    returned, refused = jax.lax.map(one_wave, outgoing)
    rows = with_zero_row(returned.reshape(size, width))[address].reshape(*experts.shape, width)
    return jnp.sum(rows * weights[..., None], axis=1), (jnp.sum(~sent) + jnp.sum(refused))[None]


def _wave(outgoing: tuple[Array, Array], matrices: tuple[Array, Array, Array], slots: int) -> tuple[Array, Array]:
    """Send rows (P, R, L) with their expert (P, R) at the target, let them compute there, bring the results back; and the drops."""
    rows, wanted = (_all_to_all(x) for x in outgoing)
    done, refused = _serve(rows, wanted, matrices, slots)
    return _all_to_all(done), refused


@functools.partial(jax.checkpoint, static_argnums=3)  # the backward pass computes again, but exchanges nothing again
def _serve(rows: Array, wanted: Array, matrices: tuple[Array, Array, Array], slots: int) -> tuple[Array, Array]:
    """What this device's experts make of the rows (P, R, L) that want them (P, R); zeros for a row that finds no slot, and their count."""
    (senders, pool, width), local = rows.shape, matrices[0].shape[0]
    rank = rank_in_group(wanted.T.ravel(), local).reshape(pool, senders).T  # the senders in turn
    asked = wanted < local
    taken = asked & (rank < slots)
    address = jnp.where(taken, wanted * slots + rank, local * slots)
    row_of_slot = jnp.full((local * slots + 1,), senders * pool, jnp.int32)
    row_of_slot = row_of_slot.at[address.ravel()].set(jnp.arange(senders * pool, dtype=jnp.int32))[: local * slots]
    full = with_zero_row(rows.reshape(-1, width))[row_of_slot].reshape(local, slots, width)
    return with_zero_row(swiglu(full, *matrices).reshape(-1, width))[address], jnp.sum(asked & ~taken)


def _all_to_all(x: Array) -> Array:
    """Part n of the first axis goes to device n; the parts that come are stacked in the order of their senders."""
    return jax.lax.all_to_all(x, AXIS, split_axis=0, concat_axis=0, tiled=True)
