"""Clients of the wire protocol."""

import contextlib
import socket
import threading
import time

from distflow_jax.parsing.one_line import one_line
from distflow_jax.parsing.token_proof import MAC_BYTES, derive_key
from distflow_jax.stream.wire.byte_stream import ByteStream
from distflow_jax.stream.wire.calls import (
    LIMIT_BYTES,
    TEXT_BYTES,
    TURNED_AWAY,
    WELCOME,
    Bytes,
    Refused,
    Unreachable,
    too_large,
)
from distflow_jax.stream.wire.session import (
    ANSWER_HEAD_BYTES,
    CHALLENGE,
    Head,
    Lane,
    Opening,
    Stranger,
)
from distflow_jax.stream.wire.tls import read_wire_tls


class WireClient:
    """Calls the methods of one server, from any number of threads.

    A connection has one frame in flight at a time; concurrent calls open further connections.

    Args:
      address: HOST:PORT of the server; ValueError if malformed.
      token: of the run.
      name: of this process, for the server's log.
      limit_bytes: maximum size of an answer.

    The environment may name authorities that verify the server's certificate (tls.py).

    Attributes:
      address: as given.
    """

    def __init__(self, address: str, token: bytes, name: str, *, limit_bytes: int = LIMIT_BYTES):
        self.address, self._key, self._name = address, derive_key("wire", token), name
        host, _, port = address.rpartition(":")
        if not (host and port.isascii() and port.isdigit() and int(port) < 65536):
            raise ValueError(f"an address must be HOST:PORT, got {address!r}")
        self._host, self._port = host.strip("[]"), int(port)
        self._limit, self._tls = limit_bytes, read_wire_tls().client
        self._lock = threading.Lock()
        self._idle: list[tuple[ByteStream, Lane]] = []
        self._busy: set[ByteStream] = set()
        self._closed = False

    def call(self, method: str, payload: bytes, seconds: float) -> Bytes:
        """The answer to one call.

        Raises Refused with the other side's text, and Unreachable if there is no genuine answer in
        time; whether the call was made is then not known.
        """
        end = time.monotonic() + seconds
        with contextlib.ExitStack() as on_failure:
            try:
                stream, lane = self._take() or self._new_lane(end)
            except OSError as error:
                raise self._unreachable(error) from None
            except Stranger as stranger:
                raise Refused(str(stranger)) from None
            on_failure.callback(self._drop, stream)  # after a lost answer the numbers may differ
            if len(payload) <= lane.limit:
                try:
                    answer, data = self._answer(stream, lane, method, payload, end)
                except (OSError, Stranger) as error:
                    raise self._unreachable(error) from None
            on_failure.pop_all()
        self._give_back(stream, lane)
        if len(payload) > lane.limit:
            raise Refused(too_large(len(payload), lane.limit))
        if answer.refused:
            raise Refused(one_line(data.decode(errors="replace")))
        return data

    def rest(self, kept: int) -> None:
        """Ends connections that are idle, all but some; a call opens others."""
        with self._lock:
            left, self._idle = self._idle[kept:], self._idle[:kept]
        for stream, _ in left:
            stream.close()

    def close(self) -> None:
        """Ends the connections. Calls that run end as Unreachable."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for stream in self._busy:
                stream.end()
        for stream, _ in idle:
            stream.close()

    def _answer(
        self, stream: ByteStream, lane: Lane, method: str, payload: bytes, end: float
    ) -> tuple[Head, Bytes]:
        """(head, bytes) of the answer to a frame."""
        stream.write(lane.head(method, payload), payload, end)
        answer = lane.answer(stream.read(ANSWER_HEAD_BYTES, end))
        if answer.size > self._limit:
            raise Stranger(f"its answer has {answer.size} bytes, above {self._limit}")
        data = stream.read(answer.size, end)
        answer.check(data)
        return answer, data

    def _take(self) -> tuple[ByteStream, Lane] | None:
        """A session that is idle and that the server has not ended; None: there is none."""
        while True:
            with self._lock:
                if self._closed or not self._idle:
                    return None
                stream, lane = self._idle.pop()
                self._busy.add(stream)
            if stream.is_quiet():
                return stream, lane
            self._drop(stream)

    def _new_lane(self, end: float) -> tuple[ByteStream, Lane]:
        with contextlib.ExitStack() as on_failure:
            stream = ByteStream(_connect(self._host, self._port, end))
            on_failure.callback(self._drop, stream)
            with self._lock:
                self._busy.add(stream)
                if self._closed:
                    raise ConnectionAbortedError
            if self._tls is not None:
                stream.encrypt(self._tls, self._host, end)
            opening = Opening(self._key, self._name)
            stream.write(opening.hello, b"", end)
            proof = opening.prove(_said(stream, CHALLENGE.size, end))
            stream.write(proof, b"", end)
            lane = opening.lane(_said(stream, MAC_BYTES, end))
            on_failure.pop_all()
        return stream, lane

    def _give_back(self, stream: ByteStream, lane: Lane) -> None:
        with self._lock:
            self._busy.discard(stream)
            if not self._closed:
                self._idle.append((stream, lane))
                return
        stream.close()

    def _drop(self, stream: ByteStream) -> None:
        with self._lock:
            self._busy.discard(stream)
        stream.close()

    def _unreachable(self, error: Exception) -> Unreachable:
        if self._closed:
            reason = "this process has closed the connection"
        elif isinstance(error, TimeoutError):
            reason = "no answer in time"
        else:
            reason = one_line(getattr(error, "strerror", None) or str(error))
        return Unreachable(f"{self.address}: {reason}")


def _said(stream: ByteStream, count: int, end: float) -> Bytes:
    """Bytes that a server sends before there is a session. Stranger, with its reason, if it sends
    none."""
    first = stream.read(1, end)
    if first == WELCOME:
        return stream.read(count, end)
    if first != TURNED_AWAY:
        raise ConnectionAbortedError(
            "it speaks another protocol; use TLS on both sides, or on none"
        )
    text = b""
    with contextlib.suppress(OSError):
        while len(text) < TEXT_BYTES:
            text += stream.read(1, end)
    raise Stranger(one_line(text.decode(errors="replace")))


def _connect(host: str, port: int, end: float) -> socket.socket:
    """A connection to one of the addresses of a host. OSError if there is none in time."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host!r} is no name of a host") from error
    for place, (family, kind, protocol, _, address) in enumerate(found):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(max(0.001, end - time.monotonic()) / (len(found) - place))
            connection.connect(address)
            return connection
        except OSError as error:
            connection.close()
            last = error
    raise last
