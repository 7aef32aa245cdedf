"""Tasks that one worker at a time may hold: groups to sample, and nodes to run."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.environments.episodes import Episode
from distflow_jax.rollout.requests import Partial

Key = tuple[int, str]  # of a task: counter of the prompt, id of the node

SAMPLING = ""  # what workers that sample serve, beside ids of nodes
EVALUATION = "(evaluation)"  # node of the groups of an evaluation, which they serve too
SAMPLER = (SAMPLING, EVALUATION)
ENVIRONMENT = "environment"  # what hosts of environments serve; no task is of it
PIECES_BYTES = 160 << 20  # of one group's responses in a frame, which holds its images too
FRUITLESS_LEASES = 30  # for which news without a new token prolong a lease
NODE_QUOTA = 2  # nodes that a worker holds at a time: one that runs, and one that is next
_TOKEN_BYTES = 17  # of a response's arrays: four numbers and a mark of each token


@dataclasses.dataclass(frozen=True)
class Piece:
    """The known tokens of one response."""

    tokens: int  # that were sampled
    lowest: int  # version of them, 0 without tokens
    highest: int  # version of them, 0 without tokens
    whole: bool  # the response has ended
    content: Any  # the response itself, or its tokens so far
    size: int = 0  # bytes of it
    worker: str = ""  # that submitted it; "": an earlier start of the run has it


@dataclasses.dataclass(eq=False, kw_only=True)
class OpenTask:
    """A task that waits for its result, and the worker that holds it."""

    key: Key
    content: Any  # what a worker needs to do it
    node: str = SAMPLING  # that a worker must serve to hold it
    worker: str = ""  # that has a lease; "": none
    until: float = 0.0  # end of the lease
    failures: dict[str, int] = dataclasses.field(default_factory=dict)  # by worker
    silent: set[str] = dataclasses.field(default_factory=set)  # workers whose leases have ended

    @property
    def queue(self) -> tuple[str, int]:
        """The node, and the step, of the tasks that it waits among."""
        return self.node, 0

    @property
    def priority(self) -> tuple[float, ...]:
        """Lowest first, among the tasks that it waits with."""
        return (self.key[0],)

    @property
    def lacks(self) -> int:
        """Responses that have not ended."""
        return 0

    @property
    def trains(self) -> bool:
        """Whether a step trains on it; otherwise it is of an evaluation."""
        return True

    def lease(self, worker: str, now: float, seconds: float, calls: float = 0.0) -> None:
        """Begins a lease, or prolongs it; see OpenTasks.lease. A node makes no `calls`."""
        self.worker, self.until = worker, now + seconds

    def free(self) -> None:
        """Ends the lease; see OpenTasks.free."""
        self.worker, self.until = "", 0.0

    def fail(self, worker: str) -> bool:
        """Notes that a worker failed, once of each lease, which may have ended; whether it had
        one."""
        if self.worker != worker and worker not in self.silent:
            return False
        self.silent.discard(worker)
        self.failures[worker] = self.failures.get(worker, 0) + 1
        return True

    def suits(self, worker: str, others: Iterable[str]) -> bool:
        """Whether a worker should hold it, and none of `others`, which are at work: not one that
        let a lease of it end while others have not tried, nor one that failed while others have
        not failed."""
        if worker in self.failures:
            return all(other in self.failures for other in others)
        tried = self.failures.keys() | self.silent
        return worker not in tried or all(other in tried for other in others)


@dataclasses.dataclass(eq=False, kw_only=True)
class NodeTask(OpenTask):
    """One node of the graph for one group. Any worker that serves the node may run it, more than
    once if needed, because no weights are involved."""

    read: Callable[[Any], Any]  # what a worker sent -> the result; ValueError for what is none
    then: Callable[[Any], None]  # called with the result, by whom takes it

    def __post_init__(self):
        self.node = self.key[1]


@dataclasses.dataclass(eq=False, kw_only=True)
class GroupTask(OpenTask):
    """The responses to one prompt, as far as they are known."""

    step: int  # that trains it, at the latest; of an evaluation: the version that answers it
    samples: range
    order: tuple[float, ...] = ()  # of groups of one step, lowest first
    size: int = 0  # bytes of the content, where they are many
    floor: int = 0  # lowest version that its tokens may have
    ended: dict[int, Piece] = dataclasses.field(default_factory=dict)
    under_way: dict[int, Piece] = dataclasses.field(default_factory=dict)
    last: str = ""  # worker that had the last lease
    shown: int = 0  # tokens that this one has shown
    moved: float = 0.0  # when these became more, or the lease began
    differed: set[int] = dataclasses.field(default_factory=set)  # samples of which results did
    workers: set[str] = dataclasses.field(default_factory=set)  # that its tokens are of
    lost: str = ""  # of an evaluation: why no worker could answer it

    def lease(self, worker: str, now: float, seconds: float, calls: float = 0.0) -> None:
        """Begins a lease, or prolongs it; without progress by no more than FRUITLESS_LEASES and the
        seconds that `calls` of an environment may take a response."""
        if self.last != worker:
            self.last, self.shown = worker, self.tokens
        if self.worker != worker:
            self.worker, self.moved = worker, now
        self.until = min(now + seconds, self.moved + FRUITLESS_LEASES * seconds + calls)

    def drop(self, worker: str) -> None:
        """Forgets what a worker has submitted: others sample it again."""
        self.ended = {s: piece for s, piece in self.ended.items() if piece.worker != worker}
        self.under_way = {s: piece for s, piece in self.under_way.items() if piece.worker != worker}

    @property
    def progress(self) -> Progress:
        """Its responses, as far as they are known."""
        return progress_of({**self.under_way, **self.ended})

    def sent(self) -> dict[int, Piece]:
        """Known responses that a worker gets, those that have ended first; ones beyond PIECES_BYTES
        it samples again."""
        found, size = {}, 0
        for sample, piece in (*self.ended.items(), *self.under_way.items()):
            size += piece.size
            if size <= PIECES_BYTES:
                found[sample] = piece
        return found

    @property
    def trains(self) -> bool:
        return self.node == SAMPLING

    @property
    def complete(self) -> bool:
        return len(self.ended) == len(self.samples)

    @property
    def lacks(self) -> int:
        """Responses that have not ended."""
        return len(self.samples) - len(self.ended)

    @property
    def tokens(self) -> int:
        """Tokens of all responses."""
        return sum(piece.tokens for piece in (*self.ended.values(), *self.under_way.values()))

    @property
    def queue(self) -> tuple[str, int]:
        return self.node, self.step

    @property
    def priority(self) -> tuple[float, ...]:
        """Lowest first: earlier steps, then what has begun, then the order of the groups."""
        return (self.step, not (self.ended or self.under_way), *self.order, self.key[0])


def pieces_of(progress: Progress) -> dict[int, Piece]:
    """The responses of a request as a task buffer holds them, by sample."""
    found = {s: _piece(e.response.version[e.mask], True, e) for s, e in progress.episodes.items()}
    for partial in progress.partials:
        version = np.concatenate([np.zeros(0, np.int32), *(c[3] for c in partial.chunks)])
        found[partial.sample] = _piece(version, False, partial)
    return found


def progress_of(pieces: Mapping[int, Piece]) -> Progress:
    """Inverse of pieces_of."""
    return Progress(
        {s: p.content for s, p in sorted(pieces.items()) if p.whole},
        [p.content for _, p in sorted(pieces.items()) if not p.whole],
    )


def _piece(version: np.ndarray, whole: bool, content: Episode | Partial) -> Piece:
    """`version`: of the tokens that were sampled; those of an environment have none."""
    low, high = (int(version.min()), int(version.max())) if len(version) else (0, 0)
    return Piece(len(version), low, high, whole, content, _size(content))


def progress_bytes(progress: Progress) -> int:
    """Bytes of a request's samples in a frame, about."""
    return sum(piece.size for piece in pieces_of(progress).values())


def _size(content: Episode | Partial) -> int:
    if isinstance(content, Partial):
        return _TOKEN_BYTES * len(content.tokens)
    response, experts = content.response, content.response.routed_experts
    size = _TOKEN_BYTES * len(response.tokens) + (0 if experts is None else experts.nbytes)
    return size + (0 if response.shown is None else response.shown.nbytes)
