"""A host that runs environments for the workers of a run, which sample the responses.

Each worker connection is a session with the objects of its responses. The worker sends calls, which
are acknowledged at once, and requests finished calls, which wait here until there are some. A
session that is silent for a lease's time is closed with all its objects.
"""

import asyncio
import collections
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.environments.environment_object import EnvironmentObject
from distflow_jax.environments.event_loop import EnvironmentCallFailed
from distflow_jax.environments.failures import CallFailure
from distflow_jax.environments.registry import Environments
from distflow_jax.stream.frames.environment_frames import (
    EnvironmentCall,
    answers_frame,
    calls_of,
    failed,
    returned,
)
from distflow_jax.stream.frames.frames import FRAME_BYTES, Frame
from distflow_jax.stream.links.buffer_addresses import announced
from distflow_jax.stream.links.waiting_questions import WAIT_SECONDS
from distflow_jax.stream.wire.calls import Bytes, Refused
from distflow_jax.stream.wire.wire_server import WireServer

CALL, WAIT = "environment_calls", "environment_wait"  # methods
ANSWER_BYTES = 32 << 20  # of the outcomes in one frame, but for the first one
LOOK_SECONDS = 0.2  # between two looks at sessions
CHECK_SECONDS = 1.0  # between two looks at the event loop

log = logging.getLogger("distflow_jax")


@dataclasses.dataclass(eq=False)
class _Hosted:
    """An object and its running call."""

    object: EnvironmentObject
    work: Future[None] | None = None
    busy: bool = False


class EnvironmentHost:
    """Runs environments for workers in the event loop of `environments`, once it listens."""

    def __init__(self, environments: Environments, seconds: float):
        """`seconds`: after which the objects of a silent worker are closed."""
        self._environments, self._loop = environments, environments.loop
        self._seconds = seconds
        self._sessions: dict[str, _Session] = {}
        self._at_end = contextlib.ExitStack()
        self._next_check = 0.0

    def listen(self, address: str, token: bytes) -> str:
        """Listens on the interface of HOST:PORT, at any free port, to those that have the run's
        token; returns the address by which they call. ValueError if it cannot."""
        methods = {CALL: self._take_calls, WAIT: self._take_question}
        interface = f"{address.rpartition(':')[0]}:0"
        server = WireServer(interface, token, methods, quick=methods, limit_bytes=FRAME_BYTES)
        self._at_end.callback(server.close)
        self._loop.start(self._watch())
        return announced(interface, server.port)

    def check(self) -> None:
        """EnvironmentsFailed where too many calls hang, or one blocks the event loop."""
        if (now := time.monotonic()) >= self._next_check:
            self._next_check = now + CHECK_SECONDS
            self._loop.check_hung()
            self._loop.check_blocked()

    def close(self) -> None:
        """Closes all objects, and the port."""
        self._loop.soon(lambda: [session.end() for session in self._sessions.values()])
        self._environments.close()
        self._at_end.close()

    def _take_calls(self, worker: str, payload: Bytes) -> Future[bytes]:
        try:
            calls = calls_of(Frame.of_bytes(payload, FRAME_BYTES))
        except ValueError as error:
            raise Refused(str(error)) from error
        return self._in_loop(self._begin, worker, calls)

    def _take_question(self, worker: str, payload: Bytes) -> Future[bytes]:
        try:
            first = Frame.of_bytes(payload).facts.get("first") is True
        except ValueError as error:
            raise Refused(str(error)) from error
        return self._in_loop(self._ask, worker, first)

    def _in_loop(self, act: Callable[..., None], *args: Any) -> Future[bytes]:
        answer: Future[bytes] = Future()
        self._loop.soon(act, *args, answer)
        return answer

    # -- in the loop's thread ---------------------------------------------------------------------

    def _begin(self, worker: str, calls: list[EnvironmentCall], answer: Future[bytes]) -> None:
        """Begins calls of a worker's objects."""
        session = self._sessions.get(worker)
        if session is not None:
            session.heard = time.monotonic()
            for call in calls:
                session.call(call)
        if answer.set_running_or_notify_cancel():  # otherwise its connection has ended
            answer.set_result(Frame({"unknown": session is None}).to_bytes())

    def _ask(self, worker: str, first: bool, answer: Future[bytes]) -> None:
        """Answers a worker once calls have ended; its `first` question begins its session."""
        if first and worker not in self._sessions:
            self._sessions[worker] = _Session(self._environments)
        if worker in self._sessions:
            seconds = 0.0 if first else min(WAIT_SECONDS, self._seconds / 3)
            self._sessions[worker].ask(answer, seconds)
        elif answer.set_running_or_notify_cancel():
            answer.set_result(Frame({"unknown": True}).to_bytes())

    async def _watch(self) -> None:
        """Answers questions that have waited, and closes the objects of workers that are silent."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for worker, session in list(self._sessions.items()):
                session.answer()
                if session.heard <= time.monotonic() - self._seconds:
                    del self._sessions[worker]
                    if count := session.end():
                        told = "worker %s is silent: %d of its environments are closed"
                        log.warning(told, worker, count)


class _Session:
    """The objects of a worker, and the outcomes of calls that it has not received.

    Attributes:
      heard: time of the worker's last heartbeat.
    """

    def __init__(self, environments: Environments):
        self.heard = time.monotonic()
        self._environments, self._loop = environments, environments.loop
        self._objects: dict[int, _Hosted] = {}
        self._ended: collections.deque[tuple[int, bytes, bool]] = collections.deque()
        self._question: Future[bytes] | None = None
        self._until = 0.0  # for which the question waits

    def call(self, call: EnvironmentCall) -> None:
        """Begins a call, or closes an object."""
        value, turn = call.value, None
        if isinstance(value, np.ndarray):
            turn = value
        else:  # the object before has ended
            self._end(self._objects.pop(call.place, None))
        if isinstance(value, Prompt):
            made = EnvironmentObject(self._environments, value, keep=returned)
            self._objects[call.place] = _Hosted(made)
        hosted = self._objects.get(call.place)
        if hosted is not None and not hosted.busy:
            hosted.busy = True
            hosted.work = self._loop.start(self._run(hosted, call.number, turn))
        elif value is not None:
            text = f"object {call.place} takes no call"
            self._ended.append((call.number, failed(CallFailure("raised", text, text)), False))

    def ask(self, answer: Future[bytes], seconds: float) -> None:
        """Answers a question, for what has ended, within so many seconds."""
        self.heard = time.monotonic()
        self._question, self._until = answer, self.heard + seconds
        self.answer()

    def answer(self) -> None:
        """Answers the question if something has ended, or it has waited enough."""
        question, ended = self._question, self._ended
        if question is None or not (ended or time.monotonic() >= self._until):
            return
        self._question, found, size = None, [], 0
        if not question.set_running_or_notify_cancel():  # its connection has ended
            return
        while ended and size < ANSWER_BYTES:
            found.append(ended.popleft())
            size += len(found[-1][1])
        question.set_result(answers_frame(found).to_bytes())

    def end(self) -> int:
        """Closes all objects; returns their number."""
        objects, self._objects = self._objects, {}
        for hosted in objects.values():
            self._end(hosted)
        return len(objects)

    async def _run(self, hosted: _Hosted, number: int, turn: np.ndarray | None) -> None:
        try:
            outcome = await hosted.object.call(turn)
        except EnvironmentCallFailed as error:
            outcome = failed(CallFailure.of(error, self._loop.seconds))
        hosted.busy = False
        self._ended.append((number, outcome, hosted.object.repeatable))
        self.answer()

    def _end(self, hosted: _Hosted | None) -> None:
        if hosted is not None:
            if hosted.work is not None:
                hosted.work.cancel()
            self._loop.finish(hosted.object.close())
