"""Weights from the training layout to every host's sampler, piece by piece.

A piece is a table (an embedding, a head) or some layers of all stages. One program casts it, brings
it into the form in which a sampler holds it, reshards it, and writes it where it stays: beside the
new weights never more is there than what a piece takes on its way. Where the trainer has a part of
every host's devices, copies within the host follow (part_weights.py).

All processes issue the programs together; afterwards each holds its own copy and needs nobody.
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

from distflow_jax.resharding.common_mesh import relabelled
from distflow_jax.resharding.layer_chunks import LayerSteps, Pieces
from distflow_jax.resharding.routes import Layouts, Step, WholeRoute
from distflow_jax.resharding.submesh_route import PartRoute

# Of a device's weights that are on their way at a time, where a layer is not more: about a
# millisecond of a link. Programs that move much less would be bound by latency.
PIECE_BYTES = 256 * 2**20

_LAYERS = "layers"  # what is stacked, of the parameters
_FIRST = np.int32(0)


class Holding(Protocol):
    """The form in which a sampler holds weights."""

    def hold(self, params: Any) -> Any:
        """Some of the parameters, by their first keys, in that form; traceable. "layers" come
        stacked, any number of them, and stay so or become a list."""

    def layouts(self, mesh: Mesh) -> Any:
        """NamedShardings of all of them in that form."""


@dataclasses.dataclass(frozen=True)
class AsTheyCome:
    """The form in which they are trained, in the layouts `shardings`."""

    shardings: Any

    def hold(self, params: Any) -> Any:
        """`params`."""
        return params

    def layouts(self, mesh: Mesh) -> Any:
        """`shardings`, on another mesh."""
        return jax.tree.map(lambda s: NamedSharding(mesh, s.spec), self.shardings)


class WeightSync:
    """Brings parameters from a training mesh to this process's sampler.

    `shardings` (nested dicts, like the parameters) are the samplers' layouts on the (replica,
    tensor) mesh over all devices; `local_mesh` lists this process's in the same order, so that its
    shards are the local arrays. The training mesh is that on which the parameters come: over all
    devices, or a part of them. `prepare`, traceable: what becomes of some of the parameters, or of
    some of their layers, before they go: those of `shardings`. `holding`: the form in which they
    stay.
    """

    def __init__(
        self,
        shardings: Any,
        local_mesh: Mesh,
        dtype: str,
        holding: Holding | None = None,
        prepare: Callable[[Any], Any] = lambda params: params,
        *,
        piece_bytes: int = PIECE_BYTES,
    ):
        self._shardings, self._local_mesh = shardings, local_mesh
        self._dtype, self._piece_bytes = jnp.dtype(dtype), piece_bytes
        self._holding, self._prepare = holding or AsTheyCome(shardings), prepare
        self._plans: dict[Mesh, _Plan] = {}  # by the training mesh

    def __call__(self, params: Any) -> Any:
        """Weights on this process's own devices, in arrays of their own."""
        plan = self._plan(params)
        params, held = jax.tree.map(plan.view, params), {}
        for keys, step in plan.tables.items():
            held |= jax.block_until_ready(step(None, _some(params, keys), _FIRST))
        if plan.layers is not None:
            held[_LAYERS] = plan.layers(params[_LAYERS])
        return jax.tree.map(relabelled, held, self._holding.layouts(self._local_mesh))

    def programs(self, params: Any) -> Iterator[tuple[jax.stages.Traced, int]]:
        """What a sync of parameters, or of ShapeDtypeStructs with shardings, runs on the trainer's
        devices, and how often."""
        plan = self._plan(params)
        params = jax.tree.map(plan.view, params)
        for keys, step in plan.tables.items():
            yield step.trace(None, _some(params, keys), _FIRST), 1
        if plan.layers is not None:
            yield plan.layers.trace(params[_LAYERS])

    def temporaries(self, params: Any) -> int | None:
        """Bytes of a device that a sync takes beside parameters and new weights; None where the
        platform does not tell. After a sync nothing is compiled for it."""
        found = [t.lower().compile().memory_analysis() for t, _ in self.programs(params)]
        return max((m.temp_size_in_bytes for m in found if m is not None), default=None)

    def _plan(self, params: Any) -> "_Plan":
        mesh = jax.tree.leaves(params)[0].sharding.mesh
        if mesh not in self._plans:
            self._plans[mesh] = self._make_plan(mesh, params)
        return self._plans[mesh]

    def _make_plan(self, mesh: Mesh, params: Any) -> "_Plan":
        replicas = jax.tree.leaves(self._shardings)[0].mesh
        kind = PartRoute if mesh.size < replicas.size else WholeRoute
        route = kind(mesh, replicas, self._local_mesh)
        arriving = jax.eval_shape(self._prepare, params)
        leaving = _like(arriving, jax.tree.map(lambda x: x.sharding, params))
        layouts = Layouts(leaving, self._shardings, self._holding.layouts(replicas))
        sizes = {key: self._bytes(arriving[key], self._shardings[key]) for key in arriving}
        at_once = sum(sizes.values()) <= self._piece_bytes
        groups = [tuple(sizes)] if at_once else [(key,) for key in sizes if key != _LAYERS]
        tables = {
            keys: route.step(
                lambda params, start: self._cast(params),
                lambda out, params, start: self._holding.hold(params),
                layouts.of(lambda tree, keys=keys: _some(tree, keys)),
            )
            for keys in groups
        }
        layers = None
        if not at_once and _LAYERS in sizes:
            stacked = jax.tree.leaves(params[_LAYERS])[0]
            count, of_stage = stacked.shape[0], stacked.sharding.shard_shape(stacked.shape)[0]
            most = self._piece_bytes * count // sizes[_LAYERS]
            layers = LayerSteps(
                route,
                Pieces.of_at_most(count, count // of_stage, most),
                params[_LAYERS],
                lambda layers: self._cast({_LAYERS: layers})[_LAYERS],
                lambda layers: self._holding.hold({_LAYERS: layers})[_LAYERS],
                layouts.of(lambda tree: tree[_LAYERS]),
            )
        return _Plan(route.view, tables, layers)

    def _cast(self, params: Any) -> Any:
        """Some of the parameters, prepared and in the samplers' dtype: the fewer bytes move."""

        def cast(x):
            if x.dtype != self._dtype:
                # for good: XLA may skip a cast that is followed by one back to float32
                to = jnp.finfo(self._dtype)
                x = lax.reduce_precision(x, to.nexp, to.nmant).astype(self._dtype)
            # a copy: of an equal layout and dtype the trainer's own buffers would come, which the
            # next update overwrites
            return jnp.copy(x)

        return jax.tree.map(cast, self._prepare(params))

    def _bytes(self, shapes: Any, shardings: Any) -> int:
        """Of a device, in the samplers' dtype."""
        counts = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)), shapes, shardings)
        return sum(jax.tree.leaves(counts)) * self._dtype.itemsize


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How parameters come from one training mesh: as `view` has them, tables by their keys, and
    layers in pieces, unless all goes at once."""

    view: Callable[[Any], Any]
    tables: Mapping[tuple[str, ...], Step]
    layers: LayerSteps | None


def _like(prepared: Any, given: Any) -> Any:
    """Of `given` what has the same paths as what was prepared of it."""
    flat = flatten_dict(given, sep="/")
    return unflatten_dict({path: flat[path] for path in flatten_dict(prepared, sep="/")}, sep="/")


def _some(params: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: params[key] for key in keys}


def num_bytes(tree: Any) -> int:
    """Bytes of all leaves, counted once each whatever their replication."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
