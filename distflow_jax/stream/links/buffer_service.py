"""The methods that a task buffer's server offers to workers.

`register` compares configs and returns the parameters of the run; `lease` leases groups,
`lease_node` a node that the worker serves; `submit` takes samples, complete or unfinished;
`submit_node` takes a node's results; `fail` and `deregister` return both to the buffer; `assign`
names the task buffers that a worker contacts. Every answer has the attempt of the run and the
available versions. A request for work that finds none waits at the buffer that the worker is
assigned to, and returns when work arrives; elsewhere the answer says when to ask again. A frame of
another attempt changes nothing.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from distflow_jax.did_you_mean import hint
from distflow_jax.parsing.one_line import one_line
from distflow_jax.rollout.response_checks import ResponseLimits
from distflow_jax.stream.frames.frames import (
    Frame,
    checked_samples,
    fact_of,
    keys_of,
    nodes_of,
    work_frame,
)
from distflow_jax.stream.links.refusals import MOST_TEXT, Refusals
from distflow_jax.stream.links.waiting_questions import WaitingQuestions
from distflow_jax.stream.links.worker_pool import Roster
from distflow_jax.stream.sample_requests import SampleRequests
from distflow_jax.stream.tasks import ENVIRONMENT, SAMPLER, Key, NodeTask, progress_of
from distflow_jax.stream.wire.calls import Bytes, Method, Refused

NODE_TABLE = "node_config"  # of a registration
# methods that wait for nobody
QUICK = ("lease", "lease_node", "submit", "submit_node", "fail", "deregister", "assign")
Table = Mapping[str, str]

log = logging.getLogger("distflow_jax")


class BufferService:
    """The methods of one task buffer, called from the threads of the wire.

    Attributes:
      ended: whether workers are informed that the run has ended.
    """

    def __init__(
        self,
        requests: SampleRequests,
        lock: threading.Condition,
        tables: Mapping[str, Table],
        facts: Mapping[str, Any],
        node_table: Table | None = None,
        *,
        limits: ResponseLimits,
        most_workers: int = 1 << 30,
    ):
        """`tables`: what workers must have alike, by name and key. `facts`: told to each that
        registers, `attempt` among them. `node_table`: keys of the config that workers which serve
        nodes must have alike too. `limits`: of the samples that come back. `most_workers`: that the
        limit of open files has room for."""
        self._requests, self._lock, self._tables = requests, lock, tables
        self._buffer = requests.buffer
        self._node_table = node_table or {}
        self._facts, self.ended = dict(facts), False
        self._told: set[str] = set()  # workers that know of the end
        self._limits, self._refusals = limits, Refusals(self._buffer)
        self._most_workers, self._roster = most_workers, Roster()
        # methods that do nothing for a frame of another attempt
        self._of_attempt = {
            self._lease,
            self._lease_node,
            self._submit,
            self._submit_node,
            self._fail,
        }
        self._waiting = WaitingQuestions(
            self._buffer.open.num_waiting, self._buffer.seconds / 3, self._news
        )

    def methods(self) -> dict[str, Method]:
        """The methods by name."""
        found = {
            "register": self._register,
            "lease": self._lease,
            "lease_node": self._lease_node,
            "submit": self._submit,
            "submit_node": self._submit_node,
            "fail": self._fail,
            "deregister": self._deregister,
            "assign": self._assign,
        }
        return {name: functools.partial(self._answer, method) for name, method in found.items()}

    def meet(self, buffers: Sequence[str]) -> None:
        """Notes where all task buffers answer: from now on workers may join."""
        with self._lock:
            self._facts["buffers"] = list(buffers)

    def know(self, worker: str, host: str) -> None:
        """Notes the host that a worker calls from."""
        with self._lock:
            self._refusals.meet(worker, host)

    def end(self, seconds: float) -> None:
        """Tells workers that the run is over; waits for them, at most so long."""
        with self._lock:
            self.ended = True
            self.answer_waiting(time.monotonic())
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0:
                if self._told >= self._buffer.workers.keys():
                    return
                self._lock.wait(left)

    def answer_waiting(self, now: float) -> None:
        """Answers questions that have waited enough; under the lock."""

        def text(worker: str) -> bytes:
            return Frame({"again": 0.0, **self._state(worker)}).to_bytes()

        self._waiting.answer(now, self._news, self._known, text)

    @property
    def _news(self) -> Hashable:
        """State of which news for workers come."""
        return self._buffer.newest, self._buffer.evaluating, self.ended

    def _known(self, worker: str) -> tuple[int, int | None, bool]:
        """Values that a worker knows whose question waits: the newest version, the one that it
        should evaluate, and whether the run has ended."""
        return self._buffer.newest, self._buffer.evaluates(worker), self.ended

    def _answer(
        self, method: Callable[[str, Frame], Frame | Future[bytes]], worker: str, payload: Bytes
    ) -> bytes | Future[bytes]:
        """The answer to a call, which counts against its worker where it cannot be read."""
        try:
            with self._lock:
                self._refusals.check(worker, time.monotonic())
                self._check_room(worker)
            frame = Frame.of_bytes(payload)
            if method in self._of_attempt and frame.facts.get("attempt") != self._facts["attempt"]:
                with self._lock:
                    return Frame(self._state(worker)).to_bytes()
            found = method(worker, frame)
            return found if isinstance(found, Future) else found.to_bytes()
        except ValueError as error:
            self._refuse(worker, [], str(error))
            raise Refused(str(error)) from error

    def _refuse(self, worker: str, keys: Sequence[Key], why: str) -> None:
        """Counts a result that is not used; its groups are for others."""
        with self._lock:
            for key in keys:
                self._buffer.take_back(worker, key)
            told = self._refusals.refuse(worker, why, time.monotonic())
            self._lock.notify_all()
        # an error, which every process of the job tells: the others know nothing of it
        log.error("a result of worker %s is refused: %s", worker, told)

    def _register(self, worker: str, frame: Frame) -> Frame:
        for name, ours in self._tables.items():
            if text := difference(name, ours, _table(frame, name)):
                raise Refused(text)
        nodes = self._nodes_of(frame)
        if nodes and (text := difference("config", self._node_table, _table(frame, NODE_TABLE))):
            raise Refused(text)
        with self._lock:
            # an answer without the task buffers means that the trainers are starting: try again
            self._buffer.heartbeat(worker, time.monotonic(), nodes or SAMPLER, starts=True)
            return Frame({**self._facts, **self._state(worker)})

    def _lease(self, worker: str, frame: Frame) -> Frame | Future[bytes]:
        held, capacity = (fact_of(frame, name, int) for name in ("version", "capacity"))
        slots = fact_of(frame, "slots", int) if "slots" in frame.facts else 0
        idle = frame.facts.get("idle") is True
        with self._lock:
            if self.ended:
                return Frame(self._state(worker))
            leased = self._requests.lease(worker, held, capacity, slots, idle=idle)
            if not leased:
                return self._nothing(worker, frame, [], samples=True)
            work = [(task.key, task.content, progress_of(task.sent())) for task in leased]
            return work_frame(self._state(worker), work, rows=self._limits.max_turns > 0)

    def _lease_node(self, worker: str, frame: Frame) -> Frame | Future[bytes]:
        capacity, now = fact_of(frame, "capacity", int), time.monotonic()
        nodes = self._nodes_of(frame)
        with self._lock:
            state = self._state(worker)
            if self.ended:
                return Frame(state)
            self._buffer.heartbeat(worker, now, nodes)
            if "address" in frame.facts:
                self._roster.meet_host(worker, fact_of(frame, "address", str))
            task = self._buffer.lease_node(worker, nodes, now) if capacity > 0 else None
            if task is None:
                samples = frame.facts.get("samples") is True
                return self._nothing(worker, frame, nodes, samples=samples)
        return Frame({**state, **task.content.facts}, task.content.arrays)

    def _submit_node(self, worker: str, frame: Frame) -> Frame:
        keys = keys_of(frame)
        if len(keys) != 1:
            raise ValueError(f"keys {keys!r:.80}, where one is wanted")
        key = keys[0]
        with self._lock:
            task = self._buffer.find(NodeTask, key)
        try:
            result = None if task is None else task.read(frame)
        except ValueError as error:
            self._refuse(worker, [key], str(error))
            with self._lock:
                return Frame(self._state(worker))
        with self._lock:
            self._buffer.submit_node(worker, key, result)
            self._lock.notify_all()
            return Frame(self._state(worker))

    def _submit(self, worker: str, frame: Frame) -> Frame:
        keys, goes_on = keys_of(frame), bool(frame.facts.get("goes_on"))
        with self._lock:
            newest, requests = self._buffer.newest, self._requests.requests(keys)
        try:
            found, spent = checked_samples(frame, requests, self._limits, newest)
        except ValueError as error:
            self._refuse(worker, keys, str(error))
            with self._lock:
                told = {"dropped": list(map(list, keys)), "refused": str(error)}
                return Frame({**self._state(worker), **told})
        with self._lock:
            dropped = self._requests.submit(worker, keys, found, spent=spent, goes_on=goes_on)
            self._lock.notify_all()
            return Frame({**self._state(worker), "dropped": [list(key) for key in dropped]})

    def _fail(self, worker: str, frame: Frame) -> Frame:
        keys, why = keys_of(frame), f"{worker}: {_why(frame)}"
        with self._lock:
            self._buffer.heartbeat(worker, time.monotonic(), ())
            for key in keys:
                self._buffer.fail(worker, key, why)
            self._lock.notify_all()
            return Frame(self._state(worker))

    def _assign(self, worker: str, frame: Frame) -> Frame:
        with self._lock:
            rank, workers = self._roster.rank(worker, time.monotonic())
            return Frame({"rank": rank, "workers": workers, **self._state(worker)})

    def _deregister(self, worker: str, frame: Frame) -> Frame:
        with self._lock:
            if why := _why(frame) if worker in self._buffer.workers else "":
                log.warning("worker %s has ended: %s", worker, why)
            self._roster.drop(worker)
            self._buffer.deregister(worker, unfit=bool(why))
            self._lock.notify_all()
            return Frame(self._state(worker))

    def _check_room(self, worker: str) -> None:
        """Refuses a worker beyond those that there is room for; under the lock."""
        for known in (self._buffer.workers, self._roster):
            if worker not in known and len(known) >= self._most_workers:
                raise Refused(
                    f"{len(known)} workers talk to this trainer already, as many as its limit of "
                    "open files has room for: raise it where trainers start (ulimit -n), or start "
                    "fewer workers"
                )

    def _nodes_of(self, frame: Frame) -> list[str]:
        """The nodes that a worker runs; refuses one that would run what the trainers run."""
        nodes, served = list(dict.fromkeys(nodes_of(frame))), self._buffer.served
        if own := [node for node in nodes if node not in served]:
            raise Refused(
                f"the trainers run node {own[0]!r} themselves ({hint(own[0], served)}): start them "
                "with its name in stream.worker_nodes, or take it out of --nodes"
            )
        return nodes

    def _nothing(
        self, worker: str, frame: Frame, nodes: Sequence[str], *, samples: bool
    ) -> Frame | Future[bytes]:
        """The answer to a question for tasks of some nodes, and for groups if the worker samples,
        where it gets none; under the lock.

        `waits` of its frame: what it knows, if it waits for a hint that there are some; whether it
        would do so next, if it was asked for them and there are none.
        """
        now, known = time.monotonic(), self._known(worker)
        if samples:
            nodes = [*nodes, *SAMPLER[: 1 + (known[1] is not None)]]
        waits, there = frame.facts.get("waits"), self._waiting.has_tasks(nodes)
        full = self._waiting.full
        if waits == list(known) and not (there or full):
            return self._waiting.add(worker, nodes, known, now)
        at_once = isinstance(waits, list) or (waits is True and not there)
        again = 0.0 if at_once and not full else self._waiting.seconds(now)
        return Frame({"again": again, **self._state(worker)})

    def _state(self, worker: str) -> dict[str, Any]:
        """Values that every answer has; under the lock."""
        if self.ended:
            self._told.add(worker)
            self._lock.notify_all()
        buffer = self._buffer
        state = {"newest": buffer.newest, "wanted": buffer.wanted(), "ended": self.ended}
        state["evaluates"] = buffer.evaluates(worker)
        if ENVIRONMENT in buffer.served:
            state["hosts"] = self._roster.hosts(buffer.at_work(ENVIRONMENT))
        return {"attempt": self._facts["attempt"], **state}


def _table(frame: Frame, name: str) -> Table:
    """A table that a worker must have alike with the trainers; empty where it has none."""
    return fact_of(frame, name, dict) if name in frame.facts else {}


def _why(frame: Frame) -> str:
    """The reason that a worker gives, in a line of MOST_TEXT characters."""
    return one_line(" ".join(str(frame.facts.get("why", "")).split())[:MOST_TEXT])


def difference(name: str, ours: Table, theirs: Table) -> str:
    """A sentence on the first key in which two tables differ; "": they are alike."""
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            here, there = (one.get(key, "missing") for one in (ours, theirs))
            return (
                f"{name} {key} is {there} at this worker and {here} at the trainers: start the "
                "worker with the trainers' config and code"
            )
    return ""
