"""The environment of one response, beside the sampler: its calls, tried again where they fail."""

import asyncio
import dataclasses
import itertools
import queue

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.environments.environment_object import EnvironmentObject
from distflow_jax.environments.event_loop import EnvironmentCallFailed, EnvironmentsFailed
from distflow_jax.environments.failures import HOST_LOST, CallFailure
from distflow_jax.environments.registry import Environments, Observed

PAUSE = 0.25  # seconds before the second try, twice as many before each further one
LOSSES = 2  # of hosts in a call that use up no try

# a turn that the environments of tools answer: in each form it is a call, mostly a wrong one
_TRIAL = '{"name"<tool>1</tool><tool_call>1</tool_call>'
_TEMPLATE = "the chat template"  # begins what a tokenizer says about turns


@dataclasses.dataclass(frozen=True)
class TryOutcome:
    """The outcome of a try, and of which handle.

    `last`: no other try follows.
    """

    handle: int
    outcome: Observed | CallFailure
    last: bool = True


class EnvironmentHandle:
    """One response's environment: `reset` and `step` go in, and Answers come out of a queue that
    many of these share.

    A call that fails is tried again on a new object, which is given the turns so far first; one
    that is `repeatable` is asked again itself. The methods may be called in any thread, one after
    the other, and never wait.
    """

    _numbers = itertools.count()

    def __init__(
        self, environments: Environments, prompt: Prompt, answers: "queue.SimpleQueue[TryOutcome]"
    ):
        self.number = next(self._numbers)
        self._environments, self._prompt, self._answers = environments, prompt, answers
        self._loop = environments.loop
        self._turns: asyncio.Queue[np.ndarray | None] = asyncio.Queue()
        self._object = EnvironmentObject(environments, prompt)
        self._past: list[tuple[np.ndarray | None, Observed]] = []  # what was answered how
        self._replayed = False  # whether the object was given all of that
        self._work = self._loop.start(self._live())

    def reset(self) -> None:
        """Makes the environment and resets it; the answer is its first observation."""
        self._loop.soon(self._turns.put_nowait, None)

    def step(self, tokens: np.ndarray) -> None:
        """Hands a turn of the model, int32 [T], to the environment."""
        self._loop.soon(self._turns.put_nowait, tokens)

    def close(self) -> None:
        """Ends the call at work, and then the environment by its own close(). May be called
        twice."""
        self._work.cancel()

    # -- in the loop's thread ---------------------------------------------------------------------

    async def _live(self) -> None:
        try:
            while True:
                await self._answer(await self._turns.get())
        finally:
            self._discard()

    async def _answer(self, turn: np.ndarray | None) -> None:
        retries, failures, losses = self._environments.calls.retries, 0, 0
        while failures <= retries:
            try:
                observed = await self._try(turn)
            except EnvironmentCallFailed as failed:
                failure = CallFailure.of(failed, self._loop.seconds)
                losses += failure.cause == HOST_LOST
                failures += failure.cause != HOST_LOST or losses > LOSSES
                last = failures > retries
                self._answers.put(TryOutcome(self.number, failure, last))
                if not (self._past and self._replayed and self._object.repeatable):
                    self._discard()
                if not last:
                    await asyncio.sleep(PAUSE * 2 ** max(0, failures - 1))
            else:
                self._past.append((turn, observed))
                self._answers.put(TryOutcome(self.number, observed))
                return

    async def _try(self, turn: np.ndarray | None) -> Observed:
        """The answer to a turn; a new object is given those before it."""
        if not self._replayed:
            for before, seen in self._past:
                if not seen.looks_like(await self._object.call(before)):
                    raise EnvironmentCallFailed("reset" if before is None else "step", "diverged")
            self._replayed = True
        return await self._object.call(turn)

    def _discard(self) -> None:
        one, self._object = self._object, EnvironmentObject(self._environments, self._prompt)
        self._replayed = False
        self._loop.finish(one.close())


def check_environments(environments: Environments, prompt: Prompt) -> None:
    """Tries the making and the reset of an environment on a row of the data, before the first step,
    and the chat template with a user's turn and with its answer to a turn.

    ValueError, in one line, if that raises, hangs, or gives something else than an observation, and
    with the place for what blocks the event loop.
    """
    if environments.tokenizer.is_chat(prompt.text):
        environments.tokenizer.encode_turn(".")
    answers: queue.SimpleQueue[TryOutcome] = queue.SimpleQueue()
    handle = EnvironmentHandle(environments, prompt, answers)
    try:
        handle.reset()
        error = _last_error(environments, answers)
        if not error:
            handle.step(environments.tokenizer.encode(_TRIAL))
            error = _last_error(environments, answers)
            if _TEMPLATE not in error:  # it may not take such a turn
                return
    except EnvironmentsFailed as failed:
        error = str(failed)
    finally:
        handle.close()
    raise ValueError(f"environment {environments.name!r} failed on the first row: {error}")


def _last_error(environments: Environments, answers: "queue.SimpleQueue[TryOutcome]") -> str:
    """In one line why an environment gave no answer after all tries; "": it did."""
    while not (answer := environments.loop.take(answers)).last:
        pass
    outcome = answer.outcome
    return outcome.error.split("\n")[0] if isinstance(outcome, CallFailure) else ""
