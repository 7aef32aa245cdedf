"""Quarantine of workers whose log-probs deviate from the others'; their groups are sampled again.

The gap of a group is the mean over its tokens of |trainer's log-prob - sampler's|, in nats. It
includes kernel noise and the steps by which the weights have moved; wrong weights, another model or
invented numbers add to it. A worker's gap is the median over its last groups, because a group
sampled by several workers counts for each of them and must not decide. It is compared with the
median of the other workers and their median absolute deviation (MAD), which a few bad workers do
not move.
"""

import collections
import logging
import statistics
import time
from collections.abc import Collection, Mapping

from distflow_jax.coordinator.batch_metrics import Gap
from distflow_jax.stream.producer import Producer

# of a worker, before it is judged. The gap of a token varies by about three times its mean, so that
# the mean of so many tokens is known to 7 %
LEAST_TOKENS, LEAST_GROUPS = 2048, 8
LAST_GROUPS = 64  # of a worker, that are remembered
LEAST_GAP = 0.1  # nats above the others' median that no worker is ended for
MOST_TIMES = 4.0  # the others' median, that weights of other ages reach
MOST_DEVIATIONS = 6.0  # standard deviations of the others above their median
_DEVIATION = 1.4826  # of a normal distribution, over its median distance

log = logging.getLogger("distflow_jax")


def outliers(groups: Mapping[str, Collection[Gap]]) -> dict[str, str]:
    """Workers whose gap leaves the others', with a sentence on it, by the gaps of the last `groups`
    of each. One alone has none to leave: its gap is in the metrics of the run."""
    gaps = {
        name: statistics.median(gap.mean for gap in known)
        for name, known in groups.items()
        if len(known) >= LEAST_GROUPS and sum(gap.tokens for gap in known) >= LEAST_TOKENS
    }
    found = {}
    for name, gap in gaps.items():
        others = [other for of, other in gaps.items() if of != name]
        if others and gap > (limit := limit_of(others)):
            found[name] = (
                f"its log-probs are {gap:.3g} nats per token from the trainers', and those of "
                f"{len(others)} others {statistics.median(others):.3g}: above {limit:.3g} it "
                "has other weights, or makes them up"
            )
    return found


def limit_of(gaps: Collection[float]) -> float:
    """The largest gap, nats per token, that does not leave these of other workers."""
    median = statistics.median(gaps)
    distance = statistics.median(abs(gap - median) for gap in gaps)
    spread = MOST_DEVIATIONS * _DEVIATION * distance
    return median + max(LEAST_GAP, (MOST_TIMES - 1) * median, spread)


class Quarantine:
    """Ends workers of one task buffer whose gaps deviate from the others'."""

    def __init__(self, producer: Producer):
        self._producer = producer
        self._groups: dict[str, collections.deque[Gap]] = {}  # the last ones of each worker

    def look(self, gaps: Mapping[str, Collection[Gap]]) -> None:
        """Takes the gaps of a step's groups, by worker, and ends workers by them."""
        buffer = self._producer.buffer
        for worker, found in gaps.items():
            self._groups.setdefault(worker, collections.deque(maxlen=LAST_GROUPS)).extend(found)
        with self._producer.lock:
            self._groups = {w: gaps for w, gaps in self._groups.items() if w in buffer.workers}
            ended = outliers(self._groups)
            for worker, why in ended.items():
                buffer.end(worker, why, time.monotonic())
        for worker, why in ended.items():
            log.error("worker %s is quarantined: %s", worker, why)
