"""The sampling side of a process whose groups workers answer."""

import logging
from collections.abc import Collection, Sequence
from typing import Any

from distflow_jax.stream.host_nodes import Group
from distflow_jax.stream.producer import Producer
from distflow_jax.stream.refills import Refills

log = logging.getLogger("distflow_jax")


class BufferProducer(Producer):
    """The groups of one process, which workers answer by way of its task buffer.

    A prompt that they cannot answer is given up once all processes have heard of it, by the gather
    that ends the wait for a step. Until then its group is there and never done.
    """

    def __init__(self, *args: Any, given_up: Collection[int] = (), **kwargs: Any):
        """As Producer, with a BufferSampler. `given_up`: before the checkpoint that the run goes on
        from. They stay so: otherwise groups that exist would belong to later steps."""
        super().__init__(*args, **kwargs)
        self._given_up: set[int] = set()  # not known to all processes
        self._lost = set(given_up)  # known to all
        for counter in sorted(self._lost):
            self.admission.judge(counter, False)

    def round(self) -> list[Group]:
        """One look at the task buffer; returns groups whose samples are complete now."""
        with self.lock:
            for counter, why in self.sampler.give_up().items():
                log.warning("prompt %d is given up, the next one takes its place: %s", counter, why)
                self._given_up.add(counter)
        return super().round()

    def wants(self, counter: int) -> bool:
        """Whether the group of a prompt that is drawn is to begin; under `lock`."""
        return super().wants(counter) and counter not in self._lost

    def facts(self) -> dict[str, Any]:
        """The prompts that were given up, for a checkpoint; under `lock`."""
        return {"given_up": sorted(self._lost)}

    def measured(self) -> dict[str, float]:
        """Workers of this task buffer, and what became of their results since it began; under
        `lock`."""
        buffer, tasks = self.sampler.buffer, self.sampler.tasks
        found = {
            "alive": len(buffer.leases.workers.keys() - buffer.leases.stalled),
            "expired": buffer.leases.expired,
            "second": buffer.counts.second + tasks.counts.second,
        }
        return {f"perf/workers/{name}": float(n) for name, n in found.items()}

    def forget(self, counters: Sequence[int]) -> list[Group]:
        """Takes groups out, those of a finished step; under `lock`."""
        self.sampler.tasks.forget(counters)
        return super().forget(counters)

    def given_up(self) -> list[int]:
        """Prompts that were given up here, of which not all processes have heard; under `lock`."""
        return sorted(self._given_up)

    def judge(self, counter: int, keep: bool) -> bool:
        """Notes a filter decision of any process; whether the next prompt takes its place. Under
        `lock`."""
        super().judge(counter, keep)
        refills = isinstance(self.admission, Refills) and not keep
        if refills:
            self._lost.add(counter)
        if counter in self._given_up:
            self._given_up.remove(counter)
            self._drop(self.groups.pop(counter))
        return refills

    def _drop(self, group: Group) -> None:
        """Takes a group that was given up out of the account; no checkpoint waits for it."""
        self.sampler.forget(group.tokens)
        self._counts = self._counts._replace(tokens=self._counts.tokens - group.tokens)
        group.samples.clear()
        group.done = True
