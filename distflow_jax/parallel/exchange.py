"""Ragged host data between processes: all-to-all in pieces of fixed capacity.

P processes, D devices of each, C bytes that a device carries to each peer in one round.

No process ever holds more than what is meant for it, and nothing recompiles: the programs, one per
capacity, are made once, and what does not fit goes in further rounds.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distflow_jax.parallel import processes
from distflow_jax.parallel.mesh import canonical_devices

# bytes per device and peer in one round, and how many rounds are better than the next larger one
CAPACITIES = tuple(1 << power for power in range(8, 21, 2))
FEW_ROUNDS = 4


@dataclasses.dataclass
class Traffic:
    """What this process received from others, in bytes."""

    payload: int = 0
    padding: int = 0  # room of the rounds that carried nothing
    rounds: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            *(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self))
        )


def all_gather_ragged(array: np.ndarray) -> list[np.ndarray]:
    """Every process's array, in the order of the processes. First dims may differ. Collective."""
    array = np.asarray(array)
    counts = processes.all_gather_ints(np.array(len(array), np.int64))
    padded = np.zeros((int(counts.max()), *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    parts = processes.all_gather_ints(padded)
    return [part[:count] for part, count in zip(parts, counts, strict=True)]


class Exchange:
    """All-to-all of byte strings among the processes of the job. Collective in every method."""

    def __init__(self):
        self._count = processes.process_count()
        self._devices = jax.local_device_count()
        devices = canonical_devices().reshape(self._count, self._devices)
        self._sharding = NamedSharding(Mesh(devices, ("process", "device")), PartitionSpec(*_AXES))

        def swap(x):  # [1, 1, P, C] on each device: what goes to each peer, then what came
            return jax.lax.all_to_all(x, "process", split_axis=2, concat_axis=2, tiled=True)

        self._swap = jax.jit(
            jax.shard_map(
                swap,
                mesh=self._sharding.mesh,
                in_specs=PartitionSpec(*_AXES),
                out_specs=PartitionSpec(*_AXES),
            )
        )

    def compile(self) -> None:
        """Runs every program once, so that nothing compiles later."""
        if self._count > 1:
            processes.all_gather_ints(np.zeros(1, np.int64))
            for capacity in CAPACITIES:
                self._round(np.zeros((self._devices, self._count, capacity), np.uint8))

    def __call__(self, blobs: Sequence[bytes]) -> tuple[list[bytes], Traffic]:
        """Sends blobs[q] to process q; returns what every process sent here, and what it cost.

        One's own blob comes back without a trip.
        """
        me = processes.process_index()
        sizes = np.array([len(blob) for blob in blobs], np.int64)
        sizes[me] = 0
        if self._count == 1:
            return list(blobs), Traffic()
        most = int(processes.all_gather_ints(sizes.max(initial=0)).max()) + _SIZE_BYTES
        fits = (c for c in CAPACITIES if c * self._devices * FEW_ROUNDS >= most)
        per_round = next(fits, CAPACITIES[-1]) * self._devices
        rounds = -(-most // per_round) if most > _SIZE_BYTES else 0
        if not rounds:
            return [blobs[q] if q == me else b"" for q in range(self._count)], Traffic()
        out = np.zeros((self._count, rounds * per_round), np.uint8)
        for q, blob in enumerate(blobs):
            if q != me:
                framed = int(sizes[q]).to_bytes(_SIZE_BYTES, "little") + blob
                out[q, : len(framed)] = np.frombuffer(framed, np.uint8)
        came = np.concatenate(
            [
                self._round(part.reshape(self._count, self._devices, -1).swapaxes(0, 1))
                for part in np.split(out, rounds, axis=1)
            ],
            axis=1,
        )
        result = []
        for q in range(self._count):
            size = int.from_bytes(came[q, :_SIZE_BYTES].tobytes(), "little")
            result.append(
                blobs[me] if q == me else came[q, _SIZE_BYTES : _SIZE_BYTES + size].tobytes()
            )
        payload = sum(len(blob) for q, blob in enumerate(result) if q != me)
        room = (self._count - 1) * rounds * per_round
        return result, Traffic(payload, room - payload, rounds)

    def _round(self, local: np.ndarray) -> np.ndarray:
        """[D, P, C] to each peer -> [P, D * C] from each peer."""
        capacity = local.shape[-1]
        shape = (self._count, self._devices, self._count, capacity)
        with processes.communicating():
            array = jax.make_array_from_process_local_data(self._sharding, local[None], shape)
            parts = {s.index[1].start or 0: s.data for s in self._swap(array).addressable_shards}
            came = np.stack([np.asarray(parts[d])[0, 0] for d in range(self._devices)])  # [D, P, C]
        return came.swapaxes(0, 1).reshape(self._count, -1)


_AXES = ("process", "device")
_SIZE_BYTES = 8
