"""Samples that ran ahead, as arrays of a checkpoint: whole responses, and those under way.

A process saves those of its own groups; a run that goes on takes them by counter, on any number of
processes. Nodes that ran ahead are run again. n requests, s of their samples, T tokens together.
"""

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
_IMAGES, _IMAGE_BYTES = "response_images", "response_image_bytes"  # where a response has some


class Addition(Protocol):
    """Addition of one process: all that it added to a checkpoint."""

    facts: Mapping[str, Any]

    def read(self, *names: str) -> Arrays:
        """Arrays by name."""


def to_arrays(requests: Mapping[Key, Progress]) -> tuple[Arrays, dict[str, Any]]:
    """Requests as (arrays by name, JSON values).

    ValueError for a response whose columns differ in length: it has grown meanwhile.
    """
    nodes = sorted({node for _, node in requests})
    packed = _Packed()
    for (counter, node), progress in sorted(requests.items()):
        key = (counter, nodes.index(node))
        for sample, episode in sorted(progress.episodes.items()):
            packed.add_episode(key, sample, episode)
        for partial in progress.partials:
            packed.add_partial(key, partial)
    return packed.arrays(), {"nodes": nodes} | ({_IMAGES: True} if packed.has_images else {})


class SavedSamples:
    """The samples of a checkpoint, to be taken by counter, each once.

    Attributes:
      left_out: tokens of samples that were taken, and are not what was asked for.
    """

    def __init__(self, additions: Sequence[Addition] = ()):
        self.left_out = 0
        self._additions = dict(enumerate(additions))
        self._place: dict[int, int] = {}  # addition that has a counter's samples
        self._left: list[set[int]] = []  # counters that were not taken, by addition
        self._open: dict[int, _Unpacked] = {}
        for place, addition in self._additions.items():
            counters = set(addition.read("index")["index"][:, 0].tolist())
            self._left.append(counters - self._place.keys())  # hosts of one sampler save the same
            self._place |= dict.fromkeys(self._left[-1], place)

    def __contains__(self, counter: int) -> bool:
        """Whether there are samples of a counter, and they were not taken."""
        place = self._place.get(counter)
        return place is not None and counter in self._left[place]

    @property
    def counters(self) -> set[int]:
        """The counters whose samples were not taken."""
        return set().union(*self._left)

    @property
    def end(self) -> int:
        """The first counter after those whose samples were not taken."""
        return 1 + max((max(left, default=-1) for left in self._left), default=-1)

    def keep(self, counters: Collection[int]) -> None:
        """Forgets the samples of all other counters, and frees additions of which none are left."""
        for place, left in enumerate(self._left):
            left &= set(counters)
            if not left:
                self._open.pop(place, None)
                self._additions.pop(place, None)

    def take(self, counter: int, requests: Mapping[str, GroupRequest]) -> dict[str, Progress]:
        """The samples of a prompt, as answers to its `requests` by node; {} if there are none, or
        they were taken. Those that the requests do not ask for, or are longer, are left out.

        ValueError for an addition whose columns differ in length.
        """
        if counter not in self:
            return {}
        place = self._place[counter]
        if place not in self._open:
            self._open[place] = _Unpacked(self._additions[place])
        found = self._open[place].of(counter, requests)
        taken = sum(progress.num_sampled for progress in found.values())
        self.left_out += self._open[place].num_sampled(counter) - taken
        self._left[place].remove(counter)
        if not self._left[place]:
            del self._open[place], self._additions[place]
        return found


# What an index row says of a sample; the lengths say which tokens are its own.
INDEX = (
    *("counter", "node", "sample", "tokens", "fed", "experts"),
    *("ended", "finished", "turns", "reason"),
)


class _Packed:
    """Samples one after the other in a few arrays."""

    def __init__(self):
        self._index: list[tuple[int, ...]] = []
        self._columns: dict[str, list[np.ndarray]] = {name: [] for name in _COLUMNS}
        self._mask: list[np.ndarray] = []
        self._fed: list[np.ndarray] = []
        self._experts: list[np.ndarray] = []
        self._reward: list[float] = []
        self._logged: list[dict[str, float]] = []
        self._images: list[np.ndarray] = []  # one of each sample, empty without images

    @property
    def has_images(self) -> bool:
        """Whether a sample has images, which are in `arrays` then alone."""
        return any(blob.size for blob in self._images)

    def add_episode(self, key: tuple[int, int], sample: int, episode: Episode) -> None:
        """Adds a response that has ended."""
        response, experts = episode.response, episode.response.routed_experts
        rows = -1 if experts is None else len(experts)
        if experts is not None:
            self._experts.append(experts)
        facts = (response.finished, episode.turns, REASONS.index(episode.reason))
        self._add(key, sample, response, rows=(0, rows), facts=(1, *map(int, facts)))
        self._mask.append(episode.mask)
        self._reward.append(episode.reward)
        self._logged.append(episode.logged)
        self._images.append(turn_images.to_bytes(response.shown))

    def add_partial(self, key: tuple[int, int], partial: Partial) -> None:
        """Adds a response that is under way."""
        response = partial.response(frozenset())
        fed = partial.fed
        self._fed.append(fed)
        self._add(key, partial.sample, response, rows=(len(fed), -1), facts=(0, 0, 0, 0))
        self._mask.append(np.ones(len(response.tokens), bool))
        self._reward.append(0.0)
        self._logged.append({})
        self._images.append(turn_images.to_bytes(partial.shown))

    def arrays(self) -> Arrays:
        """All of them by name."""
        whole = {
            name: np.concatenate([np.zeros(0, dtype), *self._columns[name]])
            for name, dtype in _COLUMNS.items()
        }
        text = json.dumps(self._logged, allow_nan=True).encode()
        if self.has_images:
            whole[_IMAGES] = np.concatenate(self._images)
            whole[_IMAGE_BYTES] = np.array([len(blob) for blob in self._images], np.int64)
        return whole | {
            "index": np.array(self._index, np.int64).reshape(-1, len(INDEX)),
            "mask": np.concatenate([np.zeros(0, bool), *self._mask]),
            "fed": np.concatenate([np.zeros(0, np.int32), *self._fed]),
            "experts": np.concatenate(self._experts) if self._experts else np.zeros(0, np.int8),
            "reward": np.array(self._reward, np.float64),
            "logged": np.frombuffer(text, np.uint8),
        }

    def _add(
        self,
        key: tuple[int, int],
        sample: int,
        response: Response,
        *,
        rows: tuple[int, int],
        facts: tuple[int, ...],
    ) -> None:
        lengths = {name: len(getattr(response, name)) for name in _COLUMNS}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"response {sample} of prompt {key[0]} has columns of several lengths, {lengths}"
            )
        self._index.append((*key, sample, len(response.tokens), *rows, *facts))
        for name in _COLUMNS:
            self._columns[name].append(getattr(response, name))


class _Unpacked:
    """The samples of one addition."""

    def __init__(self, addition: Addition):
        names = ("index", *_COLUMNS, "mask", "fed", "experts", "reward", "logged")
        if addition.facts.get(_IMAGES):
            names = (*names, _IMAGES, _IMAGE_BYTES)
        self._arrays = addition.read(*names)
        self._nodes = addition.facts["nodes"]
        self._logged = json.loads(self._arrays["logged"].tobytes())
        index = self._arrays["index"]
        self._index = {name: index[:, i] for i, name in enumerate(INDEX)}
        self._starts = {
            name: np.cumsum(np.maximum(self._index[name], 0)) - np.maximum(self._index[name], 0)
            for name in ("tokens", "fed", "experts")
        }
        self._check()

    def of(self, counter: int, requests: Mapping[str, GroupRequest]) -> dict[str, Progress]:
        """A prompt's samples by the node's id."""
        found: dict[str, Progress] = {}
        for place in np.flatnonzero(self._index["counter"] == counter).tolist():
            node, row = self._nodes[self._index["node"][place]], self._row(place)
            request = requests.get(node)
            if request is None or row["sample"] not in request.samples:
                continue
            length = row["fed"] + row["tokens"]
            progress = found.setdefault(node, Progress())
            if row["ended"] and length <= request.sampling.limit:
                progress.episodes[row["sample"]] = self._episode(place, request)
            elif not row["ended"] and length < request.sampling.limit:
                progress.partials.append(self._partial(place, request))
        return found

    def num_sampled(self, counter: int) -> int:
        """Tokens that were sampled for a prompt."""
        places = np.flatnonzero(self._index["counter"] == counter).tolist()
        return sum(int(self._slice("tokens", "mask", place).sum()) for place in places)

    def _check(self) -> None:
        """Raises ValueError if columns do not have as many values as the index says."""
        wanted = {**dict.fromkeys((*_COLUMNS, "mask"), "tokens"), "fed": "fed"}
        for column, name in wanted.items():
            total, found = int(self._index[name].sum()), len(self._arrays[column])
            if found != total:
                raise ValueError(
                    f"the samples of a checkpoint have {found} values of {column!r} for {total} "
                    "tokens, so that they would go to other responses: remove the newest folder in "
                    "checkpoints/ to go on from the one before"
                )

    def _row(self, place: int) -> dict[str, int]:
        return {name: int(values[place]) for name, values in self._index.items()}

    def _partial(self, place: int, request: GroupRequest) -> Partial:
        row = self._row(place)
        chunk = tuple(self._slice("tokens", name, place) for name in _COLUMNS)
        chunks = [chunk] if row["tokens"] else []
        fed, shown = self._slice("fed", "fed", place), self._images(place)
        return Partial(request, row["sample"], fed, chunks, shown)

    def _episode(self, place: int, request: GroupRequest) -> Episode:
        row, columns = self._row(place), {n: self._slice("tokens", n, place) for n in _COLUMNS}
        experts = self._slice("experts", "experts", place) if row["experts"] >= 0 else None
        finished = bool(row["finished"])
        return Episode(
            Response(
                request.prompt,
                row["sample"],
                **columns,
                finished=finished,
                routed_experts=experts,
                shown=self._images(place),
            ),
            mask=self._slice("tokens", "mask", place),
            reward=float(self._arrays["reward"][place]),
            turns=row["turns"],
            reason=REASONS[row["reason"]],
            logged=self._logged[place],
        )

    def _images(self, place: int) -> TurnImages | None:
        if _IMAGES not in self._arrays:
            return None
        sizes = self._arrays[_IMAGE_BYTES]
        start = int(sizes[:place].sum())
        return turn_images.from_bytes(self._arrays[_IMAGES][start : start + int(sizes[place])])

    def _slice(self, lengths: str, name: str, place: int) -> np.ndarray:
        start = self._starts[lengths][place]
        return self._arrays[name][start : start + max(self._index[lengths][place], 0)].copy()
