"""Prompts are dealt so that samplers end together, by estimates that all processes share."""

import json

import numpy as np
import pytest

from distflow_jax.data.prompt_assignment import LengthEstimates, deal


def test_each_prompt_goes_to_one_sampler():
    rng = np.random.default_rng(0)
    for _ in range(200):
        samplers, least = int(rng.integers(1, 9)), int(rng.integers(1, 3))
        count = samplers * least + int(rng.integers(0, 40))
        expected = rng.pareto(1.5, count) + 1
        dealt = deal(expected.tolist(), samplers, least=least)
        assert sorted(i for part in dealt for i in part) == list(range(count))
        assert min(map(len, dealt)) >= least
        for part in dealt:  # longest first
            assert (np.diff(expected[part]) <= 0).all()
        if least == 1:  # Graham 1969: within 4/3 of the best there is
            load = [expected[part].sum() for part in dealt]
            best = max(expected.max(), expected.sum() / samplers)
            assert max(load) <= (4 / 3) * best + expected.max() / 3


def test_equal_expectations_deal_equal_numbers_in_turn():
    assert deal([1.0] * 6, 3) == [[0, 3], [1, 4], [2, 5]]


def test_too_few_prompts():
    with pytest.raises(ValueError, match="3 prompts are too few for 2 samplers of 2 hosts"):
        deal([1.0] * 3, 2, least=2)


def test_an_estimate_knows_all_but_the_last_step():
    lengths = LengthEstimates(4)
    rows = np.arange(4)
    np.testing.assert_array_equal(lengths.expected(1, rows), 1)  # nothing known: all alike
    lengths.observe(1, np.array([0, 1]), np.array([10.0, 30.0]))
    np.testing.assert_array_equal(lengths.expected(2, rows), 1)
    np.testing.assert_array_equal(lengths.expected(3, rows), [10, 30, 20, 20])
    lengths.observe(2, np.array([0]), np.array([20.0]))
    np.testing.assert_array_equal(lengths.expected(4, rows), [15, 30, 22.5, 22.5])


def test_reading_ahead_and_resuming_change_nothing():
    rng = np.random.default_rng(1)
    plain, resumed, rows = LengthEstimates(10), LengthEstimates(10), np.arange(10)
    for step in range(1, 8):
        seen = rng.permutation(10)[:4]
        length = rng.integers(1, 50, 4)
        ahead = resumed.expected(step + 1, rows)  # before this step's lengths are known
        plain.observe(step, seen, length)
        resumed.observe(step, seen, length)
        np.testing.assert_array_equal(plain.expected(step + 1, rows), ahead)
        state = json.loads(json.dumps(resumed.state(step)))
        resumed = LengthEstimates(10)
        resumed.restore(state)


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_start_amid_a_batch_draws_it_as_before(staleness):
    """A region may end a step within a batch: the next start draws that batch again."""
    rng, rows = np.random.default_rng(staleness), np.arange(6)
    lengths, drawn = LengthEstimates(6, staleness), {}
    for batch in range(1, 12):
        drawn[batch] = lengths.expected(batch, rows)
        lengths.observe(batch, rows[batch % 2 :], rng.integers(1, 500, 6)[batch % 2 :])
        resumed = LengthEstimates(6, staleness)
        resumed.restore(json.loads(json.dumps(lengths.state(batch - 1))))
        np.testing.assert_array_equal(resumed.expected(batch, rows), drawn[batch])


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_draws_far_ahead_leave_no_trace_in_a_checkpoint(staleness):
    """Samplers that run ahead draw the batches of later steps before a step is observed."""
    rng, rows, steps = np.random.default_rng(staleness), np.arange(6), 12
    observed = rng.integers(1, 500, (steps + 1, 6))
    drawn, states, lengths = {}, {}, LengthEstimates(6, staleness)
    for step in range(1, steps + 1):
        for later in range(len(drawn) + 1, step + staleness + 1):
            drawn[later] = lengths.expected(later, rows)
        lengths.observe(step, rows[step % 2 :], observed[step, step % 2 :])
        states[step] = json.loads(json.dumps(lengths.state(step)))
    for step, state in states.items():
        resumed = LengthEstimates(6, staleness)
        resumed.restore(state)
        for later in range(step + 1, step + staleness + 1):
            np.testing.assert_array_equal(resumed.expected(later, rows), drawn[later])
