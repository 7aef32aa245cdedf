"""Weights from a part of every host's devices to the samplers, which have all of them.

First every process's part gets, in one resharding program, what its own devices will hold, each
piece as seldom as the part's size allows; then pieces are copied device to device within the host.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class PartSync:
    """Reshards, casts and copies parameters: part of every host -> local mesh on all of it.

    `shardings` are the samplers' layouts on the (replica, tensor) mesh over all devices, a pytree
    like the parameters; `prepare`, traceable, makes these of what is given. A device of the part
    needs no room beyond what it will hold itself where the sampler's tensor width (of a host, at
    most all its devices) divides the part.
    """

    def __init__(
        self,
        mesh: Mesh,
        shardings: Any,
        local_mesh: Mesh,
        dtype: str,
        prepare: Callable[[Any], Any] = lambda params: params,
    ):
        replicas = jax.tree.leaves(shardings)[0].mesh
        processes = len({d.process_index for d in mesh.devices.flat})
        width, of_host = replicas.shape["tensor"], replicas.size // processes
        hosts, wide = max(1, width // of_host), min(width, of_host)  # of a sampler
        pieces = math.gcd(wide, mesh.size // processes)
        shape = (processes // hosts, hosts, -1, pieces)
        stage = Mesh(mesh.devices.reshape(shape), ("replica", "host", "copy", "tensor"))
        self._each = wide // pieces  # a sampler's pieces in one on the way
        staged = jax.tree.map(lambda s: NamedSharding(stage, _staged_spec(s.spec)), shardings)
        target = jnp.dtype(dtype)
        # copy: what is on the way may end as the sampler's own, and the trainer's is overwritten
        self._reshard = jax.jit(
            lambda params: jax.tree.map(lambda x: jnp.copy(x.astype(target)), prepare(params)),
            out_shardings=staged,
        )
        self._local = jax.tree.map(lambda s: NamedSharding(local_mesh, s.spec), shardings)
        self._sources = self._choose_sources(stage, local_mesh, wide)

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

    def trace(self, params: Any) -> jax.stages.Traced:
        """The resharding program, to the part's own devices."""
        return self._reshard.trace(params)

    def __call__(self, params: Any) -> Any:
        """Parameters on this process's own devices."""
        staged, structure = jax.tree.flatten(self._reshard(params))
        layouts = jax.tree.leaves(self._local)
        spread = []
        for i, layout in enumerate(layouts):
            spread.append(self._spread(staged[i], layout))
            staged[i] = None  # one array at a time is there twice
        return jax.tree.unflatten(structure, spread)

    def _spread(self, x: jax.Array, layout: NamedSharding) -> jax.Array:
        held = [
            {shard.device: shard.data for shard in piece.addressable_shards}
            for piece in _split(x, self._each)
        ]
        arrays = [held[piece][source] for _, piece, source in self._sources]
        copies = jax.device_put(arrays, [device for device, *_ in self._sources])
        return jax.make_array_from_single_device_arrays(x.shape, layout, copies)


def _staged_spec(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(("host", "tensor") if axis == "tensor" else axis for axis in spec))


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
