"""The rule of publishing by divergence: which versions of the weights are worth sending.

The forward pass of the update yields log-probs of each token under the weights that the step began
with, beside the sampler's: D(age) is the mean of k3 = rho - 1 - log rho over all tokens of that
age, over all processes. After step v these weights are version v - 1, so D is one step behind the
newest weights. Samplers with version p would continue at age v - 1 - p. Version v is published only
if

- D of that age is above the threshold, or is not known, or
- a sampler is idle and may begin nothing with the weights it holds, or
- the groups of the next step could not begin at all: p < v - max_staleness.

Nothing here communicates. The idea is that of adaptive asynchronous policy synchronisation (AAPS).
"""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

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
