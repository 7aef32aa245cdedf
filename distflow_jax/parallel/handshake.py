"""Connections whose first bytes decide whether they are kept, read side by side.

A port that is open to a network is also open to port scanners, to processes of an earlier job and
to connections that never send a byte. None of them may delay the processes of the job.
"""

import dataclasses
import errno
import selectors
import socket
import time
from collections.abc import Callable

GREETING_SECONDS = 10.0  # after which a connection without a whole greeting is closed
MOST_WAITING = 256  # connections without a whole greeting; beyond it the oldest ones are closed
ACCEPTED_AT_ONCE = 64  # between two looks at the greetings that have arrived


@dataclasses.dataclass(eq=False)
class Arrival:
    """A connection and its greeting; whoever takes it from `Handshakes.read` closes it."""

    connection: socket.socket  # does not block
    peer: tuple  # the address of the other side
    opening: bytes  # the bytes that it was sent first
    deadline: float
    greeting: bytes = b""


class Handshakes:
    """Accepts connections on a listening socket and reads their greetings, of `size` bytes each.

    `opening` makes the bytes that are sent to each connection first, at most a few hundred.
    """

    def __init__(
        self, listener: socket.socket, size: int, opening: Callable[[], bytes] = lambda: b""
    ):
        self._listener, self._size, self._opening = listener, size, opening
        listener.setblocking(False)
        self._waiting: dict[Arrival, None] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def read(self, seconds: float | None = None) -> list[Arrival]:
        """Arrivals whose greetings are complete; waits for at most `seconds`, None: no bound.

        May return none before that time.
        """
        waits = [] if seconds is None else [seconds]
        waits += [arrival.deadline - time.monotonic() for arrival in [*self._waiting][:1]]
        ready = self._selector.select(max(0.0, min(waits)) if waits else None)
        arrived = [key.data for key, _ in ready if key.data is not None]
        if len(arrived) < len(ready):
            arrived += self._accept()
        # one of them may have been dropped for want of descriptors
        complete = [one for one in arrived if one in self._waiting and self._is_complete(one)]
        for oldest in tuple(self._waiting):
            if oldest.deadline > time.monotonic() and len(self._waiting) <= MOST_WAITING:
                break
            self._drop(oldest)
        return complete

    def close(self) -> None:
        """Closes the listener and all connections that have not been returned."""
        for arrival in tuple(self._waiting):
            self._drop(arrival)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> list[Arrival]:
        accepted: list[Arrival] = []
        while len(accepted) < ACCEPTED_AT_ONCE:
            try:
                connection, peer = self._listener.accept()
            except BlockingIOError:
                break
            except ConnectionAbortedError:  # gone while it waited in the kernel's queue
                continue
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._waiting:
                    raise
                self._drop(next(iter(self._waiting)))
                break
            connection.setblocking(False)
            deadline = time.monotonic() + GREETING_SECONDS
            arrival = Arrival(connection, peer, self._opening(), deadline)
            self._waiting[arrival] = None
            self._selector.register(connection, selectors.EVENT_READ, arrival)
            try:
                connection.send(arrival.opening)
                accepted.append(arrival)
            except OSError:
                self._drop(arrival)
        return accepted

    def _is_complete(self, arrival: Arrival) -> bool:
        """Reads what has arrived; drops a connection that has ended."""
        try:
            data = arrival.connection.recv(self._size - len(arrival.greeting))
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        arrival.greeting += data
        if not data:
            self._drop(arrival)
        elif len(arrival.greeting) == self._size:
            self._forget(arrival)
            return True
        return False

    def _drop(self, arrival: Arrival) -> None:
        self._forget(arrival)
        arrival.connection.close()

    def _forget(self, arrival: Arrival) -> None:
        self._selector.unregister(arrival.connection)
        del self._waiting[arrival]
