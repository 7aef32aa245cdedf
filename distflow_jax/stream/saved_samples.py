"""Samples of asynchronous groups as arrays of a checkpoint: complete and unfinished responses.

Each process saves the samples of its own groups; a resumed run takes them by counter, on any number
of processes. Nodes that ran ahead run again. n requests, s of their samples, T tokens together.
"""

import dataclasses
import functools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.environments.episodes import REASONS, Episode
from distflow_jax.images import turn_images
from distflow_jax.images.turn_images import TurnImages
from distflow_jax.rollout.requests import GroupRequest, Partial, Response
from distflow_jax.stream.tasks import Key

Arrays = dict[str, np.ndarray]
_COLUMNS = {"tokens": np.int32, "logp": np.float32, "margin": np.float32, "version": np.int32}
_ARRAYS = _COLUMNS | {"mask": np.bool_, "fed": np.int32}
DTYPES = _ARRAYS | {"index": np.int64, "reward": np.float64, "logged": np.uint8}
IMAGES, IMAGE_BYTES = "response_images", "response_image_bytes"  # where a response has some
IMAGE_DTYPES = {IMAGES: np.uint8, IMAGE_BYTES: np.int64}


class SavedAddition(Protocol):
    """The addition of one process to a checkpoint."""

    facts: Mapping[str, Any]

    def read(self, *names: str) -> Arrays:
        """Arrays by name."""


class SavedSamples:
    """The samples of a checkpoint, taken by counter, each once.

    Attributes:
      left_out: tokens of samples that were taken but do not match the request.
      given_up: prompts that no worker could answer before the checkpoint.
    """

    def __init__(self, additions: Sequence[SavedAddition] = ()):
        self.left_out = 0
        self.given_up = {c for one in additions for c in one.facts.get("given_up", ())}
        # by counter that was not taken; an addition is freed with the last one
        self._left: dict[int, _Saved] = {}
        for addition in additions:
            samples = _Saved(addition)
            for counter in samples.counters:  # hosts of one sampler save the same
                self._left.setdefault(counter, samples)

    def __contains__(self, counter: int) -> bool:
        """Whether there are samples of a counter, and they were not taken."""
        return counter in self._left

    @property
    def end(self) -> int:
        """The first counter after those whose samples were not taken."""
        return 1 + max(self._left, default=-1)

    def keep(self, counters: Collection[int]) -> None:
        """Forgets the samples of all other counters."""
        self._left = {c: samples for c, samples in self._left.items() if c in counters}

    def take(self, counter: int, requests: Mapping[str, GroupRequest]) -> dict[str, Progress]:
        """The samples of a prompt, as answers to its `requests` by node; {} if there are none, or
        they were taken. Those that the requests do not ask for, or are longer, are left out.

        ValueError for an addition whose columns differ in length.
        """
        samples = self._left.pop(counter, None)
        if samples is None:
            return {}
        found = samples.of(counter, requests)
        taken = sum(progress.num_sampled for progress in found.values())
        self.left_out += samples.num_sampled(counter) - taken
        return found


# What an index row says of a sample; the lengths say which entries of arrays are its own.
INDEX = (
    *("counter", "node", "sample", "tokens", "fed", "experts"),
    *("ended", "finished", "turns", "reason"),
)
_LENGTHS = {"fed": "fed", "experts": "experts"}  # of arrays; all others have an entry per token


@dataclasses.dataclass
class _Sample:
    """A sample as its index row and its entries of each array."""

    row: tuple[int, ...]
    columns: dict[str, np.ndarray]
    images: np.ndarray  # empty without some
    experts: np.ndarray | None = None
    reward: float = 0.0
    logged: Mapping[str, float] = dataclasses.field(default_factory=dict)


def to_arrays(requests: Mapping[Key, Progress]) -> tuple[Arrays, dict[str, Any]]:
    """Requests as (arrays by name, JSON values).

    ValueError for a response whose columns differ in length: it has grown meanwhile.
    """
    nodes = sorted({node for _, node in requests})
    samples: list[_Sample] = []
    for (counter, node), progress in sorted(requests.items()):
        key = (counter, nodes.index(node))
        samples += [_of_episode(key, episode) for _, episode in sorted(progress.episodes.items())]
        samples += [_of_partial(key, partial) for partial in progress.partials]
    arrays = {
        name: np.concatenate([np.zeros(0, dtype), *(s.columns[name] for s in samples)])
        for name, dtype in _ARRAYS.items()
    }
    experts = [s.experts for s in samples if s.experts is not None]
    text = json.dumps([s.logged for s in samples], allow_nan=True).encode()
    arrays |= {
        "index": np.array([s.row for s in samples], np.int64).reshape(-1, len(INDEX)),
        "experts": np.concatenate(experts) if experts else np.zeros(0, np.int8),
        "reward": np.array([s.reward for s in samples], np.float64),
        "logged": np.frombuffer(text, np.uint8),
    }
    images = [s.images for s in samples]
    if not any(blob.size for blob in images):
        return arrays, {"nodes": nodes}
    arrays[IMAGES] = np.concatenate(images)
    arrays[IMAGE_BYTES] = np.array([len(blob) for blob in images], np.int64)
    return arrays, {"nodes": nodes, IMAGES: True}


def _of_episode(key: tuple[int, int], episode: Episode) -> _Sample:
    """A response that has ended; `key`: counter and place of the node."""
    response, experts = episode.response, episode.response.routed_experts
    rows = -1 if experts is None else len(experts)
    facts = (1, int(response.finished), int(episode.turns), REASONS.index(episode.reason))
    columns = _columns(key[0], response) | {"mask": episode.mask, "fed": np.zeros(0, np.int32)}
    return _Sample(
        (*key, response.sample, len(response.tokens), 0, rows, *facts),
        columns,
        turn_images.to_bytes(response.shown),
        experts,
        episode.reward,
        episode.logged,
    )


def _of_partial(key: tuple[int, int], partial: Partial) -> _Sample:
    """A response that is under way."""
    columns = _columns(key[0], partial.response(frozenset()))
    length, fed = len(columns["tokens"]), partial.fed
    columns |= {"mask": np.ones(length, bool), "fed": fed}
    row = (*key, partial.sample, length, len(fed), -1, 0, 0, 0, 0)
    return _Sample(row, columns, turn_images.to_bytes(partial.shown))


def _columns(counter: int, response: Response) -> Arrays:
    columns = {name: getattr(response, name) for name in _COLUMNS}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"response {response.sample} of prompt {counter} has columns of several lengths, "
            f"{lengths}"
        )
    return columns


class _Saved:
    """The samples of one addition. Their arrays are read when some are taken.

    Attributes:
      counters: of their prompts.
    """

    def __init__(self, addition: SavedAddition):
        self._addition, self._nodes = addition, addition.facts["nodes"]
        index = addition.read("index")["index"]
        self._index = {name: index[:, i] for i, name in enumerate(INDEX)}
        self.counters = set(self._index["counter"].tolist())

    @functools.cached_property
    def _arrays(self) -> Arrays:
        names = (*_ARRAYS, "experts", "reward", "logged")
        images = (IMAGES, IMAGE_BYTES) if self._addition.facts.get(IMAGES) else ()
        arrays = self._addition.read(*names, *images)
        for name in _ARRAYS:
            total, found = self._bounds[_LENGTHS.get(name, "tokens")][-1], len(arrays[name])
            if found != total:
                raise ValueError(
                    f"the samples of a checkpoint have {found} values of {name!r} for {total} "
                    "tokens, so that they would go to other responses: remove the newest folder in "
                    "checkpoints/ to go on from the one before"
                )
        return arrays

    def of(self, counter: int, requests: Mapping[str, GroupRequest]) -> dict[str, Progress]:
        """A prompt's samples by the node's id."""
        found: dict[str, Progress] = {}
        for place in self._places(counter):
            row = {name: int(values[place]) for name, values in self._index.items()}
            node = self._nodes[row["node"]]
            request = requests.get(node)
            if request is None or row["sample"] not in request.samples:
                continue
            length, limit = row["fed"] + row["tokens"], request.sampling.limit
            progress = found.setdefault(node, Progress())
            if row["ended"] and length <= limit:
                progress.episodes[row["sample"]] = self._episode(place, row, request)
            elif not row["ended"] and length < limit:
                progress.partials.append(self._partial(place, row, request))
        return found

    def num_sampled(self, counter: int) -> int:
        """Tokens that were sampled for a prompt."""
        return sum(int(self._slice("mask", place).sum()) for place in self._places(counter))

    def _places(self, counter: int) -> list[int]:
        return np.flatnonzero(self._index["counter"] == counter).tolist()

    def _partial(self, place: int, row: Mapping[str, int], request: GroupRequest) -> Partial:
        chunk = tuple(self._slice(name, place) for name in _COLUMNS)
        chunks, fed = [chunk] if row["tokens"] else [], self._slice("fed", place)
        return Partial(request, row["sample"], fed, chunks, self._images(place))

    def _episode(self, place: int, row: Mapping[str, int], request: GroupRequest) -> Episode:
        return Episode(
            Response(
                request.prompt,
                row["sample"],
                **{name: self._slice(name, place) for name in _COLUMNS},
                finished=bool(row["finished"]),
                routed_experts=self._slice("experts", place) if row["experts"] >= 0 else None,
                shown=self._images(place),
            ),
            mask=self._slice("mask", place),
            reward=float(self._arrays["reward"][place]),
            turns=row["turns"],
            reason=REASONS[row["reason"]],
            logged=self._logged[place],
        )

    @functools.cached_property
    def _logged(self) -> list[dict[str, float]]:
        return json.loads(self._arrays["logged"].tobytes())

    def _images(self, place: int) -> TurnImages | None:
        if IMAGES not in self._arrays:
            return None
        end, sizes = np.cumsum(self._arrays[IMAGE_BYTES])[place], self._arrays[IMAGE_BYTES]
        return turn_images.from_bytes(self._arrays[IMAGES][end - sizes[place] : end])

    @functools.cached_property
    def _bounds(self) -> Arrays:
        """Where the entries of each sample begin, and the last ones end, by column of lengths."""
        lengths = {n: np.maximum(self._index[n], 0) for n in ("tokens", *_LENGTHS.values())}
        return {name: np.concatenate([[0], np.cumsum(column)]) for name, column in lengths.items()}

    def _slice(self, name: str, place: int) -> np.ndarray:
        """The entries of a sample in an array."""
        start, end = self._bounds[_LENGTHS.get(name, "tokens")][place : place + 2]
        return self._arrays[name][start:end].copy()
