"""Rules for many workers: task buffers have equally many, and no room is given twice."""

import collections
import random

import pytest

from distflow_jax.stream.links.waiting_questions import WaitingQuestions
from distflow_jax.stream.links.worker_pool import (
    GONE_SECONDS,
    LEAST_SECONDS,
    LEAST_WORKERS,
    MOST_PLACES,
    MOST_SECONDS,
    SLOW_SECONDS,
    Room,
    Roster,
    places_of,
)


@pytest.mark.parametrize("buffers", [1, 3, 16, 17, 64, 256])
@pytest.mark.parametrize("workers", [1, 2, 7, 100, 1000])
def test_all_task_buffers_have_equally_many_workers(buffers, workers):
    places = [places_of(rank, workers, buffers) for rank in range(workers)]
    count = collections.Counter(place for one in places for place in one)
    each = {len(one) for one in places}
    assert each == {len(set(places[0]))} and max(map(max, places)) < buffers
    assert max(count.values()) - min(count[place] for place in range(buffers)) <= 1
    assert min(count[place] for place in range(buffers)) >= min(workers, LEAST_WORKERS)
    if buffers <= MOST_PLACES:
        assert each == {buffers}
    elif workers >= buffers:
        assert each == {MOST_PLACES}


def test_workers_that_die_leave_all_task_buffers_with_equally_many():
    """Of 1,000 workers those of a host die, 64 at random, and others join; the rest goes on."""
    roster, draw, now = Roster(), random.Random(5), 0.0
    living = [f"host{i // 8}-{i}" for i in range(1000)]

    def places(now):
        for name in living:
            roster.rank(name, now)
        return {name: places_of(*roster.rank(name, now), 64) for name in living}

    def spread(found):
        count = collections.Counter(place for one in found.values() for place in one)
        return min(count.values()), max(count.values())

    before = places(now)
    assert spread(before) == (250, 250)
    gone = {name for name in living if name.startswith("host7-")} | set(draw.sample(living, 64))
    living = [name for name in living if name not in gone] + [f"new-{i}" for i in range(10)]
    count = collections.Counter(place for name in before for place in before[name] if name in gone)
    assert max(count.values()) < 0.2 * 250  # until the others know
    for now in (GONE_SECONDS / 2, GONE_SECONDS, GONE_SECONDS + 1):
        after = places(now)
    low, high = spread(after)
    assert high - low <= 1
    kept = [len(set(before[name]) & set(after[name])) for name in before if name in after]
    assert min(kept) >= MOST_PLACES - 8


def test_one_that_says_that_it_goes_has_left_the_roster():
    roster = Roster()
    assert roster.rank("one", 0.0) == (0, 1)
    assert roster.rank("two", 0.0)[1] == 2
    roster.drop("one")
    roster.drop("one")
    assert roster.rank("two", 0.0) == (0, 1)


def test_workers_that_got_nothing_ask_one_after_the_other():
    few, times = WaitingQuestions({}, 20.0, None), WaitingQuestions({}, 20.0, None)
    assert few.seconds(100.0) == pytest.approx(LEAST_SECONDS)
    assert few.seconds(101.0) == pytest.approx(LEAST_SECONDS)
    found = [times.seconds(100.0) for _ in range(5000)]
    assert found == sorted(found) and found[-1] == MOST_SECONDS
    assert sum(second < 1.1 for second in found) <= 55
    assert max(WaitingQuestions({}, 0.3, None).seconds(0.0) for _ in range(3)) <= 0.3


def test_room_is_given_to_one_task_buffer_at_a_time_unless_it_is_slow():
    room = Room()
    assert room.take(0, 8, 0.0) == 8
    assert room.take(1, 8, 0.1) == 0 and room.free(8, 0.1) == 0
    room.give_back(1, 0.1)
    assert room.take(1, 8, SLOW_SECONDS) == 8  # 0 is slow
    room.give_back(1, SLOW_SECONDS)
    room.give_back(0, 2 * SLOW_SECONDS)
    assert room.take(0, 8, 10.0) == 8 and room.free(8, 10.0) == 8  # it is not waited for any more
    assert room.take(1, 8, 10.0) == 8
    room.give_back(0, 10.0)
    room.give_back(1, 10.0)
    assert room.take(0, 8, 11.0) == 8 and room.free(8, 11.0) == 0  # it was quick
