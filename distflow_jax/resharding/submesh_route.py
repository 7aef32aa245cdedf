"""Weights from a part of every host's devices to the samplers, which have all of them.

First every process's part gets, in one resharding program, what its own devices will hold, each
piece as seldom as the part's size allows; then pieces are copied device to device within the host,
and brought into the form of the samplers there.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distflow_jax.resharding.common_mesh import Refinement, relabelled
from distflow_jax.resharding.routes import Layouts, Put, Take


class PartRoute:
    """From a part of every host to the local mesh on all of it; see routes.Route.

    A device of the part needs no room beyond what it will hold itself of a piece, where the
    samplers' tensor width (of a host, at most all its devices) divides the part.
    """

    def __init__(self, trainer: Mesh, replicas: Mesh, local: Mesh):
        processes = len({d.process_index for d in replicas.devices.flat})
        width, of_host = replicas.shape["tensor"], replicas.size // processes
        hosts, wide = max(1, width // of_host), min(width, of_host)  # of a sampler
        pieces = math.gcd(wide, trainer.size // processes)
        shape = (processes // hosts, hosts, -1, pieces)
        names = ("replica", "host", "copy", "tensor")
        self._stage, self._local = Mesh(trainer.devices.reshape(shape), names), local
        self._each = wide // pieces  # a sampler's pieces in one on the way
        self._sources = self._choose_sources(self._stage, local, wide)
        self._common = Refinement(trainer, self._stage)
        self.view = self._common.view

    def place(self, layout: NamedSharding) -> NamedSharding:
        """On the local mesh."""
        return NamedSharding(self._local, layout.spec)

    def step(self, take: Take, put: Put, layouts: Layouts) -> "PartStep":
        """See Route."""
        staged = jax.tree.map(self._staged, layouts.arriving)
        arriving, held = (jax.tree.map(self.place, x) for x in (layouts.arriving, layouts.held))

        def reshard(params, start):
            piece = take(params, start)
            return jax.tree.map(self._common.travel, piece, layouts.leaving, staged)

        def spread(piece):
            return jax.tree.map(self._spread, piece, staged, arriving)

        common = jax.tree.map(self._common.layout, staged)
        return PartStep(
            jax.jit(reshard, out_shardings=common),
            spread,
            jax.jit(put, donate_argnums=0, out_shardings=held),
        )

    def _staged(self, layout: NamedSharding) -> NamedSharding:
        axes = (("host", "tensor") if axis == "tensor" else axis for axis in layout.spec)
        return NamedSharding(self._stage, PartitionSpec(*axes))

    def _spread(self, x: jax.Array, staged: NamedSharding, layout: NamedSharding) -> jax.Array:
        held = [
            {shard.device: shard.data for shard in piece.addressable_shards}
            for piece in _split(relabelled(x, staged), self._each)
        ]
        arrays = [held[piece][source] for _, piece, source in self._sources]
        copies = jax.device_put(arrays, [device for device, *_ in self._sources])
        return jax.make_array_from_single_device_arrays(x.shape, layout, copies)

    def _choose_sources(self, stage: Mesh, local: Mesh, wide: int) -> list[tuple[Any, int, Any]]:
        """(own device, which piece of what is on the way, device it lies on), by canonical order.

        A device that has the piece already takes its own; others take turns.
        """
        me = jax.process_index()
        holders: dict[int, list[Any]] = {}
        for at, device in np.ndenumerate(stage.devices):
            if device.process_index == me:
                holders.setdefault(at[-1], []).append(device)
        turns = {place: itertools.cycle(devices) for place, devices in holders.items()}
        own = [d for d in local.devices.flat if d.process_index == me]
        sources = []
        for i, device in enumerate(own):
            place, piece = divmod(i % wide, self._each)
            source = device if device in holders[place] else next(turns[place])
            sources.append((device, piece, source))
        return sources


class PartStep:
    """Reshards on the part, copies within the host, and writes there; see routes.Step."""

    def __init__(self, reshard: Callable, spread: Callable[[Any], Any], put: Callable):
        self._reshard, self._spread, self._put = reshard, spread, put

    def __call__(self, out: Any, params: Any, start: np.int32) -> Any:
        """Runs its programs."""
        return self._put(out, self._spread(self._reshard(params, start)), start)

    def trace(self, out: Any, params: Any, start: np.int32) -> jax.stages.Traced:
        """The resharding program, to the part's own devices."""
        return self._reshard.trace(params, start)


def _split(x: jax.Array, pieces: int) -> tuple[jax.Array, ...]:
    """Every device's share of `x` in `pieces` parts, each an array of the same layout; a share that
    is the whole of `x` stays one."""
    spec = x.sharding.spec
    dim = next((dim for dim, axis in enumerate(spec) if axis is not None), None)
    if pieces == 1 or dim is None:
        return (x,) * pieces
    return _split_program(x, x.sharding.mesh, spec, dim, pieces)


def _split_dim(x, mesh, spec, dim, pieces):
    return jax.shard_map(
        lambda share: tuple(jnp.split(share, pieces, axis=dim)),
        mesh=mesh,
        in_specs=spec,
        out_specs=(spec,) * pieces,
        check_vma=False,
    )(x)


_split_program = jax.jit(_split_dim, static_argnums=(1, 2, 3, 4))
