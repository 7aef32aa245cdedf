"""Evaluations of versions, made by a sampler when it loads the version, or by workers as tasks."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

from distflow_jax.environments.episode_sampler import EpisodeSampler
from distflow_jax.rollout.requests import GroupRequest, Response
from distflow_jax.rollout.sampler import SamplerState
from distflow_jax.stages.evaluate import Scored
from distflow_jax.stream.tasks import GroupTask

log = logging.getLogger("distflow_jax")


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Evaluates a sampler's weights, and says when an evaluation is due."""

    due: Callable[[int], bool]  # whether the weights after so many steps are evaluated
    # responses to the evaluation prompts, with the state of the sampler, which is donated; it calls
    # the second argument with each response that ends
    answer: Callable[[SamplerState, Callable[[Response], None]], tuple[SamplerState, Any]]
    score: Callable[[Any], list[Scored]]  # scores responses; calls functions of the user
    span: Callable[[], contextlib.AbstractContextManager]  # times the sampler's part
    # the requests of an evaluation of a version, for workers
    requests: Callable[[int], Sequence[GroupRequest]] = lambda version: ()


NOTHING_EVALUATED = Evaluator(
    lambda version: False, lambda state, heard: (state, []), lambda answers: [], nullcontext
)


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """An evaluation that has ended on this process."""

    version: int  # steps that its weights had seen
    scored: list[Scored]
    seconds: float  # of the sampler
    ended: float  # since 1970


class Evaluations:
    """The evaluations of one process: made in the sampler's thread or by workers, collected by the
    main thread."""

    def __init__(self, evaluator: Evaluator, call: Callable[..., Future[Evaluated]], *, held: int):
        """`call`: HostThread.call; `held`: version at the start."""
        self._evaluator, self._call = evaluator, call
        self._made: dict[int, Future[Evaluated]] = {}
        self._began: dict[int, float] = {}  # those that workers make
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
        self._score(version, answers, time.perf_counter() - started)

    def begin(self, version: int) -> Sequence[GroupRequest]:
        """The requests of an evaluation that workers make from now on."""
        self._began[version] = time.perf_counter()
        return self._evaluator.requests(version)

    def answered(self, version: int, tasks: Sequence[GroupTask]) -> None:
        """Takes the answers of workers to all requests of a version."""
        for task in tasks:
            if task.lost:
                prompt = task.content.prompt.row
                log.warning("evaluation of step %d without row %d: %s", version, prompt, task.lost)
        whole = [task.ended for task in tasks if task.complete]
        answers = [ended[sample].content for ended in whole for sample in sorted(ended)]
        self._score(version, answers, time.perf_counter() - self._began.pop(version))

    def _score(self, version: int, answers: Any, seconds: float) -> None:
        ended = time.time()

        def score() -> Evaluated:
            return Evaluated(version, self._evaluator.score(answers), seconds, ended)

        self._made[version] = self._call(f"evaluation of step {version}", score)

    def open(self, version: int) -> list[int]:
        """The versions up to one that are evaluated, and were not taken."""
        return [v for v in range(self._next, version + 1) if self._evaluator.due(v)]

    def missing(self, version: int) -> list[int]:
        """The versions up to one whose evaluations have not ended."""
        found = [(v, self._made.get(v)) for v in self.open(version)]
        return [v for v, future in found if future is None or not future.done()]

    def take(self, version: int) -> list[Evaluated]:
        """The evaluations up to a version, all of which are done, that were not taken before."""
        found = [self._made.pop(v).result() for v in self.open(version)]
        self._next = max(self._next, version + 1)
        return found
