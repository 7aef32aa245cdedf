"""A worker's environments on other hosts: the known hosts, and the calls to them.

Two threads serve each host: one sends calls, which the host acknowledges at once, and one requests
finished calls. Everything else happens in the thread of the event loop, where a call is a waiting
coroutine.
"""

import asyncio
import itertools
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.environments.environment import Turn
from distflow_jax.environments.event_loop import EventLoop, stop_deadline
from distflow_jax.environments.failures import HOST_LOST, CallFailure, FailedElsewhere
from distflow_jax.stream.frames.environment_frames import (
    MOST_BYTES,
    EnvironmentAnswer,
    EnvironmentCall,
    answers_of,
    calls_frame,
)
from distflow_jax.stream.frames.frames import FRAME_BYTES, Frame
from distflow_jax.stream.frames.prompt_frames import request_bytes
from distflow_jax.stream.links.environment_host import CALL, WAIT
from distflow_jax.stream.wire.calls import Refused, Unreachable
from distflow_jax.stream.wire.wire_client import WireClient

CALLS_BYTES = 32 << 20  # of the prompts in one frame, but for the first one
AGAIN_SECONDS = 2.0  # before a host that was lost is asked again
TELL_SECONDS = 60.0  # between two warnings that there is no host, or that one is lost
FIRST_SECONDS = 5.0  # before the first one
MOST_NAMED = 4  # addresses in a warning
CLOSE_SECONDS = 1.0  # for what is left to be sent
_LAST = EnvironmentCall(0, 0, None)  # behind it nothing is sent

log = logging.getLogger("distflow_jax")


class EnvironmentHosts:
    """The hosts of a worker's environments. `meet` and `close` may be called anywhere, other
    methods only in the loop's thread.

    Args:
      loop: in which calls are made.
      name: of this worker.
      token: of the run.
      seconds: after which a host that does not answer is lost.
    """

    def __init__(self, loop: EventLoop, name: str, token: bytes, seconds: float):
        self.loop, self._seconds = loop, seconds
        self._name, self._token = name, token
        self._told: Mapping[str, str] = {}
        self._hosts: dict[str, _Host] = {}
        # when hosts that were lost are asked again, and from when on their loss is told again
        self._lost: dict[str, tuple[float, float]] = {}
        self._came = asyncio.Event()
        self._next_told = 0.0

    def meet(self, told: Mapping[str, str]) -> None:
        """Takes the hosts that are at work now: their addresses by name."""
        self.loop.soon(self._meet, told)

    def close(self) -> None:
        """Ends the connections, once what the hosts should know is sent."""
        for host in list(self._hosts.values()):
            host.close()

    def make(self) -> "_Elsewhere":
        """An environment that runs on one of the hosts."""
        return _Elsewhere(self)

    async def find(self) -> "_Host":
        """The host at work that has the fewest objects; waits for one."""
        began = time.monotonic()
        while True:
            known = [self._hosts[name] for name in self._told if name in self._hosts]
            if ready := [host for host in known if host.ready]:
                return min(ready, key=lambda host: len(host.objects))
            self._came.clear()
            self._warn(began)
            try:
                await asyncio.wait_for(self._came.wait(), FIRST_SECONDS)
            except TimeoutError:
                continue

    def hear(self, host: "_Host", answers: Sequence[EnvironmentAnswer]) -> None:
        """Takes what a host says."""
        host.ready = not host.lost
        self._came.set()
        for answer in answers:
            host.hear(answer)

    def lose(self, host: "_Host", why: str) -> None:
        """Gives a host up that does not answer, or not as one."""
        if self._hosts.get(host.name) is host:
            del self._hosts[host.name]
            now, (_, told) = time.monotonic(), self._lost.get(host.name, (0.0, 0.0))
            if now >= told:
                log.warning("host %s of environments does not answer: %s", host.name, why)
                told = now + TELL_SECONDS
            self._lost[host.name] = now + AGAIN_SECONDS, told
            asyncio.get_running_loop().call_later(AGAIN_SECONDS + 0.1, self._meet)
            host.lose(why)

    def release(self, host: "_Host", place: int) -> None:
        """Ends an object of a host."""
        if place in host.objects:
            host.objects.discard(place)
            host.send(EnvironmentCall(0, place, None))
            self._meet()

    def _meet(self, told: Mapping[str, str] | None = None) -> None:
        self._told, now = self._told if told is None else dict(told), time.monotonic()
        self._lost = {name: when for name, when in self._lost.items() if name in self._told}
        for name, host in list(self._hosts.items()):
            if name not in self._told and not host.objects:
                del self._hosts[name]
                host.leave()
        for name, address in self._told.items():
            if name not in self._hosts and self._lost.get(name, (0.0,))[0] <= now:
                # a name of its own for each connection: the host keeps no object of one before
                client = f"{secrets.token_hex(4)}-{self._name}"
                wire = WireClient(address, self._token, client, limit_bytes=FRAME_BYTES)
                self._hosts[name] = _Host(self, name, wire, self._seconds)

    def _warn(self, began: float) -> None:
        now = time.monotonic()
        if now >= max(began + FIRST_SECONDS, self._next_told):
            self._next_told = now + TELL_SECONDS
            why = (
                "is at work, and responses wait for one; start one: distflow worker "
                "--nodes=environment --config=... --join=..."
            )
            if self._told:
                found = ", ".join(sorted(self._told.values())[:MOST_NAMED])
                why = f"answers, and responses wait for one; open the port of {found} to this host"
            log.warning("no host of environments %s", why)


class _Host:
    """A host, its objects, and the unfinished calls there.

    Attributes:
      ready: whether it has answered, and is not lost.
      objects: places of unfinished objects.
    """

    def __init__(self, hosts: EnvironmentHosts, name: str, wire: WireClient, seconds: float):
        self.name, self.objects = name, set[int]()
        self.ready = self.lost = False
        self._why, self._numbers = "", itertools.count(1)
        self._under_way: dict[int, tuple[str, asyncio.Future[EnvironmentAnswer]]] = {}

        def heard(answers: Sequence[EnvironmentAnswer]) -> None:
            hosts.loop.soon(hosts.hear, self, answers)

        def failed(why: str) -> None:
            hosts.loop.soon(hosts.lose, self, why)

        self._talk = _Talk(wire, seconds, heard, failed)
        self.send, self.leave, self.close = self._talk.send, self._talk.leave, self._talk.close

    async def call(self, what: str, place: int, value: Prompt | np.ndarray) -> EnvironmentAnswer:
        """The answer to a call of an object, `value` as of EnvironmentCall, int32 [T].

        FailedElsewhere without one, ValueError for one that cannot be read.
        """
        if self.lost:
            raise self._lost(what)
        number = next(self._numbers)
        future: asyncio.Future[EnvironmentAnswer] = asyncio.get_running_loop().create_future()
        self._under_way[number] = what, future
        self.send(EnvironmentCall(number, place, value))
        try:
            return await future
        finally:
            del self._under_way[number]

    def hear(self, answer: EnvironmentAnswer) -> None:
        """Takes the outcome of a call; of one that was given up, nothing."""
        what, future = self._under_way.get(answer.number, ("", None))
        if future is None or future.done():
            return
        if isinstance(answer.outcome, CallFailure):
            future.set_exception(FailedElsewhere(what, answer.outcome))
        elif isinstance(answer.outcome, ValueError):
            error = f"host {self.name} of environments answers what cannot be read"
            future.set_exception(ValueError(f"{error}: {answer.outcome}"))
        else:
            future.set_result(answer)

    def lose(self, why: str) -> None:
        """Fails all calls under way."""
        self._why, self.lost, self.ready = why, True, False
        self.leave()
        for what, future in self._under_way.values():
            if not future.done():
                future.set_exception(self._lost(what))

    def _lost(self, what: str) -> FailedElsewhere:
        text = f"host {self.name} of environments is lost, its responses go on elsewhere"
        return FailedElsewhere(what, CallFailure(HOST_LOST, f"{text}: {self._why}", text))


class _Talk:
    """Two threads of a host: one sends calls, one receives finished calls.

    `heard` receives the latter, and `failed` the reason why the host is lost.
    """

    def __init__(
        self,
        wire: WireClient,
        seconds: float,
        heard: Callable[[Sequence[EnvironmentAnswer]], None],
        failed: Callable[[str], None],
    ):
        self._wire, self._seconds, self._heard, self._failed = wire, seconds, heard, failed
        self._outbox: queue.SimpleQueue[EnvironmentCall] = queue.SimpleQueue()
        self._sender, listener = (
            threading.Thread(target=one, daemon=True, name=f"environment-host-{wire.address}")
            for one in (self._send, self._listen)
        )
        self._sender.start()
        listener.start()

    def send(self, call: EnvironmentCall) -> None:
        """Has a call sent."""
        self._outbox.put(call)

    def leave(self) -> None:
        """As `close`, and does not wait."""
        threading.Thread(target=self.close, daemon=True).start()

    def close(self) -> None:
        """Ends the connections, once the calls before are sent."""
        self._outbox.put(_LAST)
        self._sender.join(CLOSE_SECONDS)
        self._wire.close()

    def _send(self) -> None:
        while calls := _take_calls(self._outbox, self._heard):
            if not self._ask(CALL, calls_frame(calls)):
                return

    def _listen(self) -> None:
        frame = Frame({"first": True})
        while answer := self._ask(WAIT, frame):
            self._heard(answer[0])
            frame = Frame({})

    def _ask(self, method: str, frame: Frame) -> tuple[Sequence[EnvironmentAnswer]] | None:
        """(what has ended,) by the host's answer; None: it is lost."""
        try:
            data = self._wire.call(method, frame.to_bytes(), self._seconds)
            answer = Frame.of_bytes(data, FRAME_BYTES)
            if answer.facts.get("unknown"):
                raise Refused("it has heard nothing of this worker for too long")
            return (answers_of(answer),)
        except (Unreachable, Refused, ValueError) as error:
            self._failed(str(error))
            return None


class _Elsewhere:
    """An environment that runs on a host."""

    _places = itertools.count(1)

    def __init__(self, hosts: EnvironmentHosts):
        self.repeatable = False
        self._hosts, self._place = hosts, next(self._places)
        self._host: _Host | None = None

    async def reset(self, prompt: Prompt) -> Any:
        """As of Environment."""
        stop_deadline()
        self._host = await self._hosts.find()
        self._host.objects.add(self._place)
        answer = await self._host.call("reset", self._place, prompt)
        self.repeatable = answer.repeatable
        return answer.outcome

    async def step(self, tokens: np.ndarray, text: str) -> Turn:
        """As of Environment; the host has the text of the tokens int32 [T]."""
        stop_deadline()
        try:
            return (await self._host.call("step", self._place, tokens)).outcome
        except FailedElsewhere as failed:
            self.repeatable &= failed.cause != HOST_LOST
            raise

    async def close(self) -> None:
        """Has the host close it."""
        if self._host is not None:
            self._hosts.release(self._host, self._place)


def _take_calls(
    outbox: queue.SimpleQueue[EnvironmentCall],
    heard: Callable[[Sequence[EnvironmentAnswer]], None],
) -> list[EnvironmentCall]:
    """Waits for calls, as many as a frame takes; [] behind the last one. `heard` gets the failures
    of those that cannot be sent."""
    calls, size = [], 0
    while not calls or (size < CALLS_BYTES and not outbox.empty()):
        if (call := outbox.get()) is _LAST:
            outbox.put(_LAST)
            break
        try:
            size += _size(call)
            calls.append(call)
        except (ValueError, RecursionError) as error:
            failure = CallFailure("raised", str(error), str(error))
            heard([EnvironmentAnswer(call.number, failure)])
    return calls


def _size(call: EnvironmentCall) -> int:
    """Bytes of a call, where they are many. ValueError for one that cannot be sent."""
    prompt = call.value
    if not isinstance(prompt, Prompt):
        return 0
    size = request_bytes(prompt, rows=True) + sum(image.pixels.nbytes for image in prompt.images)
    if size > MOST_BYTES:
        raise ValueError(
            f"row {prompt.row} of the data has {size} bytes, where a host of environments gets at "
            f"most {MOST_BYTES}: let it be smaller"
        )
    return size
