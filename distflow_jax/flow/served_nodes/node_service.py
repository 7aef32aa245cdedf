"""A worker's service of host nodes: it asks homes for them, runs them, and brings the results.

One thread talks with the homes, another one runs nodes, one after the other: functions of the user
are called from it alone. While one runs the next one is there already. A lease of a node is not
prolonged: one that runs for longer is given to another worker too, and the first result counts.
"""

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from distflow_jax.dag.plan import Unit
from distflow_jax.flow.frames.frames import Frame
from distflow_jax.flow.homes.node_tasks import QUOTA
from distflow_jax.flow.saved_samples import Key
from distflow_jax.flow.served_nodes.node_frames import NodeWork, result_frame, work_of_task
from distflow_jax.flow.wire.caller import Caller
from distflow_jax.flow.wire.calls import Refused, Unreachable
from distflow_jax.flow.workers.home_links import Joining, Links, leave
from distflow_jax.layout import Metrics

ASK_SECONDS = 0.05  # between two questions that were answered by nothing

log = logging.getLogger("distflow_jax")


@dataclasses.dataclass(frozen=True)
class ServedUnit:
    """A node that a worker runs."""

    unit: Unit
    # values in the order of Unit.inputs -> those in the order of Unit.outputs, and metrics
    run: Callable[[Sequence[Any]], tuple[Sequence[Any], Metrics]]

    def answer(self, work: NodeWork) -> Frame:
        """The result of a task, as a frame."""
        return result_frame(work.key, self.unit, *self.run(work.values))


class NodeService:
    """Runs nodes for a run until it ends. One thread calls `serve`.

    Attributes:
      served: nodes of groups that were run.
      finished: whether the run has ended.
    """

    def __init__(
        self,
        links: Links,
        joining: Joining,
        units: Mapping[str, ServedUnit],
        *,
        orphan_seconds: float,
    ):
        """`units`: by the node's id; `orphan_seconds`: for which it waits for trainers that do not
        answer."""
        self._links, self._joining, self._units = links, joining, dict(units)
        self._inputs = {
            name: [(edge.source, edge.field) for edge in one.unit.inputs]
            for name, one in units.items()
        }
        self._orphan_seconds = orphan_seconds
        self._running: dict[Key, Future[Frame]] = {}
        self._runs = ThreadPoolExecutor(1, thread_name_prefix="served-nodes")
        self._news, self._over = threading.Event(), False
        self._first = 0  # home that is asked first, another one each time
        self.served, self.finished = 0, False

    def serve(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Serves until the run has ended, or `stopped()`; what was run is brought.

        Raises ValueError if trainers do not answer for too long, or refuse a result.
        """
        try:
            while not (self._over or stopped()):
                try:
                    busy = self._exchange(stopped)
                except Unreachable as error:
                    log.warning("%s; waiting for the trainers", error)
                    self._rejoin(stopped)
                    continue
                except Refused as error:
                    raise ValueError(str(error)) from error
                if not busy:
                    self._news.wait(ASK_SECONDS)
            with contextlib.suppress(Unreachable, Refused):
                self._bring(stopped)
            self.finished = self._over and not stopped()
        finally:
            self._runs.shutdown(wait=False, cancel_futures=True)
            leave(self._links)
            self._links.close()

    def _exchange(self, stopped: Callable[[], bool]) -> bool:
        """Brings results and asks each home; whether anything was brought or came."""
        self._news.clear()
        busy = self._bring(stopped)
        callers = list(self._links.callers)
        self._first = (self._first + 1) % len(callers)
        for caller in callers[self._first :] + callers[: self._first]:
            room = QUOTA - len(self._running)
            answer = self._call(caller, "ask", {"room": room}, stopped)
            if answer is None:
                return True
            if "task" in answer.facts:
                self._begin(work_of_task(answer, self._inputs))
                busy = True
        return busy

    def _begin(self, work: NodeWork) -> None:
        if work.key in self._running:  # its lease has ended, and it runs still
            return
        future = self._runs.submit(self._units[work.key[1]].answer, work)
        self._running[work.key] = future
        future.add_done_callback(lambda _: self._news.set())

    def _bring(self, stopped: Callable[[], bool]) -> bool:
        """Brings the results that are there; whether there were any."""
        ready = [(key, future) for key, future in self._running.items() if future.done()]
        for key, future in ready:
            home, error = self._links.home_of(key[0]), future.exception()
            if error is None:
                found = future.result()
                answer = self._call(home, "give", dict(found.facts), stopped, found)
                self.served += 1
            else:
                why = f"node {key[1]!r} failed with {type(error).__name__}: {error}"
                log.warning("prompt %d: %s", key[0], why)
                answer = self._call(home, "fail", {"keys": [list(key)], "why": why}, stopped)
            if answer is None:
                return True
            del self._running[key]
        return bool(ready)

    def _call(
        self,
        caller: Caller,
        method: str,
        facts: dict[str, Any],
        stopped: Callable[[], bool],
        frame: Frame | None = None,
    ) -> Frame | None:
        """The answer of a home; None if the run was started again."""
        sent = Frame({**facts, "nodes": sorted(self._units)}, frame.arrays if frame else {})
        answer = self._links.call(caller, method, sent)
        if answer.facts["incarnation"] != self._links.incarnation:
            self._rejoin(stopped)
            return None
        self._over |= bool(answer.facts["ended"])
        return answer

    def _rejoin(self, stopped: Callable[[], bool]) -> None:
        """Waits for trainers that answer. Those that were started again make new tasks."""
        before = self._links.incarnation
        links = self._joining.again(self._orphan_seconds, stopped)
        if links is None:
            self._over = True
            return
        self._links.close()
        self._links = links
        if links.incarnation != before:
            log.warning("the run was started again after step %d", links.newest)
            for future in self._running.values():
                future.cancel()
            self._running.clear()
