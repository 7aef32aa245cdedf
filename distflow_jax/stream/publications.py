"""Publications of weights: the versions that samplers receive, agreed on by all processes.

The forward pass of the update yields log-probs of each token under the weights that the step began
with, beside the sampler's: D(age) is the mean of k3 = rho - 1 - log rho over all tokens of that
age, over all processes. After step v these weights are version v - 1, so D is one step behind the
newest weights. Samplers with version p would continue at age v - 1 - p. Version v is published only
if

- D of that age is above the threshold, or is not known, or
- a sampler is idle and may begin nothing with the weights it holds, or
- the groups of the next step could not begin at all: p < v - max_staleness.

The idea is that of adaptive asynchronous policy synchronisation (AAPS).

Only one input of the rule differs between processes: whether an idle sampler has been reported. A
gather combines it, either at the end of a step or, while training waits, together with the gather
that ends the wait; an idle sampler triggers that gather early.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from distflow_jax.cluster import processes
from distflow_jax.cluster.peers import Peers
from distflow_jax.stream.producer import Producer

STARVING = 1  # a kind of Peers: 1 + the newest version with which a sampler has nothing to do
_OF_AGE = re.compile(r".*rollout_corr/k3_kl/(\d+)")


@dataclasses.dataclass(frozen=True)
class PublishRule:
    """The constants of the rule: `threshold`, in nats per token (0: all versions are published),
    and `max_staleness` in steps."""

    threshold: float
    max_staleness: int

    @property
    def skips(self) -> bool:
        """Whether there may be versions that are not published."""
        return self.threshold > 0

    def publishes(
        self, version: int, published: int, divergence: float | None, *, starving: bool
    ) -> bool:
        """Whether the weights after `version` steps are published.

        `published`: the version before, which samplers go on with; `divergence`: of these weights;
        `starving`: whether a sampler can do nothing with them.
        """
        if not self.skips or starving or published < version - self.max_staleness:
            return True
        # not a number: nothing is known
        return divergence is None or not divergence <= self.threshold


def divergences(metrics: Mapping[str, float]) -> dict[int, float]:
    """D by age in steps, from a step's metrics; of several updates the largest."""
    found: dict[int, float] = {}
    for name, value in metrics.items():
        if match := _OF_AGE.fullmatch(name):
            age = int(match.group(1))
            found[age] = float(
                np.maximum(found.get(age, value), value)
            )  # one that is no number too
    return found


def divergence_of(by_age: Mapping[int, float], age: int) -> float | None:
    """D of weights of an age, of which tokens may not have been trained on yet: then that of the
    youngest older ones, which have changed more. None: there are none."""
    ages = [known for known in by_age if known >= age]
    return by_age[min(ages)] if ages else None


class Publications:
    """The publications of a run. Used by the training thread only, except `note_idle`.

    Attributes:
      newest: the version published last.
    """

    def __init__(
        self, rule: PublishRule, producer: Producer, peers: Peers, bring: Callable[[int], None]
    ):
        """`bring(version)`: brings the weights to all samplers; collective."""
        self._rule, self._producer, self._peers = rule, producer, peers
        self._bring = bring
        self.newest = self._offered = producer.version

    def publish(self, version: int) -> None:
        """Publishes the weights after so many steps, unless they are published. Collective."""
        if version != self.newest:
            self.newest = version
            self._bring(version)

    def offer(
        self, version: int, metrics: Mapping[str, float], *, needed: bool
    ) -> dict[str, float]:
        """Publishes the weights after a step that has finished, or not; returns metrics of that.
        Collective.

        `metrics`: the step's; `needed`: whether an evaluation needs these weights.
        """
        self._offered = version
        if not self._rule.skips:
            self.publish(version)
            return {}
        found = divergence_of(divergences(metrics), version - 1 - self.newest)
        mine = self._rule.publishes(version, self.newest, found, starving=self._starving())
        mine = needed or (mine and self._has_step(version + 1))
        publishes = bool(processes.all_gather_ints(np.int32(mine)).any())
        if publishes:
            self.publish(version)
        told = {} if found is None else {"training/off_policy/divergence": found}
        return told | {"perf/weight_update/skipped": float(not publishes)}

    def passed_over(self, version: int) -> bool:
        """Whether a version was offered and not published."""
        return self.newest < version <= self._offered

    def asked_for(self, version: int) -> bool:
        """Whether the weights of all finished steps, which were not published, are wanted by a
        sampler, as far as this process has heard. It stays true until they are published."""
        return self._rule.skips and self.newest < version and self._starving()

    def agree(self, version: int, asked: Iterable[bool]) -> None:
        """Publishes these weights if a process has heard of such a sampler; `asked`: what all
        processes have said, by `asked_for`. Collective."""
        if any(asked) and self.newest < version:
            self.publish(version)

    def note_idle(self) -> None:
        """Tells that the sampler has nothing to do, after all that may begin has begun, where newer
        weights would help. From any thread, under the producer's lock."""
        if self._rule.skips and self._producer.starving:
            self._peers.raise_to(STARVING, self._producer.version + 1)

    def _starving(self) -> bool:
        return self._peers.seen(STARVING) > self.newest

    def _has_step(self, step: int) -> bool:
        with self._producer.lock:
            return self._producer.admission.has_step(step)
