"""The weight store of a trainer process: versions in host memory, in chunks.

Each trainer process copies and serves the blocks of its own devices, each block once. Nothing is
gathered, and no process holds a whole model that is sharded. Weights are those of training, cast
and with adapters merged; workers convert them to their samplers' form.

Blocks are cut identically everywhere, into chunks of a few MiB along their longest dims. All chunks
of a tensor form a grid: in each dim their intervals are consecutive. A manifest lists the chunks of
a process with their checksums.
"""

import dataclasses
import itertools
import json
import math
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from distflow_jax.models import lora
from distflow_jax.resharding.weight_sync import cast_weights
from distflow_jax.stream.wire.calls import Bytes, Refused

CHUNK_BYTES = 4 << 20
# after its last chunk, in which a version that is to be forgotten counts as being pulled
LINGER_SECONDS = 5.0

# -- chunks ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ChunkSpec:
    """The position of a chunk in its tensor, and the CRC-32 of its bytes in C order."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    checksum: int = 0

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def overlap(
        self, start: Sequence[int], shape: Sequence[int]
    ) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """The overlap with a block, as indices into both; None: there is none."""
        of_chunk, of_block = [], []
        for a, n, b, m in zip(self.start, self.shape, start, shape, strict=True):
            low, high = max(a, b), min(a + n, b + m)
            if low >= high:
                return None
            of_chunk.append(slice(low - a, high - a))
            of_block.append(slice(low - b, high - b))
        return tuple(of_chunk), tuple(of_block)


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor, and the chunks of it that a process holds."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[ChunkSpec, ...]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The chunks of one version of the weights that a process holds."""

    attempt: str
    version: int
    tensors: Mapping[str, TensorSpec]

    def encode(self) -> bytes:
        """As JSON."""
        tensors = {
            path: [t.shape, t.dtype, [[*c.start, *c.shape, c.checksum] for c in t.chunks]]
            for path, t in self.tensors.items()
        }
        named = {"attempt": self.attempt, "version": self.version}
        return json.dumps(named | {"tensors": tensors}, separators=(",", ":")).encode()


def read_manifest(data: Bytes) -> Manifest:
    """Inverse of Manifest.encode."""
    raw, tensors = json.loads(data), {}
    for path, (shape, dtype, rows) in raw["tensors"].items():
        dims = len(shape)
        chunks = [ChunkSpec(tuple(r[:dims]), tuple(r[dims:-1]), r[-1]) for r in rows]
        tensors[path] = TensorSpec(tuple(shape), dtype, tuple(chunks))
    return Manifest(raw["attempt"], raw["version"], tensors)


def cut(
    start: Sequence[int], shape: Sequence[int], itemsize: int, most: int
) -> Iterator[ChunkSpec]:
    """The chunks of a block, of at most `most` bytes: its longest dims are halved until so."""
    if 0 in shape:
        return
    step = list(shape)
    while math.prod(step) * itemsize > most and math.prod(step) > 1:
        longest = step.index(max(step))
        step[longest] = -(-step[longest] // 2)
    begins = [range(0, n, s) for n, s in zip(shape, step, strict=True)]
    for offset in itertools.product(*begins):
        sizes = tuple(min(s, n - o) for s, n, o in zip(step, shape, offset, strict=True))
        yield ChunkSpec(tuple(a + o for a, o in zip(start, offset, strict=True)), sizes)


checksum = zlib.crc32

# -- the store -------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Version:
    tensors: dict[str, TensorSpec] = dataclasses.field(default_factory=dict)
    # by path and first element
    chunks: dict[tuple[str, tuple[int, ...]], bytes] = dataclasses.field(default_factory=dict)
    asked: float = -LINGER_SECONDS  # when a chunk was asked for last
    forgotten: bool = False


class WeightStore:
    """Versions of the weights that this process serves.

    Args:
      attempt: of the run; versions of another one are other weights.
      prepare: converts some of the parameters to the samplers' (merges adapters, for example);
        traceable.
      dtype: of the samplers' weights; None: the parameters' own.
      chunk_bytes: maximum size of a chunk.
    """

    address = "this process"

    def __init__(
        self,
        attempt: str,
        prepare: Callable[[Any], Any] = lambda params: params,
        dtype: str | None = None,
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ):
        self.attempt, self._prepare = attempt, prepare
        self._dtype, self._chunk_bytes = dtype, chunk_bytes
        self._programs: dict[str, Callable[[Any], Any]] = {}
        self._versions: dict[int, _Version] = {}
        self._lock = threading.Lock()

    @property
    def versions(self) -> list[int]:
        """Versions that are served, without those that are forgotten."""
        with self._lock:
            return sorted(v for v, kept in self._versions.items() if not kept.forgotten)

    @property
    def nbytes(self) -> int:
        """Bytes in the memory of this host."""
        with self._lock:
            return sum(len(x) for kept in self._versions.values() for x in kept.chunks.values())

    def put(self, version: int, params: Any) -> None:
        """Copies this process's blocks of the weights, and serves them from now on.

        Collective, from the thread that issues programs; the parameters may change afterwards. One
        tensor at a time, the next one on its way meanwhile: devices need memory for two.
        """
        flat, kept, before = flatten_dict(params, sep="/"), _Version(), None
        for path in flat:
            if lora.is_adapter(path):
                continue
            leaving = self._leaving(path, flat)
            if before is not None:
                self._keep(kept, *before)
            before = path, leaving
        if before is not None:
            self._keep(kept, *before)
        with self._lock:
            self._versions[version] = kept
            self._sweep()

    def forget(self, version: int) -> None:
        """Serves a version no longer, or only until the pulls that have begun are through.

        One such version is kept at most.
        """
        with self._lock:
            if version in self._versions:
                self._versions[version].forgotten = True
            self._sweep()

    def keep(self, oldest: int, evaluated: Collection[int]) -> None:
        """Forgets versions before the `oldest`, but for those that are being evaluated."""
        for version in self.versions:
            if version < oldest and version not in evaluated:
                self.forget(version)

    def manifest(self, version: int, seconds: float = 0.0) -> Manifest | None:
        """As WeightSource.manifest; it waits for nothing."""
        with self._lock:
            if not self._versions or version > max(self._versions):
                return None
            return Manifest(self.attempt, version, self._asked_for(version).tensors)

    def chunk(self, version: int, path: str, start: Sequence[int], seconds: float = 0.0) -> bytes:
        """As WeightSource.chunk; it waits for nothing."""
        with self._lock:
            self._sweep()
            data = self._asked_for(version).chunks.get((path, tuple(start)))
            if data is None:
                raise Refused(f"there is no chunk of {path} at {list(start)}")
            return data

    def _leaving(self, path: str, flat: Mapping[str, Any]) -> jax.Array:
        """A parameter as it is served, on its way to the host: in a buffer of its own and in the
        layout of training."""
        some = {p: flat[p] for p in (path, path + lora.A, path + lora.B) if p in flat}
        if path not in self._programs:

            def program(some):
                prepared = self._prepare(unflatten_dict(some, sep="/"))
                return flatten_dict(cast_weights(prepared, self._dtype), sep="/")[path]

            self._programs[path] = jax.jit(program, out_shardings=flat[path].sharding)
        found = self._programs[path](some)
        for shard in _blocks(found):
            shard.data.copy_to_host_async()
        return found

    def _keep(self, kept: _Version, path: str, x: jax.Array) -> None:
        """Copies the blocks of a tensor that has left into chunks."""
        chunks = []
        for shard in _blocks(x):
            block = np.asarray(shard.data)
            start = [index.start or 0 for index in shard.index]
            for chunk in cut(start, block.shape, block.itemsize, self._chunk_bytes):
                _, place = chunk.overlap(start, block.shape)
                data = block[place].tobytes()
                chunks.append(dataclasses.replace(chunk, checksum=checksum(data)))
                kept.chunks[path, chunk.start] = data
        kept.tensors[path] = TensorSpec(x.shape, x.dtype.name, tuple(chunks))

    def _sweep(self) -> None:
        """Drops versions that are forgotten, but for the newest while it is pulled."""
        now = time.monotonic()
        forgotten = sorted(v for v, kept in self._versions.items() if kept.forgotten)
        for version in forgotten:
            idle = now - self._versions[version].asked >= LINGER_SECONDS
            if idle or version != forgotten[-1]:
                del self._versions[version]

    def _asked_for(self, version: int) -> _Version:
        if version not in self._versions:
            raise Refused(f"version {version} is not kept; versions {sorted(self._versions)} are")
        self._versions[version].asked = time.monotonic()
        return self._versions[version]


def _blocks(x: jax.Array) -> list[Any]:
    """The shards of this process, each part of the tensor once."""
    return list({str(shard.index): shard for shard in x.addressable_shards}.values())
