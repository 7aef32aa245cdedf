"""Weight sync: weights from the training layout to every host's sampler, in chunks.

A chunk is a table (an embedding, a head) or some layers of all pipeline ranks; a small model is one
chunk. One program casts it, reshards it, brings it into the form in which samplers hold it, and
writes it to its place: next to the new weights, memory is needed for one chunk in flight only. If
the trainer runs on a submesh, copies within the host follow (submesh_route.py).

All processes issue the programs together. Afterwards each process holds its own copy.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jax.sharding import Mesh, NamedSharding

from distflow_jax.programs.launch_log import launched
from distflow_jax.resharding.common_mesh import ChunkMove, Layouts, WholeRoute, relabel
from distflow_jax.resharding.layer_chunks import LayerChunks, LayerSync
from distflow_jax.resharding.submesh_route import HostShards, SubmeshRoute

# Bytes of a device's weights in flight at a time, unless one layer is larger: about a millisecond
# of a link. Programs that move much less would be bound by latency.
CHUNK_BYTES = 256 * 2**20

_LAYERS = "layers"  # key of the stacked parameters
_FIRST = np.int32(0)


class SamplerForm(Protocol):
    """The form in which samplers hold weights."""

    def convert(self, params: Any) -> Any:
        """Converts some of the parameters, by their first keys; traceable.

        "layers" are stacked, any number of them, and stay stacked or become a list.
        """

    def layouts(self, mesh: Mesh) -> Any:
        """NamedShardings of all weights in this form, on `mesh`."""


@dataclasses.dataclass(frozen=True)
class TrainedForm:
    """The form in which weights are trained, with the layouts `shardings`."""

    shardings: Any

    def convert(self, params: Any) -> Any:
        """Returns `params` unchanged."""
        return params

    def layouts(self, mesh: Mesh) -> Any:
        """`shardings` on another mesh."""
        return jax.tree.map(lambda s: NamedSharding(mesh, s.spec), self.shardings)


class WeightSync:
    """Brings parameters from a training mesh to this process's sampler.

    The training mesh is that of the parameters passed in: over all devices, or over a submesh.

    Args:
      shardings: nested dicts like the parameters, the samplers' layouts on the (replica, tensor)
        mesh over all devices.
      local_mesh: this process's devices in the same order, so that the shards of the replica mesh
        are the local arrays.
      dtype: of the samplers' weights.
      form: the form in which samplers hold the weights; None: that of training.
      prepare: turns some of the parameters, or some of their layers, into those of `shardings`
        before they are moved (merges adapters, for example); traceable.
      chunk_bytes: bytes per device in flight at a time.
    """

    def __init__(
        self,
        shardings: Any,
        local_mesh: Mesh,
        dtype: str,
        form: SamplerForm | None = None,
        prepare: Callable[[Any], Any] = lambda params: params,
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ):
        self._shardings, self._local_mesh = shardings, local_mesh
        self._dtype, self._chunk_bytes = jnp.dtype(dtype), chunk_bytes
        self._form, self._prepare = form or TrainedForm(shardings), prepare
        self._plans: dict[Mesh, _SyncPlan] = {}  # by the training mesh

    def __call__(self, params: Any) -> Any:
        """Copies of the weights on the devices of this process's sampler."""
        launched("weight sync")
        plan = self._plan(params)
        params, held = jax.tree.map(plan.view, params), {}
        for keys, move in plan.tables.items():
            held |= jax.block_until_ready(move(None, _some(params, keys), _FIRST))
        if plan.layers is not None:
            held[_LAYERS] = plan.layers(params[_LAYERS])
        return jax.tree.map(relabel, held, self._form.layouts(self._local_mesh))

    def leave(self, params: Any) -> "WeightsInHostMemory":
        """The weights in the memory of the host, on their way to devices that only samplers have.

        Collective. The parameters may change afterwards. A chunk leaves when the one before has
        left; the last is not awaited.
        """
        launched("weight sync: leave")
        plan = self._plan(params)
        params = jax.tree.map(plan.view, params)
        left = WeightsInHostMemory(plan, {}, None if plan.layers is None else [])
        before = None
        for keys, move in plan.tables.items():
            _wait(before)
            before = left.tables[keys] = move.leave(_some(params, keys), _FIRST)
        if plan.layers is not None:
            for start, leave in plan.layers.leaving(params[_LAYERS]):
                _wait(before)
                before = leave()
                left.layers.append((start, before))
        return left

    def arrive(self, left: "WeightsInHostMemory") -> Any:
        """The weights that have left, on the devices of this process's sampler."""
        held: dict[str, Any] = {}
        for keys, chunk in left.tables.items():
            held |= jax.block_until_ready(left.plan.tables[keys].arrive(None, chunk, _FIRST))
        if left.layers is not None:
            held[_LAYERS] = left.plan.layers.arrive(left.layers)
        return jax.tree.map(relabel, held, self._form.layouts(self._local_mesh))

    def programs(self, params: Any) -> Iterator[tuple[jax.stages.Traced, int]]:
        """(program, number of runs) for each program of a sync on the trainer's devices.

        `params`: parameters, or ShapeDtypeStructs with shardings.
        """
        plan = self._plan(params)
        params = jax.tree.map(plan.view, params)
        for keys, move in plan.tables.items():
            yield move.trace(None, _some(params, keys), _FIRST), 1
        if plan.layers is not None:
            yield plan.layers.trace(params[_LAYERS])

    def temporaries(self, params: Any) -> int | None:
        """Bytes per device that a sync needs next to the parameters and the new weights.

        None if the platform does not report it. After a sync this compiles nothing.
        """
        found = [t.lower().compile().memory_analysis() for t, _ in self.programs(params)]
        return max((m.temp_size_in_bytes for m in found if m is not None), default=None)

    def _plan(self, params: Any) -> "_SyncPlan":
        mesh = jax.tree.leaves(params)[0].sharding.mesh
        if mesh not in self._plans:
            self._plans[mesh] = self._make_plan(mesh, params)
        return self._plans[mesh]

    def _make_plan(self, mesh: Mesh, params: Any) -> "_SyncPlan":
        replicas = jax.tree.leaves(self._shardings)[0].mesh
        same = set(mesh.devices.flat) == set(replicas.devices.flat)
        kind = WholeRoute if same else SubmeshRoute
        route = kind(mesh, replicas, self._local_mesh)
        arriving = jax.eval_shape(self._prepare, params)
        leaving = _like(arriving, jax.tree.map(lambda x: x.sharding, params))
        layouts = Layouts(leaving, self._shardings, self._form.layouts(replicas))
        sizes = {key: self._bytes(arriving[key], self._shardings[key]) for key in arriving}
        at_once = sum(sizes.values()) <= self._chunk_bytes
        groups = [tuple(sizes)] if at_once else [(key,) for key in sizes if key != _LAYERS]
        tables = {
            keys: route.move(
                lambda params, start: self._cast(params),
                lambda out, params, start: self._form.convert(params),
                layouts.of(lambda tree, keys=keys: _some(tree, keys)),
            )
            for keys in groups
        }
        layers = None
        if not at_once and _LAYERS in sizes:
            stacked = jax.tree.leaves(params[_LAYERS])[0]
            count, of_rank = stacked.shape[0], stacked.sharding.shard_shape(stacked.shape)[0]
            most = self._chunk_bytes * count // sizes[_LAYERS]
            layers = LayerSync(
                route,
                LayerChunks.of_at_most(count, count // of_rank, most),
                params[_LAYERS],
                lambda layers: self._cast({_LAYERS: layers})[_LAYERS],
                lambda layers: self._form.convert({_LAYERS: layers})[_LAYERS],
                layouts.of(lambda tree: tree[_LAYERS]),
            )
        return _SyncPlan(route.view, tables, layers)

    def _cast(self, params: Any) -> Any:
        """Prepares some of the parameters and casts them before the move: fewer bytes move."""
        return cast_weights(self._prepare(params), self._dtype)

    def _bytes(self, shapes: Any, shardings: Any) -> int:
        """Bytes per device in the samplers' dtype."""
        counts = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)), shapes, shardings)
        return sum(jax.tree.leaves(counts)) * self._dtype.itemsize


@dataclasses.dataclass(frozen=True)
class _SyncPlan:
    """The chunk moves of a sync from one training mesh.

    `tables`: moves of whole parameters, by their keys; `layers`: of the stacked layers in chunks.
    If all parameters fit into one chunk, `tables` has one move of all keys, and `layers` is None.
    `view` gives parameters the layout of the moves.
    """

    view: Callable[[Any], Any]
    tables: Mapping[tuple[str, ...], ChunkMove]
    layers: LayerSync | None


@dataclasses.dataclass(frozen=True)
class WeightsInHostMemory:
    """Weights in the memory of the host: what this process's sampler takes of each chunk."""

    plan: _SyncPlan
    tables: dict[tuple[str, ...], Any]
    layers: list[tuple[int, Any]] | None

    @property
    def arrays(self) -> list[Any]:
        """All that this host holds of them."""
        chunks = [*self.tables.values(), *(chunk for _, chunk in self.layers or ())]
        return [shard for x in _on_host(chunks) for shard in x.shards]

    @property
    def ready(self) -> bool:
        """Whether all of them are there: to take them waits for nothing."""
        return all(x.is_ready() for x in self.arrays if isinstance(x, jax.Array))

    @property
    def nbytes(self) -> int:
        """Bytes in the memory of this host."""
        return sum(x.nbytes for x in self.arrays)


def _like(prepared: Any, given: Any) -> Any:
    """The leaves of `given` at the paths of `prepared`."""
    flat = flatten_dict(given, sep="/")
    return unflatten_dict({path: flat[path] for path in flatten_dict(prepared, sep="/")}, sep="/")


def _wait(chunk: Any) -> None:
    """Waits until a chunk has left, if there is one: next to it no other is in flight."""
    for x in _on_host(chunk):
        x.wait()


def _on_host(chunks: Any) -> list[HostShards]:
    return jax.tree.leaves(chunks, is_leaf=lambda x: isinstance(x, HostShards))


def _some(params: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: params[key] for key in keys}


def cast_weights(params: Any, dtype: Any) -> Any:
    """The parameters in a dtype (None: their own), in buffers of their own; traceable."""

    def cast(x):
        if dtype is not None and x.dtype != jnp.dtype(dtype):
            # reduce_precision stays: XLA may drop a cast that a cast back to float32 follows
            to = jnp.finfo(dtype)
            x = lax.reduce_precision(x, to.nexp, to.nmant).astype(dtype)
        # a copy: with equal layout and dtype the output would be the trainer's own buffers,
        # which the next update overwrites
        return jnp.copy(x)

    return jax.tree.map(cast, params)


def num_bytes(tree: Any) -> int:
    """Bytes of all leaves, each counted once whatever its replication."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
