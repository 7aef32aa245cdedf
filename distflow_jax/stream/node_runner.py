"""The host nodes of a worker: one thread runs leased tasks one after another.

User functions are called from that thread only. The next task is fetched while one runs. The lease
of a node is not extended: after it expires, another worker gets the task too, and the first result
counts.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from distflow_jax.dag.plan import Unit
from distflow_jax.layout import Metrics
from distflow_jax.stream.frames.frames import Frame
from distflow_jax.stream.frames.node_frames import NodeWork, result_frame, work_of_task
from distflow_jax.stream.tasks import NODE_QUOTA, Key

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


class NodeRunner:
    """Runs tasks, and returns results to the threads that submitted them; none without a unit.

    Attributes:
      nodes: ids of the nodes that it runs, and ENVIRONMENT for a host of environments.
      address: of this host; "": it is not a host of environments.
      served: results received by task buffers.
    """

    def __init__(self, units: Mapping[str, ServedUnit], beside: Collection[str] = ()):
        """`units`: by the node's id. `beside`: of `nodes`, that no task is of."""
        self.nodes, self._units = sorted({*units, *beside}), dict(units)
        self.address = ""
        self._inputs = {
            name: [(edge.source, edge.field) for edge in one.unit.inputs]
            for name, one in units.items()
        }
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
        work = work_of_task(answer, self._inputs)
        if work.key not in self._running:  # otherwise its lease has ended, and it runs still
            future = self._runs.submit(self._units[work.key[1]].answer, work)
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


def _submission(key: Key, future: Future[Frame]) -> tuple[str, Frame]:
    if (error := future.exception()) is None:
        return "submit_node", future.result()
    return "fail", Frame({"keys": [list(key)], "why": _why(key, error)})


def _why(key: Key, error: BaseException) -> str:
    return f"node {key[1]!r} failed with {type(error).__name__}: {error}"


def _tell_failure(key: Key, future: Future[Frame]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        log.warning("prompt %d: %s", key[0], _why(key, error))
