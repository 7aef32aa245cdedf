"""The protocol of engines that answer requests: token ids in, ids and log-probs out.

An adapter speaks to one engine. It neither repeats a request nor checks an answer: both is the
work of ForeignScheduler, alike for all engines. T tokens.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from distflow_jax.rollout.requests import SamplingParams


@dataclasses.dataclass(frozen=True)
class EngineRequest:
    """One response that an engine is to sample."""

    id: int  # unique among the requests of an adapter
    counter: int  # of the prompt; with `sample` it keys the noise, where an engine takes keys
    sample: int
    tokens: np.ndarray  # int32 [T]: the prompt, and what the response has already
    sampling: SamplingParams  # `limit`: tokens that are still to be sampled at most
    begun: int = 0  # of `tokens`, the last ones that are the response's: noise goes on after theirs


@dataclasses.dataclass(frozen=True)
class Answer:
    """The tokens that an engine sampled for a request, as it said so: nothing here is checked."""

    id: int
    tokens: Sequence[int]  # [T]; the end token is part of it
    logp: Sequence[float | None] | None  # [T]; None: the engine gave none
    ended: bool  # by an end token; False: by the limit
    version: Sequence[int] | None = None  # [T], of the weights; None: those of the last `load`


@dataclasses.dataclass(frozen=True)
class Failure:
    """A request that an engine did not answer."""

    id: int
    reason: str  # one line, for the log
    # whether the connection failed: the engine may have been started again, with other weights
    lost: bool = False


@dataclasses.dataclass(frozen=True)
class Status:
    """Facts that an engine gives of itself."""

    model: str
    slots: int  # responses that it samples at a time; 0: it does not say
    started: float | None = None  # a number that changes when the engine starts again


class EngineError(RuntimeError):
    """An engine could not be reached, or refused to load weights; the message is one line."""


class ForeignEngine(Protocol):
    """An engine of somebody else's, as ForeignScheduler uses it: from one thread.

    Attributes:
      name: for messages.
      updates_in_flight: whether `load` may be called while requests run. Their answers then say the
        version of each token.
      slots: responses that it is given at a time.
      longest_prompt: tokens that it reads at most; 0: it does not say.
    """

    name: str
    updates_in_flight: bool
    slots: int
    longest_prompt: int

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Starts requests with one prompt; returns at once.

        ValueError for sampling parameters with which the engine's log-probs would not be ours.
        """

    def results(self, seconds: float) -> list[Answer | Failure]:
        """Answers and failures since the last call; waits so long for a first one."""

    def load(self, params: Any, version: int, *, cache: str = "keep") -> None:
        """Brings weights to the engine; returns when it samples with them.

        `params`: in the form of training, adapters merged. `cache`: see Scheduler.load. EngineError
        where it fails.
        """

    def status(self) -> Status:
        """The engine's own words. EngineError if it does not answer."""

    def close(self) -> None:
        """Drops what runs, and ends threads and connections."""
