"""A weight store of weights: versions in the memory of the host, handed out chunk by chunk.

Each trainer process copies the blocks of its own devices, each once, and serves them: nothing is
gathered, and no process has all of a model whose layers or matrices are divided. The weights are
those of training, cast and with adapters merged: workers bring them into their samplers' form.
"""

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from distflow_jax.models import lora
from distflow_jax.parsing.checked_fields import INTEGERS, SIZE, TEXT, check_fields
from distflow_jax.parsing.json_text import parse_json
from distflow_jax.resharding.weight_sync import cast_weights
from distflow_jax.stream.weight_chunks import (
    CHUNK_BYTES,
    ChunkSpec,
    Manifest,
    Place,
    TensorSpec,
    checksum,
    cut,
)
from distflow_jax.stream.wire.calls import Bytes, Method, Refused

MANIFEST, PIECE = "weights.manifest", "weights.piece"
NOT_YET = b""  # the answer while a version is still to come
# after its last piece, in which a version that is to be forgotten counts as being pulled
LINGER_SECONDS = 5.0


@dataclasses.dataclass
class _Version:
    tensors: dict[str, TensorSpec]
    chunks: dict[Place, Bytes] = dataclasses.field(default_factory=dict)
    asked: float = -LINGER_SECONDS  # when a piece was asked for last
    forgotten: bool = False


class WeightStore:
    """Versions of the weights that this process serves.

    Args:
      attempt: of the run; versions of another one are other weights.
      prepare: turns some of the parameters into those that samplers have (merges adapters, for
        example); traceable.
      dtype: of the samplers' weights; None: the parameters' own.
      chunk_bytes: bytes of a piece at most.

    Attributes:
      bytes_served: of pieces, since the start.
    """

    def __init__(
        self,
        attempt: str,
        prepare: Callable[[Any], Any] = lambda params: params,
        dtype: str | None = None,
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ):
        self.attempt, self.bytes_served = attempt, 0
        self._prepare, self._dtype = prepare, dtype
        self._chunk_bytes = chunk_bytes
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
        flat = flatten_dict(params, sep="/")
        kept, before = _Version({}), None
        for path in flat:
            if lora.is_adapter(path):
                continue
            leaving = self._leaving(path, flat)
            jax.tree.map(lambda x: x.copy_to_host_async(), [s.data for s in _blocks(leaving)])
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

    def methods(self) -> Mapping[str, Method]:
        """The methods of a server that hand out this weight store."""
        return {MANIFEST: self._manifest, PIECE: self._piece}

    def _leaving(self, path: str, flat: Mapping[str, Any]) -> jax.Array:
        """A parameter as it is served, in a buffer of its own and in the layout of training."""
        some = {p: flat[p] for p in (path, path + lora.A, path + lora.B) if p in flat}
        if path not in self._programs:

            def program(some):
                prepared = self._prepare(unflatten_dict(some, sep="/"))
                return flatten_dict(cast_weights(prepared, self._dtype), sep="/")[path]

            self._programs[path] = jax.jit(program, out_shardings=flat[path].sharding)
        return self._programs[path](some)

    def _keep(self, kept: _Version, path: str, x: jax.Array) -> None:
        """Copies the blocks of a tensor that has left into chunks."""
        chunks = []
        for shard in _blocks(x):
            block = np.asarray(shard.data)
            start = [index.start or 0 for index in shard.index]
            for chunk in cut(start, block.shape, block.itemsize, self._chunk_bytes):
                data = block[chunk.within(start)].tobytes()
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

    def _manifest(self, peer: str, payload: Bytes) -> bytes:
        version = _request(payload, {"version": SIZE})["version"]
        with self._lock:
            if not self._versions or version > max(self._versions):
                return NOT_YET
            kept = self._find(version)
            kept.asked = time.monotonic()
            return Manifest(self.attempt, version, kept.tensors).encode()

    def _piece(self, peer: str, payload: Bytes) -> bytes:
        request = _request(payload, {"version": SIZE, "path": TEXT, "start": INTEGERS})
        place = request["path"], tuple(request["start"])
        with self._lock:
            self._sweep()
            kept = self._find(request["version"])
            if place not in kept.chunks:
                raise Refused(f"there is no chunk of {place[0]} at {list(place[1])}")
            kept.asked = time.monotonic()
            data = kept.chunks[place]
            self.bytes_served += len(data)
            return data

    def _find(self, version: int) -> _Version:
        if version not in self._versions:
            raise Refused(f"version {version} is not kept; versions {sorted(self._versions)} are")
        return self._versions[version]


def _blocks(x: jax.Array) -> list[Any]:
    """The shards of this process, each part of the tensor once."""
    return list({str(shard.index): shard for shard in x.addressable_shards}.values())


def _request(payload: Bytes, kinds: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        request = parse_json(payload, "request")
        if not isinstance(request, Mapping):
            raise ValueError("request: no object")
        if lacking := kinds.keys() - request.keys():
            raise ValueError(f"request: {min(lacking)} is missing")
        check_fields(request, kinds, "request")
    except ValueError as error:
        raise Refused(str(error)) from error
    return request


def manifest_request(version: int) -> bytes:
    """Asks for a manifest."""
    return json.dumps({"version": version}).encode()


def piece_request(version: int, path: str, chunk: ChunkSpec) -> bytes:
    """Asks for a chunk."""
    return json.dumps({"version": version, "path": path, "start": chunk.start}).encode()
