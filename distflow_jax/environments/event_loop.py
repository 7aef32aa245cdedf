"""One event loop for the environments of a run, in a thread, and threads for calls that block."""

import asyncio
import contextlib
import contextvars
import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from distflow_jax.user_functions import ANYTHING

T = TypeVar("T")
_Outcome = tuple[Any, BaseException | None]  # what a call gave, what it raised


class EnvironmentsFailed(RuntimeError):
    """Environments fail so often, or hang so long, that nothing can be sampled with them."""


class EnvironmentCallFailed(Exception):
    """A call, `what`, gave no answer: for a cause of failures.CAUSES, by what it raised, if so."""

    def __init__(self, what: str, cause: str, error: BaseException | None = None):
        super().__init__(what, cause, error)
        self.what, self.cause, self.error = what, cause, error


class EventLoop:
    """Runs coroutines, and the calls in them under a deadline.

    A coroutine that is overdue is cancelled. A thread cannot be ended: what it returns is dropped,
    and another one takes its place, so that `threads` calls can always be at work.

    Methods are called in the loop's thread, but for `soon`, `start`, `take`, `check_hung`,
    `check_blocked` and `close`.

    Attributes:
      seconds: longest duration of a call, beside its wait for a thread.
      hung: what each call is that goes on after it was given up.
    """

    def __init__(self, seconds: float, threads: int):
        self.seconds, self.threads = seconds, threads
        self.hung: dict[asyncio.Future, str] = {}
        self._loop = asyncio.new_event_loop()
        self._free = asyncio.Semaphore(threads)
        self._work: set[Future[None]] = set()  # that `close` cancels
        self._ending: set[asyncio.Task] = set()  # for which it waits
        self._thread = threading.Thread(target=self._run, daemon=True, name="environments")
        self._thread.start()

    def soon(self, function: Callable[..., Any], *args: Any) -> None:
        """Calls a function in the loop's thread, if it has not been closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    def start(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        """Runs a coroutine, which the future's `cancel` cancels."""
        work = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        return work

    def take(self, answers: "queue.SimpleQueue[T]", seconds: float = math.inf) -> T:
        """The next of `answers`, which coroutines put there.

        queue.Empty if none comes within `seconds`; EnvironmentsFailed where something blocks the
        loop.
        """
        end = time.monotonic() + seconds
        while True:
            try:
                return answers.get(timeout=min(self.seconds, seconds))
            except queue.Empty:
                self.check_blocked()
                if time.monotonic() >= end:
                    raise

    def close(self) -> None:
        """Cancels what is at work, and waits for its end at most as long as for a call."""
        for work in list(self._work):
            work.cancel()
        self.soon(lambda: self.finish(self._end()))
        self._thread.join(2 * self.seconds + 1.0)  # it may be blocked

    def finish(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine that `close` does not cancel."""
        task = self._loop.create_task(coroutine)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def call(
        self, what: str, function: Callable[..., Any], *args: Any, pending: set[asyncio.Future]
    ) -> Any:
        """Awaits `function(*args)`, and returns its value.

        EnvironmentCallFailed if it raises, or is overdue.

        `what` names the call. `pending` gets the parts of it that have not ended.
        """
        call = _Call(self, what, pending)
        context = contextvars.copy_context()
        context.run(_CALL.set, call)
        task = self._loop.create_task(_outcome(function, args), context=context)
        call.follow(task)
        try:
            await asyncio.wait({task, call.overdue}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            call.pause()
            if not task.done():
                task.cancel()  # a coroutine may not listen to that
                self._loop.call_later(self.seconds, self._give_up, task, call.what)
        if not task.done():
            raise EnvironmentCallFailed(call.what, "timed_out")
        value, error = task.result()
        if isinstance(error, EnvironmentCallFailed):  # of another loop, which has its cause
            raise error
        if error is not None:
            raise EnvironmentCallFailed(call.what, "raised", error)
        return value

    async def in_thread(self, call: "_Call", function: Callable[..., T], args: tuple) -> T:
        """Calls a function in a thread, as a part of a call."""
        call.pause()
        await self._free.acquire()
        call.resume()
        ended: asyncio.Future[_Outcome] = self._loop.create_future()
        call.follow(ended)
        threading.Thread(
            target=self._call_here, args=(ended, function, args), daemon=True, name=call.what
        ).start()
        try:
            value, error = await asyncio.shield(ended)
        finally:
            self._free.release()
            self._give_up(ended, call.what)
        if error is not None:
            raise error
        return value

    def _call_here(
        self, ended: "asyncio.Future[_Outcome]", function: Callable[..., Any], args: tuple
    ) -> None:
        """Calls a function in this thread."""
        try:
            outcome = function(*args), None
        except ANYTHING as error:
            outcome = None, error
        self.soon(ended.set_result, outcome)

    def check_hung(self) -> None:
        """EnvironmentsFailed where more calls hang than threads are bounded to."""
        hung = list(self.hung.values())
        if len(hung) > self.threads:
            raise EnvironmentsFailed(
                f"{len(hung)} calls of environments go on after they had "
                f"rollout.environment_timeout={self.seconds:g} s, more than "
                f"rollout.environment_threads={self.threads}; {hung[0]} hangs"
            )

    def _give_up(self, future: asyncio.Future, what: str) -> None:
        """Counts a call that nobody waits for any more, until it ends."""
        if not future.done():
            self.hung[future] = what
            future.add_done_callback(self.hung.pop)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _end(self) -> None:
        if waiting := self._ending - {asyncio.current_task()}:
            _, waiting = await asyncio.wait(waiting, timeout=self.seconds)
        for task in waiting:
            task.cancel()  # it waits for a call that hangs
        await asyncio.sleep(0)
        self._loop.stop()

    def check_blocked(self) -> None:
        """EnvironmentsFailed where the loop does not answer: something blocks it."""
        alive = threading.Event()
        self.soon(alive.set)
        if not alive.wait(self.seconds):
            where = "".join(traceback.format_stack(sys._current_frames()[self._thread.ident]))
            raise EnvironmentsFailed(
                f"an environment has blocked the event loop of all others for {self.seconds:g} s "
                "(rollout.environment_timeout): await in its async methods, or make them plain "
                f"ones, which have threads. It is here:\n{where}"
            )


class _Call:
    """A call at work. Its deadline does not run while it is paused."""

    def __init__(self, loop: EventLoop, what: str, pending: set[asyncio.Future]):
        self.loop, self.what, self._pending = loop, what, pending
        self._clock = asyncio.get_running_loop()
        self._left = loop.seconds
        self.overdue = self._clock.create_future()
        self.resume()

    def follow(self, future: asyncio.Future) -> None:
        """Keeps a part of the call among those that have not ended."""
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)

    def resume(self) -> None:
        """Lets the deadline run."""
        self._since = self._clock.time()
        self._timer = self._clock.call_later(self._left, self.end)

    def pause(self) -> None:
        """Stops the deadline, if it runs."""
        if not self._timer.cancelled():
            self._timer.cancel()
            self._left -= self._clock.time() - self._since

    def seconds_left(self) -> float:
        """Seconds until the deadline, which runs."""
        return self._left - (self._clock.time() - self._since)

    def end(self) -> None:
        """The deadline has passed."""
        if not self.overdue.done():
            self.overdue.set_result(None)


_CALL: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("call", default=None)


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Calls a function that blocks in a thread; returns and raises as it does.

    In an environment's call the deadline does not run while that waits for a free thread.
    """
    call = _CALL.get()
    if call is None:
        return await asyncio.to_thread(function, *args)
    return await call.loop.in_thread(call, function, args)


def stop_deadline() -> None:
    """Lets the environment's call take its time: another loop keeps its deadline."""
    if call := _CALL.get():
        call.pause()


def seconds_left() -> float:
    """Seconds that the environment's call may still take; inf where there is none."""
    call = _CALL.get()
    return call.seconds_left() if call else math.inf


def name_call(what: str) -> None:
    """Names what the environment's call is at, for the log and for errors."""
    if call := _CALL.get():
        call.what = what


async def _outcome(function: Callable[..., Any], args: tuple) -> _Outcome:
    """A call's result or error. Not caught, a SystemExit would end the loop for all."""
    try:
        return await function(*args), None
    except ANYTHING as error:
        return None, error
