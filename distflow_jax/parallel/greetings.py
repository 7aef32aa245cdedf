"""Connections whose first bytes decide whether they are kept, read side by side.

A port that is open to a network is also open to port scanners, to processes of an earlier job and
to connections that never send a byte. None of them may delay the processes of the job.
"""

import errno
import selectors
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

GREETING_SECONDS = 10.0  # after which a connection without a whole greeting is closed
MOST_WAITING = 256  # connections without a whole greeting; beyond it the oldest ones are closed
ACCEPTED_AT_ONCE = 64  # between two looks at the greetings that have arrived


class Guest(NamedTuple):
    """A connection with its greeting; whoever takes it closes it."""

    connection: socket.socket  # does not block
    opening: bytes  # the bytes that it was sent first
    greeting: bytes


class _Arrival:
    def __init__(self, connection: socket.socket, opening: bytes):
        self.connection, self.opening = connection, opening
        self.greeting = b""
        self.deadline = time.monotonic() + GREETING_SECONDS


class Greetings:
    """Accepts connections on a listening socket and reads their greetings, of `size` bytes each.

    `opening` makes the bytes that are sent to each connection first, at most a few hundred.
    """

    def __init__(
        self, listener: socket.socket, size: int, opening: Callable[[], bytes] = lambda: b""
    ):
        self._listener, self._size, self._opening = listener, size, opening
        listener.setblocking(False)
        self._arrivals: dict[socket.socket, _Arrival] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def read(self, seconds: float | None = None) -> list[Guest]:
        """Connections whose greetings are complete; waits for at most `seconds`, None: no bound.

        May return none before that time.
        """
        now = time.monotonic()
        waits = [] if seconds is None else [seconds]
        if self._arrivals:
            waits.append(next(iter(self._arrivals.values())).deadline - now)
        ready = self._selector.select(max(0.0, min(waits)) if waits else None)
        arrived = [self._arrivals[key.fileobj] for key, _ in ready if key.fileobj in self._arrivals]
        if any(key.fileobj is self._listener for key, _ in ready):
            arrived += self._accept()
        # one of them may have been dropped for want of descriptors
        arrived = [arrival for arrival in arrived if arrival.connection in self._arrivals]
        guests = [guest for arrival in arrived if (guest := self._read(arrival))]
        self._drop_late()
        return guests

    def heed(self, connection: socket.socket) -> None:
        """From now on `read` returns early when there is something to read on a connection."""
        self._selector.register(connection, selectors.EVENT_READ)

    def ignore(self, connection: socket.socket) -> None:
        """Undoes `heed`; call it before the connection is closed."""
        self._selector.unregister(connection)

    def close(self) -> None:
        """Closes the listener and all connections that have not been returned."""
        self._selector.close()
        for connection in (*self._arrivals, self._listener):
            connection.close()
        self._arrivals.clear()

    def _accept(self) -> list[_Arrival]:
        accepted = []
        while len(accepted) < ACCEPTED_AT_ONCE:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                break
            except ConnectionAbortedError:  # gone while it waited in the kernel's queue
                continue
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._arrivals:
                    raise
                self._drop(next(iter(self._arrivals.values())))
                break
            connection.setblocking(False)
            arrival = _Arrival(connection, self._opening())
            self._arrivals[connection] = arrival
            self._selector.register(connection, selectors.EVENT_READ)
            try:
                connection.send(arrival.opening)
            except OSError:
                self._drop(arrival)
                continue
            accepted.append(arrival)
        return accepted

    def _read(self, arrival: _Arrival) -> Guest | None:
        """Reads what has arrived; the guest if that completes its greeting."""
        try:
            data = arrival.connection.recv(self._size - len(arrival.greeting))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        arrival.greeting += data
        if not data:
            self._drop(arrival)
        if not data or len(arrival.greeting) < self._size:
            return None
        self._forget(arrival)
        return Guest(arrival.connection, arrival.opening, arrival.greeting)

    def _drop_late(self) -> None:
        now = time.monotonic()
        while self._arrivals:
            oldest = next(iter(self._arrivals.values()))
            if oldest.deadline > now and len(self._arrivals) <= MOST_WAITING:
                return
            self._drop(oldest)

    def _drop(self, arrival: _Arrival) -> None:
        self._forget(arrival)
        arrival.connection.close()

    def _forget(self, arrival: _Arrival) -> None:
        self._selector.unregister(arrival.connection)
        del self._arrivals[arrival.connection]
