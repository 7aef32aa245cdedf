"""Measured rates of this job's devices: a plain product, copies of memory, collectives.

n devices, S the side of a square matrix.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from peers.paced import clocked

from distflow_jax.parallel.host_memory import device_memory_bytes
from distflow_jax.parallel.mesh import canonical_order
from distflow_jax.planning.chips import Chip, chip_of

_PRODUCT = {"cpu": 1536}  # S
_COPIED = {"cpu": 256 << 20}  # bytes, larger than every cache
_ACCELERATOR_PRODUCT, _ACCELERATOR_COPIED = 8192, 1 << 30
_REPEATS = 5


def this_chip(dtype: str) -> Chip:
    """This job's chip with the vendor's rates, or with measured rates if it is unknown."""
    return chip_of(jax.devices()[0].device_kind) or measured_chip(dtype)


def measured_chip(dtype: str) -> Chip:
    """This job's devices with rates measured while all of them run; products in `dtype`."""
    number = jax.device_count()
    link, hop = _links() if number > 1 else (0.0, 0.0)
    return Chip(
        name=jax.devices()[0].device_kind,
        platform=jax.default_backend(),
        memory=device_memory_bytes(),
        flops=product_rate(dtype),
        memory_bandwidth=copy_rate(),
        link_bandwidth=link,
        hop_seconds=hop,
        source="measured",
        host_bandwidth=host_rate(),
    )


def product_rate(dtype: str = "float32") -> float:
    """FLOP/s of a device in a plain product of square matrices, the best of five."""
    side = _PRODUCT.get(jax.default_backend(), _ACCELERATOR_PRODUCT)
    x = _on_each(np.full((side, side), 1 / side, jnp.dtype(dtype)))
    return 2 * side**3 / _best(lambda: _squared(x))


def copy_rate() -> float:
    """Bytes/s of a device's memory, read plus written."""
    size = _COPIED.get(jax.default_backend(), _ACCELERATOR_COPIED)
    held = [_on_each(np.zeros(size // 4, np.float32))]

    def run():
        # in place: on a CPU the first touch of new pages costs more than the copy
        held[0] = _added(held[0])
        return held[0]

    return 2 * size / _best(run)


def host_rate() -> float:
    """Bytes/s from the host's memory to a device's, one way."""
    size = _COPIED.get(jax.default_backend(), _ACCELERATOR_COPIED) // 4
    x = np.ones(size // 4, np.float32)
    return size / _best(lambda: jax.device_put(x))


def _links() -> tuple[float, float]:
    """(bytes/s one way of a ring through all devices, seconds of one hop)."""
    mesh = _all_devices()
    size, hops = 64 << 20, mesh.size - 1

    def gather(count: int) -> float:
        x = jax.device_put(np.zeros(count, np.float32), NamedSharding(mesh, PartitionSpec("all")))
        whole = jax.jit(lambda x: x + 1, out_shardings=NamedSharding(mesh, PartitionSpec()))
        return _best(lambda: whole(x))

    hop = gather(mesh.size) / hops
    return size * hops / mesh.size / max(gather(size // 4) - hops * hop, 1e-9), hop


@jax.jit
def _squared(x: jax.Array) -> jax.Array:
    return x @ x


@functools.partial(jax.jit, donate_argnums=0)
def _added(x: jax.Array) -> jax.Array:
    return x + 1


def _all_devices() -> Mesh:
    return Mesh(np.array(canonical_order(jax.devices()), dtype=object), ("all",))


def _on_each(x: np.ndarray) -> jax.Array:
    """[n, ...]: a copy of the array on every device. Compiles nothing."""
    mesh = _all_devices()
    there = NamedSharding(mesh, PartitionSpec("all"))
    return jax.make_array_from_callback((mesh.size, *x.shape), there, lambda index: x[None])


def _best(run: Callable[[], Any]) -> float:
    """Seconds of the fastest of several calls, after one that compiles."""

    def finish() -> None:
        jax.block_until_ready(run())

    finish()
    return min(clocked(finish)[1] for _ in range(_REPEATS))
