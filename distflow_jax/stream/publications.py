"""Publications of weights: the versions that samplers receive, agreed on by all processes.

The rule is in publish_rule.py. Only one input differs between processes: whether an idle sampler
has been reported. A gather combines it, either at the end of a step or, while training waits,
together with the gather that ends the wait; an idle sampler triggers that gather early.
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from distflow_jax.cluster import processes
from distflow_jax.cluster.peers import Peers
from distflow_jax.stream.producer import Producer
from distflow_jax.stream.publish_rule import PublishRule, divergence_of, divergences

STARVING = 1  # kind of: 1 + the newest version with which a sampler has nothing to do


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
