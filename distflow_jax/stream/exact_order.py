"""The order of a sampler's work when exactly one version of the weights samples each step.

A step's groups begin when all groups of the previous step have ended, with the one version assigned
to the step. An evaluation of a version precedes these groups: no response is unfinished then, older
weights are not needed again, and results do not depend on timing. With a region, a step has rounds.
The first round has B groups; each further round samples one replacement per group filtered so far,
once all processes know the filter decisions. Every group that begins therefore belongs to its step.
"""

import dataclasses
from collections.abc import Callable

from distflow_jax.stream.schedule import Admission


@dataclasses.dataclass(frozen=True)
class Work:
    """A unit of a sampler's work, done with the weights of `version` finished steps."""

    version: int
    step: int | None  # whose groups begin, as far as they are known; None: an evaluation


class ExactOrder:
    """The order of one process's work: call `next` when no response is unfinished."""

    def __init__(
        self,
        admission: Admission,
        *,
        held: int,
        known: Callable[[int], bool],
        due: Callable[[int], bool],
    ):
        """`held`: version at the start, which takes the place of older ones; `known(counter)`:
        whether all processes know the filter decisions of all groups below; `due(version)`: whether
        a version is evaluated."""
        self._admission, self._known, self._due = admission, known, due
        self._oldest = self._version = held  # versions below `_version` are evaluated
        self._step = admission.finished + 1
        self._begun = admission.position  # all groups below have begun
        self._last: int | None = None  # no newer version has work; None: all have

    def next(self, newest: int) -> Work | None:
        """The next piece of work, which begins now; None: it has to wait.

        `newest`: version of the newest weights that are there. Call this under the lock of the
        admission.
        """
        admission = self._admission
        if not self._end_rounds():
            return None
        newest = newest if self._last is None else min(newest, self._last)
        left = admission.has_step(self._step)
        last = self._step - 1 - admission.rule.max_staleness if left else newest
        while self._version <= min(last, newest):
            self._version += 1
            if self._due(self._version - 1):
                return Work(self._version - 1, None)
        version = max(self._oldest, admission.rule.exact_version(self._step))
        if not left or version > newest:
            return None
        self._begun = admission.cut(self._step).end
        return Work(version, self._step)

    def end_with(self, version: int) -> None:
        """Hands out no work of newer versions: the run ends; under the lock of the admission."""
        self._last = version

    def needs(self, version: int) -> bool:
        """Whether weights that wait have still to be taken; under the lock of the admission."""
        answers = self._admission.has_step(version + 1 + self._admission.rule.max_staleness)
        return answers or (version >= self._version and self._due(version))

    def _end_rounds(self) -> bool:
        """Goes on to the step whose groups begin next; False: filter decisions have to come
        first."""
        admission = self._admission
        while admission.has_step(self._step) or self._step <= admission.finished:
            if self._step > admission.finished:
                end = admission.cut(self._step).end
                if self._begun < end:
                    return True
                if not self._known(end):
                    return False
                if not admission.cut(self._step).final:
                    continue  # the step has another round
            self._step += 1
        return True
