"""The groups of a step whose rollout ends by a budget of tokens: what `GroupStream.take` is
otherwise."""

import functools
from collections.abc import Sequence

from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.coordinator.rounds import DATA_ENDED, Ended
from distflow_jax.layout import Metrics, Parts
from distflow_jax.stream.batches.rollout_budget import RolloutBudget
from distflow_jax.stream.group_stream import GroupStream

BUDGET = "rollout_budget"  # in the place of a node's id


class RolloutTaker:
    """Hands the groups of a step to the training. Call `finish` after it has trained."""

    def __init__(self, stream: GroupStream, budget: RolloutBudget, *, tokens: int):
        """`tokens`: the budget of a rollout."""
        self._stream, self._budget = stream, budget
        self._merged = functools.partial(rollout_metrics, budget=tokens)

    def take(self, step: int) -> tuple[FieldStore, Metrics]:
        """The step's groups of this process, once the rollout has ended. Collective.

        Raises Ended where the data have no group for the step, and what a sampler, an
        environment or a node that ran ahead has raised for a group that has begun.
        """
        stream, producer = self._stream, self._stream.producer
        if not producer.admission.has_step(step):
            raise Ended(DATA_ENDED)
        with stream.update_times.block("wait"):
            producer.admit()  # before anything is due: all that may begin is under way
            cut = self._budget.end(stream.drive)
        stream.rest()  # the devices are the trainer's from here on
        with producer.lock:
            done = [group for group in producer.groups.values() if group.done]
        stream.steps.learn(done[:1])  # this process may have no group of the step
        store, metrics = stream.joined(cut)
        found = {"tokens": self._budget.sampled(), "groups": len(cut.kept)}
        return store, metrics | {BUDGET: Parts((found,), self._merged)}

    def finish(self, step: int) -> int:
        """Ends a step; returns the first counter that is not trained on."""
        return self._stream.finish(step)

    def wait(self) -> None:
        """Returns once records of the steps so far are written: there are none."""

    def close(self) -> None:
        """Ends the connections."""
        self._budget.close()


def rollout_metrics(found: Sequence[dict[str, int]], *, budget: int) -> dict[str, float]:
    """Metrics of a rollout of a budget, from the numbers of all processes."""
    tokens = sum(one["tokens"] for one in found)
    return {
        "training/rollout_tokens": float(tokens),
        "training/rollout_tokens_beyond": float(max(0, tokens - budget)),
        "training/groups": float(found[0]["groups"]),
    }
