"""The connections of a worker to the task buffers: one thread for each, and rejoining."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

from distflow_jax.stream.links.buffer_links import Joining, deregister
from distflow_jax.stream.links.buffer_talk import BufferTalk
from distflow_jax.stream.links.remote_link import RemoteLink, WorkerState
from distflow_jax.stream.links.worker_pool import ROSTER_SECONDS
from distflow_jax.stream.node_runner import NodeRunner
from distflow_jax.stream.wire.calls import Refused, Unreachable
from distflow_jax.stream.worker import Worker

WAIT_SECONDS = 0.02  # between two looks at another thread
LOOK_SECONDS = 0.1  # between two looks at the talks
LEAVE_SECONDS = 10.0  # for task buffers to get what is there, at the end

log = logging.getLogger("distflow_jax")


class BufferClient:
    """Exchanges work and results with the task buffers in separate threads."""

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

    def serve(
        self,
        stopped: Callable[[], bool],
        work: Callable[[], bool] = lambda: False,
        leave: Callable[[], None] = lambda: None,
    ) -> bool:
        """Serves nodes, and has `work()` go on, which says whether there was some, until the run
        has ended, or `stopped()`; whether it has ended. `leave()` comes before the last talk.

        ValueError if trainers do not answer for too long.
        """
        with self.serving():
            while not (self.state.over or stopped()):  # which may wait for an environment
                if not work():
                    with self.state.lock:
                        self.state.lock.wait(WAIT_SECONDS)
            over = self.state.over
            leave()
        return over

    def sample(self, worker: Worker, link: RemoteLink, stopped: Callable[[], bool]) -> bool:
        """As `serve`, of a worker that samples; task buffers get what was sampled."""
        with contextlib.closing(link):
            return self.serve(stopped, worker.round, lambda: link.leave(worker))

    def _serve(self) -> None:
        """Talks until the worker ends. Raises what ends it."""
        while not self.state.over:
            try:
                self._talk()
            except Unreachable as error:
                log.warning("%s; waiting for it, up to %g s", error, self._orphan_seconds)
                self._rejoin()
            except Refused as error:
                raise ValueError(str(error)) from error

    def _talk(self) -> None:
        """Talks with the task buffers of a start of the run until the worker ends. Raises what one
        of them does."""
        state, links, next_roster = self.state, self.state.links, time.monotonic() + ROSTER_SECONDS
        running: dict[int, tuple[BufferTalk, Future[None]]] = {}
        threads = ThreadPoolExecutor(len(links.clients), thread_name_prefix="buffers")
        try:
            while not state.over:
                if time.monotonic() >= next_roster:
                    next_roster = time.monotonic() + ROSTER_SECONDS
                    with contextlib.suppress(Unreachable, Refused):
                        links.assign()
                for place in links.places:
                    if place not in running:
                        talk = BufferTalk(state, self._nodes, place, self._save_seconds)
                        running[place] = talk, threads.submit(talk.run)
                for place, (talk, run) in list(running.items()):
                    talk.leaves = place not in links.places
                    if run.done() and not state.over:
                        run.result()
                        del running[place]
                        with state.lock:
                            state.forget(place)
                with state.lock:
                    state.lock.wait(LOOK_SECONDS)
            self._wait_for_talks(running)
        finally:
            for talk, _ in running.values():
                talk.closed = True
            state.wake()
            threads.shutdown(wait=False)

    def _wait_for_talks(self, running: dict[int, tuple[BufferTalk, Future[None]]]) -> None:
        """Waits until task buffers have what is there. One where a question waits has it all."""
        end = time.monotonic() + LEAVE_SECONDS
        while time.monotonic() < end:
            waiting = set(self.state.waiting)
            left = [run for place, (_, run) in running.items() if place not in waiting]
            if not wait(left, WAIT_SECONDS).not_done:
                return

    def _rejoin(self) -> None:
        """Waits for trainers that answer, and begins anew if the run was started again."""
        before = self.state.links.attempt
        links = self._joining.again(self._orphan_seconds, lambda: self.state.over)
        if links is None:
            self.state.end()
            return
        if links.attempt == before:  # one that answers by another one is not asked on and on
            time.sleep(LOOK_SECONDS)
        self.state.links.close()
        with self.state.lock:
            self.state.join(links)
            if links.attempt != before:
                self.state.told.clear()
                self._nodes.drop()
                self.state.assigned.clear()
                self.state.rejoined = bool(self.state.slots)
                self.state.kept = links.kept_of(before)
                log.warning("the run was started again after step %d", links.began)
                self.state.lock.notify_all()
                while self.state.rejoined and not self.state.over:
                    self.state.lock.wait(WAIT_SECONDS)
