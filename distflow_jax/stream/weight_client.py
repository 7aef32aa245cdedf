"""Pulling of weights by a worker: the chunks that its layout needs, from trainers that hold them.

A version is loaded completely or not at all: arrays are created only when every chunk has arrived
and is verified. A chunk that is damaged, late or missing is pulled from another process that holds
it.
"""

import dataclasses
import itertools
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from distflow_jax.stream.weight_store import ChunkSpec, Manifest, checksum
from distflow_jax.stream.wire.calls import Bytes, Refused, Unreachable

CHUNK_SECONDS = 10.0  # for one chunk; a process that stands still is given up after it
LOOK_SECONDS = 0.05  # between two questions for a version that is not there yet
THREADS = 4  # chunks in flight
MOST_CONNECTIONS = 512  # of a pull, whose threads open further ones to a trainer as they need them
_ASKED_AT_ONCE = 16  # trainers, for their manifests

log = logging.getLogger("distflow_jax")


class WeightSource(Protocol):
    """A trainer process that serves weights: the transport, whatever moves the bytes.

    WireWeights (weight_wire.py) is the one between jobs; a WeightStore is one in its own process.
    """

    address: str  # for messages

    def manifest(self, version: int, seconds: float) -> Manifest | None:
        """The chunks of a version that it holds; None: the version is still to come. Raises Refused
        for one that it does not keep, and Unreachable after `seconds`."""

    def chunk(self, version: int, path: str, start: Sequence[int], seconds: float) -> Bytes:
        """The bytes of a chunk in C order, as its manifest lists it. Raises as `manifest`."""


def pull_target(shapes: Any, shardings: Any, dtype: str) -> Any:
    """ShapeDtypeStructs for `pull_weights`: weights of one dtype in a worker's own layout.

    `shapes` and `shardings`: trees of one structure (models/parameters.py has both).
    """
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype), sharding=s), shapes, shardings
    )


def pull_weights(
    sources: Sequence[WeightSource], version: int, target: Any, seconds: float, attempt: str = ""
) -> Any:
    """The weights of a version, as `target` has them: ShapeDtypeStructs with shardings.

    `sources`: all trainer processes; `attempt` of the run, if it is known. Raises Refused if nobody
    has the version or what is served are other weights, and Unreachable if they are not here in
    time.
    """
    end = time.monotonic() + seconds
    leaves = flatten_dict(target, sep="/")
    served = _Served(version, end, _offers(sources, version, end, attempt))
    served.check(leaves)
    blocks = {path: _blocks_of(leaf) for path, leaf in leaves.items()}

    def bring(path: str, chunk: ChunkSpec) -> None:
        needing = [block for block in blocks[path].values() if block.needs(chunk)]
        data = served.bring(path, chunk) if needing else b""
        for block in needing:
            block.write(chunk, data)

    with ThreadPoolExecutor(THREADS, "pull") as pool:
        runs = [pool.submit(bring, path, chunk) for path, chunk in served.chunks()]
        try:
            for run in as_completed(runs):
                run.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    arrays = {path: _array(leaf, blocks[path]) for path, leaf in leaves.items()}
    return jax.block_until_ready(unflatten_dict(arrays, sep="/"))


# -- what is served --------------------------------------------------------------------------------


def _offers(
    sources: Sequence[WeightSource], version: int, end: float, attempt: str
) -> list[tuple[WeightSource, Manifest]]:
    """The manifests of all trainers that answer."""
    with ThreadPoolExecutor(min(len(sources), _ASKED_AT_ONCE), "pull") as pool:
        asked = [pool.submit(_ask, source, version, end) for source in sources]
    offers, problems = [], []
    for source, run in zip(sources, asked, strict=True):
        try:
            offers.append((source, run.result()))
        except (Refused, Unreachable) as error:
            problems.append(error)
    for problem in problems:
        if not offers:
            raise problem
        log.warning("weights of version %d come from others: %s", version, problem)
    attempts = {manifest.attempt for _, manifest in offers}
    if len(attempts) > 1 or attempt not in ("", *attempts):
        raise Refused(
            f"version {version} is that of another attempt of the run: {sorted(attempts)}"
        )
    return offers


def _ask(source: WeightSource, version: int, end: float) -> Manifest:
    """A trainer's manifest, waiting until it has the version."""
    while True:
        left = end - time.monotonic()
        seconds = max(0.001, min(left, CHUNK_SECONDS))
        found = source.manifest(version, seconds)
        if found is not None:
            break
        if left <= LOOK_SECONDS:
            raise Unreachable(f"{source.address}: version {version} is not there in time")
        time.sleep(LOOK_SECONDS)
    if found.version != version:
        raise Refused(f"{source.address}: version {found.version} in place of {version}")
    return found


class _Served:
    """The chunks of one version, each assigned to a trainer that holds it, spread evenly."""

    def __init__(self, version: int, end: float, offers: Sequence[tuple[WeightSource, Manifest]]):
        """Refused where two trainers have other weights."""
        self._version, self._end = version, end
        self._lock = threading.Lock()
        self._failed: dict[str, str] = {}  # addresses, and why
        self._load: Counter[str] = Counter()  # elements that were asked for, by address
        self._tensors: dict[str, tuple[tuple[int, ...], str]] = {}  # shape and dtype
        self._chunks: dict[str, dict[tuple[int, ...], ChunkSpec]] = {}
        self._having: dict[tuple[str, tuple[int, ...]], list[WeightSource]] = {}
        for source, manifest in offers:
            for path, tensor in manifest.tensors.items():
                kind = tensor.shape, tensor.dtype
                same = self._tensors.setdefault(path, kind) == kind
                known = self._chunks.setdefault(path, {})
                for chunk in tensor.chunks:
                    same &= known.setdefault(chunk.start, chunk) == chunk
                    self._having.setdefault((path, chunk.start), []).append(source)
                if not same:
                    raise Refused(f"{source.address}: {path} differs from that of other trainers")
        most = max(1, min(THREADS, MOST_CONNECTIONS // max(1, len(offers))))
        self._calls = {source.address: threading.Semaphore(most) for source, _ in offers}
        for having in self._having.values():  # of equals another one each time
            random.shuffle(having)

    def check(self, leaves: Mapping[str, Any]) -> None:
        """Refused for weights of other names, shapes or dtypes, Unreachable if some are lacking."""
        if self._tensors.keys() != leaves.keys():
            named = min(self._tensors.keys() ^ leaves.keys())
            raise Refused(f"the weights that are served are of another model: see {named}")
        for path, leaf in leaves.items():
            (shape, dtype), wanted = self._tensors[path], jnp.dtype(leaf.dtype).name
            if (shape, dtype) != (leaf.shape, wanted):
                raise Refused(
                    f"{path} is served as {dtype}{list(shape)} and should be "
                    f"{wanted}{list(leaf.shape)}: use one config on both sides"
                )
            try:
                check_grid(path, shape, list(self._chunks[path].values()))
            except ValueError as error:
                raise Unreachable(
                    f"some weights are with no process that answers: {error}"
                ) from error

    def chunks(self) -> list[tuple[str, ChunkSpec]]:
        """The chunks by path, in the order of all workers: the largest first."""
        chunks = [(path, chunk) for path, of in self._chunks.items() for chunk in of.values()]
        return sorted(chunks, key=lambda entry: (-entry[1].size, entry[0], entry[1].start))

    def bring(self, path: str, chunk: ChunkSpec) -> Bytes:
        """A chunk; another trainer is asked where one fails."""
        while (source := self._choose(path, chunk)) is not None:
            try:
                return self._from(source, path, chunk)
            except (Refused, Unreachable) as error:
                self._note(source.address, str(error))
            if time.monotonic() >= self._end:
                break
        with self._lock:
            reasons = "; ".join(sorted(set(self._failed.values())))
        raise Unreachable(f"version {self._version} of the weights: nobody gives {path}: {reasons}")

    def _note(self, address: str, reason: str) -> None:
        """Asks a trainer no more; its first failure is told."""
        with self._lock:
            known = address in self._failed
            self._failed.setdefault(address, reason)
        if not known:
            text = "weights of version %d come no longer from %s: %s"
            log.warning(text, self._version, address, reason)

    def _choose(self, path: str, chunk: ChunkSpec) -> WeightSource | None:
        """The trainer that has been asked for the least."""
        with self._lock:
            having = [s for s in self._having[path, chunk.start] if s.address not in self._failed]
            chosen = min(having, key=lambda s: self._load[s.address], default=None)
            if chosen is not None:
                self._load[chosen.address] += chunk.size
            return chosen

    def _from(self, source: WeightSource, path: str, chunk: ChunkSpec) -> Bytes:
        seconds = max(0.001, min(self._end - time.monotonic(), CHUNK_SECONDS))
        with self._calls[source.address]:
            data = source.chunk(self._version, path, chunk.start, seconds)
        if checksum(data) != chunk.checksum:
            raise Refused(f"a chunk of {path} has another checksum than the manifest says")
        return data


def check_grid(path: str, shape: Sequence[int], chunks: Sequence[ChunkSpec]) -> None:
    """ValueError unless the chunks, each listed once, are all cells of one grid over the tensor.

    Then each element lies in exactly one of them.
    """
    begins = [sorted({0, *(chunk.start[dim] for chunk in chunks)}) for dim in range(len(shape))]
    sides = [
        [(a, b - a) for a, b in itertools.pairwise([*of_dim, size]) if a < b]
        for of_dim, size in zip(begins, shape, strict=True)
    ]
    cells = {tuple(cell) for cell in itertools.product(*sides)}
    found = [tuple(zip(chunk.start, chunk.shape, strict=True)) for chunk in chunks]
    if len(found) != len(cells) or set(found) != cells:
        there = len(cells & set(found))
        raise ValueError(f"{path}: {there} of {len(cells)} chunks are there, {len(found)} listed")


# -- what is wanted --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Block:
    """A block of a tensor that some of this process's devices hold."""

    start: tuple[int, ...]
    array: np.ndarray

    def needs(self, chunk: ChunkSpec) -> bool:
        """Whether some of a chunk lies in this block."""
        return chunk.overlap(self.start, self.array.shape) is not None

    def write(self, chunk: ChunkSpec, data: Bytes) -> None:
        """The part of a chunk that lies in this block."""
        of_chunk, of_block = chunk.overlap(self.start, self.array.shape)
        values = np.frombuffer(data, self.array.dtype).reshape(chunk.shape)
        self.array[of_block] = values[of_chunk]


def _blocks_of(leaf: Any) -> dict[str, _Block]:
    """The blocks of a tensor by their index, each once."""
    blocks = {}
    for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values():
        if str(index) not in blocks:
            bounds = [s.indices(n) for s, n in zip(index, leaf.shape, strict=True)]
            array = np.empty([b - a for a, b, _ in bounds], leaf.dtype)
            blocks[str(index)] = _Block(tuple(a for a, _, _ in bounds), array)
    return blocks


def _array(leaf: Any, blocks: Mapping[str, _Block]) -> jax.Array:
    """A tensor on its devices, once all its chunks are there."""
    return jax.make_array_from_callback(
        leaf.shape, leaf.sharding, lambda index: blocks[str(index)].array
    )
