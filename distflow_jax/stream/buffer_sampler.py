"""The sampler of a process whose groups workers answer: it hands requests to the task buffer."""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping

import numpy as np

from distflow_jax.environments.episode_sampler import Counts, Progress
from distflow_jax.environments.episodes import Episode
from distflow_jax.rollout.requests import GroupRequest, Response
from distflow_jax.stream.frames.frames import pieces_of, progress_of
from distflow_jax.stream.frames.image_frames import image_bytes
from distflow_jax.stream.node_tasks import NodeTasks
from distflow_jax.stream.saved_samples import Key
from distflow_jax.stream.task_buffer import Begun, TaskBuffer, Work

MOST_IMAGE_BYTES = 48 << 20  # of a prompt: an answer to a worker has to hold them
NEAR_TIE = 1e-4  # lead of a token over the next one below which its choice may differ

log = logging.getLogger("distflow_jax")


class BufferSampler:
    """Answers requests as EpisodeSampler does, by what workers bring to a task buffer.

    Calls but `submit` and `round` come under the lock of the producer.

    Attributes:
      in_turns: whether responses are in turns: never.
      tasks: nodes that workers run on groups whose samples are complete.
    """

    in_turns = False

    def __init__(
        self,
        buffer: TaskBuffer,
        lock: threading.Condition,
        on_response: Callable[[Response], None] | None = None,
        tasks: NodeTasks | None = None,
    ):
        """`lock` guards the task buffer and the tasks; `on_response` is called as soon as a
        response is there, in the thread of `round`. `tasks`: None where trainers run all nodes."""
        self.buffer, self._lock, self._on_response = buffer, lock, on_response
        self.tasks = tasks or NodeTasks(buffer.leases)
        self._requests: dict[Key, GroupRequest] = {}
        self._arrived: list[Response] = []
        self._restored = self._taken = self._calls = 0

    @property
    def version(self) -> int:
        """Training steps that the weights have seen which workers can get."""
        return self.buffer.newest

    @property
    def busy(self) -> bool:
        """Whether a request was not returned by `round`."""
        return bool(self._requests)

    @property
    def counts(self) -> Counts:
        """Numbers of all that workers have sampled, as far as this task buffer knows."""
        sampled = self._taken + self.buffer.tokens - self._restored
        return Counts(self._calls, sampled, self.buffer.tokens)

    def submit(self, key: Key, request: GroupRequest, progress: Progress | None = None) -> None:
        """Adds a request, to go on with the `progress` of an earlier run.

        Raises ValueError for images that are too large to be sent to a worker.
        """
        pieces = pieces_of(progress or Progress())
        order, size = tuple(request.rank or ()), image_bytes(request.prompt)
        if size > MOST_IMAGE_BYTES:
            raise ValueError(
                f"the images of prompt {key[0]} have {size >> 20} MiB of patches, and workers get "
                f"at most {MOST_IMAGE_BYTES >> 20} MiB at once: use a smaller data.image_tokens"
            )
        with self._lock:
            self._restored += sum(piece.tokens for piece in pieces.values())
            self._requests[key] = request
            self.buffer.begin(
                Begun(key, request.turn, request.samples, order, request, size), pieces
            )

    def round(self) -> list[tuple[Key, list[Episode]]]:
        """Requests that are complete now, their responses in the order of their numbers.

        Groups go on whose tasks have results.
        """
        ended = []
        with self._lock:
            results = self.tasks.take()
            arrived, self._arrived = self._arrived, []
            for group, pieces in self.buffer.take():
                del self._requests[group.key]
                self._taken += sum(piece.tokens for piece in pieces.values())
                ended.append((group.key, [pieces[s].content for s in sorted(pieces)]))
        if self._on_response is not None:
            for response in arrived:
                self._on_response(response)
        for task, result in results:
            task.then(result)
        return ended

    @property
    def has_news(self) -> bool:
        """Whether `round` has something to do."""
        news = self.buffer.has_news or self.tasks.has_news or self.buffer.leases.given_up
        return bool(self._arrived or news)

    def give_up(self) -> dict[int, str]:
        """Prompts that no worker can answer, with the reason; their requests are gone."""
        found, self.buffer.leases.given_up = self.buffer.leases.given_up, {}
        for key in [key for key in self._requests if key[0] in found]:
            del self._requests[key]
        return found

    def forget(self, tokens: int) -> None:
        """Takes tokens of a prompt that was given up out of the count: nothing trains on them."""
        self._taken -= tokens

    def progress(self) -> dict[Key, Progress]:
        """Samples of each request that `round` has not returned."""
        return {key: progress_of(pieces) for key, pieces in self.buffer.pieces().items()}

    def drain(self) -> None:
        """Does nothing: no program of this process samples."""

    def close(self) -> None:
        """Forgets the requests."""
        self._requests.clear()

    # -- what workers bring -----------------------------------------------------------------------

    def requests(self, keys: list[Key]) -> dict[Key, GroupRequest]:
        """The requests of some keys, without those that nobody waits for."""
        return {key: self._requests[key] for key in keys if key in self._requests}

    def bring(
        self,
        worker: str,
        keys: list[Key],
        found: Mapping[Key, Progress],
        *,
        calls: int,
        goes_on: bool,
    ) -> list[Key]:
        """Takes the samples of a worker; returns the keys that it should drop.

        `calls`: decode calls since it brought something last; `goes_on`: whether it works on.
        """
        self._calls += calls
        now, dropped = time.monotonic(), []
        for key in keys:
            known = self.buffer.ended(key)
            progress = found.get(key, Progress())
            if not self.buffer.bring(worker, key, pieces_of(progress), now, goes_on=goes_on):
                dropped.append(key)
            new = self.buffer.ended(key) - known
            self._arrived += [e.response for s, e in progress.episodes.items() if s in new]
        _tell_differing(self.buffer, worker)
        return dropped

    def ask(
        self, worker: str, held: int, room: int, slots: int = 0
    ) -> list[tuple[Key, GroupRequest, Progress]]:
        """Gives a worker that holds a version requests for so many responses; see Task
        buffer.ask."""
        given = self.buffer.ask(worker, held, room, time.monotonic(), slots)
        return [_request(work) for work in given]


def _request(work: Work) -> tuple[Key, GroupRequest, Progress]:
    request: GroupRequest = work.group.content
    return work.group.key, request, progress_of(work.pieces)


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first token in which two samples of one response differ; None: one has ended before."""

    place: int
    tokens: tuple[int | None, int | None]  # of the first result, which counts, and of the second


def differs(first: Episode, second: Episode) -> Difference | None:
    """Where two samples of one response differ, before a token whose choice was close."""
    one, two = first.response, second.response
    length = min(len(one.tokens), len(two.tokens))
    unlike = np.flatnonzero(one.tokens[:length] != two.tokens[:length])
    if not len(unlike) and len(one.tokens) == len(two.tokens):
        return None
    at = int(unlike[0]) if len(unlike) else length
    if len(unlike) and float(min(one.margin[at], two.margin[at])) < NEAR_TIE:
        return None
    tokens = [int(x.tokens[at]) if at < len(x.tokens) else None for x in (one, two)]
    return Difference(at, (tokens[0], tokens[1]))


def _tell_differing(buffer: TaskBuffer, worker: str) -> None:
    """Warns of second results that differ, of a worker that has just brought them."""
    found, buffer.differing = buffer.differing, []
    for (counter, _), sample, where in found:
        log.warning(
            "response %d to prompt %d differs at token %d: %s counts, and %s of %s does not; "
            "one version on every worker should give one response",
            sample,
            counter,
            where.place,
            *map(_named, where.tokens),
            worker,
        )


def _named(token: int | None) -> str:
    return "no token" if token is None else f"token {token}"
