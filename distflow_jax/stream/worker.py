"""The worker: samples groups of a task buffer with the weights it receives.

Every run ahead has workers: in the training thread, in a thread beside it, or, with stream.workers,
in separate jobs. Between two decode calls, the worker's link (stream/links/) supplies due work and
takes finished responses. The calls of a round: Driver.wait_until > SamplingSide.round (or a loop of
a thread or job) > Worker.round > EpisodeSampler.round > Scheduler.step > StepLoop.decode_round.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

from distflow_jax.environments.episode_sampler import EpisodeSampler, Progress
from distflow_jax.rollout.foreign.foreign_scheduler import TriesEnded
from distflow_jax.rollout.requests import GroupRequest
from distflow_jax.rollout.sampler import SamplerState
from distflow_jax.stream.tasks import Key

Assignment = tuple[Key, GroupRequest, Progress]  # a request, and what is known of its answers


class Link(Protocol):
    """The source of a worker's groups and weights, and the destination of its samples."""

    def advance(self, worker: "Worker") -> bool:
        """Has the worker take what is due before its next decode call: weights, groups, an
        evaluation; whether there was anything."""

    def submit(self, worker: "Worker", ended: Mapping[Key, Progress]) -> None:
        """Takes groups that are complete, after each decode call."""

    def fail(self, key: Key, why: str) -> None:
        """Takes a group back that the worker cannot answer."""


class Worker:
    """Samples the groups that its link supplies. One thread at a time calls `round`.

    Attributes:
      open: incomplete requests.
      groups: number of completely answered groups.
      loads, load_seconds: of weights, instead of decoding.
    """

    def __init__(
        self,
        sampler: EpisodeSampler,
        link: Link,
        *,
        cache: str,
        span: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ):
        """`sampler`: with weights; `cache`: as of Scheduler.load; `span()`: times a decode call."""
        self.sampler, self._link, self._cache, self._span = sampler, link, cache, span
        self.open: dict[Key, GroupRequest] = {}
        self.groups, self.loads, self.load_seconds = 0, 0, 0.0

    @property
    def version(self) -> int:
        """Training steps that the weights have seen."""
        return self.sampler.version

    def round(self) -> bool:
        """Takes what is due, and makes a decode call; whether there was work."""
        worked = self._link.advance(self)
        return self.decode() or worked

    def decode(self) -> bool:
        """Makes a decode call; whether something is under way."""
        if not self.sampler.busy:
            return False
        try:
            with self._span():
                ended = self.sampler.round()
        except TriesEnded as error:  # of an engine of another program; the other groups go on
            keys = {key for key, request in self.open.items() if request is error.request}
            self.drop(keys)
            for key in keys:
                self._link.fail(key, str(error))
            return True
        for key, _ in ended:
            del self.open[key]
            self.groups += 1
        found = {key: {e.response.sample: e for e in episodes} for key, episodes in ended}
        self._link.submit(self, {key: Progress(episodes) for key, episodes in found.items()})
        return True

    def take(self, assigned: Iterable[Assignment]) -> None:
        """Begins to answer requests: in the order of their counters, whatever the order of leases;
        those that go on come before all others, the last one first."""
        for key, request, progress in sorted(assigned, key=_turn):
            try:
                self.sampler.submit(key, request, progress)
            except ValueError as error:
                self._link.fail(key, str(error))
            else:
                self.open[key] = request

    def drop(self, keys: Collection[Key]) -> None:
        """Answers some requests no longer."""
        if keys:
            self.sampler.drop(keys)
            for key in keys:
                del self.open[key]

    def load(self, weights: Any, version: int) -> None:
        """Takes weights in place of those that are held, which are freed."""
        began = time.monotonic()
        self.sampler.load(weights, version, cache=self._cache)
        self.loads, self.load_seconds = self.loads + 1, self.load_seconds + time.monotonic() - began

    def progress(self) -> dict[Key, Progress]:
        """Samples of all requests that are open, which do not grow any more."""
        return {key: found for key, found in self.sampler.progress().items() if key in self.open}

    @contextlib.contextmanager
    def suspended(self) -> Iterator[list[SamplerState]]:
        """A block that has the sampler's state, in a list, and leaves it there.

        What is under way goes on afterwards; responses in turns end first.
        """
        while self.sampler.in_turns and self.decode():
            pass
        state, partials = self.sampler.suspend()
        held = [state]
        yield held
        self.sampler.resume(held[0], partials)


def _turn(entry: Assignment) -> tuple[bool, int]:
    (counter, _), _, progress = entry
    begun = bool(progress.episodes or progress.partials)
    return (not begun, -counter if begun else counter)
