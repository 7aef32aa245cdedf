"""A worker's pull of weights: the chunks that its own layout needs, from those that have them.

A version is had whole or not at all: arrays are made when every chunk is there and right. One that
comes damaged, late or not at all comes from another process that has it.
"""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from distflow_jax.stream.weight_chunks import (
    ChunkSpec,
    Manifest,
    TensorSpec,
    check_grid,
    checksum,
    overlap,
    read_manifest,
)
from distflow_jax.stream.weight_store import (
    MANIFEST,
    NOT_YET,
    PIECE,
    manifest_request,
    piece_request,
)
from distflow_jax.stream.wire.calls import Bytes, Refused, Unreachable

PIECE_SECONDS = 10.0  # for one chunk; a process that stands still is given up after it
LOOK_SECONDS = 0.05  # between two questions for a version that is not there yet
THREADS = 4  # chunks in flight

log = logging.getLogger("distflow_jax")


class Source(Protocol):
    """A process that serves weights: a Caller of the wire."""

    address: str

    def call(self, method: str, payload: bytes, seconds: float) -> Bytes:
        """The answer to one call; raises Refused and Unreachable."""

    def close(self) -> None:
        """Ends the connection."""


class WeightPull:
    """Pulls versions of the weights from trainers.

    Args:
      callers: of all trainer processes. The caller closes them.
      threads: chunks in flight at most.

    Attributes:
      bytes_pulled: of chunks, since the start, by address.
    """

    def __init__(self, clients: Sequence[Source], *, threads: int = THREADS):
        self._clients = sorted(clients, key=lambda client: client.address)
        self._threads = threads
        self._lock = threading.Lock()
        self.bytes_pulled: Counter[str] = Counter()

    def pull(self, version: int, target: Any, seconds: float, attempt: str = "") -> Any:
        """The weights of a version, as `target` has them: ShapeDtypeStructs with shardings.

        `attempt` of the run, if it is known. Raises Refused if nobody has the version or what
        is served are other weights, and Unreachable if they are not here in time.
        """
        end = time.monotonic() + seconds
        offers = self._offers(version, end, attempt)
        wanted = _wanted(target, _union(offers))
        fetch = _Fetch(version, offers, end)
        with ThreadPoolExecutor(self._threads, "pull") as pool:
            runs = [pool.submit(self._take, fetch, *one) for one in wanted.chunks()]
            try:
                for run in as_completed(runs):
                    run.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        return wanted.arrays()

    def _take(self, fetch: "_Fetch", path: str, chunk: ChunkSpec, blocks: list["_Block"]) -> None:
        """Brings one chunk into the blocks that need some of it."""
        data, address = fetch.bring(path, chunk)
        with self._lock:
            self.bytes_pulled[address] += len(data)
        for block in blocks:
            block.write(chunk, data)

    def _offers(self, version: int, end: float, attempt: str) -> list["_Offer"]:
        """The manifests of all trainers that answer."""
        with ThreadPoolExecutor(min(len(self._clients), 16), "pull") as pool:
            asked = [pool.submit(_ask, client, version, end) for client in self._clients]
        offers, problems = [], []
        for client, run in zip(self._clients, asked, strict=True):
            try:
                offers.append(_Offer(client, run.result()))
            except (Refused, Unreachable, ValueError) as error:
                problems.append(error)
        for problem in problems:
            if not offers:
                raise problem if not isinstance(problem, ValueError) else Refused(str(problem))
            log.warning("weights of version %d come from others: %s", version, problem)
        found = {offer.manifest.attempt for offer in offers}
        if len(found) > 1 or attempt not in ("", *found):
            raise Refused(
                f"version {version} is that of another attempt of the run: {sorted(found)}"
            )
        return offers


class _Offer(NamedTuple):
    source: Source
    manifest: Manifest


def _ask(client: Source, version: int, end: float) -> Manifest:
    """A trainer's manifest, waiting until it has the version."""
    while True:
        left = end - time.monotonic()
        seconds = max(0.001, min(left, PIECE_SECONDS))
        answer = client.call(MANIFEST, manifest_request(version), seconds)
        if answer != NOT_YET:
            break
        if left <= LOOK_SECONDS:
            raise Unreachable(f"{client.address}: version {version} is not there in time")
        time.sleep(LOOK_SECONDS)
    manifest = read_manifest(answer, client.address)
    if manifest.version != version:
        raise Refused(f"{client.address}: version {manifest.version} in place of {version}")
    return manifest


def _union(offers: list[_Offer]) -> dict[str, TensorSpec]:
    """All chunks that are there, each once. Refused where two processes have other weights."""
    found: dict[str, tuple[tuple[int, ...], str, dict[tuple, ChunkSpec]]] = {}
    for source, manifest in offers:
        for path, tensor in manifest.tensors.items():
            shape, dtype, chunks = found.setdefault(path, (tensor.shape, tensor.dtype, {}))
            for chunk in tensor.chunks:
                known = chunks.setdefault((chunk.start, chunk.shape), chunk)
                if known != chunk or (shape, dtype) != (tensor.shape, tensor.dtype):
                    raise Refused(f"{source.address}: {path} differs from that of other trainers")
    return {
        path: TensorSpec(shape, dtype, tuple(chunks.values()))
        for path, (shape, dtype, chunks) in found.items()
    }


class _Block:
    """A block of a tensor that some of this process's devices hold."""

    def __init__(self, start: tuple[int, ...], shape: tuple[int, ...], dtype: np.dtype):
        self.start, self.array = start, np.empty(shape, dtype)

    def write(self, chunk: ChunkSpec, data: Bytes) -> None:
        """The part of a chunk that lies in this block."""
        of_chunk, of_block = overlap(chunk, self.start, self.array.shape)
        values = np.frombuffer(data, self.array.dtype).reshape(chunk.shape)
        self.array[of_block] = values[of_chunk]


class _Wanted:
    """The blocks that this process's devices hold of each tensor."""

    def __init__(self):
        self._leaves: dict[str, tuple[Any, dict[str, _Block]]] = {}
        self._chunks: list[tuple[str, ChunkSpec, list[_Block]]] = []

    def add(self, path: str, leaf: Any, served: TensorSpec) -> None:
        """A tensor, which is served in these chunks."""
        blocks: dict[str, _Block] = {}
        for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values():
            if str(index) not in blocks:
                bounds = [s.indices(n) for s, n in zip(index, leaf.shape, strict=True)]
                start = tuple(a for a, _, _ in bounds)
                shape = tuple(b - a for a, b, _ in bounds)
                blocks[str(index)] = _Block(start, shape, leaf.dtype)
        self._leaves[path] = leaf, blocks
        for chunk in served.chunks:
            parts = [b for b in blocks.values() if overlap(chunk, b.start, b.array.shape)]
            if parts:
                self._chunks.append((path, chunk, parts))

    def chunks(self) -> list[tuple[str, ChunkSpec, list[_Block]]]:
        """The chunks to take, in the order of all workers: the largest first."""
        return sorted(self._chunks, key=lambda one: (-one[1].size, one[0], one[1].start))

    def arrays(self) -> Any:
        """The weights on their devices, once all chunks are there."""
        flat = {}
        for path, (leaf, blocks) in self._leaves.items():
            places = leaf.sharding.addressable_devices_indices_map(leaf.shape)
            shards = [jax.device_put(blocks[str(i)].array, d) for d, i in places.items()]
            flat[path] = jax.make_array_from_single_device_arrays(
                leaf.shape, leaf.sharding, shards, dtype=leaf.dtype
            )
        return jax.block_until_ready(unflatten_dict(flat, sep="/"))


def _wanted(target: Any, served: Mapping[str, TensorSpec]) -> _Wanted:
    """The blocks to fill. Refused for weights of other names, shapes or dtypes."""
    leaves = flatten_dict(target, sep="/")
    if served.keys() != leaves.keys():
        named = min(served.keys() ^ leaves.keys())
        raise Refused(f"the weights that are served are of another model: see {named}")
    wanted = _Wanted()
    for path, leaf in leaves.items():
        there = served[path]
        if there.shape != leaf.shape or there.dtype != jnp.dtype(leaf.dtype).name:
            raise Refused(
                f"{path} is served as {there.dtype}{list(there.shape)} and should be "
                f"{jnp.dtype(leaf.dtype).name}{list(leaf.shape)}: use one config on both sides"
            )
        try:
            check_grid(path, there.shape, there.chunks)
        except ValueError as error:
            raise Unreachable(f"some weights are with no process that answers: {error}") from error
        wanted.add(path, leaf, there)
    return wanted


class _Fetch:
    """One version's chunks, each from a process that has it, spread evenly over these."""

    def __init__(self, version: int, offers: list[_Offer], end: float):
        self.version, self._end = version, end
        self._lock = threading.Lock()
        self._out: dict[str, str] = {}  # addresses that have failed, and why
        self._load: Counter[str] = Counter()
        self._having: dict[tuple[str, tuple[int, ...]], list[Source]] = {}
        for source, manifest in offers:
            for path, tensor in manifest.tensors.items():
                for chunk in tensor.chunks:
                    self._having.setdefault((path, chunk.start), []).append(source)
        for having in self._having.values():  # of equals another one each time
            random.shuffle(having)

    def bring(self, path: str, chunk: ChunkSpec) -> tuple[Bytes, str]:
        """(a chunk, the address that it is from); another process is asked where one fails."""
        while (source := self._choose(path, chunk)) is not None:
            try:
                return self._from(source, path, chunk), source.address
            except (Refused, Unreachable) as error:
                with self._lock:
                    new = source.address not in self._out
                    self._out.setdefault(source.address, str(error))
                if time.monotonic() >= self._end:
                    break
                if new:
                    log.warning(
                        "weights of version %d come no longer from %s: %s",
                        self.version,
                        source.address,
                        error,
                    )
        with self._lock:
            reasons = "; ".join(sorted(set(self._out.values())))
        raise Unreachable(f"version {self.version} of the weights: nobody gives {path}: {reasons}")

    def _choose(self, path: str, chunk: ChunkSpec) -> Source | None:
        """The trainer that has been asked for the fewest bytes."""
        with self._lock:
            having = [s for s in self._having[path, chunk.start] if s.address not in self._out]
            chosen = min(having, key=lambda s: self._load[s.address], default=None)
            if chosen is not None:
                self._load[chosen.address] += chunk.size
            return chosen

    def _from(self, source: Source, path: str, chunk: ChunkSpec) -> Bytes:
        left = min(self._end - time.monotonic(), PIECE_SECONDS)
        data = source.call(PIECE, piece_request(self.version, path, chunk), max(left, 0.001))
        if checksum(data) != chunk.checksum:
            raise Refused(f"a piece of {path} has another checksum than the manifest says")
        return data


def pull_target(shapes: Any, shardings: Any, dtype: str) -> Any:
    """ShapeDtypeStructs for WeightPull.pull: weights of one dtype in a worker's own layout.

    `shapes` and `shardings`: trees of one structure (models/parameters.py has both).
    """
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype), sharding=s), shapes, shardings
    )
