"""Weights from the training layout to every host's sampler, in one resharding program.

All processes issue it together; afterwards each holds its own copy and needs nobody. Where the
trainer has a part of every host's devices, copies within the host follow (part_weights.py).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from distflow_jax.parallel.part_weights import PartSync


class WeightSync:
    """Reshards and casts parameters: training mesh -> (replica, tensor) mesh -> local mesh.

    `shardings` are the samplers' layouts on the replica mesh (a pytree like the parameters); the
    local mesh lists this process's devices in the same order, so its shards are the local arrays.
    The training mesh is that on which the parameters come: over all devices, or a part of them.
    `prepare`, traceable: what becomes of the parameters before they go, those of `shardings`.
    `arrange`: what becomes of the local arrays at last.
    """

    def __init__(
        self,
        shardings: Any,
        local_mesh: Mesh,
        dtype: str,
        arrange: Callable[[Any], Any] = lambda params: params,
        prepare: Callable[[Any], Any] = lambda params: params,
    ):
        target = jnp.dtype(dtype)
        self._arrange = arrange
        self._from_part = functools.cache(
            lambda mesh: PartSync(mesh, shardings, local_mesh, dtype, prepare)
        )
        self._devices = jax.tree.leaves(shardings)[0].mesh.size
        # copy: without it an equal layout and dtype would hand out the trainer's own buffers, which
        # the next update overwrites
        self._reshard = jax.jit(
            lambda params: jax.tree.map(lambda x: jnp.copy(x.astype(target)), prepare(params)),
            out_shardings=shardings,
        )
        self._local = jax.tree.map(lambda s: NamedSharding(local_mesh, s.spec), shardings)

    def trace(self, params: Any) -> jax.stages.Traced:
        """The resharding program for parameters, or ShapeDtypeStructs with shardings."""
        mesh = jax.tree.leaves(params)[0].sharding.mesh
        if mesh.size < self._devices:
            return self._from_part(mesh).trace(params)
        return self._reshard.trace(params)

    def __call__(self, params: Any) -> Any:
        """Parameters on this process's own devices."""
        mesh = jax.tree.leaves(params)[0].sharding.mesh
        if mesh.size < self._devices:
            return self._arrange(self._from_part(mesh)(params))

        def own(x, layout):
            shards = [shard.data for shard in x.addressable_shards]
            return jax.make_array_from_single_device_arrays(x.shape, layout, shards)

        return self._arrange(jax.tree.map(own, self._reshard(params), self._local))


def num_bytes(tree: Any) -> int:
    """Bytes of all leaves, counted once each whatever their replication."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
