"""Seconds of slots and of those who wait: what metrics make of them."""

import pytest

from distflow_jax.rollout.occupancy import Occupancy, OccupancyClock


class Clock:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


def test_seconds_count_for_what_was_the_case_before_them():
    now = Clock()
    clock = OccupancyClock(4, now)
    for passed, running, held, waiting in ((5, 1, 0, 0), (2, 4, 3, 2), (10, 0, 2, 0), (1, 0, 0, 0)):
        now.seconds += passed
        clock.look(running=running, held=held, waiting=waiting)
    now.seconds += 50  # nothing is under way
    total = clock.look(running=2, held=0, waiting=0, ended=3)
    # the first 5 seconds are nobody's; 2 with 1 running, 10 with 4, 3 and 2, 1 with 2 held
    assert total == clock.total == Occupancy(4 * 13, 2 + 40, 30 + 2, 20, ended=3)


def test_metrics_are_shares_and_means():
    whole = Occupancy(100.0, 80.0, 30.0, 12.0, ended=6, reread_tokens=7)
    more = whole.plus(Occupancy(50.0, 20.0, 3.0, 6.0, 2, 3))
    assert more.plus(whole, -1) == Occupancy(50.0, 20.0, 3.0, 6.0, 2, 3)
    assert whole.metrics() == {
        "perf/slots_busy_share": 0.8,
        "perf/trajectories/tool_seconds": 5.0,
        "perf/trajectories/slot_seconds": 2.0,
        "perf/trajectories/reread_tokens": 7,
    }
    assert more.metrics()["perf/slots_busy_share"] == pytest.approx(100 / 150)
    assert Occupancy().metrics() == {}
