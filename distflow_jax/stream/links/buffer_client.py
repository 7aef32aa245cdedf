"""A worker's talk with the task buffers: it submits results, leases work, and joins again."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.stream.frames.frames import Frame, samples_frame, work_of
from distflow_jax.stream.links.buffer_links import Joining, deregister
from distflow_jax.stream.links.remote_link import LeasedGroup, RemoteLink, WorkerState
from distflow_jax.stream.node_runner import NodeRunner
from distflow_jax.stream.tasks import Key, progress_bytes
from distflow_jax.stream.wire.calls import Refused, Unreachable
from distflow_jax.stream.wire.wire_client import WireClient
from distflow_jax.stream.worker import Worker

SUBMIT_BYTES = 32 << 20  # of the samples in one frame, but for a single response
WAIT_SECONDS = 0.02  # between two looks at another thread
LEASE_SECONDS = 0.1  # between two questions that were answered by nothing
LEAVE_SECONDS = 10.0  # for task buffers to get what is there, at the end

log = logging.getLogger("distflow_jax")


class BufferClient:
    """Talks with the task buffers in a thread of its own."""

    def __init__(
        self,
        state: WorkerState,
        joining: Joining,
        nodes: NodeRunner,
        *,
        save_seconds: float,
        orphan_seconds: float,
    ):
        """`state`: with links, shared with the thread that samples. `nodes`: host nodes that the
        worker runs. `save_seconds`: between two times that it tells of groups that wait for
        weights; `orphan_seconds`: for which it waits for trainers that do not answer."""
        self.state, self._joining, self._nodes = state, joining, nodes
        self._save_seconds, self._orphan_seconds = save_seconds, orphan_seconds
        self._next_keep = 0.0
        # ended responses that the task buffers have, by sample
        self._told: dict[Key, set[int]] = {}

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """A block beside which it talks, which raises what ended the talk before; task buffers then
        get what is there, and know that the worker goes."""
        threads = ThreadPoolExecutor(1, thread_name_prefix="buffers")
        talk = threads.submit(self._serve)
        talk.add_done_callback(lambda _: self.state.end())
        try:
            yield
        finally:
            self.state.end()
            wait([talk], LEAVE_SECONDS)
            threads.shutdown(wait=False)
            self._nodes.close()
            deregister(self.state.links, str(sys.exception() or ""))
            self.state.links.close()
        if talk.done():
            talk.result()

    def serve(self, stopped: Callable[[], bool]) -> bool:
        """Serves nodes alone until the run has ended, or `stopped()`; whether it has ended."""
        with self.serving(), self.state.lock:
            while not (self.state.over or stopped()):
                self.state.lock.wait(WAIT_SECONDS)
            return self.state.over

    def sample(self, worker: Worker, link: RemoteLink, stopped: Callable[[], bool]) -> bool:
        """Has a worker sample until the run has ended, or `stopped()`; whether it has ended.

        Task buffers then get what was sampled. ValueError if trainers do not answer for too long.
        """
        try:
            with self.serving():
                while not (self.state.over or stopped()):
                    if not worker.round():
                        with self.state.lock:
                            self.state.lock.wait(WAIT_SECONDS)
                return link.leave(worker)
        finally:
            link.close()

    def _serve(self) -> None:
        """Talks until the worker ends, and once more then. Raises what ends it."""
        state = self.state
        while not state.over:
            try:
                quiet = not self._exchange()
            except Unreachable as error:
                log.warning("%s; waiting for the trainers", error)
                self._rejoin()
                continue
            except Refused as error:
                raise ValueError(str(error)) from error
            if quiet:
                with state.lock:
                    state.lock.wait(LEASE_SECONDS)
        with contextlib.suppress(Unreachable, Refused):
            if not state.rejoined:  # otherwise there may be samples of weights that are undone
                self._exchange()

    def _exchange(self) -> bool:
        """Submits results, and leases work; whether there was anything."""
        state = self.state
        with state.lock:
            self._keep_open()
            whole, partial, state.partial = dict(state.whole), state.partial, None
            failed, state.failed = state.failed, {}
        for key, why in failed.items():
            self._told.pop(key, None)
            self._call(
                self.state.links.buffer_of(key[0]), "fail", Frame({"keys": [list(key)], "why": why})
            )
        sent = self._submit(whole, whole=True)
        if partial is not None:
            self._submit({k: p for k, p in partial.items() if k not in whole}, whole=False)
        return any([sent, self._submit_nodes(), self._lease(), self._lease_nodes()])

    def _keep_open(self) -> None:
        """Lets the leases go on while the main thread loads weights; under the lock."""
        state, now = self.state, time.monotonic()
        if state.partial is None and self._next_keep <= now < state.keep_until:
            self._next_keep = now + self._save_seconds
            keys = state.kept_open | {work.key for work in state.assigned}
            state.partial = {key: Progress() for key in keys} or None

    def _submit(self, found: dict[Key, Progress], *, whole: bool) -> bool:
        """Submits samples to their task buffers; `whole`: the worker does not go on with these
        groups.

        A response that has ended is submitted once.
        """
        state = self.state
        untold = {key: self._untold(key, progress) for key, progress in found.items()}
        frames = _by_buffers(untold, len(self.state.links.clients))
        for place, samples, more in frames:
            with state.lock:
                calls, state.calls = state.calls, 0
            frame = samples_frame({"calls": calls, "goes_on": more or not whole}, samples)
            answer = self._call(self.state.links.clients[place], "submit", frame)
            if answer is None:
                return False
            if why := answer.facts.get("refused"):
                log.warning("the trainers refuse samples: %s", why)
            gone = {(int(c), str(node)) for c, node in answer.facts.get("dropped", [])}
            with state.lock:
                for key, progress in samples.items():
                    self._told.setdefault(key, set()).update(progress.episodes)
                    if whole and not more:
                        state.whole.pop(key, None)
                    if key in gone or (whole and not more):
                        del self._told[key]
                if not whole:
                    state.dropped |= gone
        return bool(frames)

    def _untold(self, key: Key, progress: Progress) -> Progress:
        """The part of a request's samples that its task buffer does not have."""
        told = self._told.get(key, set())
        episodes = {s: e for s, e in progress.episodes.items() if s not in told}
        return Progress(episodes, progress.partials)

    def _submit_nodes(self) -> bool:
        """Gives task buffers what nodes wrote, or why they failed; whether there was anything."""
        ready = self._nodes.ready()
        for key, found in ready:
            buffer = self.state.links.buffer_of(key[0])
            if isinstance(found, Frame):
                answer = self._call(buffer, "submit_node", found)
            else:
                answer = self._call(buffer, "fail", Frame({"keys": [list(key)], "why": found}))
            if answer is None:
                break
            self._nodes.forget(key)
        return bool(ready)

    def _lease_nodes(self) -> bool:
        """Asks each task buffer for a node to run; whether one came."""
        nodes, came = self._nodes, False
        for client in self._clients() if nodes.nodes else ():
            told = {"capacity": nodes.capacity, "nodes": nodes.nodes}
            answer = self._call(client, "lease_node", Frame(told))
            if answer is None:
                return True
            if "task" in answer.facts:
                nodes.begin(answer, self.state.wake)
                came = True
        return came

    def _clients(self) -> list[WireClient]:
        """All task buffers, another one first each time."""
        clients = list(self.state.links.clients)
        first = int(time.monotonic() * 1000) % len(clients)
        return clients[first:] + clients[:first]

    def _lease(self) -> bool:
        """Asks each task buffer for groups; whether any came."""
        state, came, wanted, newest, evaluated = self.state, 0, [], [], []
        if not state.slots:
            return False
        for client in self._clients():
            with state.lock:
                capacity, held = state.capacity, state.version
                drains = state.evaluates is not None and state.evaluates < held
                idle = capacity == state.slots and state.asked >= len(state.links.clients)
            if state.over or held < 0 or drains:
                capacity = 0
            told = {"version": held, "capacity": capacity, "slots": state.slots, "idle": idle}
            answer = self._call(client, "lease", Frame(told))
            if answer is None:
                return False
            work = [LeasedGroup(held, *one) for one in work_of(answer)]
            self._told |= {one.key: set(one.progress.episodes) for one in work}
            wanted.append(int(answer.facts["wanted"][0]))
            newest.append(int(answer.facts["newest"]))
            evaluated.append(answer.facts.get("evaluates"))
            with state.lock:
                state.assigned.extend(work)
                state.capacity -= sum(one.lacks for one in work)
                if held == state.version and not work:
                    state.asked += 1
                elif work:
                    state.asked = 0
                came += len(work)
                if work:
                    state.lock.notify_all()
        with state.lock:
            state.newest, state.wanted = min(newest), tuple(wanted)
            state.evaluates = min((v for v in evaluated if v is not None), default=None)
            state.lock.notify_all()
        return bool(came)

    def _call(self, client: WireClient, method: str, frame: Frame) -> Frame | None:
        """The answer of a task buffer; None if the run has ended or was started again."""
        answer = self.state.links.call(client, method, frame)
        if answer.facts["attempt"] != self.state.links.attempt:
            self._rejoin()
            return None
        if answer.facts["ended"]:
            self.state.end()
        return answer

    def _rejoin(self) -> None:
        """Waits for trainers that answer, and begins anew if the run was started again."""
        before = self.state.links.attempt
        links = self._joining.again(self._orphan_seconds, lambda: self.state.over)
        if links is None:
            self.state.end()
            return
        self.state.links.close()
        with self.state.lock:
            self.state.links = links
            self.state.newest, self.state.asked = links.newest, 0
            self.state.wanted, self.state.evaluates = (), None
            if links.attempt != before:
                self._told.clear()
                self._nodes.drop()
                self.state.assigned.clear()
                self.state.rejoined = bool(self.state.slots)
                self.state.kept = links.kept_of(before)
                log.warning("the run was started again after step %d", links.began)
                self.state.lock.notify_all()
                while self.state.rejoined and not self.state.over:
                    self.state.lock.wait(WAIT_SECONDS)


def _by_buffers(
    found: dict[Key, Progress], buffers: int
) -> list[tuple[int, dict[Key, Progress], bool]]:
    """Samples by task buffer, in frames of at most SUBMIT_BYTES, or of one response.

    Returns of each frame the task buffer, the samples, and whether more of them follow in a later
    one.
    """
    early: list[tuple[int, dict[Key, Progress], bool]] = []
    frames: list[tuple[int, dict[Key, Progress], bool]] = []
    for place in range(buffers):
        size = SUBMIT_BYTES + 1
        for key, progress in found.items():
            if key[0] % buffers != place:
                continue
            *parts, last = _parts(progress)
            early += [(place, {key: part}, True) for part in parts]
            own = progress_bytes(last)
            if size + own > SUBMIT_BYTES:
                size = 0
                frames.append((place, {}, False))
            size += own
            frames[-1][1][key] = last
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
