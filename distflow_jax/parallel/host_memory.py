"""Memory of devices and of the host: sizes, live arrays, and arrays moved between the two.

Shards are moved one by one, so that no process waits for another. Transfers are asynchronous.
"""

import collections
import os
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

HOST = "pinned_host"


def check_host_memory(what: str) -> None:
    """Raises ValueError unless every device of this process has a separate memory on the host.

    `what`: the setting that needs it, for the message.
    """
    for device in jax.local_devices():
        if not has_host_memory(device):
            kinds = [memory.kind for memory in device.addressable_memories()]
            raise ValueError(
                f"{what} needs {HOST} memory, but {device.platform} devices have "
                f"{', '.join(kinds)} here: use 'none'"
            )


def has_host_memory(device: jax.Device) -> bool:
    """Whether a device has a separate memory on the host."""
    kinds = [memory.kind for memory in device.addressable_memories()]
    return HOST in kinds and device.default_memory().kind != HOST


def start_to_host(arrays: Sequence[jax.Array]) -> list[Any]:
    """Copies of arrays (any shape), each of one device, in the memory of the host.

    In `pinned_host` memory they are started and not awaited, and `np.asarray` views them. Where a
    platform has none they are NumPy arrays.
    """
    devices = [x.sharding.device_set for x in arrays]
    if not all(has_host_memory(device) for (device,) in devices):
        return [np.asarray(x) for x in arrays]
    targets = [SingleDeviceSharding(device, memory_kind=HOST) for (device,) in devices]
    return jax.device_put(list(arrays), targets)


def to_host(tree: Any) -> Any:
    """A copy of a pytree of arrays in host memory, with the same layout."""
    return jax.tree.map(lambda x: _to_kind(x, HOST), tree)


def to_device(tree: Any) -> Any:
    """A copy of a pytree of arrays in the default memory of its devices."""
    return jax.tree.map(lambda x: _to_kind(x, None), tree)


def on_host(tree: Any) -> bool:
    """Whether any array of a pytree is in host memory."""
    return any(x.sharding.memory_kind == HOST for x in jax.tree.leaves(tree))


def layouts_on_host(tree: Any) -> Any:
    """ShapeDtypeStructs with shardings -> the same in host memory."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=x.sharding.with_memory_kind(HOST)
        ),
        tree,
    )


def delete(tree: Any) -> None:
    """Frees the buffers after pending computations, even if references remain."""
    for x in jax.tree.leaves(tree):
        x.delete()


def bytes_by_kind() -> dict[str, int]:
    """Bytes of all live arrays on this process's devices by kind of memory.

    Buffers that several arrays share count once.
    """
    total: dict[str, int] = collections.defaultdict(int)
    for (_, kind, _), size in buffers(jax.live_arrays()).items():
        total[kind] += size
    return dict(total)


def buffers(arrays: Iterable[jax.Array]) -> dict[tuple[jax.Device, str, int], int]:
    """(device, kind of memory, address) -> bytes, of each local buffer of `arrays` (any shape)."""
    found = {}
    for x in arrays:
        if not x.is_deleted() and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
            for shard in x.addressable_shards:
                kind = shard.data.sharding.memory_kind
                place = shard.device, kind, shard.data.unsafe_buffer_pointer()
                found[place] = shard.data.nbytes
    return found


def _to_kind(x: jax.Array, kind: str | None) -> jax.Array:
    devices = [shard.device for shard in x.addressable_shards]
    kinds = [kind or device.default_memory().kind for device in devices]
    targets = [
        SingleDeviceSharding(device, memory_kind=memory)
        for device, memory in zip(devices, kinds, strict=True)
    ]
    shards = jax.device_put([shard.data for shard in x.addressable_shards], targets)
    layout = x.sharding.with_memory_kind(kinds[0])
    return jax.make_array_from_single_device_arrays(x.shape, layout, shards)


def device_memory_bytes() -> int:
    """Memory of one of this process's devices, in bytes; 0 if the platform does not report it.

    A CPU device has an equal share of the host's memory.
    """
    local = jax.local_devices()
    if local[0].platform == "cpu":
        return host_memory_bytes() // len(local)
    stats = local[0].memory_stats() or {}
    return int(stats.get("bytes_limit", 0))


def host_memory_bytes() -> int:
    """Memory of this host, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def live_bytes() -> int:
    """Bytes of live arrays on the fullest of this process's devices."""
    total: dict[jax.Device, int] = collections.defaultdict(int)
    for (device, kind, _), size in buffers(jax.live_arrays()).items():
        if kind == device.default_memory().kind:
            total[device] += size
    return max(total.values(), default=0)
