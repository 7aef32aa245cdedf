"""Frames that task buffers and workers exchange: JSON values and arrays, including samples."""

import dataclasses
import functools
import json
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

import numpy as np

from distflow_jax.coordinator.column_codec import decode, encode
from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.rollout.occupancy import Occupancy
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.response_checks import ResponseLimits
from distflow_jax.stream.border import check_arrays, check_index, check_samples, check_spent
from distflow_jax.stream.frames.image_frames import SentImages, images_of
from distflow_jax.stream.frames.prompt_frames import (
    prompt_facts,
    prompt_of,
    tokens_name,
    without_row,
)
from distflow_jax.stream.saved_samples import Arrays, SavedSamples, to_arrays
from distflow_jax.stream.tasks import Key
from distflow_jax.stream.wire.calls import Bytes

_P = ParamSpec("_P")
_T = TypeVar("_T")
FRAME_BYTES = 256 << 20  # of a frame between a task buffer and a worker, at most
TOLD_BYTES = 4 << 20  # of the JSON values of a worker's frame, which take twenty times that
MOST_ARRAYS = 1 << 16  # of a frame, and entries of a column
_BROKEN = (
    *(KeyError, IndexError, TypeError, OverflowError, AttributeError, struct.error),
    RecursionError,  # of JSON
)


@dataclasses.dataclass(frozen=True)
class Frame:
    """JSON values and arrays. `read` turns a frame into an addition, as SavedSamples takes it."""

    facts: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def read(self, *names: str) -> Arrays:
        """Arrays by name, of any shape."""
        return {name: self.arrays[name] for name in names}

    def to_bytes(self) -> bytes:
        """Bytes for the wire."""
        head = json.dumps({"facts": self.facts, "arrays": list(self.arrays)}).encode()
        return encode([np.frombuffer(head, np.uint8), *self.arrays.values()], "a frame")

    @classmethod
    def of_bytes(cls, data: Bytes, most: int = TOLD_BYTES) -> "Frame":
        """Inverse of to_bytes. ValueError for bytes that are no frame, and for more than `most` of
        JSON values."""
        return _frame_of(data, most)


def reads_frames(read: Callable[_P, _T]) -> Callable[_P, _T]:
    """`read`, with a ValueError in place of what broken frames lead to."""

    @functools.wraps(read)
    def checked(*arguments: _P.args, **options: _P.kwargs) -> _T:
        try:
            return read(*arguments, **options)
        except _BROKEN as error:
            text = f"a frame cannot be read ({type(error).__name__}: {error})"
            raise ValueError(text) from error

    return checked


@reads_frames
def _frame_of(data: Bytes, most: int) -> Frame:
    head, *arrays = decode(data, MOST_ARRAYS)
    if np.size(head) > most:
        raise ValueError(f"{np.size(head)} bytes of JSON values, where {most} are the most")
    found = json.loads(np.asarray(head, np.uint8).tobytes())
    return Frame(dict(found["facts"]), dict(zip(found["arrays"], arrays, strict=True)))


def samples_frame(facts: Mapping[str, Any], found: Mapping[Key, Progress]) -> Frame:
    """A frame with the samples of requests, by counter and node."""
    arrays, told = to_arrays(found)
    keys = [list(key) for key in sorted(found)]
    return Frame({**facts, **told, "keys": keys}, arrays)


def fact_of(frame: Frame, name: str, kind: type[_T]) -> _T:
    """A JSON value of a frame. ValueError for one of another kind."""
    value = frame.facts.get(name)
    if not isinstance(value, kind):
        raise ValueError(f"{name} {value!r:.80}, where {kind.__name__} is wanted")
    return value


def keys_of(frame: Frame) -> list[Key]:
    """Counters and nodes of a frame with samples, each once."""
    keys = fact_of(frame, "keys", list)
    for key in keys:
        if not isinstance(key, list) or [type(part) for part in key] != [int, str]:
            raise ValueError(f"key {key!r:.80}, where [counter, node] is wanted")
    return list(dict.fromkeys((counter, node) for counter, node in keys))


def nodes_of(frame: Frame) -> list[str]:
    """Ids of the nodes that the worker serves which sent a frame, beside those that sample."""
    nodes = frame.facts.get("nodes", [])
    if not isinstance(nodes, list) or not all(isinstance(node, str) for node in nodes):
        raise ValueError(f"nodes {nodes!r:.80}, where names are wanted")
    return nodes


@reads_frames
def samples_of(frame: Frame, requests: Mapping[Key, GroupRequest]) -> dict[Key, Progress]:
    """The samples of a frame that are answers to `requests`; others are left out."""
    saved, found = SavedSamples([frame]), {}
    for counter in sorted({counter for counter, _ in requests}):
        nodes = {node: request for (c, node), request in requests.items() if c == counter}
        for node, progress in saved.take(counter, nodes).items():
            found[counter, node] = progress
    return found


def checked_samples(
    frame: Frame, requests: Mapping[Key, GroupRequest], limits: ResponseLimits, newest: int
) -> tuple[dict[Key, Progress], Occupancy]:
    """The samples of a worker's frame that are answers to `requests`, and what its slots did.

    `newest`: version of the weights that workers can get. ValueError for what none can have made.
    """
    spent = check_spent(frame.facts.get("spent"))
    check_arrays(frame.facts, frame.arrays)
    check_index(frame.facts, frame.arrays, keys_of(frame), requests)
    found = samples_of(frame, requests)
    check_samples(found, requests, limits, newest)
    return found, spent


def work_frame(
    facts: Mapping[str, Any],
    work: Iterable[tuple[Key, GroupRequest, Progress]],
    *,
    rows: bool = False,
) -> Frame:
    """A frame with requests, and what is known of the answers to each; `rows`: with what
    environments read of their prompts.

    An image that several prompts have is in it once.
    """
    groups, arrays, known, sent = [], {}, {}, SentImages(previews=rows)
    for place, (key, request, progress) in enumerate(work):
        prompt = request.prompt if rows else without_row(request.prompt)
        groups.append(
            {
                **({"images": sent.add(place, prompt)} if prompt.images else {}),
                **prompt_facts(prompt),
                "node": key[1],
                "sampling": dataclasses.asdict(request.sampling),
                "turn": request.turn,
                "rank": request.rank,
                "version": request.version,
            }
        )
        arrays[tokens_name(place)] = np.asarray(prompt.tokens, np.int32)
        known[key] = progress
    seen = {"images": sent.facts} if sent.facts else {}
    frame = samples_frame({**facts, **seen, "groups": groups}, known)
    return Frame(frame.facts, {**frame.arrays, **arrays, **sent.arrays})


@reads_frames
def work_of(frame: Frame) -> list[tuple[Key, GroupRequest, Progress]]:
    """Requests of a frame, and what is known of the answers to each.

    ValueError for tokens, patches and places whose sizes do not belong together.
    """
    images, requests = images_of(frame.facts, frame.arrays), {}
    for place, group in enumerate(frame.facts.get("groups", [])):
        requests[group["counter"], group["node"]] = GroupRequest(
            prompt_of(place, group, images, frame.arrays),
            SamplingParams(**group["sampling"]),
            turn=int(group["turn"]),
            rank=None if group["rank"] is None else tuple(group["rank"]),
            version=group["version"],
        )
    if not requests:
        return []
    known = samples_of(frame, requests)
    return [(key, request, known.get(key, Progress())) for key, request in requests.items()]
