"""A worker's talk with the homes: it brings samples, asks for groups, and joins again."""

import collections
import contextlib
import dataclasses
import logging
import threading
import time

from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.flow.frames.frames import Frame, progress_bytes, samples_frame, work_of
from distflow_jax.flow.saved_samples import Key
from distflow_jax.flow.wire.caller import Caller
from distflow_jax.flow.wire.calls import Refused, Unreachable
from distflow_jax.flow.workers.home_links import Joining, Links
from distflow_jax.rollout.requests import GroupRequest

BRING_BYTES = 32 << 20  # of the samples in one frame, but for a single response
WAIT_SECONDS = 0.02  # between two looks at another thread
ASK_SECONDS = 0.1  # between two questions that were answered by nothing

log = logging.getLogger("distflow_jax")


@dataclasses.dataclass(frozen=True)
class Came:
    """A group that a home gave to a worker which held a version."""

    held: int
    key: Key
    request: GroupRequest
    progress: Progress

    @property
    def lacks(self) -> int:
        """Responses that have not ended."""
        return self.request.sampling.num_samples - len(self.progress.episodes)


@dataclasses.dataclass
class Shared:
    """State that the threads of a worker share, under `lock`."""

    lock: threading.Condition = dataclasses.field(default_factory=threading.Condition)
    room: int = 0  # responses that the sampler has room for
    asked: int = 0  # questions that came back with nothing, since something was under way
    version: int = -1  # that the sampler holds
    newest: int = -1  # that all homes have
    wanted: tuple[int, ...] = ()  # versions that homes need most, one of each home
    came: collections.deque[Came] = dataclasses.field(default_factory=collections.deque)
    # to be brought: samples that the sampler does not go on with, and those that it does
    goes: dict[Key, Progress] = dataclasses.field(default_factory=dict)
    saves: dict[Key, Progress] | None = None
    # groups that wait while the main thread loads weights, and until when their leases are kept
    kept_open: set[Key] = dataclasses.field(default_factory=set)
    keep_until: float = 0.0
    failed: dict[Key, str] = dataclasses.field(default_factory=dict)
    dropped: set[Key] = dataclasses.field(default_factory=set)  # that homes do not want
    calls: int = 0  # decode calls that no home knows of
    slots: int = 0  # of the sampler
    rejoined: bool = False  # the run was started again, and the main thread has not begun anew
    kept: int = -1  # version up to which samples of the start before are kept then
    over: bool = False  # the run has ended, or the worker shall end

    def wake(self) -> None:
        """Has the other threads look."""
        with self.lock:
            self.lock.notify_all()

    def end(self) -> None:
        """Has all threads end."""
        with self.lock:
            self.over = True
            self.lock.notify_all()


class Talk:
    """Talks with the homes in a thread of its own.

    Attributes:
      links: to the homes of the present start of the run.
    """

    def __init__(
        self,
        links: Links,
        joining: Joining,
        shared: Shared,
        *,
        orphan_seconds: float,
        save_seconds: float,
    ):
        self.links, self._joining, self._shared = links, joining, shared
        self._orphan_seconds, self._save_seconds = orphan_seconds, save_seconds
        self._next_keep = 0.0
        self._told: dict[Key, set[int]] = {}  # ended responses that the homes have, by sample

    def serve(self) -> None:
        """Talks until the worker ends, and once more then. Raises what ends it."""
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
            if not shared.rejoined:  # otherwise there may be samples of weights that are undone
                self._exchange()

    def _exchange(self) -> bool:
        """Brings samples, and asks for work; whether anything was brought or came."""
        shared = self._shared
        with shared.lock:
            self._keep_open()
            goes, saves, shared.saves = dict(shared.goes), shared.saves, None
            failed, shared.failed = shared.failed, {}
        for key, why in failed.items():
            self._told.pop(key, None)
            self._call(self.links.home_of(key[0]), "fail", Frame({"keys": [list(key)], "why": why}))
        sent = self._bring(goes, whole=True)
        if saves is not None:
            self._bring({k: p for k, p in saves.items() if k not in goes}, whole=False)
        return self._ask() or sent

    def _keep_open(self) -> None:
        """Lets the leases go on while the main thread loads weights; under the lock."""
        shared, now = self._shared, time.monotonic()
        if shared.saves is None and self._next_keep <= now < shared.keep_until:
            self._next_keep = now + self._save_seconds
            keys = shared.kept_open | {work.key for work in shared.came}
            shared.saves = {key: Progress() for key in keys} or None

    def _bring(self, found: dict[Key, Progress], *, whole: bool) -> bool:
        """Brings samples to their homes; `whole`: the worker does not go on with these groups.

        A response that has ended is brought once.
        """
        shared = self._shared
        untold = {key: self._untold(key, progress) for key, progress in found.items()}
        frames = _by_homes(untold, len(self.links.callers))
        for place, samples, more in frames:
            with shared.lock:
                calls, shared.calls = shared.calls, 0
            frame = samples_frame({"calls": calls, "goes_on": more or not whole}, samples)
            answer = self._call(self.links.callers[place], "bring", frame)
            if answer is None:
                return False
            gone = {(int(c), str(node)) for c, node in answer.facts.get("dropped", [])}
            with shared.lock:
                for key, progress in samples.items():
                    self._told.setdefault(key, set()).update(progress.episodes)
                    if whole and not more:
                        shared.goes.pop(key, None)
                    if key in gone or (whole and not more):
                        del self._told[key]
                if not whole:
                    shared.dropped |= gone
        return bool(frames)

    def _untold(self, key: Key, progress: Progress) -> Progress:
        """The part of a request's samples that its home does not have."""
        told = self._told.get(key, set())
        episodes = {s: e for s, e in progress.episodes.items() if s not in told}
        return Progress(episodes, progress.partials)

    def _ask(self) -> bool:
        shared, came, wanted, newest = self._shared, 0, [], []
        callers = list(self.links.callers)
        first = int(time.monotonic() * 1000) % len(callers)
        for caller in callers[first:] + callers[:first]:
            with shared.lock:
                room, held = shared.room, shared.version
            if shared.over or held < 0:
                room = 0
            told = {"version": held, "room": room, "slots": shared.slots}
            answer = self._call(caller, "ask", Frame(told))
            if answer is None:
                return False
            work = [Came(held, *one) for one in work_of(answer)]
            self._told |= {one.key: set(one.progress.episodes) for one in work}
            wanted.append(int(answer.facts["wanted"][0]))
            newest.append(int(answer.facts["newest"]))
            with shared.lock:
                shared.came.extend(work)
                shared.room -= sum(one.lacks for one in work)
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
        answer = self.links.call(caller, method, frame)
        if answer.facts["incarnation"] != self.links.incarnation:
            self._rejoin()
            return None
        if answer.facts["ended"]:
            self._shared.end()
        return answer

    def _rejoin(self) -> None:
        """Waits for trainers that answer, and begins anew if the run was started again."""
        before = self.links.incarnation
        links = self._joining.again(self._orphan_seconds, lambda: self._shared.over)
        if links is None:
            self._shared.end()
            return
        self.links.close()
        with self._shared.lock:
            self.links = links
            self._shared.newest, self._shared.asked = links.newest, 0
            self._shared.wanted = ()
            if links.incarnation != before:
                self._told.clear()
                self._shared.came.clear()
                self._shared.rejoined, self._shared.kept = True, links.kept_of(before)
                log.warning("the run was started again after step %d", links.began)
                self._shared.lock.notify_all()
                while self._shared.rejoined and not self._shared.over:
                    self._shared.lock.wait(WAIT_SECONDS)


def _by_homes(
    found: dict[Key, Progress], homes: int
) -> list[tuple[int, dict[Key, Progress], bool]]:
    """Samples by home, in frames of at most BRING_BYTES, or of one response.

    Returns of each frame the home, the samples, and whether more of them follow in a later one.
    """
    early: list[tuple[int, dict[Key, Progress], bool]] = []
    frames: list[tuple[int, dict[Key, Progress], bool]] = []
    for place in range(homes):
        size = BRING_BYTES + 1
        for key, progress in found.items():
            if key[0] % homes != place:
                continue
            *parts, last = _parts(progress)
            early += [(place, {key: part}, True) for part in parts]
            own = progress_bytes(last)
            if size + own > BRING_BYTES:
                size = 0
                frames.append((place, {}, False))
            size += own
            frames[-1][1][key] = last
    return early + frames


def _parts(progress: Progress) -> list[Progress]:
    """Samples of a request in parts of at most BRING_BYTES, or of one response; the last one has
    those under way."""
    parts, size = [Progress()], 0
    for sample, episode in progress.episodes.items():
        own = progress_bytes(Progress({sample: episode}))
        if parts[-1].episodes and size + own > BRING_BYTES:
            parts.append(Progress())
            size = 0
        size += own
        parts[-1].episodes[sample] = episode
    parts[-1].partials = progress.partials
    return parts
