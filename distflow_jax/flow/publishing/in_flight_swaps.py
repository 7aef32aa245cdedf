"""In-flight swaps of one sampler: when it may pause for new weights, and what it tells."""

import time
from collections.abc import Callable

from distflow_jax.flow.producer import Producer
from distflow_jax.flow.publishing.sampler_news import SamplerNews
from distflow_jax.flow.publishing.swap_turns import SwapTurns


class InFlightSwaps:
    """Swaps at once, or in turns with other samplers. Calls come under the producer's lock.

    Args:
      news: None: nobody wants to know what this sampler does.
      turns: None: it may always pause.
      tells_starving: whether trainers publish by what samplers need.
    """

    def __init__(
        self,
        news: SamplerNews | None = None,
        turns: SwapTurns | None = None,
        *,
        tells_starving: bool = False,
        now: Callable[[], float] = time.monotonic,
    ):
        self._news, self._turns, self._now = news, turns, now
        self._tells_starving = tells_starving

    def published(self, version: int) -> None:
        """Notes a version that is on its way to all samplers."""
        if self._turns is not None:
            self._turns.publish(version)

    def may_pause(self) -> bool:
        """Whether responses under way may be interrupted now to take the newest weights."""
        if self._turns is None or self._news is None:
            return True
        return self._turns.mine(self._news.taken(), self._now())

    def took(self, version: int, seconds: float) -> None:
        """Notes and tells that the sampler has taken weights, in so many seconds."""
        if self._turns is not None and self._news is not None:
            self._turns.took(seconds, self._now())
            self._news.tell_taken(version)

    def idle(self, producer: Producer) -> None:
        """Notes that nothing is under way, after all that may begin has begun; tells it, where
        newer weights would help."""
        if self._tells_starving and self._news is not None and producer.starving:
            self._news.tell_starving(producer.sampler.version)
