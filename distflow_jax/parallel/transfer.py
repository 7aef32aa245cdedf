"""Weights from the training layout to every host's sampler, in one resharding program.

All processes issue it together; afterwards each holds its own copy and needs nobody.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding


class WeightSync:
    """Reshards and casts parameters: training mesh -> (replica, tensor) mesh -> local mesh.

    `shardings` are the samplers' layouts on the replica mesh (a pytree like the parameters); the
    local mesh lists this process's devices in the same order, so its shards are the local arrays.
    """

    def __init__(self, shardings: Any, local_mesh: Mesh, dtype: str):
        target = jnp.dtype(dtype)
        # copy: without it an equal layout and dtype would hand out the trainer's own buffers, which
        # the next update overwrites
        self._reshard = jax.jit(
            lambda params: jax.tree.map(lambda x: jnp.copy(x.astype(target)), params),
            out_shardings=shardings,
        )
        self._local = jax.tree.map(lambda s: NamedSharding(local_mesh, s.spec), shardings)

    def __call__(self, params: Any) -> Any:
        """Parameters on this process's own devices."""

        def own(x, layout):
            shards = [shard.data for shard in x.addressable_shards]
            return jax.make_array_from_single_device_arrays(x.shape, layout, shards)

        return jax.tree.map(own, self._reshard(params), self._local)


def num_bytes(tree: Any) -> int:
    """Bytes of all leaves, counted once each whatever their replication."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
