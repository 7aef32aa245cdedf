"""Orders of waiting requests: what takes slots first among the groups of a step."""

import numpy as np
import pytest

from distflow_jax.batch import Prompt
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.sampling_order import ORDERS
from distflow_jax.rollout.scheduling.sequences import RequestGroup

# counter -> (expected length, spread of its last scores)
ROWS = {4: (30, 0.0), 5: (10, 1.0), 6: (30, 0.5), 7: (20, 1.0)}


def request_of(counter, *, turn=0, order=None):
    length, spread = ROWS[counter]
    tokens = np.zeros(2, np.int32)
    prompt = Prompt(counter, counter, tokens, "", "", None, {}, length, expected_spread=spread)
    request = GroupRequest(prompt, SamplingParams(2, 8), turn=turn)
    rank = None if order is None else ORDERS[order](request)
    return GroupRequest(prompt, request.sampling, turn=turn, rank=rank)


def first_to_last(requests):
    groups = [RequestGroup(place, request, [0]) for place, request in enumerate(requests)]
    return [g.request.prompt.counter for g in sorted(groups, key=lambda g: g.priority)]


@pytest.mark.parametrize(
    "order, expected",
    [
        ("longest", [6, 4, 7, 5]),
        ("counter", [4, 5, 6, 7]),
        ("informative", [7, 5, 6, 4]),
        (None, [6, 4, 7, 5]),
    ],
)
def test_the_order_of_one_step(order, expected):
    requests = [request_of(counter, order=order) for counter in (6, 7, 5, 4)]
    assert first_to_last(requests) == expected


@pytest.mark.parametrize("order", ORDERS)
def test_an_earlier_step_comes_first_in_every_order(order):
    late = [request_of(c, turn=2, order=order) for c in (6, 7)]
    early = [request_of(c, turn=1, order=order) for c in (4, 5)]
    assert set(first_to_last([*late, *early])[:2]) == {4, 5}
