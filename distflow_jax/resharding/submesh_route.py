"""Weights moved from a submesh to samplers on other devices of every host, or on all of them.

One resharding program first brings to every host's submesh what the host's samplers will hold, with
as few copies of each shard as the size of the submesh allows. Then shards are copied from device to
device within the host and brought into the form of the samplers there.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distflow_jax.parallel.host_memory import start_to_host
from distflow_jax.resharding.common_mesh import CommonMesh, Layouts, Put, Take, relabel


class SubmeshRoute:
    """The route from a submesh to a local mesh that has more devices, or others; see Route.

    Where the samplers' tensor width (within a host) divides the submesh, a device of the submesh
    needs no memory beyond its own final shard of a chunk.
    """

    def __init__(self, trainer: Mesh, replicas: Mesh, local: Mesh):
        processes = len({d.process_index for d in replicas.devices.flat})
        width, of_host = replicas.shape["tensor"], replicas.size // processes
        # of a sampler: its hosts, and its devices on each
        hosts, wide = max(1, width // of_host), min(width, of_host)
        shards = math.gcd(wide, trainer.size // processes)
        shape = (processes // hosts, hosts, -1, shards)
        names = ("replica", "host", "copy", "tensor")
        self._staging, self._local = Mesh(trainer.devices.reshape(shape), names), local
        self._wide = wide  # shards of a sampler on this host
        self._split_count = wide // shards  # those of them in one staged shard
        self._sources = self._choose_sources(self._staging, local, wide)
        self._common = CommonMesh(trainer, self._staging)
        self.view = self._common.view

    def place(self, layout: NamedSharding) -> NamedSharding:
        """The same spec on the local mesh."""
        return NamedSharding(self._local, layout.spec)

    def move(self, take: Take, put: Put, layouts: Layouts) -> "SubmeshMove":
        """See Route."""
        staged = jax.tree.map(self._staged, layouts.arriving)
        arriving, held = (jax.tree.map(self.place, x) for x in (layouts.arriving, layouts.held))

        def reshard(params, start):
            chunk = take(params, start)
            return jax.tree.map(self._common.reshard, chunk, layouts.leaving, staged)

        def copy_within_host(chunk):
            return jax.tree.map(self._copy_within_host, chunk, staged, arriving)

        def to_host(chunk):
            return jax.tree.map(self._to_host, chunk, staged)

        def from_host(chunk):
            return jax.tree.map(
                self._from_host, chunk, arriving, is_leaf=lambda x: isinstance(x, HostShards)
            )

        common = jax.tree.map(self._common.layout, staged)
        return SubmeshMove(
            jax.jit(reshard, out_shardings=common),
            copy_within_host,
            jax.jit(put, donate_argnums=0, out_shardings=held),
            to_host,
            from_host,
        )

    def _staged(self, layout: NamedSharding) -> NamedSharding:
        axes = (("host", "tensor") if axis == "tensor" else axis for axis in layout.spec)
        return NamedSharding(self._staging, PartitionSpec(*axes))

    def _copy_within_host(
        self, x: jax.Array, staged: NamedSharding, layout: NamedSharding
    ) -> jax.Array:
        held = self._shards(x, staged)
        arrays = [held[index][source] for _, index, source in self._sources]
        copies = jax.device_put(arrays, [device for device, *_ in self._sources])
        return jax.make_array_from_single_device_arrays(x.shape, layout, copies)

    def _shards(self, x: jax.Array, staged: NamedSharding) -> list[dict[Any, jax.Array]]:
        """{device: what it holds of an array} for each of the parts of a staged shard."""
        return [
            {shard.device: shard.data for shard in split.addressable_shards}
            for split in _split(relabel(x, staged), self._split_count)
        ]

    def _to_host(self, x: jax.Array, staged: NamedSharding) -> "HostShards":
        held = self._shards(x, staged)
        first = self._sources[: self._wide]  # the samplers of a host share what has left
        copies = start_to_host([held[index][source] for _, index, source in first])
        return HostShards(x.shape, tuple(copies))

    def _from_host(self, x: "HostShards", layout: NamedSharding) -> jax.Array:
        # as NumPy arrays, which view the host's memory: from there any device takes a copy
        shards = [np.asarray(shard) for shard in x.shards]
        devices = [device for device, *_ in self._sources]
        copies = jax.device_put([shards[i % self._wide] for i in range(len(devices))], devices)
        return jax.make_array_from_single_device_arrays(x.shape, layout, copies)

    def _choose_sources(self, staging: Mesh, local: Mesh, wide: int) -> list[tuple[Any, int, Any]]:
        """(own device, index within the staged shard, source device), in the canonical order.

        A device that already has the shard takes its own; the others alternate among its holders,
        which may all be trainers'.
        """
        process = jax.process_index()
        holders: dict[int, list[Any]] = {}
        for at, device in np.ndenumerate(staging.devices):
            if device.process_index == process:
                holders.setdefault(at[-1], []).append(device)
        turns = {place: itertools.cycle(devices) for place, devices in holders.items()}
        own = [d for d in local.devices.flat if d.process_index == process]
        sources = []
        for i, device in enumerate(own):
            place, index = divmod(i % wide, self._split_count)
            source = device if device in holders[place] else next(turns[place])
            sources.append((device, index, source))
        return sources


@dataclasses.dataclass(frozen=True)
class HostShards:
    """An array on its way, in the memory of the host: what this host's samplers take of it."""

    shape: tuple[int, ...]  # of the whole array
    shards: tuple[Any, ...]  # of one sampler, in its order; see host_memory.start_to_host

    def wait(self) -> None:
        """Waits until the copies are complete."""
        jax.block_until_ready(self.shards)


class SubmeshMove:
    """The ChunkMove of a SubmeshRoute: reshards on the submesh, copies within the host, and writes
    there.

    `leave` and `arrive` are its halves, with the chunk in the memory of the host between them: the
    first is collective, the second is this process's alone.
    """

    def __init__(
        self,
        reshard: Callable,
        copy_within_host: Callable[[Any], Any],
        put: Callable,
        to_host: Callable[[Any], Any],
        from_host: Callable[[Any], Any],
    ):
        self._reshard, self._copy_within_host, self._put = reshard, copy_within_host, put
        self._to_host, self._from_host = to_host, from_host

    def leave(self, params: Any, start: np.int32) -> Any:
        """A chunk on its way to the memory of the host, of HostShards; not awaited."""
        return self._to_host(self._reshard(params, start))

    def arrive(self, out: Any, chunk: Any, start: np.int32) -> Any:
        """Writes a chunk that has left into the weights, as a call does."""
        return self._put(out, self._from_host(chunk), start)

    def __call__(self, out: Any, params: Any, start: np.int32) -> Any:
        """See ChunkMove."""
        return self._put(out, self._copy_within_host(self._reshard(params, start)), start)

    def trace(self, out: Any, params: Any, start: np.int32) -> jax.stages.Traced:
        """The resharding program, on the devices of the submesh."""
        return self._reshard.trace(params, start)


def _split(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """Splits every device's shard of `x` into `count` arrays of the same layout.

    Where `x` is replicated, every element of the result is `x` itself.
    """
    spec = x.sharding.spec
    dim = next((dim for dim, axis in enumerate(spec) if axis is not None), None)
    if count == 1 or dim is None:
        return (x,) * count
    return _split_program(x, x.sharding.mesh, spec, dim, count)


def _split_dim(x, mesh, spec, dim, count):
    return jax.shard_map(
        lambda shard: tuple(jnp.split(shard, count, axis=dim)),
        mesh=mesh,
        in_specs=spec,
        out_specs=(spec,) * count,
        check_vma=False,
    )(x)


_split_program = jax.jit(_split_dim, static_argnums=(1, 2, 3, 4))
