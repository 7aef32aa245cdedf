"""The rule where a prompt may be given up: the next counter takes its place."""

from distflow_jax.stream.schedule import Admission, Cut


class Refills(Admission):
    """The rule of a run whose workers may fail on a prompt, without a region.

    A filter decision of False gives a prompt up. All processes must hear of it before they cut its
    step; every other prompt counts as kept. So a step has B groups as long as there are data.
    """

    def _next_cut(self, step: int, start: int) -> Cut:
        kept: list[int] = []
        counter, limit = start, self._bounded(start + self.rule.groups + len(self._decisions))
        while counter < limit and len(kept) < self.rule.groups:
            if self._decisions.get(counter, True):
                kept.append(counter)
            counter += 1
        return Cut(step, start, counter, tuple(kept), final=True)

    def step_of(self, counter: int) -> int:
        """The step of a counter at or above `position`, which may fall as prompts are given up."""
        lost = sum(1 for c, keep in self._decisions.items() if not keep and c < counter)
        if counter < self.position or not lost:
            return super().step_of(counter)
        return next(found.step for found in self._cuts() if counter < found.end)
