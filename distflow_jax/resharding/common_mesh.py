"""Routes of weight chunks from a training mesh to the samplers' devices, and resharding between two
meshes over the same devices, one kind of collective per step.

Where two layouts differ too much, XLA by itself gathers the whole array on every device and then
cuts out each device's shard.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Axes = tuple[tuple[str, ...], ...]  # the mesh axes that divide each dim of an array


class CommonMesh:
    """A mesh on which the layouts of two meshes over the same device order can both be written.

    Its axes divide the axes of both: for (fsdp 16, tensor 4) and (replica 8, tensor 8) they are
    8, 2, 4. fsdp is the first two of them, the samplers' tensor the last two. No such mesh exists
    where an axis of one ends within a factor of the other's (6 = 3 x 2 and 2 x 3): layouts are then
    kept unchanged, and XLA chooses the collectives.
    """

    def __init__(self, first: Mesh, second: Mesh):
        ends = sorted({1, *_ends(first), *_ends(second)})
        self._pairs = list(itertools.pairwise(ends))[::-1]  # the outermost first
        self._exists = all(outer % inner == 0 for inner, outer in self._pairs)
        if self._exists:
            shape = [outer // inner for inner, outer in self._pairs]
            self._mesh = Mesh(first.devices.reshape(shape), [_name(p) for p in self._pairs])

    def layout(self, sharding: NamedSharding) -> NamedSharding:
        """`sharding`, a layout on one of the two meshes, written on the common mesh."""
        if not self._exists:
            return sharding
        axes = self._axes(sharding.mesh)
        entries = ((name,) if isinstance(name, str) else name or () for name in sharding.spec)
        return self._sharding([sum((axes[n] for n in names), ()) for names in entries])

    def view(self, x: Any) -> Any:
        """An array or ShapeDtypeStruct, its layout written on the common mesh; copies nothing."""
        layout = self.layout(x.sharding)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)
        return relabel(x, layout)

    def reshard(self, x: jax.Array, source: NamedSharding, target: NamedSharding) -> jax.Array:
        """Reshards `x`, any shape, from one layout to another; traceable.

        Axes that divide another dim in the target move to that dim (all-to-all), and axes that
        divide none in the source are applied by slicing. Then axes are brought into the target's
        order (permutation), and those that the target does not use are gathered.
        """
        source, target = self.layout(source), self.layout(target)
        for step in self._steps(source, target, x.ndim) if self._exists else (source, target):
            x = lax.with_sharding_constraint(x, step)
        return x

    def _steps(
        self, source: NamedSharding, target: NamedSharding, dims: int
    ) -> list[NamedSharding]:
        own_dims, target_dims = _dims(source, dims), _dims(target, dims)
        wanted = {axis for axes in target_dims for axis in axes}
        left = [tuple(a for a in axes if a not in wanted) for axes in own_dims]
        moved = [
            tuple(a for a in own if a not in wanted or a in aim)
            + tuple(a for a in aim if a not in own)
            for own, aim in zip(own_dims, target_dims, strict=True)
        ]
        ordered = [aim + rest for aim, rest in zip(target_dims, left, strict=True)]
        return [source, *map(self._sharding, (moved, ordered)), target]

    def _sharding(self, dims: list[tuple[str, ...]]) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec(*(axes or None for axes in dims)))

    def _axes(self, mesh: Mesh) -> Mapping[str, tuple[str, ...]]:
        """The axes of the common mesh that make up each axis of `mesh`, the outermost first."""
        found, inner = {}, 1
        for name, size in reversed(mesh.shape.items()):
            outer = inner * size
            found[name] = tuple(_name(p) for p in self._pairs if inner <= p[0] and p[1] <= outer)
            inner = outer
        return found


def relabel(x: jax.Array, layout: NamedSharding) -> jax.Array:
    """An array, any shape, of the same shards under another sharding; copies nothing.

    If `layout` covers only this process's devices, the result is their part of the array.
    """
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, layout, shards)


def _dims(sharding: NamedSharding, count: int) -> Axes:
    spec = [*sharding.spec, *[None] * (count - len(sharding.spec))]
    return tuple((axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec)


def _name(pair: tuple[int, int]) -> str:
    return f"{pair[0]}:{pair[1]}"


def _ends(mesh: Mesh) -> list[int]:
    """Cumulative products of the axis sizes, from the innermost axis."""
    sizes = reversed(mesh.shape.values())
    return list(itertools.accumulate(sizes, lambda a, b: a * b))


# traceable: (parameters, the chunk's first layer) -> the chunk to be moved
Take = Callable[[Any, jax.Array], Any]
# traceable: (weights or None, chunk, its first layer) -> the weights with the chunk written in
Put = Callable[[Any, Any, jax.Array], Any]


class ChunkMove(Protocol):
    """The move of one chunk: (weights or None, parameters, the chunk's first layer) -> weights.

    Returns the weights with the chunk written in, or the chunk alone for None. The weights passed
    in are donated.
    """

    def __call__(self, out: Any, params: Any, start: np.int32) -> Any:
        """Runs the programs of the move."""

    def trace(self, out: Any, params: Any, start: np.int32) -> jax.stages.Traced:
        """The program on the trainer's devices."""


@dataclasses.dataclass(frozen=True)
class Layouts:
    """Pytrees of the NamedShardings of a chunk on its way."""

    leaving: Any  # on the trainer's mesh, before the move
    arriving: Any  # on the samplers' (replica, tensor) mesh, after the move
    held: Any  # of the output of `put`, on the samplers' mesh

    def of(self, choose: Callable[[Any], Any]) -> "Layouts":
        """The layouts of a subtree, picked by `choose`."""
        return Layouts(choose(self.leaving), choose(self.arriving), choose(self.held))


class Route(Protocol):
    """A way from a trainer's mesh to the devices on which samplers hold the weights."""

    def view(self, x: Any) -> Any:
        """A parameter, or its ShapeDtypeStruct, in the layout that moves take."""

    def place(self, layout: NamedSharding) -> NamedSharding:
        """The sharding in which weights of this layout on the samplers' mesh are stored."""

    def move(self, take: Take, put: Put, layouts: Layouts) -> ChunkMove:
        """The move of chunks with these layouts."""


class WholeRoute:
    """The route from all devices to all devices: a move is one program."""

    def __init__(self, trainer: Mesh, replicas: Mesh, local: Mesh):
        self._common = CommonMesh(trainer, replicas)
        self.view, self.place = self._common.view, self._common.layout

    def move(self, take: Take, put: Put, layouts: Layouts) -> ChunkMove:
        """See Route."""

        def run(out, params, start):
            chunk = take(params, start)
            arrived = jax.tree.map(self._common.reshard, chunk, layouts.leaving, layouts.arriving)
            return put(out, arrived, start)

        held = jax.tree.map(self.place, layouts.held)
        return jax.jit(run, donate_argnums=0, out_shardings=held)
