"""Rows of device arrays from a part of every host's devices to another part of them.

K mini-batches, R rows per data rank, P processes; n data ranks of the target.

XLA has no program that takes arrays on some devices and leaves them on others, and `device_put`
between two sets of devices needs both to be this process's own. So rows first go to the right host,
by all-to-all among the devices they are on, and then from device to device within it. Neither step
waits for a value, so that the controller can go on.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from distflow_jax.parallel.host_exchange import Traffic
from distflow_jax.parallel.rules import data_ranks, rows_spec
from distflow_jax.resharding.rows_all_to_all import Repartition, Row


class Crossing:
    """Moves rows between two meshes of training on disjoint parts of every host."""

    def __init__(self, source: Mesh, target: Mesh, rows: tuple[int, int], *, capacity: int = 2):
        """`rows`: R of source and target."""
        assert not set(source.devices.flat) & set(target.devices.flat)
        hosts = len({d.process_index for d in source.devices.flat})
        assert hosts == len({d.process_index for d in target.devices.flat})
        self._target, self._room = target, rows[1]
        wanted = data_ranks(target.shape)
        # as many ranks on the way as the source's devices of a host can tell apart
        staged = wanted
        if wanted > hosts:
            staged = hosts * math.gcd(wanted // hosts, source.size // hosts)
        self._each = wanted // staged  # target ranks that a rank on the way holds, one by one
        stage = Mesh(source.devices.reshape(staged, -1), ("fsdp", "tensor"))
        self._to_host = Repartition(
            source, stage, (rows[0], self._each * rows[1]), capacity=capacity
        )
        self._split = jax.jit(self._pieces, out_shardings=NamedSharding(stage, rows_spec(stage)))

    def __call__(self, value: Any, pairs: Sequence[tuple[Row, Row]]) -> tuple[Any, Traffic]:
        """A pytree of [K, m R, ...] leaves -> the same rows as [K, n R', ...], others zero.

        Also returns what a process received from the others at most, as Repartition does; the way
        within the host is not counted. Collective.
        """
        on_the_way = [
            (source, (k, rank // self._each, rank % self._each * self._room + row))
            for source, (k, rank, row) in pairs
        ]
        staged, traffic = self._to_host(value, on_the_way)
        return jax.tree.map(self._within_host, staged), traffic

    def _pieces(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """[K, n R', ...] -> one [K, n R' / each, ...] for each target rank of a rank on the way."""
        ranks = x.reshape(x.shape[0], -1, self._each, self._room, *x.shape[2:])
        shape = (x.shape[0], -1, *x.shape[2:])
        return tuple(ranks[:, :, i].reshape(shape) for i in range(self._each))

    def _within_host(self, x: jax.Array) -> jax.Array:
        target, each = self._target, self._each
        ranks = data_ranks(target.shape)
        held: dict[int, list[jax.Array]] = {}  # by target rank, one for each copy of it here
        for i, piece in enumerate(self._split(x)):
            for shard in piece.addressable_shards:
                rank = (shard.index[1].start or 0) // self._room * each + i
                held.setdefault(rank, []).append(shard.data)
        arrays, devices = [], []
        for (rank, copy), device in np.ndenumerate(target.devices.reshape(ranks, -1)):
            if device.process_index == jax.process_index():
                arrays.append(held[rank][copy % len(held[rank])])
                devices.append(device)
        shape = (x.shape[0], ranks * self._room, *x.shape[2:])
        layout = NamedSharding(target, rows_spec(target))
        return jax.make_array_from_single_device_arrays(
            shape, layout, jax.device_put(arrays, devices)
        )
