"""Sampling on the devices of the trainer, in the thread that trains, while it waits for samples."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax

from distflow_jax.resharding.weight_sync import WeightSync, num_bytes
from distflow_jax.stream.producer import Producer


class InlineSampling:
    """Samples when it is asked to. It has the calls of SamplingThread that the training makes."""

    def __init__(
        self, producer: Producer, round: Callable[[], None], *, cache: str, idle: Callable[[], None]
    ):
        """`round()`: a round of the sampler that hands its groups on; `cache`, `idle`: as of
        SamplingThread."""
        self._producer, self._round_of_sampler = producer, round
        self._cache, self._idle = cache, idle
        self.missing_workers: list[str] = []  # nodes that wait for a worker: never

    def bring(self, sync: WeightSync, params: Any, version: int) -> int:
        """Gives the sampler the trainer's weights; returns their bytes."""
        sampler = self._producer.sampler
        sampler.free_weights()
        weights = jax.block_until_ready(sync(params))
        sampler.load(weights, version, cache=self._cache)
        return num_bytes(weights)

    def round(self) -> bool:
        """Samples for a moment; whether there was anything to do."""
        self._producer.admit()
        if self._producer.sampler.busy:
            self._round_of_sampler()
            return True
        with self._producer.lock:
            self._idle()
        return False

    def rest(self) -> None:
        """Leaves the devices to the trainer."""
        self._producer.sampler.drain()

    def raise_error(self) -> None:
        """Raises nothing: errors come where they happen."""

    def hold(self, version: int) -> contextlib.AbstractContextManager[None]:
        """A block in which nothing samples: no other thread does."""
        return contextlib.nullcontext()

    def end_with(self, version: int) -> None:
        """Nothing: evaluations are the trainer's."""

    def close(self) -> bool:
        """Whether nothing samples any more: it does not."""
        return True
