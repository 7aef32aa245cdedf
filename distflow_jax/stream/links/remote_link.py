"""The link of a worker in a separate job to the task buffers of a run.

The sampling thread calls a Link here. A second thread exchanges with the task buffers
(buffer_client.py), and a third pulls weights, which are loaded between two decode calls or, with
exact versions, when no response is unfinished.
"""

import collections
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.rollout.occupancy import Occupancy
from distflow_jax.rollout.requests import GroupRequest
from distflow_jax.stream.links.buffer_links import Links
from distflow_jax.stream.links.worker_pool import Room
from distflow_jax.stream.tasks import Key
from distflow_jax.stream.wire.calls import Refused, Unreachable
from distflow_jax.stream.worker import Worker

LOAD_SECONDS = 1200.0  # of a load in which groups stay here: a response's and the weights' time
RETRY_SECONDS = 0.5  # after a pull that failed
REFUSED_SECONDS = 60.0  # for which trainers of one start may refuse all pulls
TOLD_SECONDS = 60.0  # between two log lines on pulls that fail

log = logging.getLogger("distflow_jax")

Pull = Callable[[Links, int], Any]  # the weights of a version, on the devices of the sampler


@dataclasses.dataclass(frozen=True)
class LeasedGroup:
    """A group that a task buffer leased to a worker, with the worker's version at that time."""

    held: int
    key: Key
    request: GroupRequest
    progress: Progress

    @property
    def lacks(self) -> int:
        """Responses that have not ended."""
        return self.request.sampling.num_samples - len(self.progress.episodes)


@dataclasses.dataclass
class WorkerState:
    """State shared by the threads of a worker, under `lock`."""

    links: Links  # to the task buffers of the present start of the run
    lock: threading.Condition = dataclasses.field(default_factory=threading.Condition)
    capacity: int = 0  # responses that the sampler has room for
    # places of task buffers that had nothing, since something was under way, and of those where a
    # question waits
    asked: set[int] = dataclasses.field(default_factory=set)
    waiting: set[int] = dataclasses.field(default_factory=set)
    version: int = -1  # that the sampler holds
    # of each task buffer that the worker asks, by place: its newest version, the one that it needs
    # most, and the one that this worker should hold for an evaluation
    said: dict[int, tuple[int, int, int | None]] = dataclasses.field(default_factory=dict)
    # hosts of environments that each task buffer names, by place, and what takes them
    hosts: dict[int, dict[str, str]] = dataclasses.field(default_factory=dict)
    meet: Callable[[Mapping[str, str]], None] = lambda hosts: None
    assigned: collections.deque[LeasedGroup] = dataclasses.field(default_factory=collections.deque)
    # to be submitted: samples that the sampler does not go on with, and those that it does
    whole: dict[Key, Progress] = dataclasses.field(default_factory=dict)
    partial: dict[Key, Progress] = dataclasses.field(default_factory=dict)
    # groups that wait while weights are loaded, and until when their leases are kept
    kept_open: set[Key] = dataclasses.field(default_factory=set)
    keep_until: float = 0.0
    failed: dict[Key, str] = dataclasses.field(default_factory=dict)
    # finished responses that task buffers have, by sample, of the groups that it holds
    told: dict[Key, set[int]] = dataclasses.field(default_factory=dict)
    dropped: set[Key] = dataclasses.field(default_factory=set)  # that task buffers do not want
    spent: Occupancy = Occupancy()  # that no task buffer knows of
    slots: int = 0  # of the sampler; 0: there is none
    # responses, and nodes, for which task buffers are asked
    slots_room: Room = dataclasses.field(default_factory=Room)
    nodes_room: Room = dataclasses.field(default_factory=Room)
    rejoined: bool = False  # the run was started again, and the worker has not begun anew
    kept: int = -1  # version up to which samples of the start before are kept then
    over: bool = False  # the run has ended, or the worker shall end

    def join(self, links: Links) -> None:
        """Takes links to task buffers of a start of the run; under the lock."""
        self.links = links
        self.said.clear()
        self.hosts.clear()
        self.asked.clear()
        self.lock.notify_all()

    def hear(self, place: int, facts: Mapping[str, Any]) -> bool:
        """Takes the versions that a task buffer has, wants and evaluates, and returns whether they
        are others than before; under the lock."""
        said = facts["newest"], facts["wanted"][0], facts.get("evaluates")
        if changed := said != self.said.get(place):
            self.said[place] = said
            self.lock.notify_all()
        if "hosts" in facts:
            self.hosts[place] = facts["hosts"]
            self.meet(dict(collections.ChainMap(*self.hosts.values())))
        return changed

    def forget(self, place: int) -> None:
        """Forgets what a task buffer has said which the worker asks no more; under the lock."""
        self.said.pop(place, None)
        self.hosts.pop(place, None)
        self.lock.notify_all()

    def take_spent(self) -> list[float]:
        """Takes what the slots did that no task buffer knows of, for one; under the lock."""
        spent, self.spent = self.spent, Occupancy()
        return list(spent)

    @property
    def newest(self) -> int:
        """The version that all task buffers have which the worker asks; under the lock."""
        return min((newest for newest, _, _ in self.said.values()), default=self.links.newest)

    @property
    def evaluates(self) -> int | None:
        """The version that it should hold for an evaluation; under the lock."""
        found = [version for _, _, version in self.said.values() if version is not None]
        return min(found, default=None)

    @property
    def drains(self) -> bool:
        """Whether it should hold older weights once nothing is under way; under the lock."""
        evaluates = self.evaluates
        return evaluates is not None and evaluates < self.version

    def wake(self) -> None:
        """Has the other threads look."""
        with self.lock:
            self.lock.notify_all()

    def end(self) -> None:
        """Has all threads end."""
        with self.lock:
            self.over = True
            self.lock.notify_all()


class RemoteLink:
    """A worker's link through its state, which the other threads read and write."""

    def __init__(self, state: WorkerState, pull: Pull, *, save_seconds: float):
        """`save_seconds`: between two times that tokens under way are submitted."""
        self._state, self._pull = state, pull
        self._save_seconds, self._next_save = save_seconds, 0.0
        self._pulling: tuple[int, Links, Future[Any]] | None = None
        self._puller = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._spent = Occupancy()  # all so far
        # next pull, next log line, and since when trainers of the same start refuse all
        self._next_pull, self._next_told, self._refused = 0.0, 0.0, math.inf

    def advance(self, worker: Worker) -> bool:
        """Takes what the task buffers have sent, and weights; whether groups came."""
        state = self._state
        with state.lock:
            rejoined = state.rejoined
            dropped, state.dropped = state.dropped, set()
            assigned, state.assigned = state.assigned, collections.deque()
        if rejoined:
            self.begin_anew(worker)
        worker.drop(dropped & worker.open.keys())
        self._take(worker, assigned)
        self._take_weights(worker)
        if not worker.sampler.busy:
            self.submit(worker, {})
        return bool(assigned or worker.open)

    def submit(self, worker: Worker, ended: Mapping[Key, Progress]) -> None:
        """Leaves what has ended to the other thread, and at times what is under way."""
        state, spent = self._state, worker.sampler.counts.occupancy
        with state.lock:
            state.spent, self._spent = state.spent.plus(spent.plus(self._spent, -1)), spent
            state.whole |= ended
            coming = sum(assignment.lacks for assignment in state.assigned)
            state.capacity = max(0, state.slots - worker.sampler.lacks - coming)
            if worker.open:
                state.asked.clear()
            if worker.open and time.monotonic() >= self._next_save:
                self._next_save = time.monotonic() + self._save_seconds
                state.partial |= {key: Progress() for key in worker.open} | worker.progress()
            state.lock.notify_all()

    def fail(self, key: Key, why: str) -> None:
        """Returns a group that the engine does not answer."""
        with self._state.lock:
            self._state.failed[key] = why

    def begin_anew(self, worker: Worker) -> None:
        """Goes on for a run that was started again: what undone weights have sampled is dropped."""
        state, kept, left = self._state, self._state.kept, worker.progress()
        worker.drop(set(worker.open))
        with state.lock:
            whole = {**left, **state.whole}
            state.whole = {k: p for k, p in whole.items() if _up_to(p, kept)}
            state.partial.clear()
            state.failed.clear()
            state.dropped.clear()
            if worker.version > kept:
                state.version = -1
            state.rejoined = False  # only now: the other thread submits nothing before
            state.lock.notify_all()

    def leave(self, worker: Worker) -> None:
        """Leaves all samples to the other thread, at the end."""
        if self._state.rejoined:
            self.begin_anew(worker)
        with self._state.lock:
            self._state.whole = worker.progress() | self._state.whole

    def close(self) -> None:
        """Ends the pulls."""
        self._puller.shutdown(wait=False, cancel_futures=True)

    def _take(self, worker: Worker, assigned: collections.deque[LeasedGroup]) -> None:
        """Begins groups, unless other weights came in between and theirs are exact."""
        mine = []
        for entry in assigned:
            exact = self._exact or entry.request.version is not None
            if entry.held != worker.version and (exact or entry.held > worker.version):
                with self._state.lock:
                    self._state.whole[entry.key] = entry.progress  # it is for others
            elif entry.key not in worker.open:
                mine.append((entry.key, entry.request, entry.progress))
        worker.take(mine)

    @property
    def _exact(self) -> bool:
        return self._state.links.exact

    def _take_weights(self, worker: Worker) -> None:
        """Takes weights that were pulled, or begins to pull those that are wanted."""
        version, links = self._version_to_hold(worker), self._state.links
        if self._pulling is None:
            if version is not None and time.monotonic() >= self._next_pull:
                future = self._puller.submit(self._pull, links, version)
                future.add_done_callback(lambda _: self._state.wake())
                self._pulling = version, links, future
            return
        pulled, of, future = self._pulling
        if not future.done():
            return
        if of is not links or future.exception() is not None:
            self._pulling = None  # of the run before, or too old by now
            try:
                future.result()
            except Unreachable as error:
                self._note_lost(error, refused=False)
            except Refused as error:
                self._note_lost(error, refused=of is links and version == pulled)
        elif version is not None:  # otherwise those that are held are right for now
            self._pulling = None
            later = not self._exact and self._state.version < pulled < version
            if version == pulled or later:
                self._load(worker, future.result(), pulled)

    def _load(self, worker: Worker, weights: Any, version: int) -> None:
        """Loads weights. An engine may end its responses first, so the leases go on."""
        state = self._state
        with state.lock:
            state.kept_open = set(worker.open)
            state.keep_until = time.monotonic() + LOAD_SECONDS
        try:
            worker.sampler.free_weights()
            worker.load(weights, version)
        finally:
            with state.lock:
                state.kept_open, state.keep_until = set(), 0.0
        self._refused = math.inf
        with state.lock:
            state.version = version
            state.asked.clear()
            state.links.rest()

    def _note_lost(self, error: Exception, *, refused: bool) -> None:
        """Has a pull tried again later. Raises a refusal that stays; `refused`: trainers which have
        these weights, and no newer ones, did not give them."""
        now = time.monotonic()
        self._refused = min(self._refused, now) if refused else math.inf
        if now - self._refused >= REFUSED_SECONDS:
            raise ValueError(f"the weights did not come: {error}") from error
        self._next_pull = now + RETRY_SECONDS
        if now >= self._next_told:
            self._next_told = now + TOLD_SECONDS
            log.warning("weights did not come, they are asked for again: %s", error)

    def _version_to_hold(self, worker: Worker) -> int | None:
        """The version that is to be pulled now; None: that which is held is right."""
        state, held = self._state, worker.version
        with state.lock:
            wanted = [version for _, version, _ in state.said.values()]
            best = min(wanted, default=state.newest) if self._exact else state.newest
            evaluates = state.evaluates
            best = best if evaluates is None else evaluates
            if state.version < 0:  # those that are held are of a start that is undone
                return best
            requests = [*worker.open.values(), *(entry.request for entry in state.assigned)]
            if not self._exact and best > held:  # between two tokens, but not of an evaluation
                return None if any(r.version is not None for r in requests) else best
            asked = (state.asked | state.waiting).issuperset(state.links.places)
            idle = not requests and (asked or state.drains)
            return best if idle and best != held else None


def _up_to(progress: Progress, version: int) -> bool:
    """Whether weights of a version, or older ones, have sampled all tokens."""
    versions = [e.response.version for e in progress.episodes.values()]
    versions += [chunk[3] for p in progress.partials for chunk in p.chunks]
    return all(v.max(initial=-1) <= version for v in versions)
