"""One connection of a door: bytes that have come, and bytes that have to go. It never waits."""

import contextlib
import socket
import ssl
import time
from collections.abc import Generator
from concurrent.futures import Future

from distflow_jax.flow.wire.session import Stranger
from distflow_jax.flow.wire.stream import PIECE_BYTES, prepare

READ_BYTES = 1 << 20  # at a time, so that others have their turn
Answer = tuple[bytes, bytes]  # head, bytes
# yields a number of bytes, and is sent these; or a call that runs, and is sent its answer
Conversation = Generator[int | Future[Answer], bytes | Answer, None]


class Guest:
    """A connection whose conversation goes on as its bytes come.

    Attributes:
      host: of the other side.
      until: moment at which it ends if its conversation has not gone on.
      runs: the call that its conversation waits for.
      leaves: whether it ends once all that was said has gone.
      stuck: since when something that was said has not gone; None: all of it has.
      events: of a selector that it waits for.
    """

    def __init__(self, connection: socket.socket, host: str, tls: ssl.SSLContext | None):
        prepare(connection)
        connection.setblocking(False)
        self.socket = connection
        if tls is not None:
            self.socket = tls.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        self.host, self.until, self.leaves = host, 0.0, False
        self.runs: Future[Answer] | None = None
        self.stuck: float | None = None
        self.events = 0
        self._has_shaken = tls is None
        self._conversation: Conversation | None = None
        self._wanted, self._come, self._goes = 0, [], []

    def begin(self, conversation: Conversation) -> None:
        """Begins a conversation."""
        self._conversation = conversation
        self._take(next(conversation))

    def say(self, *parts: bytes) -> None:
        """Has bytes go."""
        if sum(map(len, parts)) <= PIECE_BYTES:
            parts = (b"".join(parts),)
        self._goes += [memoryview(part) for part in parts if part]

    def go_on(self) -> None:
        """Does all that can be done now. Raises what ends the connection."""
        while self._flush() and self.runs is None:
            if self.leaves:
                raise ConnectionAbortedError("all is said")
            if (data := self._read()) is None:
                return
            self._take(self._conversation.send(data))

    def answer(self) -> None:
        """Goes on with the answer of the call that has run."""
        run, self.runs = self.runs, None
        self._take(self._conversation.send(run.result()))

    def close(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self._conversation = None

    def _take(self, wanted: int | Future[Answer]) -> None:
        if isinstance(wanted, int):
            self._wanted = wanted
        else:
            self.runs = wanted

    def _flush(self) -> bool:
        """Sends what can be sent now; whether nothing is left."""
        while self._goes:
            try:
                sent = self.socket.send(self._goes[0])
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                if self.stuck is None:
                    self.stuck = time.monotonic()
                return False
            if sent == len(self._goes[0]):
                del self._goes[0]
            else:
                self._goes[0] = self._goes[0][sent:]
        self.stuck = None
        return True

    def _read(self) -> bytes | None:
        """The bytes that are wanted, once they have come."""
        try:
            if not self._has_shaken:
                self._shake()
            left = self._wanted - sum(map(len, self._come))
            while left:
                data = self.socket.recv(min(left, READ_BYTES))
                if not data:
                    raise ConnectionResetError("the other side has ended the connection")
                self._come.append(data)
                left -= len(data)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        come, self._come = self._come, []
        return come[0] if len(come) == 1 else b"".join(come)

    def _shake(self) -> None:
        """Goes on with the handshake of TLS."""
        try:
            self.socket.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, ssl.SSLEOFError):
            raise
        except ssl.SSLError as error:
            raise Stranger(f"its connection is not encrypted by TLS ({error.reason})") from None
        self._has_shaken = True
