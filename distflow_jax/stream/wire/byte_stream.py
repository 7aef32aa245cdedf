"""One client connection: bytes sent and received before a deadline."""

import contextlib
import select
import socket
import ssl
import time

from distflow_jax.stream.wire.calls import Bytes

PIECE_BYTES = 1 << 16  # that are sent in one go with their head
# a host that has failed closes nothing: it is asked after so many idle seconds, so often
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPALIVE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


class ByteStream:
    """A connected socket, used by one thread at a time; any thread may end it.

    Reading and writing raise TimeoutError at the deadline `end` of time.monotonic(), and another
    OSError if the connection ends before.
    """

    def __init__(self, connection: socket.socket):
        self._socket, self._ended = connection, False
        prepare(connection)

    def encrypt(self, tls: ssl.SSLContext, host: str, end: float) -> None:
        """Makes it TLS; `host`: of the server, that its certificate has to be for."""
        self._socket.settimeout(_left(end))
        self._socket = tls.wrap_socket(
            self._socket, server_hostname=host, do_handshake_on_connect=False
        )
        if self._ended:  # meanwhile, when it was another socket
            raise ConnectionAbortedError("this process has ended the connection")
        self._socket.do_handshake()

    def read(self, count: int, end: float) -> Bytes:
        """So many bytes."""
        data, at = bytearray(count), 0
        view = memoryview(data)
        while at < count:
            self._socket.settimeout(_left(end))
            if not (more := self._socket.recv_into(view[at:])):
                raise ConnectionResetError("the other side has ended the connection")
            at += more
        view.release()
        return data

    def write(self, head: bytes, payload: bytes, end: float) -> None:
        """Sends both."""
        if len(payload) <= PIECE_BYTES:
            self._send(head + payload, end)
        else:
            self._send(head, end)
            self._send(payload, end)

    def is_quiet(self) -> bool:
        """Whether nothing has come that was not read, such as the connection's end."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def end(self) -> None:
        """Ends the connection, from any thread: the one that uses it gets an OSError."""
        self._ended = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection and frees its number; for the thread that uses it."""
        self.end()
        with contextlib.suppress(OSError):
            self._socket.close()

    def _send(self, data: bytes, end: float) -> None:
        view, at = memoryview(data), 0
        while at < len(data):
            self._socket.settimeout(_left(end))
            at += self._socket.send(view[at:])


def prepare(connection: socket.socket) -> None:
    """Sets a connection's options. OSError if it has ended."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _left(end: float) -> float:
    """Seconds until a moment, for a socket: 0 would mean not to wait at all."""
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time is over")
    return left
