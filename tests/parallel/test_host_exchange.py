"""Messages of any size reach whom they are for, among threads that stand for processes."""

import concurrent.futures
import socket
import threading

import numpy as np
import pytest

from distflow_jax.parallel.host_exchange import HostExchange, Traffic, listen

TOKEN = bytes(range(16))


def job(count):
    listeners = [listen("127.0.0.1") for _ in range(count)]
    addresses = [("127.0.0.1", listener.getsockname()[1]) for listener in listeners]
    return [HostExchange(i, addresses, listener, TOKEN) for i, listener in enumerate(listeners)]


@pytest.fixture
def together():
    """together(count, f): the results of f(index, exchange), run side by side."""
    open_exchanges = []

    def run(count, function):
        members = job(count)
        open_exchanges.extend(members)
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(function, i, exchange) for i, exchange in enumerate(members)]
            return [future.result(timeout=60) for future in futures]

    yield run
    for exchange in open_exchanges:
        exchange.close()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_everyone_gets_everything_in_order(together, count):
    def gather(index, exchange):
        first = exchange.all_gather(bytes([index]) * (3 * index))
        return first, exchange.all_gather(b"again %d" % index)

    for first, second in together(count, gather):
        assert first == [bytes([i]) * (3 * i) for i in range(count)]
        assert second == [b"again %d" % i for i in range(count)]


def test_large_messages_cross_without_waiting_for_each_other(together):
    """Larger than any socket's buffer, in both directions at once, several times."""
    rng = np.random.default_rng(0)
    count = 4
    for most in (0, 10, 5_000_000):
        sizes = rng.integers(0, most + 1, (count, count))
        present = rng.random((count, count)) < 0.7
        blobs = {(p, q): rng.bytes(sizes[p, q]) for p, q in zip(*np.nonzero(present), strict=True)}

        def swap(me, exchange, blobs=blobs):
            mine = {q: blob for (p, q), blob in blobs.items() if p == me}
            sources = {p for p, q in blobs if q == me}
            return exchange.exchange(mine, sources)

        for me, (came, traffic) in enumerate(together(count, swap)):
            assert came == {p: blob for (p, q), blob in blobs.items() if q == me}
            others = [blob for (p, q), blob in blobs.items() if q == me and p != me]
            assert traffic.payload == sum(map(len, others))
            assert traffic.padding == 8 * len(others)


def test_who_has_nothing_to_say_opens_no_connection(together):
    def swap(me, exchange):
        came, traffic = exchange.exchange({1: b"x"} if me == 0 else {}, {0} if me == 1 else ())
        return came, traffic, len(exchange._sockets)

    first, second, third = together(3, swap)
    assert second[0] == {0: b"x"} and second[2] == 1
    assert third == ({}, Traffic(), 0) and first[2] == 1


def test_strangers_are_hung_up_on(together):
    def swap(me, exchange):
        if me == 1:
            for hello in (b"", b"GET / HTTP/1.1\r\n\r\n and so on", bytes(20)):
                with socket.create_connection(exchange._addresses[1]) as stranger:
                    stranger.sendall(hello)
        barrier.wait()
        return exchange.exchange({1 - me: b"hello %d" % me}, {1 - me})[0]

    barrier = threading.Barrier(2)
    assert together(2, swap) == [{1: b"hello 1"}, {0: b"hello 0"}]


def test_a_process_that_goes_is_named(together):
    def swap(me, exchange):
        exchange.exchange({1 - me: b"first"}, {1 - me})
        if me == 1:
            exchange.close()
            return None
        with pytest.raises(ConnectionError, match="process 1 has ended"):
            while True:
                exchange.exchange({1: b"second"}, {1})
        return True

    assert together(2, swap) == [True, None]


def test_a_host_that_cannot_be_reached_is_named():
    with listen("127.0.0.1") as closed:
        address = closed.getsockname()[:2]
    exchange = HostExchange(0, [("127.0.0.1", 1), address], listen("127.0.0.1"), TOKEN)
    with pytest.raises(ConnectionError, match="process 1 cannot be reached at 127.0.0.1:"):
        exchange.all_gather(b"")
    exchange.close()
