"""One server connection: received and pending bytes. It never blocks."""

import contextlib
import socket
import ssl
import time
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any

from distflow_jax.stream.wire.byte_stream import PIECE_BYTES, prepare
from distflow_jax.stream.wire.calls import Bytes
from distflow_jax.stream.wire.session import Stranger

READ_BYTES = 1 << 20  # at a time, so that others have their turn
_READS = 2  # a head and the bytes of its frame
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
Answer = tuple[bytes, bytes]  # head, bytes
# yields a number of bytes, and is sent these; or a call that runs, and is sent its result
Conversation = Generator[int | Future[Any], Any, None]


class Connection:
    """A connection whose protocol advances as bytes arrive.

    Attributes:
      host: of the other side.
      until: time at which it ends if its protocol has not advanced.
      runs: the call that its protocol waits for.
      kept: bytes of that call's frame, until it begins.
      leaves: whether it ends once all pending bytes are sent.
      stuck: time since which pending bytes could not be sent; None: all are sent.
      events: of a selector that it waits for.
    """

    def __init__(self, connection: socket.socket, host: str, tls: ssl.SSLContext | None):
        prepare(connection)
        connection.setblocking(False)
        if tls is not None:
            handshake = {"server_side": True, "do_handshake_on_connect": False}
            connection = tls.wrap_socket(connection, **handshake)  # with the first bytes
        self.socket, self.host, self.until = connection, host, 0.0
        self.leaves, self.events = False, 0
        self.runs: Future[Any] | None = None
        self.kept: Bytes = b""
        self.stuck: float | None = None
        self._conversation: Conversation | None = None
        self._wanted, self._come = 0, bytearray()
        self._says: list[memoryview] = []

    def begin(self, conversation: Conversation) -> None:
        """Begins a conversation."""
        self._conversation = conversation
        self._take(next(conversation))

    def say(self, *parts: bytes) -> None:
        """Has bytes go."""
        if sum(map(len, parts)) <= PIECE_BYTES:
            parts = (b"".join(parts),)
        self._says += [memoryview(part) for part in parts if part]

    def go_on(self) -> bool:
        """Does what can be done now, up to the answer of one frame. Whether there may be more that
        a selector does not see. Raises what ends the connection."""
        for _ in range(_READS):
            if not self._flush() or self.runs is not None:
                return False
            data = self._read()
            if data is None:
                self._flush()
                return self._has_pending()
            self._take(self._conversation.send(data))
        self._flush()
        return self._has_pending() or not self._wanted

    def answer(self) -> None:
        """Goes on with the result of the call that has run."""
        run, self.runs = self.runs, None
        self._take(self._conversation.send(run.result()))

    def is_gone(self) -> bool:
        """Whether the other side has left, while a call runs for it."""
        try:
            return not socket.socket.recv(self.socket, 1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Ends the connection."""
        if self.runs is not None:
            self.runs.cancel()
        self.kept = b""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self._conversation = None

    def _take(self, wanted: int | Future[Any]) -> None:
        if isinstance(wanted, int):
            self._wanted = wanted
        else:
            self.runs = wanted

    # -- bytes ------------------------------------------------------------------------------------

    def _flush(self) -> bool:
        """Sends what can be sent now; whether nothing is left. OSError once all is said."""
        while self._says:
            try:
                sent = self.socket.send(self._says[0])
            except _NOT_NOW:
                self.stuck = self.stuck or time.monotonic()
                return False
            self._says[0] = self._says[0][sent:]
            if not self._says[0]:
                del self._says[0]
        self.stuck = None
        if self.leaves:
            raise ConnectionAbortedError("all is said")
        return True

    def _read(self) -> Bytes | None:
        """The bytes that are wanted, once they have come."""
        left = READ_BYTES
        while len(self._come) < self._wanted:
            data = self._receive(min(left, self._wanted - len(self._come))) if left else None
            if data is None:
                return None
            if len(data) == self._wanted:
                return data
            self._come += data
            left -= len(data)
        come, self._come = self._come, bytearray()
        return come

    def _receive(self, most: int) -> bytes | None:
        """Bytes that have come; None if there are none now. Stranger if they are not of TLS."""
        try:
            data = self.socket.recv(most)
        except _NOT_NOW:
            return None
        except ssl.SSLError as error:
            if self.socket.version() is not None:
                raise
            raise Stranger(f"its connection is not encrypted by TLS ({error.reason})") from None
        if not data:
            raise ConnectionResetError("the other side has ended the connection")
        return data

    def _has_pending(self) -> bool:
        """Whether bytes have been decrypted that nothing has read."""
        return isinstance(self.socket, ssl.SSLSocket) and self.socket.pending() > 0
