"""Logical axes -> mesh axes: the one table that decides how every array is laid out.

Model code names the dims of its arrays ("hidden", "heads", ...) and knows no mesh. A dim whose mesh
axis does not divide it is an error that says what would, except for key/value heads, which are
replicated when there are fewer of them than the axis is wide.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# logical dim -> the mesh axes that may hold it, the first that the mesh has (none: replicated)
RULES: Mapping[str, tuple[str, ...]] = {
    "batch": ("fsdp", "data"),  # rows of a training batch, slots of a sampler
    "length": (),
    "layers": (),
    "blocks": (),
    "hidden": ("fsdp",),  # of parameters: gathered layer by layer
    "activation": (),  # width of an activation: whole on every device
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "rank": (),  # of adapters
    "mlp": ("tensor",),
    "experts": ("expert",),
    "vocab": ("tensor",),
    "logits": (),  # a sampler's vocabulary: whole, it is sorted out slot by slot
}
# a lone prompt is read by every data rank alike; few key/value heads are copied
_REPLICATE_WHERE_INDIVISIBLE = {"batch", "kv_heads"}

_active_mesh: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("mesh", default=None)


def partition_spec(mesh: Mesh, axes: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
    """Layout of one array whose dims carry the logical names `axes`.

    Raises ValueError where a dim is not divisible by its mesh axis, naming both.
    """
    assert len(axes) == len(shape), (axes, shape)
    entries = []
    for name, size in zip(axes, shape, strict=True):
        axis = next((a for a in RULES[name] if mesh.shape.get(a, 1) > 1), None)
        if axis is None:
            entries.append(None)
            continue
        width = mesh.shape[axis]
        if size % width == 0:
            assert axis not in entries, f"two dims of {axes} claim mesh axis {axis}"
            entries.append(axis)
        elif name in _REPLICATE_WHERE_INDIVISIBLE:
            entries.append(None)
        else:
            fits = [d for d in range(1, width + 1) if size % d == 0]
            raise ValueError(
                f"mesh axis {axis}={width} does not divide {name}={size}; "
                f"use {axis}={fits[-1]} (or any of {fits})"
            )
    return PartitionSpec(*entries)


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


def constrain(x: jax.Array, *axes: str) -> jax.Array:
    """Pins the layout of an activation by the names of its dims; no effect outside `use_mesh`."""
    mesh = _active_mesh.get()
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, sharding(mesh, axes, x.shape))


def width(name: str) -> int:
    """Over how many devices a dim of that name is divided within `use_mesh`; 1 outside."""
    mesh = _active_mesh.get()
    return 1 if mesh is None else max((mesh.shape.get(a, 1) for a in RULES[name]), default=1)


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
) -> Any:
    """`function(*arguments)` on what each device holds of them, without a collective in between.

    `axes` are the arguments' logical dims, each a tuple of names or a pytree of tuples like the
    argument; `out` those of the result, an array. `summed`: a logical dim that the function sums
    over; results are added up over the devices that it is divided over. Within `use_mesh`; outside
    it is a plain call. The dims that are divided must divide evenly, ValueError else.
    """
    mesh = _active_mesh.get()
    if mesh is None or mesh.size == 1:
        return function(*arguments)
    shape = jax.eval_shape(function, *arguments).shape

    def specs(axes, x):
        if isinstance(axes, tuple) and all(isinstance(name, str) for name in axes):
            return partition_spec(mesh, axes, x.shape)
        return type(x)(*map(specs, axes, x))

    parts = () if summed is None else [a for a in RULES[summed] if mesh.shape.get(a, 1) > 1]

    def on_device(*arguments):
        result = function(*arguments)
        return jax.lax.psum(result, tuple(parts)) if parts else result

    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=tuple(map(specs, axes, arguments)),
        out_specs=partition_spec(mesh, out, shape),
        check_vma=False,  # loops whose length differs from device to device
    )(*arguments)
