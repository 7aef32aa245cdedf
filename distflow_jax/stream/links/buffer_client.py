"""A worker's talk with the task buffers: it brings results, asks for work, and joins again."""

import collections
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.rollout.requests import GroupRequest
from distflow_jax.stream.frames.frames import Frame, progress_bytes, samples_frame, work_of
from distflow_jax.stream.links.buffer_links import Joining, Links, leave
from distflow_jax.stream.node_runner import NodeRunner
from distflow_jax.stream.saved_samples import Key
from distflow_jax.stream.wire.calls import Refused, Unreachable
from distflow_jax.stream.wire.wire_client import WireClient

BRING_BYTES = 32 << 20  # of the samples in one frame, but for a single response
WAIT_SECONDS = 0.02  # between two looks at another thread
ASK_SECONDS = 0.1  # between two questions that were answered by nothing
LEAVE_SECONDS = 10.0  # for task buffers to get what is there, at the end

log = logging.getLogger("distflow_jax")


@dataclasses.dataclass(frozen=True)
class Pace:
    """Times of a worker, in seconds."""

    save: float  # between two times that it sends tokens under way
    orphan: float  # for which it waits for trainers that do not answer


@dataclasses.dataclass(frozen=True)
class Assignment:
    """A group that a task buffer gave to a worker which held a version."""

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
    """State that the threads of a worker share, under `lock`."""

    lock: threading.Condition = dataclasses.field(default_factory=threading.Condition)
    room: int = 0  # responses that the sampler has room for
    asked: int = 0  # questions that came back with nothing, since something was under way
    version: int = -1  # that the sampler holds
    newest: int = -1  # that all task buffers have
    wanted: tuple[int, ...] = ()  # versions that task buffers need most, one of each task buffer
    came: collections.deque[Assignment] = dataclasses.field(default_factory=collections.deque)
    # to be brought: samples that the sampler does not go on with, and those that it does
    goes: dict[Key, Progress] = dataclasses.field(default_factory=dict)
    saves: dict[Key, Progress] | None = None
    # groups that wait while the main thread loads weights, and until when their leases are kept
    kept_open: set[Key] = dataclasses.field(default_factory=set)
    keep_until: float = 0.0
    failed: dict[Key, str] = dataclasses.field(default_factory=dict)
    dropped: set[Key] = dataclasses.field(default_factory=set)  # that task buffers do not want
    calls: int = 0  # decode calls that no task buffer knows of
    slots: int = 0  # of the sampler; 0: there is none
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


class BufferClient:
    """Talks with the task buffers in a thread of its own.

    Attributes:
      links: to the task buffers of the present start of the run.
      shared: with the thread that samples.
      pace: of both.
    """

    def __init__(
        self, links: Links, joining: Joining, shared: WorkerState, pace: Pace, nodes: NodeRunner
    ):
        """`nodes`: host nodes that the worker runs."""
        self.links, self._joining, self.shared = links, joining, shared
        self.pace, self._nodes = pace, nodes
        self._next_keep = 0.0
        self._told: dict[
            Key, set[int]
        ] = {}  # ended responses that the task buffers have, by sample

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """A block beside which it talks, which raises what ended the talk before; task buffers then
        get what is there, and know that the worker goes."""
        threads = ThreadPoolExecutor(1, thread_name_prefix="buffers")
        talk = threads.submit(self._serve)
        talk.add_done_callback(lambda _: self.shared.end())
        try:
            yield
        finally:
            self.shared.end()
            wait([talk], LEAVE_SECONDS)
            threads.shutdown(wait=False)
            self._nodes.close()
            leave(self.links)
            self.links.close()
        if talk.done():
            talk.result()

    def serve(self, stopped: Callable[[], bool]) -> bool:
        """Serves nodes alone until the run has ended, or `stopped()`; whether it has ended."""
        with self.serving(), self.shared.lock:
            while not (self.shared.over or stopped()):
                self.shared.lock.wait(WAIT_SECONDS)
            return self.shared.over

    def _serve(self) -> None:
        """Talks until the worker ends, and once more then. Raises what ends it."""
        shared = self.shared
        while not shared.over:
            try:
                quiet = not self._exchange()
            except Unreachable as error:
                log.warning("%s; waiting for the trainers", error)
                self._rejoin()
                continue
            except Refused as error:
                raise ValueError(str(error)) from error
            if quiet:
                with shared.lock:
                    shared.lock.wait(ASK_SECONDS)
        with contextlib.suppress(Unreachable, Refused):
            if not shared.rejoined:  # otherwise there may be samples of weights that are undone
                self._exchange()

    def _exchange(self) -> bool:
        """Brings results, and asks for work; whether anything was brought or came."""
        shared = self.shared
        with shared.lock:
            self._keep_open()
            goes, saves, shared.saves = dict(shared.goes), shared.saves, None
            failed, shared.failed = shared.failed, {}
        for key, why in failed.items():
            self._told.pop(key, None)
            self._call(
                self.links.buffer_of(key[0]), "fail", Frame({"keys": [list(key)], "why": why})
            )
        sent = self._bring(goes, whole=True)
        if saves is not None:
            self._bring({k: p for k, p in saves.items() if k not in goes}, whole=False)
        return any([sent, self._give(), self._ask(), self._ask_for_nodes()])

    def _keep_open(self) -> None:
        """Lets the leases go on while the main thread loads weights; under the lock."""
        shared, now = self.shared, time.monotonic()
        if shared.saves is None and self._next_keep <= now < shared.keep_until:
            self._next_keep = now + self.pace.save
            keys = shared.kept_open | {work.key for work in shared.came}
            shared.saves = {key: Progress() for key in keys} or None

    def _bring(self, found: dict[Key, Progress], *, whole: bool) -> bool:
        """Brings samples to their task buffers; `whole`: the worker does not go on with these
        groups.

        A response that has ended is brought once.
        """
        shared = self.shared
        untold = {key: self._untold(key, progress) for key, progress in found.items()}
        frames = _by_buffers(untold, len(self.links.clients))
        for place, samples, more in frames:
            with shared.lock:
                calls, shared.calls = shared.calls, 0
            frame = samples_frame({"calls": calls, "goes_on": more or not whole}, samples)
            answer = self._call(self.links.clients[place], "bring", frame)
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
        """The part of a request's samples that its task buffer does not have."""
        told = self._told.get(key, set())
        episodes = {s: e for s, e in progress.episodes.items() if s not in told}
        return Progress(episodes, progress.partials)

    def _give(self) -> bool:
        """Gives task buffers what nodes wrote, or why they failed; whether there was anything."""
        ready = self._nodes.ready()
        for key, found in ready:
            buffer = self.links.buffer_of(key[0])
            if isinstance(found, Frame):
                answer = self._call(buffer, "give", found)
            else:
                answer = self._call(buffer, "fail", Frame({"keys": [list(key)], "why": found}))
            if answer is None:
                break
            self._nodes.forget(key)
        return bool(ready)

    def _ask_for_nodes(self) -> bool:
        """Asks each task buffer for a node to run; whether one came."""
        nodes, came = self._nodes, False
        for client in self._clients() if nodes.nodes else ():
            told = {"room": nodes.room, "nodes": nodes.nodes}
            answer = self._call(client, "ask_node", Frame(told))
            if answer is None:
                return True
            if "task" in answer.facts:
                nodes.begin(answer, self.shared.wake)
                came = True
        return came

    def _clients(self) -> list[WireClient]:
        """All task buffers, another one first each time."""
        clients = list(self.links.clients)
        first = int(time.monotonic() * 1000) % len(clients)
        return clients[first:] + clients[:first]

    def _ask(self) -> bool:
        """Asks each task buffer for groups; whether any came."""
        shared, came, wanted, newest = self.shared, 0, [], []
        if not shared.slots:
            return False
        for client in self._clients():
            with shared.lock:
                room, held = shared.room, shared.version
            if shared.over or held < 0:
                room = 0
            told = {"version": held, "room": room, "slots": shared.slots}
            answer = self._call(client, "ask", Frame(told))
            if answer is None:
                return False
            work = [Assignment(held, *one) for one in work_of(answer)]
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

    def _call(self, client: WireClient, method: str, frame: Frame) -> Frame | None:
        """The answer of a task buffer; None if the run has ended or was started again."""
        answer = self.links.call(client, method, frame)
        if answer.facts["attempt"] != self.links.attempt:
            self._rejoin()
            return None
        if answer.facts["ended"]:
            self.shared.end()
        return answer

    def _rejoin(self) -> None:
        """Waits for trainers that answer, and begins anew if the run was started again."""
        before = self.links.attempt
        links = self._joining.again(self.pace.orphan, lambda: self.shared.over)
        if links is None:
            self.shared.end()
            return
        self.links.close()
        with self.shared.lock:
            self.links = links
            self.shared.newest, self.shared.asked = links.newest, 0
            self.shared.wanted = ()
            if links.attempt != before:
                self._told.clear()
                self._nodes.drop()
                self.shared.came.clear()
                self.shared.rejoined = bool(self.shared.slots)
                self.shared.kept = links.kept_of(before)
                log.warning("the run was started again after step %d", links.began)
                self.shared.lock.notify_all()
                while self.shared.rejoined and not self.shared.over:
                    self.shared.lock.wait(WAIT_SECONDS)


def _by_buffers(
    found: dict[Key, Progress], buffers: int
) -> list[tuple[int, dict[Key, Progress], bool]]:
    """Samples by task buffer, in frames of at most BRING_BYTES, or of one response.

    Returns of each frame the task buffer, the samples, and whether more of them follow in a later
    one.
    """
    early: list[tuple[int, dict[Key, Progress], bool]] = []
    frames: list[tuple[int, dict[Key, Progress], bool]] = []
    for place in range(buffers):
        size = BRING_BYTES + 1
        for key, progress in found.items():
            if key[0] % buffers != place:
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
