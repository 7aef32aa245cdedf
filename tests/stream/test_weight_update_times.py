"""Seconds of weight updates: which of them delay the training."""

import pytest

from distflow_jax.stream.weight_update_times import WeightUpdateTimes, means


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self):
        return self.now


def test_a_second_is_exposed_if_the_training_is_late_by_it():
    clock = Clock()
    update_times = WeightUpdateTimes(clock)

    def passes(seconds):
        clock.now += seconds

    with update_times.block("leave"):
        passes(1.0)
    passes(10.0)  # neither
    with update_times.block("arrive"):
        passes(2.0)  # beside a step
        with update_times.block("wait"):
            passes(4.0)
        with update_times.block("leave"):  # the next weights
            passes(8.0)
    with update_times.block("wait"):
        passes(16.0)
    update_times.moved(300)
    update_times.moved(20)
    assert update_times.take().values == ([9.0, 14.0, 13.0, 2.0, 320.0],)
    assert update_times.take().values == ([0.0] * 5,)


def test_a_block_that_runs_on_counts_in_both_steps():
    clock = Clock()
    update_times = WeightUpdateTimes(clock)
    with update_times.block("arrive"):
        clock.now += 1.0
        first = update_times.take()
        clock.now += 2.0
    assert [first.values[0][1], update_times.take().values[0][1]] == [1.0, 2.0]


def test_metrics_are_means_over_processes():
    found = means([[1.0, 2.0, 3.0, 0.0, 8.0], [3.0, 4.0, 5.0, 2.0, 10.0]])
    names = ("leave", "arrive", "exposed", "hidden", "bytes")
    of_all = (2.0, 3.0, 4.0, 1.0, 9.0)
    want = dict(zip((f"perf/weight_update/{n}" for n in names), of_all, strict=True))
    assert found == pytest.approx(want)
