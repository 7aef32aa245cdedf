"""The rule of asynchronous steps: the step of each group, and when the group may begin.

B groups make a step, v training steps are finished, and `max_staleness` is the maximum age of a
token in steps when it is trained on. The group of prompt counter c belongs to step s(c) = c // B +
1, whichever group ends first, and may begin once its sampler holds a version v >= s(c) - 1 -
max_staleness. Without any shared counter it follows that:

- No token is more than max_staleness steps old when it is trained on, including the time it waits.
- At most (max_staleness + 1) B groups have begun and are not trained on yet.
- Batches equal those of a synchronous run: no step prefers short responses.
- A restart has nothing to recount: the rule is a function of c and v alone.

With a region, each group gets a filter decision, and steps are cut from the counters by these
decisions: step s takes groups in order, starting where step s - 1 ended, until B are kept or
max_rounds x B were examined. A group without a decision counts as kept, so s(c) can only fall as
decisions arrive, and the bounds hold meanwhile.

Without a region, a decision of False gives a prompt up that no worker can answer: the next counter
takes its place, so a step has B groups as long as data remain. All processes must learn of it
before they cut its step.

Nothing here communicates. Fu et al. 2025 (AReaL, arxiv.org/abs/2505.24298), sec. 5.1, bound the
same staleness by counters in one process.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from distflow_jax.config.stream_config import StreamConfig
from distflow_jax.parsing.checked_fields import at_least
from distflow_jax.parsing.setting_checks import Section, needed, setting


@dataclasses.dataclass(frozen=True)
class Rule(Section):
    """The constants of the rule."""

    groups: int = needed(at_least(1))  # B, of a step, over all processes
    max_staleness: int = needed(at_least(0))  # steps
    # of a region: a step looks at no more than so many times B groups
    max_rounds: int = setting(1, at_least(1))

    def newest_step(self, held: int) -> int:
        """The last step whose groups may begin with the weights of `held` finished steps."""
        return held + 1 + self.max_staleness

    def exact_version(self, step: int) -> int:
        """The version that answers a step's groups where each version has its own steps."""
        return max(0, step - 1 - self.max_staleness)

    @property
    def observed_staleness(self) -> int:
        """Batches of B counters between one that is dealt to samplers and the newest whose response
        lengths all processes know by then."""
        return (self.max_staleness + 1) * self.max_rounds


@dataclasses.dataclass(frozen=True)
class Cut:
    """The counters of one step: `start` <= c < `end`, of which `kept` are trained on.

    `final`: whether all decisive filter decisions are known. Until then `end` may grow, and `kept`
    includes the groups without a decision.
    """

    step: int
    start: int
    end: int
    kept: tuple[int, ...]
    final: bool

    @property
    def counters(self) -> Sequence[int]:
        """The counters that the step looks at."""
        return range(self.start, self.end)


class Admission:
    """The rule, applied to the filter decisions that a process knows.

    Args:
      rule: the constants.
      step: steps whose groups are all taken, 0 at the start of a run. The last of them counts here
        while it still trains; versions of weights count only steps that have trained.
      counter: the first one not examined by these steps.
      last: the first counter beyond the data; None: the data never end.
      steps: the last step of the run, beyond which nothing begins; None: unlimited.
      judged: whether groups get filter decisions, as in a region; otherwise all are kept except
        prompts that are given up.
      exact: whether one version answers each step: a group begins once its step is certain.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        step: int = 0,
        counter: int = 0,
        last: int | None = None,
        steps: int | None = None,
        judged: bool = False,
        exact: bool = False,
    ):
        self.rule, self.finished, self.position = rule, step, counter
        self._last, self._steps, self.judged, self._exact = last, steps, judged, exact
        self._decisions: dict[int, bool] = {}  # of counters from `position` on

    def judge(self, counter: int, keep: bool) -> None:
        """Notes a filter decision. One that is known already must be the same; ValueError
        otherwise."""
        if counter < self.position or (keep and not self.judged):
            return
        if self._decisions.setdefault(counter, keep) != keep:
            raise ValueError(f"the group of prompt {counter} was judged twice, and differently")

    def cut(self, step: int) -> Cut:
        """The counters of a step that is not finished, as far as filter decisions say."""
        if step <= self.finished:
            raise ValueError(f"step {step} is finished: {self.finished} steps are")
        return next(found for found in self._cuts() if found.step == step)

    def step_of(self, counter: int) -> int:
        """The step of a counter at or above `position`: s(c), which may fall as filter decisions
        come."""
        if counter < self.position:
            raise ValueError(f"prompt {counter} was looked at in a finished step")
        if self._last is not None and counter >= self._last:
            raise ValueError(f"prompt {counter} is beyond the end of the data, {self._last}")
        lost = self._given_up(counter)
        if not (self.judged or lost):
            return self.finished + 1 + (counter - self.position) // self.rule.groups
        return next(found.step for found in self._cuts() if counter < found.end)

    def end(self, held: int) -> int:
        """The first counter that may not begin with the weights of `held` finished steps."""
        step = self.rule.newest_step(held)
        step = step if self._steps is None else min(step, self._steps)
        if step <= self.finished:
            return self.position
        return next(c.end for c in self._cuts() if c.step == step or (self._exact and not c.final))

    def end_of(self, step: int) -> int | None:
        """The first counter after those of a step, or of the run's last; None: not known yet."""
        step = step if self._steps is None else min(step, self._steps)
        if step <= self.finished:
            return self.position
        cut = self.cut(step)
        return cut.end if cut.final else None

    def has_step(self, step: int) -> bool:
        """Whether a step is one of the run, and has a group as far as is known."""
        if self._steps is not None and step > self._steps:
            return False
        cut = self.cut(step) if step > self.finished else None
        return cut is not None and cut.start < cut.end

    def finish(self, step: int) -> Cut:
        """Counts a step as finished: its groups are taken, though it may still train. Its cut must
        be final; its filter decisions are forgotten."""
        cut = self.cut(step)
        if step != self.finished + 1 or not cut.final:
            raise ValueError(f"step {step} cannot end after {self.finished} finished ones: {cut}")
        self.finished, self.position = step, cut.end
        for counter in [c for c in self._decisions if c < cut.end]:
            del self._decisions[counter]
        return cut

    def _cuts(self) -> Iterator[Cut]:
        """The cuts of all steps that are not finished, without end."""
        step, start = self.finished, self.position
        while True:
            step += 1
            cut = self._next_cut(step, start)
            yield cut
            start = cut.end

    def _next_cut(self, step: int, start: int) -> Cut:
        groups = self.rule.groups
        most = groups * self.rule.max_rounds if self.judged else groups + self._given_up()
        limit = self._bounded(start + most)
        if most == groups and not self.judged:
            return Cut(step, start, limit, tuple(range(start, limit)), final=True)
        kept, final, counter = [], True, start
        while counter < limit and len(kept) < groups:
            decision = self._decisions.get(counter)
            final &= decision is not None or not self.judged
            if decision is not False:
                kept.append(counter)
            counter += 1
        return Cut(step, start, counter, tuple(kept), final)

    def _given_up(self, end: int | None = None) -> int:
        """Prompts below `end` that were given up, and are not trained on."""
        return sum(
            not keep and (end is None or counter < end) for counter, keep in self._decisions.items()
        )

    def _bounded(self, counter: int) -> int:
        return counter if self._last is None else min(counter, self._last)


def weight_buffers(config: StreamConfig) -> int:
    """Weights of the trainer that may lie in a host's memory on their way to its sampler.

    With `boundary` a sampler at step s still has to take versions s - max_staleness .. s - 1, and
    workers that join, or answer a group of one that has ended, the version before these too.
    """
    waiting = {"in_flight": 1, "boundary": config.max_staleness}[config.weight_update]
    return max(2, waiting + config.workers)
