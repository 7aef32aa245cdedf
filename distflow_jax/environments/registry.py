"""Environments by name, and what they return, checked."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from distflow_jax import user_functions
from distflow_jax.config.sandbox_config import SandboxConfig
from distflow_jax.environments.environment import Environment, Shown, Turn
from distflow_jax.environments.episodes import OF_RUN
from distflow_jax.environments.event_loop import EventLoop
from distflow_jax.environments.failures import Failures
from distflow_jax.environments.observed_pictures import ImageSupport, check_shown
from distflow_jax.environments.tool_functions import TOOLS
from distflow_jax.environments.tools import Tools, alone
from distflow_jax.images.turn_images import TurnImages
from distflow_jax.layout import OF_LOOP
from distflow_jax.models.chat.render import names_read
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.rewards.records import MOST_SCORE, number_of
from distflow_jax.user_functions import shown_with_type

ENVIRONMENTS: dict[str, Callable[..., Environment]] = {"tools": Tools} | {
    tool: alone(tool) for tool in TOOLS
}


@dataclasses.dataclass(frozen=True)
class Observed:
    """A checked Turn: `tokens` int32 [M], and the images among them."""

    tokens: np.ndarray
    reward: float = 0.0
    done: bool = False
    logged: Mapping[str, float] = dataclasses.field(default_factory=dict)
    shown: TurnImages | None = None

    def looks_like(self, other: "Observed") -> bool:
        """Whether two observations have the same tokens and images, and end alike."""
        if self.done != other.done or not np.array_equal(self.tokens, other.tokens):
            return False
        return other.shown is None if self.shown is None else self.shown.same_as(other.shown)


@dataclasses.dataclass(frozen=True)
class CallLimits:
    """How calls of environments are made."""

    seconds: float  # longest duration of one
    retries: int = 2  # further tries of one that failed
    threads: int = 64  # at work at a time of those that do not await
    max_infra_rate: float = 0.5  # share of failed ones above which the run ends


class Environments:
    """The environments of a run, one per response, and the limits of a response in turns.

    Args:
      name: `tools`, a built-in tool, my_module:MyClass or path/to/file.py:MyClass.
      kwargs: for it, beside the tokenizer.
      calls: how its methods are called.
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
        calls: CallLimits,
        turn_length: int = 0,
        max_turns: int = 4,
        sight: ImageSupport | None = None,
    ):
        self.name, self.tokenizer, self.calls = name, tokenizer, calls
        self.turn_length, self.max_turns = turn_length, max_turns
        self._sight = sight
        self._make = load_environment(name)
        _check_signature(name, self._make, tokenizer, kwargs)
        step = getattr(self._make, "step", None) if inspect.isclass(self._make) else None
        self.is_async = inspect.iscoroutinefunction(step)
        self._new = functools.partial(self._make, tokenizer, **kwargs)
        # what is 0 in a response none of whose turns logs it
        counts = getattr(getattr(self._make, "func", self._make), "counts", ())
        self.counts = (counts,) if isinstance(counts, str) else tuple(counts)
        self.failures = Failures(name, calls.max_infra_rate)
        self._loop: EventLoop | None = None

    def make(self) -> Environment:
        """A new one."""
        return self._new()

    def run_elsewhere(self, make: Callable[[], Environment]) -> None:
        """Has `make` give a new one from now on, whose async methods call one of another host."""
        self._new, self.is_async = make, True

    @property
    def loop(self) -> EventLoop:
        """The loop that the calls of all of them are made in."""
        if self._loop is None:
            self._loop = EventLoop(self.calls.seconds, self.calls.threads)
        return self._loop

    def close(self) -> None:
        """Ends all that are at work. May be called twice."""
        if self._loop is not None:
            self._loop.close()
            self.failures.summarize()
            self._loop = None

    @property
    def seconds(self) -> float:
        """Longest time that calls may take a response before it is drawn anew."""
        return (1 + self.max_turns) * (1 + self.calls.retries) * self.calls.seconds

    def first(self, observation: Any) -> Observed:
        """Checks what a reset returned."""
        tokens, shown = self.read(observation)
        return Observed(tokens, shown=shown)

    def observed(self, turn: Any) -> Observed:
        """A Turn that was returned, checked; TypeError or ValueError for what it cannot be."""
        if not isinstance(turn, Turn):
            raise TypeError(f"step returned {shown_with_type(turn)}, not a Turn")
        reward, done, logged = _numbers(turn)
        tokens, shown = self.read(turn.observation)
        return Observed(tokens, reward, done, logged, shown)

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
            f"{shown_with_type(observation)}"
        )
        try:
            ids = np.asarray(observation)
        except ValueError:  # of parts with several shapes
            raise TypeError(wrong) from None
        of_bytes = isinstance(observation, bytearray | memoryview)  # integers to NumPy
        if of_bytes or ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise TypeError(wrong)
        if ids.size and not (0 <= ids.min() and ids.max() < self.tokenizer.vocab_size):
            raise ValueError(
                f"an observation has ids from {ids.min()} to {ids.max()}, the vocabulary "
                f"{self.tokenizer.vocab_size}"
            )
        return ids.astype(np.int32)


def _numbers(turn: Turn) -> tuple[float, bool, dict[str, float]]:
    """(reward, done, logged) of a Turn; TypeError or ValueError for what they cannot be."""
    reward, done = number_of(turn.reward), number_of(turn.done)
    logged = {str(name): number_of(value) for name, value in turn.logged.items()}
    if reward is None or done not in (0, 1) or None in logged.values():
        given = shown_with_type((turn.reward, turn.done, turn.logged))
        raise TypeError(f"step returned a Turn of {given}, not of (number, bool, {{name: number}})")
    if not abs(reward) <= MOST_SCORE:  # nan, too
        raise ValueError(f"step returned a reward of {reward}, outside ±{MOST_SCORE:g}")
    if taken := [name for name in logged if name.startswith(OF_RUN) or OF_LOOP.search(name)]:
        raise ValueError(f"step logs {taken[0]!r}, which the run counts: choose another name")
    return reward, bool(done), logged


def _check_signature(
    name: str, make: Callable[..., Any], tokenizer: Tokenizer, kwargs: Mapping[str, Any]
) -> None:
    for method in ("reset", "step"):
        if inspect.isclass(make) and not callable(getattr(make, method, None)):
            raise ValueError(
                f"environment {name!r} has no method {method!r}: it needs reset(prompt) and "
                "step(tokens, text)"
            )
    try:
        inspect.signature(make).bind(tokenizer, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"rollout.environment_kwargs={kwargs} do not fit {name}{inspect.signature(make)}: "
            f"{error}"
        ) from error


def template_variables(
    name: str, kwargs: Mapping[str, Any], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Variables of the chat template that an environment adds to prompts: the schemas of its tools.

    They are those of its class method template_variables, which gets what the class gets, as far as
    the template reads them. Raises ValueError or FileNotFoundError as Environments does.
    """
    make = load_environment(name) if name else None
    found = getattr(getattr(make, "func", make), "template_variables", None)
    if make is None or found is None:
        return {}
    _check_signature(name, make, tokenizer, kwargs)
    read = names_read(tokenizer.chat_template or "")
    added = found(tokenizer, **{**getattr(make, "keywords", {}), **kwargs})
    return {variable: value for variable, value in added.items() if variable in read}


def with_sandbox(name: str, kwargs: Mapping[str, Any], sandbox: SandboxConfig) -> Mapping[str, Any]:
    """The arguments of an environment, and the run's section `sandbox` if it has a parameter of
    that name."""
    takes = "sandbox" in inspect.signature(load_environment(name)).parameters
    return {"sandbox": sandbox, **kwargs} if takes else kwargs


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
