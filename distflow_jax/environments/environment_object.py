"""An object of the environment, and its calls, each under the deadline of the event loop."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.environments.environment import Environment, Shown, Turn
from distflow_jax.environments.event_loop import EnvironmentCallFailed, in_thread
from distflow_jax.environments.failures import CallFailure
from distflow_jax.environments.registry import Environments

MOST_IN_LOOP = 1 << 14  # characters of a text that is encoded in the loop, in about 15 ms


class EnvironmentObject:
    """An object of the environment, made by its first call; coroutines for the loop's thread."""

    def __init__(
        self,
        environments: Environments,
        prompt: Prompt,
        *,
        keep: Callable[[Any, Any], Any] = lambda returned, observed: observed,
    ):
        """`keep`: of what a method returned, and of that checked, what `call` returns."""
        self.made: Environment | None = None
        self._loop = environments.loop
        self._environments, self._prompt, self._keep = environments, prompt, keep
        self._pending: set[asyncio.Future] = set()  # parts of its calls that have not ended

    @property
    def repeatable(self) -> bool:
        """Whether `step` may be called again after it has failed."""
        return getattr(self.made, "repeatable", False)

    async def call(self, turn: np.ndarray | None) -> Any:
        """The answer to a turn, int32 [T]; None: to a reset. EnvironmentCallFailed without one."""
        what, method = ("reset", self._reset) if turn is None else ("step", self._step)
        args = () if turn is None else (turn,)
        return await self._loop.call(what, method, *args, pending=self._pending)

    async def close(self) -> None:
        """Calls the object's close() once no call of it is at work."""
        while self._pending:
            await asyncio.wait(set(self._pending))
        try:
            await self._loop.call("close", self._close, pending=set())
        except EnvironmentCallFailed as failed:
            failure = CallFailure.of(failed, self._loop.seconds)
            self._environments.failures.tell(failure.kind, failure.error)

    async def _reset(self) -> Any:
        if self._environments.is_async:
            self._make()
        else:
            await in_thread(self._make)
        return await self._read(self._environments.first, self.made.reset, self._prompt)

    async def _step(self, tokens: np.ndarray) -> Any:
        text = self._environments.tokenizer.decode(tokens)
        return await self._read(self._environments.observed, self.made.step, tokens, text)

    async def _close(self) -> None:
        if hasattr(self.made, "close"):
            await _read(lambda _: None, self.made.close)

    def _make(self) -> None:
        self.made = self._environments.make()

    async def _read(
        self, check: Callable[[Any], Any], method: Callable[..., Any], *args: Any
    ) -> Any:
        return await _read(lambda returned: self._keep(returned, check(returned)), method, *args)


async def _read(read: Callable[[Any], Any], method: Callable[..., Any], *args: Any) -> Any:
    """read(what a method gives): in the loop for a coroutine and no long text, else in a thread."""
    if not inspect.iscoroutinefunction(method):
        return await in_thread(lambda: read(method(*args)))
    returned = await method(*args)
    shown = returned.observation if isinstance(returned, Turn) else returned
    text = shown.text if isinstance(shown, Shown) else shown
    is_long = isinstance(text, str) and len(text) > MOST_IN_LOOP
    return await in_thread(read, returned) if is_long else read(returned)
