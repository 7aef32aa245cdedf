"""The interface between training and the sampler of a process, whatever its kind.

SamplingSide  samples in           Link of the worker  weights after `bring`
InlineLink    the training thread  InlineLink          are loaded
ThreadLink    a thread beside it   ThreadLink          wait in host memory; the newest are loaded
OrderedLink   a thread beside it   OrderedLink         wait in host memory; a step has one version
WorkersSide   other jobs           RemoteLink          are in WeightStore, which workers pull from
"""

import abc
import contextlib
import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Protocol

from distflow_jax.rollout.sampler import SamplerState
from distflow_jax.stream.evaluations import Evaluations

JOIN_SECONDS = 60.0  # for a decode call to end


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Calls from a sampler into the training, from the sampler's thread.

    Attributes:
      hand_on: passes complete groups on.
      arriving: a block in which the sampler does not decode, since weights come.
      span: times a decode call.
      idle: called under the producer's lock if no response is unfinished and none may begin.
      evaluations: that samplers make.
      known: whether all processes know the filter decisions below a counter, see RegionRounds.
    """

    hand_on: Callable[[], None]
    arriving: Callable[[], contextlib.AbstractContextManager[Any]]
    span: Callable[[], contextlib.AbstractContextManager[Any]]
    idle: Callable[[], None]
    evaluations: Evaluations
    known: Callable[[int], bool]


class SamplingSide(Protocol):
    """Calls from the training into a sampler. A call that need not be overridden has no effect.

    Attributes:
      missing_workers: nodes that have waited too long for a worker.
    """

    missing_workers: list[str] = []

    @abc.abstractmethod
    def start(self, hooks: Hooks) -> None:
        """Starts what samples, once; threads begin here."""

    @abc.abstractmethod
    def bring(self, params: Any, version: int) -> int:
        """Sends the trainer's weights to where samplers take them; returns their bytes."""

    @abc.abstractmethod
    def hold(self, version: int) -> contextlib.AbstractContextManager[None]:
        """A block in which nothing begins or is handed on, and samplers of this process hold this
        version or a later one."""

    def suspended(self, version: int) -> contextlib.AbstractContextManager[list[SamplerState]]:
        """A block as of `hold` that has the sampler's state, see Worker.suspended."""
        raise ValueError("workers of other jobs sample: this process has no sampler")

    def round(self) -> bool:
        """Samples for a moment, if the thread that trains does; whether there was work."""
        return False

    def rest(self) -> None:
        """Leaves devices that are shared to the trainer."""

    def raise_error(self) -> None:
        """Raises what has ended the thread that samples, if anything has."""

    def evaluated_by(self, step: int) -> int:
        """The version up to which evaluations are recorded after a step, -1 if samplers make none;
        on all processes alike. Collective."""
        return -1

    def status(self) -> str:
        """The workers that sample, for a line of a log on a long wait; "": there are none."""
        return ""

    def stop_waiting(self) -> None:
        """Waits for workers that are missing no longer than a few seconds; from any thread."""

    def end_with(self, version: int) -> None:
        """Evaluates no newer version: the run ends."""

    def close(self) -> None:
        """Ends what samples, and drops what is under way unless it does not end in time."""


class SamplingThread:
    """A sampling thread beside the training, which starts at once."""

    def __init__(self, name: str, serve: Callable[[], None]):
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._end = self._executor.submit(serve)

    def raise_error(self) -> None:
        """Raises what has ended the thread, if anything has."""
        if self._end.done():
            self._end.result()

    def join(self) -> bool:
        """Waits for the end of the thread; whether it has come in time."""
        wait([self._end], JOIN_SECONDS)
        self._executor.shutdown(wait=False)
        return self._end.done()
