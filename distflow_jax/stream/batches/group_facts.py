"""Facts of a complete group that processes exchange."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from distflow_jax.coordinator.assignment import StepLengths
from distflow_jax.coordinator.first_fit import Lengths
from distflow_jax.layout import VERSION
from distflow_jax.stream.host_nodes import Group


@dataclasses.dataclass(frozen=True)
class GroupFacts:
    """A complete group: its lengths in tokens, the versions that sampled it, and its filter
    decision."""

    counter: int
    buffer: int  # the process that sampled it
    prompt: int
    responses: tuple[int, ...]
    first: int  # lowest version of the weights that sampled one of its tokens
    last: int  # highest
    keep: bool = True  # the filter decision; False of a group that was given up

    def to_json(self) -> list[Any]:
        """The facts as a list; the process that reads it knows the task buffer."""
        return [self.counter, self.prompt, list(self.responses), self.first, self.last, self.keep]

    @classmethod
    def from_json(cls, buffer: int, row: Sequence[Any]) -> "GroupFacts":
        """Inverse of `to_json`."""
        counter, prompt, responses, first, last, keep = row
        return cls(counter, buffer, prompt, tuple(responses), first, last, bool(keep))

    def tokens(self, *, shared: bool) -> int:
        """Tokens that the group takes at least; `shared`: in one row its prompt lies once."""
        copies = min(1, len(self.responses)) if shared else len(self.responses)
        return copies * self.prompt + sum(self.responses)


FactsOf = Callable[[Group, int], GroupFacts]  # of a group that is done, and its process


def facts_of(group: Group, buffer: int) -> GroupFacts:
    """The facts of a group whose nodes that run ahead have run, all responses that were kept."""
    columns = group.store.columns
    prompts, responses = columns["prompt"], columns.get("response", ())  # of one given up: none
    versions = _of_sampled_tokens(columns)
    return GroupFacts(
        counter=group.counter,
        buffer=buffer,
        prompt=len(prompts[0].tokens) if len(prompts) else 0,
        responses=tuple(len(response) for response in responses),
        first=int(versions.min()) if len(versions) else 0,
        last=int(versions.max()) if len(versions) else 0,
        keep=group.keep,
    )


def decision_of(group: Group, buffer: int) -> GroupFacts:
    """The filter decision alone, of a group whose step is not divided."""
    return GroupFacts(group.counter, buffer, 0, (), 0, 0, group.keep)


def lengths_of(groups: Sequence[GroupFacts], sites: int, processes: int) -> Lengths:
    """Lengths of the groups' sequences, int64 [N] each, in the order of the groups.

    `sites`: of them `processes` processes make up so many, see coordinator/packing.py.
    """
    counts = [len(group.responses) for group in groups]
    response = [n for group in groups for n in group.responses]
    site = [group.buffer * sites // processes for group in groups]
    return Lengths(
        prompt=np.repeat(np.array([g.prompt for g in groups], np.int64), counts),
        response=np.array(response, np.int64),
        group=np.repeat(np.arange(len(groups), dtype=np.int64), counts),
        site=np.repeat(np.array(site, np.int64), counts),
    )


def step_lengths(groups: Sequence[GroupFacts]) -> StepLengths:
    """Lengths of the groups' sequences by which rows are assigned; counters must rise."""
    counts = [len(group.responses) for group in groups]
    facts = np.array([(g.counter, g.buffer, g.prompt) for g in groups], np.int64).reshape(-1, 3)
    counter, buffer, prompt = np.repeat(facts, counts, axis=0).T
    response = np.array([n for group in groups for n in group.responses], np.int64)
    return StepLengths(counter, buffer, prompt, response)


def _of_sampled_tokens(columns: Mapping[str, Sequence[Any]]) -> np.ndarray:
    """The versions of a group's sampled tokens, int [n]: tokens of an environment have none."""
    versions = columns.get(VERSION, ())
    if not len(versions):
        return np.zeros(0, np.int32)
    return np.concatenate(versions)[np.concatenate(columns["response_mask"]).astype(bool)]
