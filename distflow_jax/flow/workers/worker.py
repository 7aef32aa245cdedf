"""A worker: it answers groups of the homes of a run, by the weights that these publish.

The main thread samples. A thread talks with the homes: it asks for groups while there is room,
brings samples, and learns which versions there are. Another one pulls weights while the main thread
samples; it takes them between two decode calls. With exact versions it takes others only when it
has nothing under way.
"""

import collections
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from distflow_jax.environments.episode_sampler import EpisodeSampler, Progress
from distflow_jax.flow.homes.home import Key
from distflow_jax.flow.workers.frames import Frame, samples_frame, work_of
from distflow_jax.flow.workers.home_links import Joining, Links, leave
from distflow_jax.flow.workers.wire import Caller, Refused, Unreachable
from distflow_jax.rollout.requests import GroupRequest

IDLE_SECONDS = 0.02  # between two looks at what other threads have done
LEAVE_SECONDS = 10.0  # for homes to get what was sampled, at the end
ASK_SECONDS = 0.1  # between two questions that were answered by nothing

log = logging.getLogger("distflow_jax")

Pull = Callable[[Links, int], Any]  # the weights of a version, on the devices of the sampler


@dataclasses.dataclass(frozen=True)
class Pace:
    """Times of a worker, in seconds."""

    save: float  # between two times that it sends tokens under way
    orphan: float  # for which it waits for trainers that do not answer


@dataclasses.dataclass
class _Shared:
    """State that the threads of a worker share, under `lock`."""

    lock: threading.Condition = dataclasses.field(default_factory=threading.Condition)
    room: int = 0  # responses that the sampler has room for
    asked: int = 0  # questions that came back with nothing, since something was under way
    version: int = -1  # that the sampler holds
    newest: int = -1  # that all homes have
    wanted: tuple[int, ...] = ()  # versions that homes need most, one of each home
    came: collections.deque[tuple[Key, GroupRequest, Progress]] = dataclasses.field(
        default_factory=collections.deque
    )
    # to be brought: what the sampler does not go on with, and what it does
    goes: dict[Key, Progress] = dataclasses.field(default_factory=dict)
    saves: dict[Key, Progress] | None = None
    failed: dict[Key, str] = dataclasses.field(default_factory=dict)
    dropped: set[Key] = dataclasses.field(default_factory=set)  # that homes do not want
    calls: int = 0  # decode calls that no home knows of
    rejoined: bool = False  # the run was started again
    over: bool = False  # the run has ended, or the worker shall end


class Worker:
    """Samples for a run until it ends. One thread calls `serve`."""

    def __init__(
        self,
        sampler: EpisodeSampler,
        links: Links,
        joining: Joining,
        pull: Pull,
        pace: Pace,
        *,
        slots: int,
        cache: str,
    ):
        """`sampler`: with the weights of a version that `links` have; `slots`: its number of
        responses at a time; `cache`: as of Scheduler.load."""
        self._sampler, self._links, self._joining = sampler, links, joining
        self._pull, self._pace, self._slots, self._cache = pull, pace, slots, cache
        self._shared = _Shared(version=sampler.version, newest=links.newest)
        self._open: dict[Key, GroupRequest] = {}
        self._pulling: tuple[int, Links, Future[Any]] | None = None
        self._puller = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._next_save, self._calls = 0.0, 0
        self.groups = 0  # that were answered whole

    def serve(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Samples until the run has ended, or `stopped()`; homes then get what was sampled.

        Raises ValueError if trainers do not answer for too long.
        """
        shared, sampler = self._shared, self._sampler
        talks = ThreadPoolExecutor(1, thread_name_prefix="homes")
        talk = talks.submit(self._talk)
        talk.add_done_callback(lambda _: self._end())
        try:
            while not (shared.over or stopped()):
                if not self._round():
                    with shared.lock:
                        shared.lock.wait(IDLE_SECONDS)
            with shared.lock:
                under_way = {k: p for k, p in sampler.progress().items() if k in self._open}
                shared.goes = under_way | shared.goes
        finally:
            shared.over = True
            wait([talk], LEAVE_SECONDS)
            talks.shutdown(wait=False)
            self._puller.shutdown(wait=False, cancel_futures=True)
            leave(self._links)
            self._links.close()
        if talk.done():
            talk.result()

    # -- the main thread --------------------------------------------------------------------------

    def _round(self) -> bool:
        """A look at what the homes have sent, and a decode call; whether there was work."""
        shared, sampler = self._shared, self._sampler
        with shared.lock:
            rejoined, shared.rejoined = shared.rejoined, False
            dropped, shared.dropped = shared.dropped, set()
            came, shared.came = shared.came, collections.deque()
        if rejoined:
            self._begin_anew()
        self._drop(dropped & self._open.keys())
        for key, request, progress in came:
            self._submit(key, request, progress)
        self._take_weights()
        ended = sampler.round() if sampler.busy else []
        for key, _ in ended:
            del self._open[key]
            self.groups += 1
        calls = sampler.counts.generate_calls
        with shared.lock:
            shared.calls += calls - self._calls
            self._calls = calls
            for key, episodes in ended:
                shared.goes[key] = Progress({e.response.sample: e for e in episodes})
            wanted = sum(request.sampling.num_samples for request in self._open.values())
            shared.room = max(0, self._slots - wanted)
            if self._open:
                shared.asked = 0
            if time.monotonic() >= self._next_save and self._open and shared.saves is None:
                self._next_save = time.monotonic() + self._pace.save
                shared.saves = {key: Progress() for key in self._open} | sampler.progress()
            shared.lock.notify_all()
        return bool(came or self._open)

    def _submit(self, key: Key, request: GroupRequest, progress: Progress) -> None:
        if key in self._open:
            return
        try:
            self._sampler.submit(key, request, progress)
            self._open[key] = request
        except ValueError as error:
            with self._shared.lock:
                self._shared.failed[key] = str(error)

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
            if links is not self._links or future.exception() is not None:
                self._pulling = None  # of the run before, or too old by now
                if (error := future.exception()) is not None:
                    _raise_unless_lost(error)
                return
            if self._links.exact and (self._open or version != pulled):
                if version is not None and version != pulled:
                    self._pulling = None
                return
            self._pulling = None
            self._sampler.free_weights()
            self._sampler.load(future.result(), pulled, cache=self._cache)
            with self._shared.lock:
                self._shared.version, self._shared.asked = pulled, 0
        elif version is not None:
            future = self._puller.submit(self._pull, self._links, version)
            future.add_done_callback(lambda _: self._wake())
            self._pulling = version, self._links, future

    def _version_to_hold(self) -> int | None:
        """The version that is to be pulled now; None: that which is held is right."""
        shared, held = self._shared, self._sampler.version
        with shared.lock:
            if shared.version < 0:  # those that are held are of a start that is undone
                return (
                    shared.newest
                    if not self._links.exact
                    else min(shared.wanted or (shared.newest,))
                )
            if not self._links.exact:
                return shared.newest if shared.newest > held else None
            idle = not self._open and not shared.came and shared.asked >= len(self._links.callers)
            if not idle or not shared.wanted:
                return None
            best = min(shared.wanted)
            return best if best != held else None

    def _begin_anew(self) -> None:
        """Goes on for a run that was started again: what later weights have sampled is dropped."""
        newest = self._links.newest
        left = {k: p for k, p in self._sampler.progress().items() if k in self._open}
        self._drop(set(self._open))
        with self._shared.lock:
            goes = {**left, **self._shared.goes}
            self._shared.goes = {k: p for k, p in goes.items() if _up_to(p, newest)}
            self._shared.saves = None
            self._shared.failed.clear()
            self._shared.dropped.clear()
            if self._sampler.version > newest:
                self._shared.version = -1

    def _wake(self) -> None:
        with self._shared.lock:
            self._shared.lock.notify_all()

    # -- the thread that talks --------------------------------------------------------------------

    def _talk(self) -> None:
        shared = self._shared
        while not shared.over:
            try:
                quiet = not self._exchange()
            except Unreachable as error:
                log.warning("%s; waiting for the trainers", error)
                self._rejoin()
                continue
            if quiet:
                with shared.lock:
                    shared.lock.wait(ASK_SECONDS)
        with contextlib.suppress(Unreachable, Refused):
            self._exchange()

    def _end(self) -> None:
        """Has `serve` end."""
        with self._shared.lock:
            self._shared.over = True
            self._shared.lock.notify_all()

    def _exchange(self) -> bool:
        """Brings samples, and asks for work; whether anything was brought or came."""
        shared = self._shared
        with shared.lock:
            goes, saves, shared.saves = dict(shared.goes), shared.saves, None
            failed, shared.failed = shared.failed, {}
        for key, why in failed.items():
            self._call(
                self._links.home_of(key[0]), "fail", Frame({"keys": [list(key)], "why": why})
            )
        sent = self._bring(goes, whole=True)
        if saves is not None:
            self._bring({k: p for k, p in saves.items() if k not in goes}, whole=False)
        return self._ask() or sent

    def _bring(self, found: dict[Key, Progress], *, whole: bool) -> bool:
        """Brings samples to their homes; `whole`: the worker does not go on with these groups."""
        shared = self._shared
        by_home: dict[int, dict[Key, Progress]] = {}
        for key, progress in found.items():
            by_home.setdefault(key[0] % len(self._links.callers), {})[key] = progress
        for place, samples in by_home.items():
            with shared.lock:
                calls, shared.calls = shared.calls, 0
            frame = samples_frame({"calls": calls, "goes_on": not whole}, samples)
            answer = self._call(self._links.callers[place], "bring", frame)
            if answer is None:
                return False
            with shared.lock:
                if whole:
                    for key in samples:
                        shared.goes.pop(key, None)
                else:
                    dropped = answer.facts.get("dropped", [])
                    shared.dropped |= {(int(c), str(node)) for c, node in dropped}
        return bool(by_home)

    def _ask(self) -> bool:
        shared, came, wanted, newest = self._shared, 0, [], []
        callers = list(self._links.callers)
        first = int(time.monotonic() * 1000) % len(callers)
        for caller in callers[first:] + callers[:first]:
            with shared.lock:
                room, held = shared.room, shared.version
            if shared.over or held < 0:
                room = 0
            answer = self._call(caller, "ask", Frame({"version": held, "room": room}))
            if answer is None:
                return False
            work = work_of(answer)
            wanted.append(int(answer.facts["wanted"][0]))
            newest.append(int(answer.facts["newest"]))
            with shared.lock:
                shared.came.extend(work)
                shared.room -= sum(request.sampling.num_samples for _, request, _ in work)
                if held == shared.version and not work:
                    shared.asked += 1
                elif work:
                    shared.asked = 0
                came += len(work)
                if work:
                    shared.lock.notify_all()
        with shared.lock:
            shared.newest, shared.wanted = min(newest), tuple(wanted)
            shared.lock.notify_all()
        return bool(came)

    def _call(self, caller: Caller, method: str, frame: Frame) -> Frame | None:
        """The answer of a home; None if the run has ended or was started again."""
        answer = self._links.call(caller, method, frame)
        if answer.facts["incarnation"] != self._links.incarnation:
            self._rejoin()
            return None
        if answer.facts["ended"]:
            self._end()
        return answer

    def _rejoin(self) -> None:
        """Waits for trainers that answer, and begins anew if the run was started again."""
        before = self._links.incarnation
        links = self._joining.again(self._pace.orphan, lambda: self._shared.over)
        if links is None:
            self._end()
            return
        self._links.close()
        with self._shared.lock:
            self._links = links
            self._shared.newest, self._shared.asked = links.newest, 0
            self._shared.wanted = ()
            if links.incarnation != before:
                self._shared.came.clear()
                self._shared.rejoined = True
                log.info("the run was started again after step %d", links.newest)
                self._shared.lock.notify_all()
                while self._shared.rejoined and not self._shared.over:
                    self._shared.lock.wait(IDLE_SECONDS)


def _raise_unless_lost(error: BaseException) -> None:
    """Raises what is neither a lost connection nor a version that is not there any more."""
    if not isinstance(error, (Unreachable, Refused, LookupError)):
        raise error
    log.info("weights did not come: %s", error)


def _up_to(progress: Progress, newest: int) -> bool:
    """Whether weights of a version, or older ones, have sampled all tokens."""
    versions = [e.response.version for e in progress.episodes.values()]
    versions += [chunk[3] for p in progress.partials for chunk in p.chunks]
    return all(v.max(initial=0) <= newest for v in versions)
