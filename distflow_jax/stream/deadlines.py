"""The rule of steps of varying size: each group has a deadline, and a step trains at most B groups.

v training steps are finished, and `max_staleness` is the maximum age of a token in steps when it is
trained on. A group that may begin with version b has the deadline b + max_staleness: the step after
that many finished steps is the last that may train the group. N(d) is the number of groups that
have begun, are untrained, and have deadline d or earlier. The rule:

- Groups begin in counter order, while at most max_staleness x B groups are untrained.
- A step trains complete groups in counter order, at most B.
- A step that begins after v finished steps ends only when its groups leave N(d) <= (d - v) B for
  each d: every group that later steps could not train in time is complete.

Later steps then have room for all remaining groups, so no group becomes too old or is dropped.
Before the step, N(d) <= (d - v) B + B holds, because the previous step left at most that many;
groups that began since have the last deadline, up to which there are at most max_staleness x B. A
step therefore never needs more than B groups, in whatever order groups end.

In the last step of a run, the last deadline is its version for all groups. Processes that know the
same complete groups reach the same decisions. Nothing here communicates.
"""

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from distflow_jax.stream.schedule import Admission, Cut, Rule


@dataclasses.dataclass(frozen=True)
class Taken(Cut):
    """The groups of one step: exactly those in `kept`."""

    @property
    def counters(self) -> Sequence[int]:
        """The counters that the step looks at."""
        return self.kept


def observed_staleness(rule: Rule) -> int:
    """Batches of B counters between one that is dealt to samplers and the newest whose response
    lengths all processes know by then, as Rule.observed_staleness. No more than 2 max_staleness x B
    counters lie between the first one that is not trained on and the last one that may begin."""
    return 2 * rule.max_staleness


class Deadlines(Admission):
    """The rule, applied to the complete groups that a process knows.

    Attributes:
      finished: finished steps.
      position: the first counter that is not trained on.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        step: int = 0,
        counter: int = 0,
        begun: Mapping[str, Any] | None = None,
        last: int | None = None,
        steps: int | None = None,
    ):
        """`begun`: of a checkpoint, see the property; None: all from `counter` on are to begin.
        The others as of Admission. ValueError with max_staleness 0, where nothing could begin."""
        if rule.max_staleness < 1:
            raise ValueError(
                "deadlines need a max_staleness of at least 1: with 0 nothing could begin"
            )
        super().__init__(rule, step=step, counter=counter, last=last, steps=steps)
        # counter -> version since when it may begin; rising, of groups that are not trained on
        self._versions: dict[int, int] = {}
        self._next = counter
        if begun is not None:
            self._versions = {int(c): int(version) for c, version in sorted(begun["waiting"])}
            self._next = int(begun["next"])
        self._complete: set[int] = set()
        self._begin()
        self.position = next(iter(self._versions), self._next)

    @property
    def begun(self) -> dict[str, Any]:
        """The groups that may have begun and are not trained on, for a checkpoint; JSON-able.

        {"next": first counter that may not begin, "waiting": [[counter, version], ...]}
        """
        return {"next": self._next, "waiting": [[c, v] for c, v in self._versions.items()]}

    def complete(self, counter: int) -> None:
        """Notes that a group is complete, as all processes know."""
        if counter in self._versions:
            self._complete.add(counter)

    def judge(self, counter: int, keep: bool) -> None:
        """Notes that a group was given up, as all processes know; another one may begin."""
        if not keep and self._versions.pop(counter, None) is not None:
            self._begin()
            self.position = next(iter(self._versions), self._next)

    @property
    def lacking(self) -> int:
        """Complete groups that a full step lacks: it has B, or all that may begin."""
        return max(0, min(self.rule.groups, len(self._versions)) - len(self._complete))

    def awaited(self) -> int | None:
        """The first counter after those of which another group has to be complete before the next
        step may end; None: it may. A step has one group at least."""
        groups, complete = self.rule.groups, 0
        for number, (counter, version) in enumerate(self._versions.items(), 1):
            complete += counter in self._complete
            later = (self._deadline(version) - self.finished) * groups
            if complete < min(groups, number - later):
                return counter + 1
        return None if complete else self._next

    def untrained(self, counter: int) -> bool:
        """Whether no step has trained a counter's group."""
        return counter in self._versions or counter >= self._next

    def cut(self, step: int) -> Taken:
        """The groups of the next step, as far as complete ones are known."""
        if step != self.finished + 1:
            raise ValueError(
                f"step {step} has no groups yet: with deadlines only the next one has, "
                f"{self.finished + 1}"
            )
        complete = (counter for counter in self._versions if counter in self._complete)
        kept = tuple(itertools.islice(complete, self.rule.groups))
        trained = set(kept)
        end = next((c for c in self._versions if c not in trained), self._next)
        return Taken(step, self.position, end, kept, final=self.awaited() is None)

    def step_of(self, counter: int) -> int:
        """The last step that may train the group of a counter."""
        if counter not in self._versions:
            raise ValueError(f"prompt {counter} is trained on, or may not begin yet")
        return self._deadline(self._versions[counter]) + 1

    def end(self, held: int) -> int:
        """The first counter that may not begin with the weights of `held` finished steps."""
        if held >= self.finished:
            return self._next
        return next((c for c, version in self._versions.items() if version > held), self._next)

    def end_of(self, step: int) -> int | None:
        """None: which counters a step trains is known in the end only."""
        return self.position if step <= self.finished else None

    def has_step(self, step: int) -> bool:
        """Whether a step is one of the run, and there are groups for it."""
        return (self._steps is None or step <= self._steps) and bool(self._versions)

    def finish(self, step: int) -> Taken:
        """Ends a step, which must have the groups that it needs; others may begin."""
        cut = self.cut(step)
        if not cut.final:
            raise ValueError(f"step {step} needs a group below prompt {self.awaited()}: {cut}")
        for counter in cut.kept:
            del self._versions[counter]
            self._complete.remove(counter)
        self.finished = step
        self._begin()
        self.position = next(iter(self._versions), self._next)
        return cut

    def _begin(self) -> None:
        """Lets groups begin with the present version, as many as later steps have room for."""
        most = self.rule.max_staleness * self.rule.groups
        if self._steps is not None:
            most = min(most, (self._steps - self.finished) * self.rule.groups)
        while len(self._versions) < most and (self._last is None or self._next < self._last):
            self._versions[self._next] = self.finished
            self._next += 1

    def _deadline(self, version: int) -> int:
        """The last number of finished steps after which a step may train a group that may begin by
        `version`; of one that is too late already, the present one."""
        deadline = version + self.rule.max_staleness
        if self._steps is not None:
            deadline = min(deadline, self._steps - 1)
        return max(deadline, self.finished)


def begun_by_steps(
    rule: Rule, step: int, counter: int, counters: Collection[int]
) -> dict[str, Any]:
    """`Deadlines.begun` of a checkpoint whose steps have B groups each (schedule.py).

    `counters`: of the groups of which it has samples. The group at place i after `counter` belongs
    to the i // B-th step from there, for which it is young enough.
    """
    end = max(counters, default=counter - 1) + 1
    versions = [
        [c, step + (c - counter) // rule.groups - rule.max_staleness] for c in range(counter, end)
    ]
    return {"next": end, "waiting": versions}


def in_order(begun: Mapping[str, Any]) -> bool:
    """Whether the groups of `Deadlines.begun` that are trained on come before all others."""
    waiting = [counter for counter, _ in begun["waiting"]]
    return waiting == list(range(begun["next"] - len(waiting), begun["next"]))
