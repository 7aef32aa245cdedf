"""From one mesh to another over the same devices, in steps that are one kind of collective each.

Left to itself XLA gives every device the whole array where layouts are too far apart, and cuts off
what it should have.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Axes = tuple[tuple[str, ...], ...]  # over which each dim of an array is divided


class Refinement:
    """Layouts on two meshes whose devices are in the same order, as layouts on one.

    Its axes are parts of those of both: of (fsdp 16, tensor 4) and (replica 8, tensor 8) they are
    8, 2, 4, of which fsdp is the first two, and the samplers' tensor the last two. Where an axis of
    one ends within a factor of the other's (6 = 3 x 2 and 2 x 3) there is no such mesh, layouts
    stay as they are, and XLA is left to itself.
    """

    def __init__(self, first: Mesh, second: Mesh):
        ends = sorted({1, *_ends(first), *_ends(second)})
        self._pairs = list(itertools.pairwise(ends))[::-1]  # the outermost first
        self._exists = all(outer % inner == 0 for inner, outer in self._pairs)
        if self._exists:
            shape = [outer // inner for inner, outer in self._pairs]
            self._mesh = Mesh(first.devices.reshape(shape), [_name(p) for p in self._pairs])

    def layout(self, sharding: NamedSharding) -> NamedSharding:
        """The same layout on the common mesh."""
        if not self._exists:
            return sharding
        axes = self._axes(sharding.mesh)
        entries = ((name,) if isinstance(name, str) else name or () for name in sharding.spec)
        return self._sharding([sum((axes[n] for n in names), ()) for names in entries])

    def view(self, x: Any) -> Any:
        """An array or a ShapeDtypeStruct in the same layout on the common mesh."""
        layout = self.layout(x.sharding)
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)
        return relabelled(x, layout)

    def travel(self, x: jax.Array, source: NamedSharding, target: NamedSharding) -> jax.Array:
        """`x` from one layout to another; traceable.

        Axes that divide another dim there go to that (all-to-all), those that divide none here are
        cut; then they come in the target's order (permutation), and what divides nothing there is
        gathered.
        """
        source, target = self.layout(source), self.layout(target)
        for step in self._steps(source, target, x.ndim) if self._exists else (source, target):
            x = lax.with_sharding_constraint(x, step)
        return x

    def _steps(
        self, source: NamedSharding, target: NamedSharding, dims: int
    ) -> list[NamedSharding]:
        here, there = _dims(source, dims), _dims(target, dims)
        wanted = {axis for axes in there for axis in axes}
        left = [tuple(a for a in axes if a not in wanted) for axes in here]
        moved = [
            tuple(a for a in own if a not in wanted or a in aim)
            + tuple(a for a in aim if a not in own)
            for own, aim in zip(here, there, strict=True)
        ]
        ordered = [aim + rest for aim, rest in zip(there, left, strict=True)]
        return [source, *map(self._sharding, (moved, ordered)), target]

    def _sharding(self, dims: list[tuple[str, ...]]) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec(*(axes or None for axes in dims)))

    def _axes(self, mesh: Mesh) -> Mapping[str, tuple[str, ...]]:
        """The common mesh's axes that each axis of one of the two is, the outermost first."""
        found, inner = {}, 1
        for name, size in reversed(mesh.shape.items()):
            outer = inner * size
            found[name] = tuple(_name(p) for p in self._pairs if inner <= p[0] and p[1] <= outer)
            inner = outer
        return found


def relabelled(x: jax.Array, layout: NamedSharding) -> jax.Array:
    """An array under another name of its layout: where that is of this process's devices alone,
    what these have of it. Nothing is copied."""
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, layout, shards)


def _dims(sharding: NamedSharding, count: int) -> Axes:
    spec = [*sharding.spec, *[None] * (count - len(sharding.spec))]
    return tuple((axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec)


def _name(pair: tuple[int, int]) -> str:
    return f"{pair[0]}:{pair[1]}"


def _ends(mesh: Mesh) -> list[int]:
    """Products of the sizes of axes, from the innermost on."""
    sizes = reversed(mesh.shape.values())
    return list(itertools.accumulate(sizes, lambda a, b: a * b))
