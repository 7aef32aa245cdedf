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
RAW_BYTES = 1 << 16  # of TLS, at a time
MOST_RAW_BYTES = 1 << 16  # of TLS, from a caller that has not proved the token
WRITE_BYTES = 1 << 18  # that are encrypted at a time
_READS = 2  # a head and the bytes of its frame
Answer = tuple[bytes, bytes]  # head, bytes
# yields a number of bytes, and is sent these; or a call that runs, and is sent its result
Conversation = Generator[int | Future[Any], Any, None]


class Connection:
    """A connection whose protocol advances as bytes arrive.

    Attributes:
      host: of the other side.
      until: time at which it ends if its protocol has not advanced.
      is_stranger: whether it has not proved the token.
      runs: the call that its protocol waits for.
      kept: bytes of that call's frame, until it begins.
      leaves: whether it ends once all pending bytes are sent.
      stuck: time since which pending bytes could not be sent; None: all are sent.
      events: of a selector that it waits for.
    """

    def __init__(self, connection: socket.socket, host: str, tls: ssl.SSLContext | None):
        prepare(connection)
        connection.setblocking(False)
        self.socket, self.host, self.until = connection, host, 0.0
        self.is_stranger, self.leaves, self.events = True, False, 0
        self.runs: Future[Any] | None = None
        self.kept: Bytes = b""
        self.stuck: float | None = None
        self._tls = None if tls is None else _Tls(tls)
        self._conversation: Conversation | None = None
        self._wanted, self._come = 0, bytearray()
        self._says: list[memoryview] = []
        self._raw = memoryview(b"")  # of what is said, encrypted

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
            before = len(self._come)
            data = self._read()
            if data is None:
                self._flush()
                return self._tls is not None and len(self._come) > before
            self._take(self._conversation.send(data))
        self._flush()
        return self._tls is not None or not self._wanted

    def answer(self) -> None:
        """Goes on with the result of the call that has run."""
        run, self.runs = self.runs, None
        self._take(self._conversation.send(run.result()))

    def is_gone(self) -> bool:
        """Whether the other side has left, while a call runs for it."""
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
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
        while piece := self._next_piece():
            try:
                sent = self.socket.send(piece)
            except BlockingIOError:
                self.stuck = self.stuck or time.monotonic()
                return False
            if self._tls is not None:
                self._raw = piece[sent:]
            elif sent < len(piece):
                self._says[0] = piece[sent:]
            else:
                del self._says[0]
        self.stuck = None
        if self.leaves:
            raise ConnectionAbortedError("all is said")
        return True

    def _next_piece(self) -> memoryview:
        """Bytes that go next, encrypted where the connection is."""
        if self._tls is None:
            return self._says[0] if self._says else self._raw
        if not self._raw:
            if self._says and self._tls.has_shaken:
                self._tls.encrypt(self._says[0][:WRITE_BYTES])
                self._says[0] = self._says[0][WRITE_BYTES:]
                if not self._says[0]:
                    del self._says[0]
            self._raw = memoryview(self._tls.goes())
        return self._raw

    def _read(self) -> Bytes | None:
        """The bytes that are wanted, once they have come."""
        left = self._wanted - len(self._come)
        data = b""
        if left:
            data = self._receive(min(left, READ_BYTES))
            if data is None:
                return None
        if len(data) == self._wanted:
            return data
        self._come += data
        if len(self._come) < self._wanted:
            return None
        come, self._come = self._come, bytearray()
        return come

    def _receive(self, most: int) -> bytes | None:
        """Bytes that have come; None if there are none now."""
        if self._tls is None:
            return self._raw_bytes(most)
        if data := self._tls.decrypted(most):
            return data
        if (raw := self._raw_bytes(RAW_BYTES)) is None:
            return None
        self._tls.comes(raw)
        if self.is_stranger and self._tls.num_come > MOST_RAW_BYTES:
            raise Stranger("it sends more than it takes to prove the token")
        return self._tls.decrypted(most)

    def _raw_bytes(self, most: int) -> bytes | None:
        try:
            data = self.socket.recv(most)
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionResetError("the other side has ended the connection")
        return data


class _Tls:
    """TLS of one connection, between bytes in memory.

    Attributes:
      has_shaken: whether the handshake is done.
      num_come: encrypted bytes that have come.
    """

    def __init__(self, context: ssl.SSLContext):
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.has_shaken, self.num_come = False, 0

    def comes(self, raw: bytes) -> None:
        """Takes encrypted bytes."""
        self.num_come += len(raw)
        self._incoming.write(raw)

    def goes(self) -> bytes:
        """Encrypted bytes that have to go."""
        return self._outgoing.read()

    def encrypt(self, data: memoryview) -> None:
        """Has bytes go."""
        self._object.write(data)

    def decrypted(self, most: int) -> bytes | None:
        """Bytes that have come; None if there are none yet. Stranger if they are not of TLS."""
        try:
            if not self.has_shaken:
                self._object.do_handshake()
                self.has_shaken = True
            data = self._object.read(most)
        except ssl.SSLWantReadError:
            return None
        except ssl.SSLZeroReturnError:
            data = b""
        except ssl.SSLError as error:
            if self.has_shaken:
                raise
            raise Stranger(f"its connection is not encrypted by TLS ({error.reason})") from None
        if not data:
            raise ConnectionResetError("the other side has ended the connection")
        return data
