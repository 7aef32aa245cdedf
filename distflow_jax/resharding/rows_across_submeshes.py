"""Rows of device arrays moved from one submesh to another, disjoint one.

K mini-batches, R rows per data rank of the source, R' of the target; m and n data ranks of source
and target.

XLA compiles no program that reads arrays on some devices and writes them on others, and
`device_put` between two sets of devices needs both in this process. So rows first move to the
target's host, by all-to-all among the source's devices, and then from device to device within the
host. Neither step waits for a value, so the controller is not blocked.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from distflow_jax.parallel.host_exchange import Traffic
from distflow_jax.parallel.rules import data_ranks, rows_spec
from distflow_jax.resharding.rows_all_to_all import Row, RowsAllToAll


class RowsAcrossSubmeshes:
    """Moves rows between two training meshes on disjoint submeshes."""

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
