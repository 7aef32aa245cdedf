"""Rows of device arrays moved from one mesh to another, by all-to-all.

K mini-batches, R rows per data rank of the source, R' of the target, D devices; m and n data ranks
of source and target.

Every host computes the same row maps. A program of fixed shape moves up to `capacity` rows from
each device to each other one, and runs again while any pair has more. A row goes straight from a
device that has it to every device that needs it: nothing is gathered.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distflow_jax.cluster.host_exchange import Traffic
from distflow_jax.parallel.rules import data_ranks, rows_spec

Row = tuple[int, int, int]  # mini-batch, data rank, row within the rank


@dataclasses.dataclass(frozen=True)
class RowMoves:
    """Rows that each device sends to each other one in each round.

    `send[t, d, e, c]` is an index into the K R local rows of device d, `receive[t, e, d, c]` the
    index into those of device e at which the row is written. Out-of-range indices are empty places.
    """

    send: np.ndarray  # int32 [rounds, D, D, capacity]
    receive: np.ndarray  # int32 [rounds, D, D, capacity]
    moved: int  # rows that leave their device, every copy counted


def plan_moves(
    pairs: Sequence[tuple[Row, Row]],
    *,
    devices: int,
    ranks: tuple[int, int],
    rows: tuple[int, int],
    capacity: int,
) -> RowMoves:
    """Routes of the rows in `pairs`, (source, target), from m to n data ranks.

    `ranks`: (m, n); `rows`: (R, R'). A device that already has a row takes its own; otherwise the
    devices that hold copies of a source rank send alternately.
    """
    copies = tuple(devices // r for r in ranks)
    routes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (k, rank, row), (target_k, target_rank, target_row) in pairs:
        for copy in range(copies[1]):
            receiver = target_rank * copies[1] + copy
            own = receiver // copies[0] == rank
            sender = receiver if own else rank * copies[0] + copy % copies[0]
            routes.setdefault((sender, receiver), []).append(
                (k * rows[0] + row, target_k * rows[1] + target_row)
            )
    rounds = max((-(-len(route) // capacity) for route in routes.values()), default=0)
    shape = (rounds, devices, devices, capacity)
    nothing = np.iinfo(np.int32).max
    send, receive = np.full(shape, nothing, np.int32), np.full(shape, nothing, np.int32)
    for (sender, receiver), route in routes.items():
        for place, (source, target) in enumerate(route):
            t, c = divmod(place, capacity)
            send[t, sender, receiver, c] = source
            receive[t, receiver, sender, c] = target
    moved = sum(len(route) for (a, b), route in routes.items() if a != b)
    return RowMoves(send, receive, moved)


class RowsAllToAll:
    """Moves rows between two training meshes over one device order."""

    def __init__(self, source: Mesh, target: Mesh, rows: tuple[int, int], *, capacity: int = 2):
        """`rows`: (R, R'); `capacity`: rows that a device sends to each other one in a round."""
        assert source.devices.flatten().tolist() == target.devices.flatten().tolist()
        self._source, self._target, self._rows = source, target, rows
        self._capacity = capacity
        self._by_device = NamedSharding(source, PartitionSpec(source.axis_names))

    def __call__(self, value: Any, pairs: Sequence[tuple[Row, Row]]) -> tuple[Any, Traffic]:
        """A pytree of [K, m R, ...] leaves -> the rows in `pairs` as [K, n R', ...], others zero.

        Also returns the bytes that this process's devices received from other devices, padding
        included. Collective.
        """
        ranks = data_ranks(self._source.shape), data_ranks(self._target.shape)
        moves = plan_moves(
            pairs,
            devices=self._source.size,
            ranks=ranks,
            rows=self._rows,
            capacity=self._capacity,
        )
        sends = [self._place(index) for index in moves.send]
        receives = [self._place(index) for index in moves.receive]

        def one(x):
            out = _empty(self._source, x.shape[0], self._rows[1], x.shape[2:], x.dtype)
            for send, receive in zip(sends, receives, strict=True):
                out = _round(self._source, x, out, send, receive)
            return self._as_target(out)

        return jax.tree.map(one, value), self._traffic(moves, jax.tree.leaves(value))

    def _place(self, index: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(
            index.shape, self._by_device, lambda at: index[at], dtype=index.dtype
        )

    def _as_target(self, out: jax.Array) -> jax.Array:
        """[K, D R', ...], a shard per device -> [K, n R', ...]: copies of a rank are equal."""
        rows = data_ranks(self._target.shape) * self._rows[1]
        shape = (out.shape[0], rows, *out.shape[2:])
        layout = NamedSharding(self._target, rows_spec(self._target))
        return jax.make_array_from_single_device_arrays(
            shape, layout, [shard.data for shard in out.addressable_shards]
        )

    def _traffic(self, moves: RowMoves, leaves: Sequence[jax.Array]) -> Traffic:
        """Bytes that this process's devices receive from other devices."""
        here = [i for i, d in enumerate(self._source.devices.flat) if d in set(jax.local_devices())]
        row_bytes = sum(x.dtype.itemsize * int(np.prod(x.shape[2:])) for x in leaves)
        rounds, devices, _, capacity = moves.send.shape
        filled = moves.receive[:, here] < np.iinfo(np.int32).max
        for place, device in enumerate(here):
            filled[:, place, device] = False  # from itself
        payload = int(filled.sum()) * row_bytes
        capacity_bytes = rounds * len(here) * (devices - 1) * capacity * row_bytes
        return Traffic(payload, capacity_bytes - payload, rounds)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _empty(mesh, minis, rows, rest, dtype):
    layout = NamedSharding(mesh, PartitionSpec(None, mesh.axis_names))
    out = jnp.zeros((minis, mesh.size * rows, *rest), dtype)
    return jax.lax.with_sharding_constraint(out, layout)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _round(mesh, x, out, send, receive):
    """One all-to-all: writes the received rows into out [K, D R', ...]."""
    axes = mesh.axis_names
    by_device = PartitionSpec(None, axes)

    def move(x, out, send, receive):
        flat = x.reshape(-1, *x.shape[2:])
        sent = jnp.take(flat, send[0], axis=0, mode="fill", fill_value=0)  # [D, capacity, ...]
        received = jax.lax.all_to_all(sent, axes, split_axis=0, concat_axis=0, tiled=True)
        target = out.reshape(-1, *out.shape[2:])
        return target.at[receive[0]].set(received, mode="drop").reshape(out.shape)

    return jax.shard_map(
        move,
        mesh=mesh,
        in_specs=(rows_spec(mesh), by_device, PartitionSpec(axes), PartitionSpec(axes)),
        out_specs=by_device,
        check_vma=False,
    )(x, out, send, receive)


class RowsAcrossSubmeshes:
    """Moves rows between two training meshes on disjoint submeshes.

    XLA compiles no program that reads arrays on some devices and writes them on others, and
    `device_put` between two sets of devices needs both in this process. So rows first move to the
    target's host, by all-to-all among the source's devices, and then from device to device within
    the host. Neither step waits for a value, so the controller is not blocked.
    """

    def __init__(self, source: Mesh, target: Mesh, rows: tuple[int, int], *, capacity: int = 2):
        """`rows`: (R, R'); `capacity`: rows that a device sends to each other one in a round."""
        assert not set(source.devices.flat) & set(target.devices.flat)
        hosts = len({d.process_index for d in source.devices.flat})
        assert hosts == len({d.process_index for d in target.devices.flat})
        self._target, self._rows = target, rows[1]
        wanted = data_ranks(target.shape)
        # as many ranks in the staged layout as the source's devices of a host can hold apart
        staged = wanted
        if wanted > hosts:
            staged = hosts * math.gcd(wanted // hosts, source.size // hosts)
        self._ranks_held = wanted // staged  # target ranks in a staged rank, one after the other
        staging = Mesh(source.devices.reshape(staged, -1), ("fsdp", "tensor"))
        self._to_host = RowsAllToAll(
            source, staging, (rows[0], self._ranks_held * rows[1]), capacity=capacity
        )
        by_rank = NamedSharding(staging, rows_spec(staging))
        self._split = jax.jit(self._split_ranks, out_shardings=by_rank)

    def __call__(self, value: Any, pairs: Sequence[tuple[Row, Row]]) -> tuple[Any, Traffic]:
        """A pytree of [K, m R, ...] leaves -> the rows in `pairs` as [K, n R', ...], others zero.

        `pairs`: (source row, target row). Also returns the bytes that this process received, as
        RowsAllToAll does; copies within the host are not counted. Collective.
        """
        staged_pairs = [
            (source, (k, rank // self._ranks_held, rank % self._ranks_held * self._rows + row))
            for source, (k, rank, row) in pairs
        ]
        staged, traffic = self._to_host(value, staged_pairs)
        return jax.tree.map(self._within_host, staged), traffic

    def _split_ranks(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """[K, n R', ...] -> for each of the e target ranks of a staged rank [K, n R' / e, ...]."""
        ranks = x.reshape(x.shape[0], -1, self._ranks_held, self._rows, *x.shape[2:])
        shape = (x.shape[0], -1, *x.shape[2:])
        return tuple(ranks[:, :, i].reshape(shape) for i in range(self._ranks_held))

    def _within_host(self, x: jax.Array) -> jax.Array:
        target, ranks_held = self._target, self._ranks_held
        ranks = data_ranks(target.shape)
        held: dict[int, list[jax.Array]] = {}  # by target rank, one for each copy of it here
        for i, chunk in enumerate(self._split(x)):
            for shard in chunk.addressable_shards:
                rank = (shard.index[1].start or 0) // self._rows * ranks_held + i
                held.setdefault(rank, []).append(shard.data)
        arrays, devices = [], []
        for (rank, copy), device in np.ndenumerate(target.devices.reshape(ranks, -1)):
            if device.process_index == jax.process_index():
                arrays.append(held[rank][copy % len(held[rank])])
                devices.append(device)
        shape = (x.shape[0], ranks * self._rows, *x.shape[2:])
        layout = NamedSharding(target, rows_spec(target))
        return jax.make_array_from_single_device_arrays(
            shape, layout, jax.device_put(arrays, devices)
        )
