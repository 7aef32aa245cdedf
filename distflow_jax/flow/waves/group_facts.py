"""Facts of a complete group that processes tell each other."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distflow_jax.coordinator.assignment import StepLengths
from distflow_jax.coordinator.first_fit import Lengths
from distflow_jax.flow.host_nodes import Group
from distflow_jax.layout import VERSION


@dataclasses.dataclass(frozen=True)
class GroupFacts:
    """A complete group: its lengths in tokens, the versions that sampled it, and the verdict."""

    counter: int
    home: int  # the process that sampled it
    prompt: int
    responses: tuple[int, ...]
    first: int  # lowest version of the weights that sampled one of its tokens
    last: int  # highest
    keep: bool = True  # the verdict of a region

    def to_json(self) -> list[Any]:
        """The facts as a list; the process that reads it knows the home."""
        return [self.counter, self.prompt, list(self.responses), self.first, self.last, self.keep]

    @classmethod
    def from_json(cls, home: int, row: Sequence[Any]) -> "GroupFacts":
        """Inverse of `to_json`."""
        counter, prompt, responses, first, last, keep = row
        return cls(counter, home, prompt, tuple(responses), first, last, bool(keep))

    def tokens(self, *, shared: bool) -> int:
        """Tokens that the group takes at least; `shared`: in one row its prompt lies once."""
        copies = min(1, len(self.responses)) if shared else len(self.responses)
        return copies * self.prompt + sum(self.responses)


def facts_of(group: Group, home: int) -> GroupFacts:
    """The facts of a group whose nodes that run ahead have run, all responses that were kept."""
    columns = group.store.columns
    prompts, responses = columns["prompt"], columns["response"]
    spans = [_span(versions) for versions in _sampled(columns) if len(versions)]
    return GroupFacts(
        counter=group.counter,
        home=home,
        prompt=len(prompts[0].tokens) if len(prompts) else 0,
        responses=tuple(len(response) for response in responses),
        first=min((low for low, _ in spans), default=0),
        last=max((high for _, high in spans), default=0),
        keep=group.keep,
    )


def lengths_of(groups: Sequence[GroupFacts], sites: int, processes: int) -> Lengths:
    """Lengths of the groups' sequences, int64 [N] each, in the order of the groups.

    `sites`: of them `processes` processes make up so many, see coordinator/packing.py.
    """
    counts = [len(group.responses) for group in groups]
    response = [n for group in groups for n in group.responses]
    site = [group.home * sites // processes for group in groups]
    return Lengths(
        prompt=np.repeat(np.array([g.prompt for g in groups], np.int64), counts),
        response=np.array(response, np.int64),
        group=np.repeat(np.arange(len(groups), dtype=np.int64), counts),
        site=np.repeat(np.array(site, np.int64), counts),
    )


def step_lengths(groups: Sequence[GroupFacts]) -> StepLengths:
    """Lengths of the groups' sequences by which rows are assigned; counters must rise."""
    counts = [len(group.responses) for group in groups]
    facts = np.array([(g.counter, g.home, g.prompt) for g in groups], np.int64).reshape(-1, 3)
    counter, home, prompt = np.repeat(facts, counts, axis=0).T
    response = np.array([n for group in groups for n in group.responses], np.int64)
    return StepLengths(counter, home, prompt, response)


def _sampled(columns: Mapping[str, Sequence[Any]]) -> list[np.ndarray]:
    """The versions of each response's sampled tokens: those that an environment wrote have none."""
    pairs = zip(columns.get(VERSION, ()), columns["response_mask"], strict=False)
    return [np.asarray(versions)[np.asarray(mask, bool)] for versions, mask in pairs]


def _span(versions: np.ndarray) -> tuple[int, int]:
    return int(versions.min()), int(versions.max())
