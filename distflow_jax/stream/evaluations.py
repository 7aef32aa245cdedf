"""Evaluations that a sampler makes when it takes the version to be evaluated."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from distflow_jax.environments.episode_sampler import EpisodeSampler
from distflow_jax.rollout.requests import Response
from distflow_jax.rollout.sampler import SamplerState
from distflow_jax.stages.evaluate import Scored
from distflow_jax.stream.host_nodes import HostThread


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """How a sampler evaluates its weights, and when."""

    due: Callable[[int], bool]  # whether the weights after so many steps are evaluated
    # responses to the evaluation prompts, with the state of the sampler, which is donated; it calls
    # the second argument with each response that ends
    answer: Callable[[SamplerState, Callable[[Response], None]], tuple[SamplerState, Any]]
    score: Callable[[Any], list[Scored]]  # scores responses; calls functions of the user
    span: Callable[[], contextlib.AbstractContextManager]  # times the sampler's part


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """An evaluation that has ended on this process."""

    version: int  # steps that its weights had seen
    scored: list[Scored]
    seconds: float  # of the sampler
    ended: float  # since 1970


class Evaluations:
    """The evaluations of one process: made in the sampler's thread, taken by the main thread."""

    def __init__(self, evaluator: Evaluator, host: HostThread, *, held: int):
        """`host`: the thread that calls functions of the user; `held`: version at the start."""
        self._evaluator, self._host = evaluator, host
        self._made: dict[int, Future[Evaluated]] = {}
        self._next = held  # all versions below are taken

    @property
    def due(self) -> Callable[[int], bool]:
        """Whether a version is evaluated."""
        return self._evaluator.due

    def make(self, sampler: EpisodeSampler, heard: Callable[[Response], None]) -> None:
        """Evaluates the weights that a sampler holds; nothing may be under way in it.

        `heard` is called with each response that ends. An error of it ends the evaluation, and the
        sampler has no state then.
        """
        started, version = time.perf_counter(), sampler.version
        state, partials = sampler.suspend()
        with self._evaluator.span():
            state, answers = self._evaluator.answer(state, heard)
        sampler.resume(state, partials)
        seconds, ended = time.perf_counter() - started, time.time()

        def score() -> Evaluated:
            return Evaluated(version, self._evaluator.score(answers), seconds, ended)

        self._made[version] = self._host.call(f"evaluation of step {version}", score)

    def missing(self, version: int) -> list[int]:
        """The versions up to one whose evaluations have not ended."""
        found = [(v, self._made.get(v)) for v in self._due_up_to(version)]
        return [v for v, future in found if future is None or not future.done()]

    def take(self, version: int) -> list[Evaluated]:
        """The evaluations up to a version, all of which are done, that were not taken before."""
        found = [self._made.pop(v).result() for v in self._due_up_to(version)]
        self._next = max(self._next, version + 1)
        return found

    def _due_up_to(self, version: int) -> list[int]:
        return [v for v in range(self._next, version + 1) if self._evaluator.due(v)]
