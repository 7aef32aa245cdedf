"""The exchange of a worker with one task buffer: it submits results and leases work."""

import contextlib
import logging
import time
from collections.abc import Iterable
from typing import Any

from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.stream.frames.frames import Frame, samples_frame, work_of
from distflow_jax.stream.links.remote_link import LeasedGroup, WorkerState
from distflow_jax.stream.links.worker_pool import LEAST_SECONDS, MOST_SECONDS
from distflow_jax.stream.node_runner import NodeRunner
from distflow_jax.stream.tasks import Key, progress_bytes
from distflow_jax.stream.wire.calls import Refused, Unreachable

MOST_FRUITLESS = 10  # questions that are answered at once by nothing, before there is a pause
SUBMIT_BYTES = 32 << 20  # of the samples in one frame, but for a single response

log = logging.getLogger("distflow_jax")


class BufferTalk:
    """Exchanges with one task buffer. One thread calls `run`.

    Attributes:
      leaves: whether it leases nothing more, and ends once the worker holds nothing of this buffer.
      closed: whether it ends at once.
    """

    def __init__(self, state: WorkerState, nodes: NodeRunner, place: int, save_seconds: float):
        self._state, self._nodes, self.place = state, nodes, place
        self._links, self._save_seconds = state.links, save_seconds
        self.leaves = self.closed = False
        self._next = self._next_keep = 0.0  # to ask for work, to keep leases
        self._asked_with = -1  # version of the weights at the last question
        self._full = False  # it was asked for nothing, since there was no room
        self._empty = False  # it had nothing, and was asked for work to come since
        self._fruitless = 0  # questions that were answered at once by nothing, since there was work

    def run(self) -> None:
        """Talks until the worker ends or leaves, and once more then. Unreachable where it does not
        answer, or for another run."""
        state = self._state
        while not (state.over or self.closed):
            self.submit()
            if not self.leaves:
                self._ask()
            elif not self._holds():
                return
            with state.lock:
                while not self._is_due(now := time.monotonic()):
                    state.lock.wait(self._pause(now))
        with contextlib.suppress(Unreachable, Refused):
            if not (state.rejoined or self.closed):  # there may be samples of undone weights
                self.submit()

    def submit(self) -> None:
        """Submits what the worker has for this task buffer."""
        state = self._state
        with state.lock:
            self._keep_open()
            whole = {key: state.whole[key] for key in self._mine(state.whole)}
            partial = {key: state.partial.pop(key) for key in self._mine(state.partial)}
            failed = {key: state.failed[key] for key in self._mine(state.failed)}
        for key, why in failed.items():
            self._call("fail", Frame({"keys": [list(key)], "why": why}))
            with state.lock:
                state.failed.pop(key, None)
                state.told.pop(key, None)
        self.submit_samples(whole, whole=True)
        self.submit_samples({k: p for k, p in partial.items() if k not in whole}, whole=False)
        for key, method, frame in self._nodes.ready():
            if key[0] % len(self._links.clients) == self.place:
                self._call(method, frame)
                self._nodes.forget(key)

    def submit_samples(self, found: dict[Key, Progress], *, whole: bool) -> None:
        """Submits samples; `whole`: the worker does not go on with these groups.

        A response that has ended is submitted once.
        """
        state, told = self._state, self._state.told
        untold = {key: _without(progress, told.get(key, ())) for key, progress in found.items()}
        for samples, more in frames_of(untold):
            with state.lock:
                spent = state.take_spent()
            frame = samples_frame({"spent": spent, "goes_on": more or not whole}, samples)
            answer = self._call("submit", frame)
            if why := answer.facts.get("refused"):
                log.warning("the trainers refuse samples: %s", why)
            gone = {(c, node) for c, node in answer.facts.get("dropped", [])}
            with state.lock:
                if whole:
                    # it has room, and this task buffer may have more by it
                    self._next, self._fruitless = 0.0, 0
                for key, progress in samples.items():
                    told.setdefault(key, set()).update(progress.episodes)
                    if whole and not more:
                        state.whole.pop(key, None)
                    if key in gone or (whole and not more):
                        told.pop(key, None)
                if not whole:
                    state.dropped |= gone

    # -- work -------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Asks for work if it is time to, or waits for a hint of some."""
        state = self._state
        with state.lock:
            if not self._asks(time.monotonic()):
                return
            waits = self._empty and not self._holds()
        if waits:
            self._empty, self._next = False, 0.0
            self._wait()
            return
        answers = [self.lease()] if state.slots else []
        answers += [self._lease_node()] if self._nodes.nodes else []
        came, again = any(c for c, _ in answers), max(a for _, a in answers)
        self._empty = not came and again == 0.0
        self._fruitless = 0 if came else self._fruitless + 1
        if self._fruitless > MOST_FRUITLESS:
            again = max(again, LEAST_SECONDS)
        self._next = 0.0 if came else time.monotonic() + min(again, MOST_SECONDS)

    def _wait(self) -> None:
        """Asks for a hint: the answer comes once there is something to ask for."""
        state = self._state
        with state.lock:
            state.waiting.add(self.place)
            told = {"waits": self._knows, "samples": bool(state.slots), **self._served}
            told |= self._told(0)
        began = time.monotonic()
        try:
            self._call("lease_node" if self._nodes.nodes else "lease", Frame(told))
        finally:
            with state.lock:
                state.waiting.discard(self.place)
        if time.monotonic() - began >= LEAST_SECONDS:
            self._fruitless = 0

    def lease(self) -> tuple[bool, float]:
        """Asks for groups; (whether any came, seconds until the next question)."""
        state, room = self._state, self._state.slots_room
        with state.lock:
            held = state.version
            size = room.take(self.place, self._room, time.monotonic())
            self._full, self._asked_with = size <= 0, held
            told = self._told(size) | {"waits": size > 0 and not self._holds() or None}
        try:
            answer = self._call("lease", Frame(told))
            work = [LeasedGroup(held, *one) for one in work_of(answer)]
        finally:
            with state.lock:
                room.give_back(self.place, time.monotonic())
        with state.lock:
            if state.links is not self._links:  # the run was started again
                return False, 0.0
            state.told |= {one.key: set(one.progress.episodes) for one in work}
            state.assigned.extend(work)
            state.capacity -= sum(one.lacks for one in work)
            if work:
                state.asked.clear()
            elif held == state.version and size:
                state.asked.add(self.place)
            state.lock.notify_all()
        return bool(work), answer.facts.get("again", LEAST_SECONDS)

    def _lease_node(self) -> tuple[bool, float]:
        """Asks for a node to run; (whether one came, seconds until the next question)."""
        nodes, room, state = self._nodes, self._state.nodes_room, self._state
        with state.lock:
            size = min(1, room.take(self.place, nodes.capacity, time.monotonic()))
            told: dict[str, Any] = self._served | {"capacity": size}
            told["waits"] = size > 0 and not self._holds() or None
        try:
            answer = self._call("lease_node", Frame(told))
        finally:
            with state.lock:
                room.give_back(self.place, time.monotonic())
        came = "task" in answer.facts and state.links is self._links  # else it was started again
        if came:
            nodes.begin(answer, state.wake)
        return came, answer.facts.get("again", LEAST_SECONDS)

    @property
    def _served(self) -> dict[str, Any]:
        """Facts of the nodes that the worker serves."""
        address = {"address": self._nodes.address} if self._nodes.address else {}
        return {"nodes": self._nodes.nodes, **address}

    def _told(self, size: int) -> dict[str, Any]:
        """State of the worker that a question for groups tells; under the lock."""
        state, asked = self._state, self._state.asked | self._state.waiting
        idle = state.capacity == state.slots and asked.issuperset(self._links.places)
        return {"version": state.version, "capacity": size, "slots": state.slots, "idle": idle}

    def _is_due(self, now: float) -> bool:
        """Whether there is something to do; under the lock."""
        state = self._state
        keeps = self._next_keep <= now < state.keep_until
        return (
            state.over
            or self.closed
            or (not self._holds() if self.leaves else self._asks(now))
            or (keeps and self._holds())
            or any(map(self._mine, (state.whole, state.partial, state.failed)))
            or bool(self._mine(key for key, *_ in self._nodes.ready()))
        )

    def _pause(self, now: float) -> float:
        """Seconds until something is due, unless another thread notifies before."""
        seconds = LEAST_SECONDS if self.leaves else self._next - now  # one that leaves asks nothing
        if now < self._state.keep_until:
            seconds = min(seconds, self._save_seconds)
        return max(0.0, seconds)

    def _asks(self, now: float) -> bool:
        """Whether it is time to ask for work: as was said, since there is room or are weights that
        there were not when it was asked last, or since nothing is under way any more. Under the
        lock."""
        state = self._state
        idle = state.capacity == state.slots and self.place not in state.asked
        fills = (self._full or idle) and state.slots_room.free(self._room, now) > 0
        loaded = bool(state.slots) and state.version != self._asked_with
        return now >= self._next or fills or loaded

    @property
    def _room(self) -> int:
        """Responses that the worker may be given by the weights that it holds; under the lock."""
        state = self._state
        return 0 if state.over or state.version < 0 or state.drains else state.capacity

    @property
    def _knows(self) -> list[Any]:
        """Values that this task buffer has said; it tells when they change. Under the lock."""
        newest, _, evaluates = self._state.said.get(self.place, (-1, -1, None))
        return [newest, evaluates, False]

    def _keep_open(self) -> None:
        """Lets leases go on while the thread that samples loads weights; under the lock."""
        state, now = self._state, time.monotonic()
        if self._next_keep <= now < state.keep_until:
            self._next_keep = now + self._save_seconds
            keys = state.kept_open | {work.key for work in state.assigned}
            for key in self._mine(keys):
                state.partial.setdefault(key, Progress())

    def _holds(self) -> bool:
        """Whether the worker holds a group or a node of this task buffer."""
        with self._state.lock:
            return bool(self._mine(self._state.told) or self._mine(self._nodes.keys))

    def _mine(self, keys: Iterable[Key]) -> list[Key]:
        buffers = len(self._links.clients)
        return [key for key in keys if key[0] % buffers == self.place]

    def _call(self, method: str, frame: Frame) -> Frame:
        """The answer of the task buffer."""
        client = self._links.clients[self.place]
        answer = self._links.call(client, method, frame)
        if answer.facts["attempt"] != self._links.attempt:
            raise Unreachable(f"{client.address}: the run was started again")
        if answer.facts["ended"]:
            self._state.end()
        with self._state.lock:
            if self._state.links is self._links and self._state.hear(self.place, answer.facts):
                self._next = 0.0  # there may be work by it
        return answer


def _without(progress: Progress, told: Iterable[int]) -> Progress:
    """The part of a request's samples that its task buffer does not have."""
    episodes = {s: e for s, e in progress.episodes.items() if s not in told}
    return Progress(episodes, progress.partials)


def frames_of(found: dict[Key, Progress]) -> list[tuple[dict[Key, Progress], bool]]:
    """Samples in frames of at most SUBMIT_BYTES, or of one response.

    Returns of each frame the samples, and whether more of them follow in a later one.
    """
    early: list[tuple[dict[Key, Progress], bool]] = []
    frames: list[tuple[dict[Key, Progress], bool]] = []
    size = SUBMIT_BYTES + 1
    for key, progress in found.items():
        *parts, last = _parts(progress)
        early += [({key: part}, True) for part in parts]
        own = progress_bytes(last)
        if size + own > SUBMIT_BYTES:
            size = 0
            frames.append(({}, False))
        size += own
        frames[-1][0][key] = last
    return early + frames


def _parts(progress: Progress) -> list[Progress]:
    """Samples of a request in parts of at most SUBMIT_BYTES, or of one response; the last one has
    those under way."""
    parts, size = [Progress()], 0
    for sample, episode in progress.episodes.items():
        own = progress_bytes(Progress({sample: episode}))
        if parts[-1].episodes and size + own > SUBMIT_BYTES:
            parts.append(Progress())
            size = 0
        size += own
        parts[-1].episodes[sample] = episode
    parts[-1].partials = progress.partials
    return parts
