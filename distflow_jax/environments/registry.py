"""Environments by name, and the thread in which one of them lives beside the sampler."""

import contextlib
import dataclasses
import inspect
import itertools
import logging
import math
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from distflow_jax import user_functions
from distflow_jax.batch import Prompt
from distflow_jax.environments.environment import Environment, Shown, Turn
from distflow_jax.environments.observed_pictures import Sight, check_shown
from distflow_jax.environments.tools import Tools, calculator
from distflow_jax.images.turn_images import TurnImages
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.rewards.records import MOST_SCORE

ENVIRONMENTS: dict[str, Callable[..., Environment]] = {"calculator": calculator, "tools": Tools}

_TRIAL = "<tool>1</tool>"  # a turn that the environments of tools answer
_TEMPLATE = "the chat template"  # begins what a tokenizer says about turns

log = logging.getLogger("distflow_jax")


@dataclasses.dataclass(frozen=True)
class Failure:
    """The failure of a call: `error` holds a summary and below it the traceback; `place` is the
    kind of error and where it was raised."""

    error: str
    place: str


@dataclasses.dataclass(frozen=True)
class Observed:
    """A checked Turn: `tokens` int32 [M], and the images among them."""

    tokens: np.ndarray
    reward: float = 0.0
    done: bool = False
    logged: Mapping[str, float] = dataclasses.field(default_factory=dict)
    shown: TurnImages | None = None


@dataclasses.dataclass(frozen=True)
class Answer:
    """The outcome of a call, with the numbers of its thread and of the call."""

    thread: int
    call: int
    outcome: Observed | Failure


class Environments:
    """The environments of a run, one per response, and the limits of a response in turns.

    Args:
      name: `calculator`, `tools`, my_module:MyClass or path/to/file.py:MyClass.
      kwargs: for it, beside the tokenizer.
      seconds: longest duration of one call.
      turn_length: most tokens of one turn of the model, the end token included; 0: as many as the
        response may have.
      max_turns: turns of the model in one response.
      sight: what takes pictures of observations; None: the model has no tower.

    Raises:
      ValueError, FileNotFoundError: nothing by that name (the nearest is named), or it cannot be
        called with the tokenizer and these kwargs.
    """

    def __init__(
        self,
        name: str,
        kwargs: Mapping[str, Any],
        tokenizer: Tokenizer,
        *,
        seconds: float,
        turn_length: int = 0,
        max_turns: int = 4,
        sight: Sight | None = None,
    ):
        self.name, self.seconds, self.tokenizer = name, seconds, tokenizer
        self.turn_length, self.max_turns = turn_length, max_turns
        self._sight = sight
        self._make, self._kwargs = load_environment(name), dict(kwargs)
        self._check_signature()
        self._logged: set[str] = set()

    def make(self) -> Environment:
        """A new one."""
        return self._make(self.tokenizer, **self._kwargs)

    def check(self, prompt: Prompt) -> None:
        """Tries the making and the reset of one on a row of the data, before the first step, and
        the chat template with a user's turn and with its answer to a turn.

        ValueError, in one line, if that raises, hangs, or gives something else than an observation.
        """
        if self.tokenizer.is_chat(prompt.text):
            self.tokenizer.encode_turn(".")
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        with EnvironmentThread(self, answers) as thread:
            thread.reset(prompt)
            try:
                outcome = answers.get(timeout=self.seconds).outcome
            except queue.Empty:
                raise ValueError(
                    f"environment {self.name!r} was not reset within rollout.environment_seconds="
                    f"{self.seconds:g} on the first row; mend it, or raise that"
                ) from None
            if not isinstance(outcome, Failure):
                thread.step(self.tokenizer.encode(_TRIAL))
                with contextlib.suppress(queue.Empty):  # it may take long to answer
                    outcome = answers.get(timeout=self.seconds).outcome
                    if _TEMPLATE not in getattr(outcome, "error", "").split("\n")[0]:
                        return  # it may not take such a turn
        if isinstance(outcome, Failure):
            summary = outcome.error.split("\n")[0]
            raise ValueError(f"environment {self.name!r} failed on the first row: {summary}")

    def log_once(self, kind: str, what: str) -> None:
        """Warns of something that went wrong, of each kind once in this process."""
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning(
                "environment %r: %s\n(further ones of this kind are only counted)", self.name, what
            )

    def observed(self, turn: Any) -> Observed:
        """A Turn that was returned, checked; TypeError or ValueError for what it cannot be."""
        if not isinstance(turn, Turn):
            raise TypeError(f"step returned {_shown(turn)}, not a Turn")
        reward = float(turn.reward)
        if not abs(reward) <= MOST_SCORE:  # nan, too
            raise ValueError(f"step returned a reward of {reward}, outside ±{MOST_SCORE:g}")
        logged = {str(name): float(value) for name, value in turn.logged.items()}
        tokens, shown = self.read(turn.observation)
        return Observed(tokens, reward, bool(turn.done), logged, shown)

    def read(self, observation: Any) -> tuple[np.ndarray, TurnImages | None]:
        """An observation, text or ids or Shown or None: its ids int32 [M], and its images."""
        if isinstance(observation, Shown):
            try:
                check_shown(observation, self._sight)
                if observation.images:
                    return self._sight.read(observation)
            except ValueError as error:  # frames of ours say nothing about the user's code
                raise ValueError(str(error)) from None
            if observation.role is not None:
                turn = self.tokenizer.encode_turn(observation.text, role=observation.role)
                return turn, None
            observation = observation.text
        return self._ids(observation), None

    def _ids(self, observation: Any) -> np.ndarray:
        if observation is None:
            return np.zeros(0, np.int32)
        if isinstance(observation, str):
            return self.tokenizer.encode(self.tokenizer.plain(observation))
        wrong = (
            "an observation must be text, token ids, or Shown(text, images) with pictures, got "
            f"{_shown(observation)}"
        )
        try:
            ids = np.asarray(observation)
        except ValueError:  # of parts with several shapes
            raise TypeError(wrong) from None
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise TypeError(wrong)
        if ids.size and not (0 <= ids.min() and ids.max() < self.tokenizer.vocab_size):
            raise ValueError(
                f"an observation has ids from {ids.min()} to {ids.max()}, the vocabulary "
                f"{self.tokenizer.vocab_size}"
            )
        return ids.astype(np.int32)

    def _check_signature(self) -> None:
        for name in ("reset", "step"):
            if inspect.isclass(self._make) and not callable(getattr(self._make, name, None)):
                raise ValueError(
                    f"environment {self.name!r} has no method {name!r}: it needs reset(prompt) and "
                    "step(tokens, text)"
                )
        try:
            inspect.signature(self._make).bind(self.tokenizer, **self._kwargs)
        except TypeError as error:
            raise ValueError(
                f"rollout.environment_kwargs={self._kwargs} do not fit {self.name}"
                f"{inspect.signature(self._make)}: {error}"
            ) from error


class EnvironmentThread:
    """One response's environment: calls go in, and Answers come out of `answers`, a queue that many
    of these share.

    A call that hangs cannot be ended in Python: the thread is left behind then, and ends when the
    call does. It holds no part of the sampler, and does not keep the process alive.
    """

    _numbers = itertools.count()

    def __init__(self, environments: Environments, answers: "queue.SimpleQueue[Answer]"):
        self.number = next(self._numbers)
        self.deadline = math.inf  # of the call at work, on time.monotonic's clock
        self.call = 0  # number of the last call
        self._environments = environments
        self._jobs: queue.SimpleQueue[tuple[str, tuple] | None] = queue.SimpleQueue()
        threading.Thread(
            target=_live,
            args=(environments, self.number, self._jobs, answers),
            daemon=True,
            name=f"environment-{self.number}",
        ).start()

    def reset(self, prompt: Prompt) -> None:
        """Makes the environment and resets it; the answer is its first observation."""
        self._begin("reset", prompt)

    def step(self, tokens: np.ndarray) -> None:
        """Hands a turn of the model, int32 [T], to the environment."""
        self._begin("step", tokens)

    def is_answer(self, answer: Answer) -> bool:
        """Whether this is the outcome of the last call; if so, the deadline is off."""
        if answer.call != self.call or self.deadline == math.inf:
            return False
        self.deadline = math.inf
        return True

    def close(self) -> None:
        """Lets it end, after its own close(). May be called twice; does not wait."""
        self.deadline = math.inf
        self._jobs.put(None)

    def __enter__(self) -> "EnvironmentThread":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _begin(self, method: str, *args: Any) -> None:
        self.call += 1
        self.deadline = time.monotonic() + self._environments.seconds
        self._jobs.put((method, args))


def _live(
    environments: Environments,
    number: int,
    jobs: "queue.SimpleQueue[tuple[str, tuple] | None]",
    answers: "queue.SimpleQueue[Answer]",
) -> None:
    """The life of one environment: calls until a None comes."""
    environment = None
    for call in itertools.count(1):
        if (job := jobs.get()) is None:
            break
        method, args = job
        try:
            if method == "reset":
                environment = environments.make()
                tokens, shown = environments.read(environment.reset(*args))
                outcome = Observed(tokens, shown=shown)
            else:
                text = environments.tokenizer.decode(*args)
                outcome = environments.observed(environment.step(*args, text))
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            outcome = _failure(error)
        answers.put(Answer(number, call, outcome))
    if hasattr(environment, "close"):
        try:
            environment.close()
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            failure = _failure(error)
            environments.log_once(failure.place, f"close() raised {failure.error}")


def _failure(error: BaseException) -> Failure:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next  # our own frames say nothing about what is wrong in the user's code
    summary = "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")
    place = ""
    if trace is not None:
        frame = traceback.extract_tb(trace)[-1]
        place = f" ({frame.filename}, line {frame.lineno})"
    text = "".join(traceback.format_exception(type(error), error, trace))
    return Failure(f"{summary}{place}\n{text}", f"{type(error).__name__}{place}")


def load_environment(name: str) -> Callable[..., Environment]:
    """The class or function that `rollout.environment` names. ValueError or FileNotFoundError where
    there is none."""
    return user_functions.load_named(
        name,
        ENVIRONMENTS,
        "environment",
        setting="rollout.environment",
        example="my_module:MyClass or path/to/file.py:MyClass",
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
