"""The policy of rollouts with a token budget, which end at the same point on all processes.

A rollout ends when all processes together have sampled that many tokens, or its step is full, and
the groups that the step must train are complete. Its step is one partial batch. Each process counts
its own tokens and groups, and all gather these numbers (agreement.py): first when one of P
processes has a P-th of the missing tokens, or of the groups that fill the step; then whenever a
group ends for which the step waits. Samplers decode meanwhile.
"""

import functools
from collections.abc import Iterable, Sequence

from distflow_jax.layout import Metrics, Parts
from distflow_jax.stream.batches.group_facts import GroupFacts, decision_of
from distflow_jax.stream.batches.partial_batches import PartialBatch, View
from distflow_jax.stream.deadlines import Deadlines, Taken

BUDGET = "rollout_budget"  # in the place of a node's id


class RolloutBudget:
    """Ends the rollouts of a run. Has the interface of PartialBatchPlanner."""

    facts_of = staticmethod(decision_of)
    spreads, mini_batch = True, 0

    def __init__(self, admission: Deadlines, *, tokens: int):
        """`admission`: the producer's; `tokens`: of a rollout, over all processes."""
        self._admission, self._budget = admission, tokens
        self._facts: dict[int, GroupFacts] = {}  # of complete groups that are not trained on
        self._known = 0  # tokens of the rollout that all processes know

    @property
    def step(self) -> int:
        return self._admission.finished + 1

    @property
    def cut(self) -> Taken:
        return self._admission.cut(self.step)

    @property
    def needs(self) -> int:
        """The first counter that may not begin: any of these groups may be the step's."""
        return self._admission.end(self._admission.finished)

    end = needs

    def begin(self, step: int) -> bool:
        """Begins the rollout of a step; whether there is a group for it."""
        return self._admission.has_step(step)

    def due(self, mine: View) -> bool:
        """Whether a process could end the rollout, if all processes have as much."""
        tokens = mine.tokens()
        if mine.begun and all(group.done for group in mine.groups):  # nothing is under way here
            return bool(mine.news or tokens)
        missing, lacking = self._budget - self._known, self._admission.lacking
        if missing > 0 and lacking:
            shares = (tokens, missing), (len(mine.news), lacking)
            return any(share * mine.processes >= all_of_it for share, all_of_it in shares)
        awaited = self._admission.awaited()
        return awaited is not None and any(facts.counter < awaited for facts in mine.news)

    def learn(self, facts: Iterable[GroupFacts], tokens: int) -> None:
        """Notes complete groups, those that were given up, and tokens that were sampled."""
        self._known += tokens
        for group in facts:
            if group.keep:
                self._facts[group.counter] = group
                self._admission.complete(group.counter)
            else:
                self._admission.judge(group.counter, False)

    def next(self) -> PartialBatch | None:
        """The step's groups, once its rollout has ended by what all processes know."""
        full = self._known >= self._budget or not self._admission.lacking
        if not full or self._admission.awaited() is not None:
            return None
        cut = self.cut
        groups = tuple(self._facts[counter] for counter in cut.kept)
        return PartialBatch(cut.step, 1, 0, groups, ends_mini_batch=True, last=True)

    def metrics(self, sampled: int) -> Metrics:
        """Tokens and groups of the step, of which this process has sampled so many tokens."""
        found = {"tokens": sampled, "groups": len(self.cut.kept)}
        return {BUDGET: Parts((found,), functools.partial(rollout_metrics, budget=self._budget))}

    def finish(self) -> None:
        """Forgets the groups of the step; tokens from now on are the next rollout's."""
        kept = set(self.cut.kept)
        self._facts = {c: facts for c, facts in self._facts.items() if c not in kept}
        self._known = 0


def rollout_metrics(found: Sequence[dict[str, int]], *, budget: int) -> dict[str, float]:
    """Metrics of a rollout of a budget, from the numbers of all processes."""
    tokens = sum(one["tokens"] for one in found)
    return {
        "training/rollout_tokens": float(tokens),
        "training/rollout_tokens_beyond": float(max(0, tokens - budget)),
        "training/groups": float(found[0]["groups"]),
    }
