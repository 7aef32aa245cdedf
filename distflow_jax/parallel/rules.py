"""Sharding rules: the one table from logical dims to mesh axes, for every array.

Model code names the dims of its arrays ("hidden", "heads", ...) and refers to no mesh. A dim that
its mesh axes do not divide is an error that lists the sizes that would fit. The dims in
_REPLICATE_WHERE_INDIVISIBLE, such as key/value heads, are replicated instead.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

# logical dim -> the mesh axes that divide it together, of those that the mesh has (none:
# replicated)
RULES: Mapping[str, tuple[str, ...]] = {
    "rows": ("data", "fsdp", "expert"),  # packed rows, and values per row
    "context": ("context",),  # context shards of a row (context_parallel.py)
    "shards": ("data", "fsdp", "expert", "context"),  # the context shards of all rows
    # of a network's activations: context shards of rows in training, slots of a sampler. Pipeline
    # ranks divide them before the first layer and after the last; in between each rank works on
    # all of them (pipeline.py)
    "batch": ("data", "fsdp", "expert", "context", "pipeline"),
    "length": (),
    "stream": ("tensor",),  # tokens of the residual stream between products (transformer.py)
    "layers": ("pipeline",),
    "blocks": (),
    "hidden": ("fsdp",),  # of the parameters of layers, which are gathered layer by layer
    "embedding": ("fsdp", "pipeline"),  # the same dim of tables outside of the layers
    "activation": (),  # width of an activation: whole on every device
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "rank": (),  # of adapters
    "mlp": ("tensor",),
    "experts": ("expert",),  # of a mixture: tokens are sent to them and outputs back (moe.py)
    "vocab": ("tensor",),
    "tower_rows": ("data", "fsdp", "expert", "context", "pipeline"),  # rows of patches
    "tower_hidden": ("fsdp",),  # of a vision tower's parameters (models/vision/)
    "tower_heads": ("tensor",),
    "tower_mlp": ("tensor",),
    "logits": (),  # a sampler's vocabulary: whole, as it is sorted slot by slot
}
# a single prompt is computed by every data rank, the tokens of a decode step by every tensor rank;
# key/value heads are replicated where there are fewer of them than tensor ranks; a vision tower's
# dims have no relation to the mesh that the text model's sizes suggest
_REPLICATE_WHERE_INDIVISIBLE = {
    *("batch", "stream", "kv_heads"),
    *("tower_hidden", "tower_heads", "tower_mlp"),
}
# a tower's rows are those of the text before the context divides these: the last axes are left out
# until the others divide them
_FEWER_WHERE_INDIVISIBLE = {"tower_rows"}

_active_mesh: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)
_divided: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar(
    "divided", default=frozenset()
)


def partition_spec(mesh: Mesh, axes: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
    """The PartitionSpec of an array of this shape whose dims have the logical names `axes`.

    Raises ValueError if a dim is not divisible by its mesh axes; the message names both.
    """
    assert len(axes) == len(shape), (axes, shape)
    entries: list[str | tuple[str, ...] | None] = []
    claimed: set[str] = set()
    for name, size in zip(axes, shape, strict=True):
        held = _held(mesh, name)
        if name in _FEWER_WHERE_INDIVISIBLE:
            while size % math.prod(held.values()):
                held.popitem()
        count = math.prod(held.values())
        if size % count == 0:
            assert not claimed & held.keys(), f"two dims of {axes} claim one of {set(held)}"
            claimed |= held.keys()
            entries.append(_entry(tuple(held)))
        elif name in _REPLICATE_WHERE_INDIVISIBLE:
            entries.append(None)
        else:
            fits = [d for d in range(1, count + 1) if size % d == 0]
            raise ValueError(_indivisible(held, name, size, fits))
    return PartitionSpec(*entries)


def _held(mesh: Mesh, name: str) -> dict[str, int]:
    """The mesh axes that divide a dim of that name, and their sizes."""
    axes = (axis for axis in RULES[name] if axis not in _divided.get())
    return {axis: mesh.shape[axis] for axis in axes if mesh.shape.get(axis, 1) > 1}


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    if len(axes) > 1:
        return axes
    return axes[0] if axes else None


def _indivisible(held: Mapping[str, int], name: str, size: int, fits: list[int]) -> str:
    text = " x ".join(f"{axis}={count}" for axis, count in held.items())
    if len(held) == 1:
        (axis,) = held
        fix = f"use {axis}={fits[-1]} (or any of {fits})"
        return f"mesh axis {text} does not divide {name}={size}; {fix}"
    fix = f"use a product of {fits[-1]} (or any of {fits})"
    return f"mesh axes {text} do not divide {name}={size}; {fix}"


def data_ranks(sizes: Mapping[str, int]) -> int:
    """Number of data ranks of a mesh whose axes have these sizes."""
    return math.prod(sizes.get(axis, 1) for axis in RULES["rows"])


def rows_spec(mesh: Mesh) -> PartitionSpec:
    """The PartitionSpec of packed fields [K, R, ...]: rows over all data ranks, in order."""
    return PartitionSpec(None, _entry(tuple(a for a in RULES["rows"] if a in mesh.shape)))


def sharding(mesh: Mesh, axes: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
    """The NamedSharding of one array; see partition_spec."""
    return NamedSharding(mesh, partition_spec(mesh, axes, shape))


@contextlib.contextmanager
def use_mesh(mesh: Mesh) -> Iterator[None]:
    """Makes `mesh` the active mesh, for `constrain` and others, while a function is traced."""
    token = _active_mesh.set(mesh)
    try:
        yield
    finally:
        _active_mesh.reset(token)


@contextlib.contextmanager
def divided(axis: str) -> Iterator[None]:
    """Marks a mesh axis as manual: no dim is divided over it any more.

    For the body of a shard_map over that axis alone, within `use_mesh`.
    """
    token = _divided.set(_divided.get() | {axis})
    try:
        yield
    finally:
        _divided.reset(token)


def _mesh_here(mesh: Mesh) -> Mesh | AbstractMesh:
    """The mesh for shardings over the axes that are not manual.

    Inside a shard_map JAX accepts only its own view of the mesh.
    """
    return jax.sharding.get_abstract_mesh() if _divided.get() else mesh


def constrain(x: jax.Array, *axes: str) -> jax.Array:
    """Constrains the layout of `x`, any shape, by the names of its dims.

    No effect outside `use_mesh`. Errors: see partition_spec.
    """
    mesh = _active_mesh.get()
    if mesh is None or mesh.size == 1:
        return x
    spec = partition_spec(mesh, axes, x.shape)
    return jax.lax.with_sharding_constraint(x, NamedSharding(_mesh_here(mesh), spec))


def active_mesh() -> Mesh | None:
    """The mesh of `use_mesh`; None outside."""
    return _active_mesh.get()


def width(name: str) -> int:
    """Number of devices that divide a dim of that name within `use_mesh`; 1 outside."""
    mesh = _active_mesh.get()
    return 1 if mesh is None else math.prod(_held(mesh, name).values())


def mesh_axes(name: str) -> tuple[str, ...]:
    """The mesh axes that divide a dim of that name within `use_mesh`; none outside.

    For the collectives of a function that `local` calls.
    """
    mesh = _active_mesh.get()
    return () if mesh is None else tuple(_held(mesh, name))


def platform() -> str:
    """cpu, gpu or tpu: the platform of the active mesh, or JAX's default outside `use_mesh`."""
    mesh = _active_mesh.get()
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


def local(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    axes: Sequence[Any],
    out: tuple[str, ...],
    *,
    summed: str | None = None,
    shape: tuple[int, ...] | None = None,
) -> Any:
    """Calls `function` on the shards of each device: a shard_map over the active mesh.

    The only collectives are those of the function, and the sum over `summed`. Outside `use_mesh`
    this is a plain call.

    Args:
      function: takes the arguments and returns one array.
      arguments: arrays, or tuples of arrays.
      axes: logical dims of each argument, a tuple of names or a tuple of tuples like the argument.
      out: logical dims of the result.
      summed: a logical dim that the function sums over; results are added up over the devices that
        divide it.
      shape: of the result; required if the function has collectives.

    Raises ValueError if a dim is not divisible by its mesh axes.
    """
    mesh = _active_mesh.get()
    if mesh is None or mesh.size == 1:
        return function(*arguments)
    if shape is None:
        shape = jax.eval_shape(function, *arguments).shape

    def specs(axes, x):
        if isinstance(axes, tuple) and all(isinstance(name, str) for name in axes):
            return partition_spec(mesh, axes, x.shape)
        return type(x)(*map(specs, axes, x))

    summed_axes = () if summed is None else mesh_axes(summed)

    def on_device(*arguments):
        result = function(*arguments)
        return jax.lax.psum(result, summed_axes) if summed_axes else result

    return jax.shard_map(
        on_device,
        mesh=_mesh_here(mesh),
        in_specs=tuple(map(specs, axes, arguments)),
        out_specs=partition_spec(mesh, out, shape),
        check_vma=False,  # lengths of loops differ between devices
    )(*arguments)


def device_bytes(spec: Any) -> int:
    """Bytes on one device of a pytree of ShapeDtypeStructs with shardings."""
    leaves = jax.tree.leaves(spec)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
