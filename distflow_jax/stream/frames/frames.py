"""Frames that task buffers and workers send each other: JSON values and arrays, and samples among
them."""

import dataclasses
import json
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.coordinator.column_codec import decode, encode
from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.stream.frames.image_frames import SentImages, images_of, patch_of
from distflow_jax.stream.saved_samples import Arrays, SavedSamples, to_arrays
from distflow_jax.stream.tasks import Key
from distflow_jax.stream.wire.calls import Bytes

_T = TypeVar("_T")
FRAME_BYTES = 256 << 20  # of a frame between a task buffer and a worker, at most
_PROMPT = "prompt"  # of the arrays, before a group's place
_BROKEN = (KeyError, IndexError, TypeError, OverflowError, AttributeError, struct.error)


@dataclasses.dataclass(frozen=True)
class Frame:
    """A frame: JSON values and arrays. `read` makes it an addition as SavedSamples takes them."""

    facts: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def read(self, *names: str) -> Arrays:
        """Arrays by name, of any shape."""
        return {name: self.arrays[name] for name in names}

    def joined(self, facts: Mapping[str, Any]) -> "Frame":
        """This frame with further JSON values."""
        return Frame({**facts, **self.facts}, self.arrays)

    def to_bytes(self) -> bytes:
        """Bytes for the wire."""
        head = json.dumps({"facts": self.facts, "arrays": list(self.arrays)}).encode()
        return encode([np.frombuffer(head, np.uint8), *self.arrays.values()], "a frame")

    @classmethod
    def of_bytes(cls, data: Bytes) -> "Frame":
        """Inverse of to_bytes. ValueError for bytes that are no frame."""
        head, *arrays = checked(lambda: decode(data))
        found = checked(lambda: json.loads(np.asarray(head, np.uint8).tobytes()))
        names = checked(lambda: dict(zip(found["arrays"], arrays, strict=True)))
        return cls(checked(lambda: dict(found["facts"])), names)


def checked(read: Callable[[], _T]) -> _T:
    """The result of `read`; a ValueError in place of what broken frames lead to."""
    try:
        return read()
    except _BROKEN as error:
        raise ValueError(f"a frame cannot be read ({type(error).__name__}: {error})") from error


def samples_frame(facts: Mapping[str, Any], found: Mapping[Key, Progress]) -> Frame:
    """A frame with the samples of requests, by counter and node."""
    arrays, told = to_arrays(found)
    keys = [list(key) for key in sorted(found)]
    return Frame({**facts, **told, "keys": keys}, arrays)


def keys_of(frame: Frame) -> list[Key]:
    """Counters and nodes of a frame with samples."""
    return checked(lambda: [(int(counter), str(node)) for counter, node in frame.facts["keys"]])


def nodes_of(frame: Frame) -> list[str]:
    """Ids of the nodes that the worker serves which sent a frame, beside those that sample."""
    return checked(lambda: [str(node) for node in frame.facts.get("nodes", [])])


def samples_of(frame: Frame, requests: Mapping[Key, GroupRequest]) -> dict[Key, Progress]:
    """The samples of a frame that are answers to `requests`; others are left out."""

    def read() -> dict[Key, Progress]:
        saved, found = SavedSamples([frame]), {}
        for counter in sorted({counter for counter, _ in requests}):
            nodes = {node: request for (c, node), request in requests.items() if c == counter}
            for node, progress in saved.take(counter, nodes).items():
                found[counter, node] = progress
        return found

    return checked(read)


def work_frame(
    facts: Mapping[str, Any], work: Iterable[tuple[Key, GroupRequest, Progress]]
) -> Frame:
    """A frame with requests, and what is known of the answers to each.

    An image that several prompts have is in it once.
    """
    groups, arrays, known, sent = [], {}, {}, SentImages()
    for place, (key, request, progress) in enumerate(work):
        prompt = request.prompt
        groups.append(
            {
                **({"images": sent.add(place, prompt)} if prompt.images else {}),
                "node": key[1],
                "counter": prompt.counter,
                "row": prompt.row,
                "expected": [prompt.expected_length, prompt.expected_spread],
                "sampling": dataclasses.asdict(request.sampling),
                "turn": request.turn,
                "rank": request.rank,
                "version": request.version,
            }
        )
        arrays[f"{_PROMPT}{place}"] = np.asarray(prompt.tokens, np.int32)
        known[key] = progress
    seen = {"images": sent.facts} if sent.facts else {}
    frame = samples_frame({**facts, **seen, "groups": groups}, known)
    return Frame(frame.facts, {**frame.arrays, **arrays, **sent.arrays})


def work_of(frame: Frame) -> list[tuple[Key, GroupRequest, Progress]]:
    """Requests of a frame, and what is known of the answers to each.

    ValueError for tokens, patches and places whose sizes do not belong together.
    """
    images = checked(lambda: images_of(frame.facts, frame.arrays))

    def request_of(place: int, group: Mapping[str, Any]) -> GroupRequest:
        length, spread = group["expected"]
        tokens = frame.arrays[f"{_PROMPT}{place}"]
        if tokens.dtype != np.int32 or tokens.ndim != 1:
            raise ValueError(f"a frame's prompt {place} is {tokens.dtype}{list(tokens.shape)}")
        own = tuple(images[number] for number in group.get("images", ()))
        prompt = Prompt(
            counter=int(group["counter"]),
            row=int(group["row"]),
            tokens=tokens,
            text="",
            data_source="",
            ground_truth=None,
            extra_info={},
            expected_length=float(length),
            expected_spread=float(spread),
            images=own,
            patch=patch_of(place, len(tokens), own, frame.arrays),
        )
        rank = None if group["rank"] is None else tuple(group["rank"])
        sampling, version = SamplingParams(**group["sampling"]), group["version"]
        return GroupRequest(prompt, sampling, turn=int(group["turn"]), rank=rank, version=version)

    def read() -> dict[Key, GroupRequest]:
        groups = frame.facts.get("groups", [])
        return {(g["counter"], g["node"]): request_of(i, g) for i, g in enumerate(groups)}

    requests = checked(read)
    if not requests:
        return []
    known = samples_of(frame, requests)
    return [(key, request, known.get(key, Progress())) for key, request in requests.items()]
