"""Logical axes -> mesh axes: the one table that decides how every array is laid out.

Model code names the dims of its arrays ("hidden", "heads", ...) and knows no mesh. A dim whose mesh
axis does not divide it is an error that says what would, except for key/value heads, which are
replicated when there are fewer of them than the axis is wide.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

# logical dim -> the mesh axes that hold it, together: all of them that the mesh has (none:
# replicated)
RULES: Mapping[str, tuple[str, ...]] = {
    "rows": ("data", "fsdp", "expert"),  # packed rows, and what is known of each
    "context": ("context",),  # parts of a row (context.py)
    "shards": ("data", "fsdp", "expert", "context"),  # the parts of all rows
    # of a network's activations: parts of rows in training, slots of a sampler. Stages have a share
    # of them before the first layer and behind the last; between, each works on all (pipeline.py)
    "batch": ("data", "fsdp", "expert", "context", "pipeline"),
    "length": (),
    "stream": ("tensor",),  # tokens of the residual stream between two products (transformer.py)
    "layers": ("pipeline",),
    "blocks": (),
    "hidden": ("fsdp",),  # of layers' parameters: gathered layer by layer; the others have copies
    "embedding": ("fsdp", "pipeline"),  # the same dim of tables that belong to no layer
    "activation": (),  # width of an activation: whole on every device
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "rank": (),  # of adapters
    "mlp": ("tensor",),
    "experts": ("expert",),  # of a mixture: tokens go to them, and what comes of them back (moe.py)
    "vocab": ("tensor",),
    "logits": (),  # a sampler's vocabulary: whole, it is sorted out slot by slot
}
# a lone prompt is read by every data rank alike, the tokens of a decode step by every tensor rank;
# few key/value heads are copied
_REPLICATE_WHERE_INDIVISIBLE = {"batch", "stream", "kv_heads"}

_active_mesh: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)
_divided: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar(
    "divided", default=frozenset()
)


def partition_spec(mesh: Mesh, axes: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
    """Layout of one array whose dims carry the logical names `axes`.

    Raises ValueError where a dim is not divisible by its mesh axes, naming both.
    """
    assert len(axes) == len(shape), (axes, shape)
    entries: list[str | tuple[str, ...] | None] = []
    claimed: set[str] = set()
    for name, size in zip(axes, shape, strict=True):
        held = _held(mesh, name)
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
    """The mesh axes over which a dim of that name is divided, and their sizes."""
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
    """Groups of devices that hold different rows, of a mesh whose axes have these sizes."""
    return math.prod(sizes.get(axis, 1) for axis in RULES["rows"])


def rows_spec(mesh: Mesh) -> PartitionSpec:
    """Layout of packed fields [K, R, ...]: rows over all data ranks, in their order."""
    return PartitionSpec(None, _entry(tuple(a for a in RULES["rows"] if a in mesh.shape)))


def sharding(mesh: Mesh, axes: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
    """NamedSharding of one array; see partition_spec."""
    return NamedSharding(mesh, partition_spec(mesh, axes, shape))


@contextlib.contextmanager
def use_mesh(mesh: Mesh) -> Iterator[None]:
    """Within it, `constrain` pins activations to `mesh`. Enter it while a function is traced."""
    token = _active_mesh.set(mesh)
    try:
        yield
    finally:
        _active_mesh.reset(token)


@contextlib.contextmanager
def divided(axis: str) -> Iterator[None]:
    """Within it, arrays are what a device has of them along a mesh axis, which no dim is divided
    over any more: for the body of a shard_map over that axis alone. Enter it within `use_mesh`."""
    token = _divided.set(_divided.get() | {axis})
    try:
        yield
    finally:
        _divided.reset(token)


def _mesh_here(mesh: Mesh) -> Mesh | AbstractMesh:
    """`mesh` for what is laid out on the axes that are not divided yet: inside a shard_map JAX
    takes only its own view of the mesh."""
    return jax.sharding.get_abstract_mesh() if _divided.get() else mesh


def constrain(x: jax.Array, *axes: str) -> jax.Array:
    """Pins the layout of an activation by the names of its dims; no effect outside `use_mesh`."""
    mesh = _active_mesh.get()
    if mesh is None or mesh.size == 1:
        return x
    spec = partition_spec(mesh, axes, x.shape)
    return jax.lax.with_sharding_constraint(x, NamedSharding(_mesh_here(mesh), spec))


def active_mesh() -> Mesh | None:
    """The mesh of `use_mesh`; None outside."""
    return _active_mesh.get()


def width(name: str) -> int:
    """Over how many devices a dim of that name is divided within `use_mesh`; 1 outside."""
    mesh = _active_mesh.get()
    return 1 if mesh is None else math.prod(_held(mesh, name).values())


def mesh_axes(name: str) -> tuple[str, ...]:
    """The mesh axes over which a dim of that name is divided within `use_mesh`; none outside.

    For the collectives of a function that `local` calls.
    """
    mesh = _active_mesh.get()
    return () if mesh is None else tuple(_held(mesh, name))


def platform() -> str:
    """What computes: cpu, gpu or tpu. That of the mesh within `use_mesh`, else JAX's default."""
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
    """`function(*arguments)` on what each device holds of them, without a collective but its own.

    `axes` are the arguments' logical dims, each a tuple of names or a pytree of tuples like the
    argument; `out` those of the result, an array, whose `shape` must be given where the function
    has collectives of its own. `summed`: a logical dim that the function sums over; results are
    added up over the devices that it is divided over. Within `use_mesh`; outside it is a plain
    call. The dims that are divided must divide evenly, ValueError else.
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

    parts = () if summed is None else mesh_axes(summed)

    def on_device(*arguments):
        result = function(*arguments)
        return jax.lax.psum(result, parts) if parts else result

    return jax.shard_map(
        on_device,
        mesh=_mesh_here(mesh),
        in_specs=tuple(map(specs, axes, arguments)),
        out_specs=partition_spec(mesh, out, shape),
        check_vma=False,  # loops whose length differs from device to device
    )(*arguments)
