"""A worker: it answers groups of the task buffers of a run, by the weights that these publish.

The main thread samples. A thread talks with the task buffers: it asks for groups while there is
room, brings samples, and learns which versions there are; host nodes of groups run beside that.
Another thread pulls weights while the main thread samples; it takes them between two decode calls.
With exact versions it takes others only when it has nothing under way.
"""

import collections
import dataclasses
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from distflow_jax.environments.episode_sampler import EpisodeSampler, Progress
from distflow_jax.rollout.foreign.foreign_scheduler import TriesEnded
from distflow_jax.rollout.requests import GroupRequest, Response
from distflow_jax.stream.links.buffer_client import Assignment, BufferClient
from distflow_jax.stream.links.buffer_links import Links
from distflow_jax.stream.saved_samples import Key
from distflow_jax.stream.wire.calls import Refused, Unreachable

IDLE_SECONDS = 0.02  # between two looks at what other threads have done
LOAD_SECONDS = 1200.0  # of a load in which groups stay here: a response's and the weights' time
MOST_LOST = 20  # pulls in a row that trainers may refuse

log = logging.getLogger("distflow_jax")

Pull = Callable[[Links, int], Any]  # the weights of a version, on the devices of the sampler


class Worker:
    """Samples for a run until it ends. One thread calls `serve`."""

    def __init__(
        self,
        sampler: EpisodeSampler,
        talk: BufferClient,
        pull: Pull,
        *,
        cache: str,
        ended: collections.deque[Response],
    ):
        """`sampler`: with weights of the version that `talk` says it holds; `cache`: as of
        Scheduler.load; `ended`: where the sampler puts responses."""
        self._sampler, self._ended = sampler, ended
        self._talk, self._shared = talk, talk.shared
        self._pull, self._cache = pull, cache
        self._open: dict[Key, GroupRequest] = {}
        self._arrived: dict[Key, int] = {}  # responses of these that had ended elsewhere
        self._pulling: tuple[int, Links, Future[Any]] | None = None
        self._puller = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._next_save, self._calls = 0.0, 0
        self._lost = 0  # pulls in a row that failed
        self.groups = 0  # that were answered whole
        self.loads, self.load_seconds = 0, 0.0  # of weights, in place of decoding
        self.finished = False  # the run has ended

    def serve(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Samples until the run has ended, or `stopped()`; task buffers then get what was sampled.

        Raises ValueError if trainers do not answer for too long.
        """
        shared = self._shared
        try:
            with self._talk.serving():
                while not (shared.over or stopped()):
                    if not self._round():
                        with shared.lock:
                            shared.lock.wait(IDLE_SECONDS)
                if shared.rejoined:
                    self._begin_anew()
                with shared.lock:
                    self.finished = shared.over
                    shared.goes = self._progress() | shared.goes
        finally:
            self._puller.shutdown(wait=False, cancel_futures=True)

    def _round(self) -> bool:
        """A look at what the task buffers have sent, and a decode call; whether there was work."""
        shared, sampler = self._shared, self._sampler
        with shared.lock:
            rejoined = shared.rejoined
            dropped, shared.dropped = shared.dropped, set()
            came, shared.came = shared.came, collections.deque()
        if rejoined:
            self._begin_anew()
        self._drop(dropped & self._open.keys())
        for work in came:
            self._submit(work)
        self._take_weights()
        try:
            ended = sampler.round() if sampler.busy else []
        except TriesEnded as error:
            self._give_up(error)
            return True
        for key, _ in ended:
            del self._open[key]
            self.groups += 1
        counts = sampler.counts
        calls = counts.generate_calls
        with shared.lock:
            shared.calls += calls - self._calls
            self._calls = calls
            for key, episodes in ended:
                shared.goes[key] = Progress({e.response.sample: e for e in episodes})
            coming = sum(work.lacks for work in shared.came)
            under_way = self._under_way()
            shared.room = max(0, self._shared.slots - under_way - coming)
            if self._open:
                shared.asked = 0
            if time.monotonic() >= self._next_save and self._open and shared.saves is None:
                self._next_save = time.monotonic() + self._talk.pace.save
                shared.saves = {key: Progress() for key in self._open} | self._progress()
            shared.lock.notify_all()
        return bool(came or self._open)

    def _under_way(self) -> int:
        """Responses of open requests that have not ended."""
        wanted = sum(request.sampling.num_samples for request in self._open.values())
        keys = {key[0] for key in self._open}
        for _ in range(len(self._ended)):  # those of groups that are gone are forgotten
            response = self._ended.popleft()
            if response.prompt.counter in keys:
                self._ended.append(response)
        self._arrived = {key: self._arrived[key] for key in self._open}
        return wanted - sum(self._arrived.values()) - len(self._ended)

    def _progress(self) -> dict[Key, Progress]:
        """Samples of all requests that are open, which do not grow any more."""
        found = {k: p for k, p in self._sampler.progress().items() if k in self._open}
        for progress in found.values():
            progress.partials = [
                dataclasses.replace(one, chunks=list(one.chunks)) for one in progress.partials
            ]
        return found

    def _submit(self, work: Assignment) -> None:
        shared, key = self._shared, work.key
        if key in self._open:
            return
        if self._talk.links.exact and work.held != self._sampler.version:
            with shared.lock:  # other weights came in between: it is for others
                shared.goes[key] = work.progress
            return
        try:
            self._sampler.submit(key, work.request, work.progress)
            self._open[key] = work.request
            here = {r.sample for r in self._ended if r.prompt.counter == key[0]}
            self._arrived[key] = len(work.progress.episodes.keys() - here)
        except ValueError as error:
            with shared.lock:
                shared.failed[key] = str(error)

    def _give_up(self, error: TriesEnded) -> None:
        """Returns a group that the engine does not answer; the others go on."""
        keys = {key for key, request in self._open.items() if request is error.request}
        self._drop(keys)
        with self._shared.lock:
            self._shared.failed |= dict.fromkeys(keys, str(error))

    def _drop(self, keys: set[Key]) -> None:
        """Answers some requests no longer; the tokens of others are read again."""
        if keys:
            self._sampler.resume(*self._sampler.suspend(keys))
            for key in keys:
                del self._open[key]

    def _take_weights(self) -> None:
        """Takes weights that were pulled, or begins to pull those that are wanted."""
        version = self._version_to_hold()
        if self._pulling is not None:
            pulled, links, future = self._pulling
            if not future.done():
                return
            if links is not self._talk.links or future.exception() is not None:
                self._pulling = None  # of the run before, or too old by now
                if (error := future.exception()) is not None:
                    self._note_lost(error)
                return
            if self._talk.links.exact and (self._open or version != pulled):
                if version is not None and version != pulled:
                    self._pulling = None
                return
            self._pulling = None
            self._load(future.result(), pulled)
        elif version is not None:
            future = self._puller.submit(self._pull, self._talk.links, version)
            future.add_done_callback(lambda _: self._shared.wake())
            self._pulling = version, self._talk.links, future

    def _load(self, params: Any, version: int) -> None:
        """Weight updates the weights. An engine may end its responses first, so the leases go
        on."""
        shared, began = self._shared, time.monotonic()
        with shared.lock:
            shared.kept_open, shared.keep_until = set(self._open), began + LOAD_SECONDS
        try:
            self._sampler.free_weights()
            self._sampler.load(params, version, cache=self._cache)
        finally:
            with shared.lock:
                shared.kept_open, shared.keep_until = set(), 0.0
        self.loads, self._lost = self.loads + 1, 0
        self.load_seconds += time.monotonic() - began
        with shared.lock:
            shared.version, shared.asked = version, 0

    def _note_lost(self, error: BaseException) -> None:
        """Raises what has ended a pull, unless trainers may have newer weights, or be away."""
        self._lost += 1
        if not isinstance(error, (Unreachable, Refused)):
            raise error
        if isinstance(error, Refused) and self._lost >= MOST_LOST:
            raise ValueError(f"the weights did not come: {error}") from error
        log.warning("weights did not come: %s", error)
        time.sleep(IDLE_SECONDS)

    def _version_to_hold(self) -> int | None:
        """The version that is to be pulled now; None: that which is held is right."""
        shared, held = self._shared, self._sampler.version
        with shared.lock:
            links = self._talk.links
            best = min(shared.wanted or (shared.newest,)) if links.exact else shared.newest
            if shared.version < 0:  # those that are held are of a start that is undone
                return best
            if not links.exact:
                return best if best > held else None
            idle = not (self._open or shared.came) and shared.asked >= len(links.clients)
            return best if idle and best != held else None

    def _begin_anew(self) -> None:
        """Goes on for a run that was started again: what undone weights have sampled is dropped."""
        kept = self._shared.kept
        left = self._progress()
        self._drop(set(self._open))
        with self._shared.lock:
            goes = {**left, **self._shared.goes}
            self._shared.goes = {k: p for k, p in goes.items() if _up_to(p, kept)}
            self._shared.saves = None
            self._shared.failed.clear()
            self._shared.dropped.clear()
            if self._sampler.version > kept:
                self._shared.version = -1
            self._shared.rejoined = False  # only now: the other thread brings nothing before
            self._shared.lock.notify_all()


def _up_to(progress: Progress, version: int) -> bool:
    """Whether weights of a version, or older ones, have sampled all tokens."""
    versions = [e.response.version for e in progress.episodes.values()]
    versions += [chunk[3] for p in progress.partials for chunk in p.chunks]
    return all(v.max(initial=-1) <= version for v in versions)
