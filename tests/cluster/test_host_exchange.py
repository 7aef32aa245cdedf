"""Messages of any size reach whom they are for, among threads that stand for processes."""

import contextlib
import resource
import socket
import struct
import threading

import numpy as np
import pytest
from support import gathers
from support.waiting import HANG

from distflow_jax.cluster import handshakes
from distflow_jax.cluster.host_exchange import MESSAGE_BYTES, HostExchange, Traffic, listen

TOKEN = bytes(range(16))


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Nobody is late, but where a test says so."""
    monkeypatch.setattr(handshakes, "GREETING_SECONDS", HANG)


@pytest.fixture
def together():
    """together(count, f): the results of f(index, exchange), run side by side."""
    open_exchanges = []

    def run(count, function):
        members = gathers.exchanges(count, TOKEN)
        open_exchanges.extend(members)
        return gathers.together(count, lambda i: function(i, members[i]))

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

        def weight_update(me, exchange, blobs=blobs):
            mine = {q: blob for (p, q), blob in blobs.items() if p == me}
            sources = {p for p, q in blobs if q == me}
            return exchange.exchange(mine, sources)

        for me, (came, traffic) in enumerate(together(count, weight_update)):
            assert came == {p: blob for (p, q), blob in blobs.items() if q == me}
            others = [blob for (p, q), blob in blobs.items() if q == me and p != me]
            assert traffic.payload == sum(map(len, others))
            assert traffic.padding == 8 * len(others)


def test_who_has_nothing_to_say_opens_no_connection(together):
    def weight_update(me, exchange):
        came, traffic = exchange.exchange({1: b"x"} if me == 0 else {}, {0} if me == 1 else ())
        return came, traffic, len(exchange._sockets)

    first, second, third = together(3, weight_update)
    assert second[0] == {0: b"x"} and second[2] == 1
    assert third == ({}, Traffic(), 0) and first[2] == 1


def test_strangers_are_hung_up_on(together):
    def weight_update(me, exchange):
        if me == 1:
            for hello in (b"", b"GET / HTTP/1.1\r\n\r\n and so on", bytes(20)):
                with socket.create_connection(exchange._addresses[1]) as stranger:
                    stranger.sendall(hello)
        barrier.wait()
        return exchange.exchange({1 - me: b"hello %d" % me}, {1 - me})[0]

    barrier = threading.Barrier(2)
    assert together(2, weight_update) == [{1: b"hello 1"}, {0: b"hello 0"}]


@pytest.fixture
def many_files():
    """Lets this process open several thousand files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("silent", [3, 1025])
def test_silent_strangers_delay_nobody(together, many_files, silent):
    """As many as the queue of a listener holds, and one more; none is waited for."""

    def weight_update(me, exchange):
        with contextlib.ExitStack() as strangers:
            if me == 1:
                for _ in range(silent):
                    stranger = strangers.enter_context(socket.socket())
                    stranger.setblocking(False)
                    stranger.connect_ex(exchange._addresses[1])
                    strangers.callback(stranger.close)
            barrier.wait()
            return exchange.exchange({1 - me: b"hello %d" % me}, {1 - me})[0]

    barrier = threading.Barrier(2)
    assert together(2, weight_update) == [{1: b"hello 1"}, {0: b"hello 0"}]


@pytest.fixture
def arrivals():
    """(Handshakes of 4 bytes, connect(): a connection to them)."""
    listener = listen("127.0.0.1")
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(
            contextlib.closing(handshakes.Handshakes(listener, 4, lambda: b"who?"))
        )
        address = listener.getsockname()
        yield reader, lambda: stack.enter_context(socket.create_connection(address, timeout=HANG))


def test_a_greeting_may_come_in_pieces(arrivals):
    reader, connect = arrivals
    slow, quick = connect(), connect()
    for byte in (b"a", b"b", b"c"):
        slow.sendall(byte)
        assert reader.read(0.05) == []
    quick.sendall(b"quick, and a message")
    (first,) = collect(reader, 1)
    assert (first.opening, first.greeting) == (b"who?", b"quic") and quick.recv(9) == b"who?"
    slow.sendall(b"d")
    (second,) = collect(reader, 1)
    assert second.greeting == b"abcd"
    for arrival in (first, second):
        arrival.connection.close()


def collect(reader, count):
    found = []
    while len(found) < count:
        found += reader.read(HANG)
    return found


def test_silent_connections_are_bounded_in_number(arrivals, monkeypatch):
    reader, connect = arrivals
    monkeypatch.setattr(handshakes, "MOST_WAITING", 5)
    silent = [connect() for _ in range(8)]
    while not all(map(closed, silent[:3])):
        assert reader.read(0.05) == []
    assert not any(map(closed, silent[3:]))


def test_silent_connections_are_bounded_in_time(arrivals, monkeypatch):
    reader, connect = arrivals
    monkeypatch.setattr(handshakes, "GREETING_SECONDS", 0.1)
    silent = [connect(), connect()]
    silent[1].sendall(b"abc")
    while not all(map(closed, silent)):
        assert reader.read(0.05) == []


def closed(connection):
    """Whether the other side has closed it; the opening may have come before."""
    connection.settimeout(0.05)
    try:
        while connection.recv(100):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def test_a_place_that_is_taken_or_of_a_higher_process_is_refused():
    exchange = gathers.exchanges(3, TOKEN)[2]
    with contextlib.ExitStack() as stack:
        connections = []
        for index in (2, 7, 0, 0, 1):
            connection = socket.create_connection(exchange._addresses[2])
            stack.enter_context(connection).sendall(struct.pack("<I16sQ", index, TOKEN, 0))
            connections.append(connection)
        assert exchange.exchange({}, {0, 1})[0] == {0: b"", 1: b""}
        assert list(map(closed, connections)) == [True, True, False, True, False]
    exchange.close()


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (struct.pack("<Q", 1 << 62), f"announced a message of {1 << 62} bytes, above"),
        (struct.pack("<QQ", 8, 5), "sent 8 bytes that announce 13"),
        (struct.pack("<QI", 4, 5), "sent 4 bytes that announce 8"),
        (struct.pack("<Q", 0), "the data of 0 processes instead of 1"),
        (struct.pack("<QQQ", 16, 0, 0), "the data of 2 processes instead of 1"),
    ],
)
def test_a_message_holds_what_it_announces(sent, words):
    exchange = gathers.exchanges(2, TOKEN)[1]
    with socket.create_connection(exchange._addresses[1]) as peer:
        peer.sendall(struct.pack("<I16s", 0, TOKEN) + sent)
        with pytest.raises(ConnectionError, match=f"^process 0 .*{words}"):
            exchange.all_gather(b"")
    exchange.close()


def test_memory_follows_what_has_arrived_and_not_what_was_announced():
    exchange = gathers.exchanges(2, TOKEN)[1]
    with socket.create_connection(exchange._addresses[1]) as peer:
        peer.sendall(struct.pack("<I16sQ", 0, TOKEN, MESSAGE_BYTES) + bytes(1000))
        peer.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError, match="process 0 has ended"):
            exchange.exchange({}, {0})
    exchange.close()


def test_a_process_that_goes_is_named(together):
    def weight_update(me, exchange):
        exchange.exchange({1 - me: b"first"}, {1 - me})
        if me == 1:
            exchange.close()
            return None
        with pytest.raises(ConnectionError, match="process 1 has ended"):
            while True:
                exchange.exchange({1: b"second"}, {1})
        return True

    assert together(2, weight_update) == [True, None]


def test_a_host_that_cannot_be_reached_is_named():
    with listen("127.0.0.1") as closed:
        address = closed.getsockname()[:2]
    exchange = HostExchange(0, [("127.0.0.1", 1), address], listen("127.0.0.1"), TOKEN)
    with pytest.raises(ConnectionError, match="process 1 cannot be reached at 127.0.0.1:"):
        exchange.all_gather(b"")
    exchange.close()
