"""Prefetching changes when items are made, and nothing else."""

import threading

import pytest
from support.waiting import HANG

from distflow_jax.data.prefetch import Prefetch


@pytest.mark.parametrize("enabled", [True, False])
def test_items_come_in_order_and_end(enabled):
    with Prefetch(iter(range(5)), enabled=enabled) as items:
        assert list(items) == [0, 1, 2, 3, 4]
        assert list(items) == []


def test_one_item_is_made_ahead_in_another_thread():
    made = []
    third = threading.Event()

    def source():
        for i in range(10):
            made.append((i, threading.current_thread()))
            if i == 2:
                third.set()
            yield i

    with Prefetch(source()) as items:
        assert [next(items), next(items)] == [0, 1]
        assert third.wait(HANG)
    assert [i for i, _ in made] == [0, 1, 2]
    assert {thread for _, thread in made} != {threading.current_thread()}


@pytest.mark.parametrize("enabled", [True, False])
def test_an_error_is_raised_where_its_item_was_due(enabled):
    def source():
        yield 0
        raise OSError("disk gone")

    with Prefetch(source(), enabled=enabled) as items:
        assert next(items) == 0
        with pytest.raises(OSError, match="disk gone"):
            next(items)


def test_close_joins_the_thread():
    before = set(threading.enumerate())
    items = Prefetch(iter(range(3)))
    next(items)
    items.close()
    items.close()
    assert set(threading.enumerate()) <= before
