"""Numbers reach all processes, whoever raises them."""

import threading

import pytest
from support.gathers import exchanges, together
from support.waiting import HANG

from distflow_jax.cluster.peers import Peers


class Process:
    """The peers of one process; `until` waits for what they hear."""

    def __init__(self, exchange, index, count):
        self.news = threading.Condition()
        self.peers = Peers(exchange, index, count, self.heard)

    def heard(self):
        with self.news:
            self.news.notify_all()

    def until(self, what):
        with self.news:
            assert self.news.wait_for(what, HANG)


def started(count):
    """Processes as threads, with real connections."""
    ends = exchanges(count)
    return together(count, lambda index: Process(ends[index], index, count))


@pytest.mark.parametrize("count", [2, 3, 7])
def test_a_number_reaches_all_processes(count):
    processes = started(count)
    for index, process in enumerate(processes):
        process.peers.raise_to(3, index + 5)
        for other in processes:
            other.until(lambda peers=other.peers, n=index + 5: peers.seen(3) >= n)
    processes[0].peers.raise_to(3, 2)  # lower: nothing
    assert [process.peers.seen(3) for process in processes] == [count + 4] * count
    assert [process.peers.seen(2) for process in processes] == [0] * count
    for process in processes:
        process.peers.close()


def test_all_raise_at_once_and_the_highest_number_is_everywhere():
    processes = started(5)
    threads = [
        threading.Thread(target=process.peers.raise_to, args=(0, 100 + index))
        for index, process in enumerate(processes)
    ]
    for thread in threads:
        thread.start()
    for process in processes:
        process.until(lambda peers=process.peers: peers.seen(0) == 104)
    for process in processes:
        process.peers.close()


def test_a_peer_that_ends_is_named():
    first, second = started(2)
    second.peers.close()
    with first.news:
        first.news.wait_for(lambda: first.peers._error is not None, HANG)
    with pytest.raises(ConnectionError, match="process 1 has ended"):
        first.peers.check()
    first.peers.close()


def test_one_process_hears_itself():
    peers = Peers(None, 0, 1, lambda: None)
    peers.raise_to(0, 4)
    assert peers.seen(0) == 4
    peers.check()
    peers.close()
