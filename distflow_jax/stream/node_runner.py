"""The host nodes of a worker: one thread runs leased tasks one after another.

User functions are called from that thread only. The next task is fetched while one runs. The lease
of a node is not extended: after it expires, another worker gets the task too, and the first result
counts.
"""

import functools
import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor

from distflow_jax.stream.frames.frames import Frame
from distflow_jax.stream.frames.node_frames import NodeWork, result_frame, work_of_task
from distflow_jax.stream.host_nodes import NodesAhead
from distflow_jax.stream.tasks import NODE_QUOTA, Key

log = logging.getLogger("distflow_jax")


NO_NODES = NodesAhead(frozenset(), (), {})


class NodeRunner:
    """Runs tasks, and returns results to the threads that submitted them; none without a unit.

    Attributes:
      nodes: ids of the nodes that it runs, and ENVIRONMENT for a host of environments.
      address: of this host; "": it is not a host of environments.
      served: results received by task buffers.
    """

    def __init__(self, ahead: NodesAhead = NO_NODES, beside: Collection[str] = ()):
        """`ahead`: nodes that it runs. `beside`: of `nodes`, that no task is of."""
        self._ahead, self._units = ahead, {unit.name: unit for unit in ahead.units}
        self.nodes, self.address = sorted({*self._units, *beside}), ""
        self._running: dict[Key, Future[Frame]] = {}
        self._runs = ThreadPoolExecutor(1, thread_name_prefix="served-nodes")
        self.served = 0

    @property
    def capacity(self) -> int:
        """Tasks that it would take."""
        return NODE_QUOTA - len(self._running)

    @property
    def keys(self) -> list[Key]:
        """Tasks that it has begun, and whose results no task buffer has."""
        return list(self._running)

    def begin(self, answer: Frame, done: Callable[[], object]) -> None:
        """Begins the task of a frame; `done` is called in the thread once it has ended."""
        work = work_of_task(answer)
        if work.key not in self._running:  # otherwise its lease has ended, and it runs still
            future = self._runs.submit(self._run, work)
            self._running[work.key] = future
            future.add_done_callback(functools.partial(_tell_failure, work.key))
            future.add_done_callback(lambda _: done())

    def ready(self) -> list[tuple[Key, str, Frame]]:
        """Tasks that have ended: a task buffer's method, and its frame with the result, or with
        why there is none."""
        ended = [(key, future) for key, future in list(self._running.items()) if future.done()]
        return [(key, *_submission(key, future)) for key, future in ended]

    def forget(self, key: Key) -> None:
        """Forgets a task whose result a task buffer has."""
        found = self._running.pop(key, None)
        self.served += found is not None and found.exception() is None

    def drop(self) -> None:
        """Forgets all tasks: those of a start of the run that is over."""
        for future in self._running.values():
            future.cancel()
        self._running.clear()

    def close(self) -> None:
        """Ends the thread after the task that runs."""
        self._runs.shutdown(wait=False, cancel_futures=True)

    def _run(self, work: NodeWork) -> Frame:
        """The result of a task, as a frame."""
        unit = self._units[work.key[1]]
        return result_frame(work.key, unit, *self._ahead.results(unit, work.values))


def _submission(key: Key, future: Future[Frame]) -> tuple[str, Frame]:
    if (error := future.exception()) is None:
        return "submit_node", future.result()
    return "fail", Frame({"keys": [list(key)], "why": _why(key, error)})


def _why(key: Key, error: BaseException) -> str:
    return f"node {key[1]!r} failed with {type(error).__name__}: {error}"


def _tell_failure(key: Key, future: Future[Frame]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        log.warning("prompt %d: %s", key[0], _why(key, error))
