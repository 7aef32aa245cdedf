"""The ports of a job: who listens there, and the greetings of all who connect."""

import contextlib
import dataclasses
import errno
import ipaddress
import logging
import select
import socket
import time
from collections.abc import Callable, Iterable

from distflow_jax.parsing.addresses import Address

GREETING_SECONDS = 10.0  # after which a connection without a whole greeting is closed
MOST_WAITING = 256  # connections without a whole greeting; beyond it the oldest ones are closed
ACCEPTED_AT_ONCE = 64  # between two looks at the greetings that have arrived
LOOK_SECONDS = 0.2  # that a call waits
RELEASE_SECONDS = 10.0  # for an earlier run's process 0 to release the address
TRY_SECONDS = 0.25  # between two attempts to listen

log = logging.getLogger("distflow_jax")


@dataclasses.dataclass
class Arrival:
    """A connection, which does not block, and its greeting; whoever takes it closes it."""

    connection: socket.socket
    peer: Address
    opening: bytes  # what was sent to it
    deadline: float
    greeting: bytes = b""


class Handshakes:
    """Accepts connections and reads their greetings side by side, of `size` bytes each.

    A port that is open to a network is also open to port scanners, to processes of an earlier job
    and to connections that never send a byte. None of them delays the processes of the job.
    `opening` makes the bytes that are sent to each connection first, at most a few hundred.
    """

    def __init__(
        self, listener: socket.socket, size: int, opening: Callable[[], bytes] = lambda: b""
    ):
        self._listener, self._size, self._opening = listener, size, opening
        listener.setblocking(False)
        self._waiting: dict[socket.socket, Arrival] = {}  # the oldest first

    def read(
        self, seconds: float = LOOK_SECONDS, members: Iterable[socket.socket] = ()
    ) -> list[Arrival]:
        """Arrivals whose greetings are complete, perhaps none after at most `seconds`, or as soon
        as one of `members` hangs up."""
        poll = select.poll()
        for source in (self._listener, *self._waiting):
            poll.register(source, select.POLLIN)
        for member in members:  # what it sends wakes nobody
            poll.register(member, getattr(select, "POLLRDHUP", select.POLLHUP))
        poll.poll(1000 * seconds)
        complete = []
        for arrival in tuple(self._waiting.values()):
            data = arrived(arrival.connection, self._size - len(arrival.greeting))
            arrival.greeting += data or b""
            if len(arrival.greeting) == self._size:
                complete.append(self._waiting.pop(arrival.connection))
            elif data == b"" or arrival.deadline < time.monotonic():
                self._drop(arrival)
        self._accept()
        for arrival in tuple(self._waiting.values())[:-MOST_WAITING]:
            self._drop(arrival)
        return complete

    def close(self) -> None:
        """Closes the listener and all connections that have not been returned."""
        for arrival in tuple(self._waiting.values()):
            self._drop(arrival)
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, peer = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:  # gone while it waited in the kernel's queue
                continue
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._waiting:
                    raise
                return self._drop(next(iter(self._waiting.values())))
            connection.setblocking(False)
            opening, deadline = self._opening(), time.monotonic() + GREETING_SECONDS
            arrival = Arrival(connection, Address(*peer[:2]), opening, deadline)
            self._waiting[connection] = arrival
            with contextlib.suppress(OSError):  # it has ended, which reading finds
                connection.send(opening)

    def _drop(self, arrival: Arrival) -> None:
        del self._waiting[arrival.connection]
        arrival.connection.close()


def arrived(connection: socket.socket, most: int) -> bytes | None:
    """Bytes that have arrived; None: there are none now, b"": the connection has ended."""
    try:
        return connection.recv(most)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def open_listener(coordinator: str) -> socket.socket:
    """Process 0's listening socket, on the interface of the coordinator's address.

    Raises ValueError if another process has the address.
    """
    host, port = Address.parse(coordinator)
    deadline = time.monotonic() + RELEASE_SECONDS
    while True:
        try:
            family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(place[:2], family=family)
            break
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:  # forwarded to this host
                log.warning(f"{host} is no address of this host; listening on all of them")
                host = "0.0.0.0"
            elif error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                raise ValueError(
                    f"process 0 cannot listen on {coordinator} ({error.strerror}): end the process "
                    "that has this port, perhaps process 0 of the same job, or choose another"
                ) from error
        time.sleep(TRY_SECONDS)
    own = listener.getsockname()[0]
    if ipaddress.ip_address(own).is_loopback and host not in (own, "localhost"):
        log.warning(
            f"{host} is {own} on this host: no process on another host can reach it; name the job "
            "by an address of the network"
        )
    return listener
