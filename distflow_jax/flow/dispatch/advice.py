"""Advice from measured seconds: would another worker, another trainer or a larger lag help?

A step takes T seconds, in W of which the trainers wait for samples. So they need R = T - W seconds
for it. Of n workers' slots a share u is busy, so that one worker would need S = n u T seconds for a
step's samples, and n workers S / n. Beside each other both need M = max(R, S / n) at least; what T
is above that is lost to neither: some slots are idle while trainers wait for the longest responses.

One more worker makes M' = max(R, S / (n + 1)), one more trainer process of P, on the same number of
devices as each of the others, M' = max(R P / (P + 1), S / n). The step is taken to become shorter
as M does: by T (1 - M' / M). A larger lag lets samplers begin more groups while the longest
responses end: it saves T - M at most.
"""

import dataclasses
from collections.abc import Mapping

from distflow_jax.flow.dispatch.fleet import Report


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Measurements of a step, or of several."""

    seconds: float
    waited: float  # of these, for samples
    busy: float  # slots x seconds with a response, of all workers
    idle: float  # slots x seconds without one
    workers: int
    trainers: int  # processes


def advise(times: StepTimes) -> dict[str, float]:
    """Share of a step's seconds that each change would save, by the model above.

    >>> advise(StepTimes(10.0, 6.0, 95.0, 5.0, workers=1, trainers=1))
    {'worker': 0.5, 'trainer': 0.0, 'lag': 0.05}
    """
    total, slots = times.seconds, times.busy + times.idle
    if total <= 0 or slots <= 0 or times.workers < 1:
        return {}
    training = min(max(total - times.waited, 0.0), total)
    sampling = times.workers * times.busy / slots * total
    workers, trainers = times.workers, times.trainers
    most = max(training, sampling / workers)
    if most <= 0:
        return {}
    with_worker = max(training, sampling / (workers + 1))
    with_trainer = max(training * trainers / (trainers + 1), sampling / workers)
    saved = {
        "worker": 1 - with_worker / most,
        "trainer": 1 - with_trainer / most,
        "lag": 1 - most / total,
    }
    return {name: round(max(share, 0.0), 6) for name, share in saved.items()}


class Advisor:
    """Makes advice of what workers have reported between two steps."""

    def __init__(self, now: float, trainers: int):
        """`trainers`: processes."""
        self._then, self._waited, self._trainers = now, 0.0, trainers
        self._before: dict[str, Report] = {}

    def step(self, now: float, waited: float, reports: Mapping[str, Report]) -> dict[str, float]:
        """Advice on the time since the last step. `waited`: seconds for samples since the run
        began; `reports`: the last ones of workers that live."""
        pairs = [(self._before.get(name, Report()), after) for name, after in reports.items()]
        pairs = [(before, after) for before, after in pairs if after.busy >= before.busy]
        times = StepTimes(
            now - self._then,
            waited - self._waited,
            sum(after.busy - before.busy for before, after in pairs),
            sum(after.idle - before.idle for before, after in pairs),
            len(pairs),
            self._trainers,
        )
        self._then, self._waited, self._before = now, waited, dict(reports)
        return advise(times)
