"""The protocol of engines that answer requests, threads that wait for answers, and their checks.

Token ids go in, ids and log-probs come out. An adapter speaks to one engine. It neither repeats a
request nor checks an answer: both is the work of ForeignScheduler, alike for all engines. T tokens.
"""

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from distflow_jax.rollout.requests import SamplingParams
from distflow_jax.rollout.response_checks import RefusedAnswer, ResponseLimits, check_response


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
    again: float = 0.0  # seconds after which the engine asks to be called again


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


class AnswerThreads:
    """Runs calls of a server, each in a thread. Every request of a call ends exactly once.

    Attributes:
      closing: set when nobody waits any more.
    """

    def __init__(self, threads: int):
        self.closing = threading.Event()
        self._ended: queue.SimpleQueue[Answer | Failure] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(threads, "engine")

    def start(self, numbers: Iterable[int], call: Callable[[], Iterator[Answer | Failure]]) -> None:
        """Starts a call that answers these requests.

        Those that it does not answer have failed, by its own error if it raises one.
        """
        left = set(numbers)

        def run() -> None:
            if self.closing.is_set():
                return
            for entry in call():
                if entry.id in left:
                    left.discard(entry.id)
                    self._ended.put(entry)

        def end(future: Future) -> None:
            error = None if future.cancelled() else future.exception()
            reason = "the server ended the call before this response"
            if error is not None:  # whatever it is, nobody must wait for ever
                reason = f"{type(error).__name__}: {error}"
            for number in sorted(left):
                self._ended.put(Failure(number, reason))

        self._threads.submit(run).add_done_callback(end)

    def results(self, seconds: float) -> list[Answer | Failure]:
        """Answers and failures since the last call; waits so long for a first one."""
        found = []
        try:
            found.append(self._ended.get(timeout=seconds))
            while True:
                found.append(self._ended.get_nowait())
        except queue.Empty:
            return found

    def close(self) -> None:
        """Starts no other call; the threads end with those that run."""
        self.closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)


def checked_columns(
    answer: Answer, limits: ResponseLimits, *, limit: int, held: int, known: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens int32, log-probs float32, versions int32) of an answer, [T] each.

    `limit`: tokens at most; `held`: version when it was requested; `known`: version that the engine
    was given last. Raises RefusedAnswer.
    """
    tokens = _integers(answer.tokens, "token ids")
    logp = _log_probs(answer.logp)
    if answer.version is None:
        version: np.ndarray = np.full(len(tokens), known, np.int64)
    else:
        # the first token may be drawn from logits that the weights before had computed
        version = _integers(answer.version, "versions")
    for name, column in {"log-probs": logp, "versions": version}.items():
        if len(column) != len(tokens):
            raise RefusedAnswer(f"{len(tokens)} tokens with {len(column)} {name}")
    ends = bool(len(tokens)) and int(tokens[-1]) in limits.stops
    ended = bool(answer.ended) or ends
    check_response(tokens, logp, version, limits, limit=limit, ended=ended, versions=(held, known))
    return tokens.astype(np.int32), np.minimum(logp, np.float32(0)), version.astype(np.int32)


def _integers(values: Any, what: str) -> np.ndarray:
    """JSON integers as int64 [T]."""
    if not isinstance(values, list | tuple) or not all(type(value) is int for value in values):
        raise RefusedAnswer(f"{what} that are no integers")
    try:
        return np.array(values, np.int64)
    except OverflowError as error:  # JSON has integers of any size
        raise RefusedAnswer(f"{what} of more than 64 bits") from error


def _log_probs(values: Any) -> np.ndarray:
    """JSON numbers as float32 [T]."""
    if values is None:
        raise RefusedAnswer("no log-probs")
    if not isinstance(values, list | tuple):
        raise RefusedAnswer("log-probs that are no list")
    if not all(type(value) in (int, float) for value in values):
        raise RefusedAnswer("a token without log-prob")
    try:
        logp = np.array(values, np.float64)
    except OverflowError as error:  # JSON has integers of any size
        raise RefusedAnswer("a log-prob that no float holds") from error
    with np.errstate(over="ignore"):
        return logp.astype(np.float32)
