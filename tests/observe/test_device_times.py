"""When programs had their devices, by a clock that the tests set."""

import threading
import types

import pytest

from distflow_jax.observe import device_times
from distflow_jax.observe.device_times import DeviceTimes


class Clock(threading.local):
    """Each thread's own: a thread that waited for a result finds it at the result's end."""

    now = 0.0

    def perf_counter(self):
        return self.now


class Result:
    """A result that is ready at a given time, as the array of a program that runs until then."""

    def __init__(self, clock, ready):
        self.clock, self.ready = clock, ready

    def block_until_ready(self):
        self.clock.now = self.ready
        return self


@pytest.fixture
def follow(monkeypatch):
    clock, times = Clock(), DeviceTimes()
    monkeypatch.setattr(device_times, "time", clock)

    def follow(name, device, *, start, end):
        clock.now = start
        return times.follow(name, [device], lambda: Result(clock, end))

    yield types.SimpleNamespace(call=follow, clock=clock, times=times)
    times.close()


def test_a_program_has_its_device_from_the_end_of_the_one_before(follow):
    follow.call("reference", "a", start=10.0, end=12.0)
    follow.call("update", "a", start=10.5, end=17.0)  # waits until 12
    follow.call("elsewhere", "b", start=11.0, end=16.0)
    follow.call("late", "a", start=20.0, end=21.0)
    assert follow.times.take() == {"reference": 2, "update": 5, "elsewhere": 5, "late": 1}
    assert follow.times.take() == {}


def test_times_of_one_name_add_up(follow):
    follow.call("update", "a", start=1.0, end=3.0)
    follow.call("update", "a", start=1.5, end=6.0)
    assert follow.times.take() == {"update": 5}


def test_what_a_program_gives_is_handed_on_and_only_what_is_watched_waited_for(follow):
    gone, there = Result(follow.clock, 99.0), Result(follow.clock, 2.0)
    found = follow.times.follow("update", ["a"], lambda: (gone, there), lambda pair: pair[1])
    assert found == (gone, there)
    assert follow.times.take() == {"update": 2}


def test_a_result_that_cannot_be_waited_for_costs_no_later_time(follow):
    class Deleted:
        def block_until_ready(self):
            raise RuntimeError("Array has been deleted")

    follow.call("reference", "a", start=10.0, end=12.0)
    follow.times.follow("update", ["a"], Deleted)
    with pytest.raises(RuntimeError, match="deleted"):
        follow.times.take()
    follow.call("update", "a", start=20.0, end=21.0)
    assert follow.times.take() == {"update": 1}
