"""Callers of the wire: they make the calls that doors answer."""

import contextlib
import socket
import threading
import time

from distflow_jax.flow.wire.calls import (
    LIMIT_BYTES,
    TEXT_BYTES,
    TURNED_AWAY,
    WELCOME,
    Refused,
    Unreachable,
    too_large,
)
from distflow_jax.flow.wire.session import ANSWER_HEAD_BYTES, CHALLENGE, Lane, Opening, Stranger
from distflow_jax.flow.wire.stream import Stream
from distflow_jax.flow.wire.tls import WireTls, read_wire_tls
from distflow_jax.parsing.one_line import one_line
from distflow_jax.parsing.token_proof import MAC_BYTES, derive_key


class Caller:
    """Calls the methods of one door, from any number of threads.

    A connection has one frame in flight at a time; further ones begin as threads call at once.

    Args:
      address: HOST:PORT of the door.
      token: of the run.
      name: of this process, for the door's log.
      limit_bytes: of an answer.
      tls: with the authorities that the door's certificate is checked by; None: those of the
        environment, if it names some.

    Attributes:
      address: as given.
    """

    def __init__(
        self,
        address: str,
        token: bytes,
        name: str,
        *,
        limit_bytes: int = LIMIT_BYTES,
        tls: WireTls | None = None,
    ):
        self.address, self._key, self._name = address, derive_key("wire", token), name
        self._limit, self._tls = limit_bytes, (read_wire_tls() if tls is None else tls).caller
        self._lock = threading.Lock()
        self._idle: list[tuple[Stream, Lane]] = []
        self._busy: set[Stream] = set()
        self._closed = False

    def call(self, method: str, payload: bytes, seconds: float) -> bytes:
        """The answer to one call.

        Raises Refused with the other side's text, and Unreachable if there is no genuine answer in
        time; whether the call was made is then not known.
        """
        end = time.monotonic() + seconds
        try:
            stream, lane = self._take() or self._new_lane(end)
        except OSError as error:
            raise self._unreachable(error) from None
        except Stranger as stranger:
            raise Refused(f"{self.address}: {stranger}") from None
        if len(payload) > lane.limit:
            self._give_back(stream, lane)
            raise Refused(too_large(len(payload), lane.limit))
        try:
            stream.write(lane.head(method, payload), payload, end)
            answer = lane.answer(stream.read(ANSWER_HEAD_BYTES, end))
            if answer.size > self._limit:
                raise Stranger(f"its answer has {answer.size} bytes, above {self._limit}")
            data = stream.read(answer.size, end)
            answer.check(data)
        except (OSError, Stranger) as error:
            self._drop(stream)  # after a lost answer the numbers may differ
            raise self._unreachable(error) from None
        self._give_back(stream, lane)
        if answer.refused:
            raise Refused(one_line(data.decode(errors="replace")))
        return data

    def close(self) -> None:
        """Ends the connections. Calls that run end as Unreachable."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for stream in self._busy:
                stream.end()
        for stream, _ in idle:
            stream.close()

    def _take(self) -> tuple[Stream, Lane] | None:
        """A session that is idle and that the door has not ended; None: there is none."""
        while True:
            with self._lock:
                if self._closed or not self._idle:
                    return None
                stream, lane = self._idle.pop()
                self._busy.add(stream)
            if stream.is_quiet():
                return stream, lane
            self._drop(stream)

    def _new_lane(self, end: float) -> tuple[Stream, Lane]:
        host, _, port = self.address.rpartition(":")
        host = host.strip("[]")
        if self._closed:
            raise ConnectionAbortedError
        stream = Stream(_connect(host, int(port), end))
        with self._lock:
            self._busy.add(stream)
        try:
            if self._tls is not None:
                stream.encrypt(self._tls, host, end)
            opening = Opening(self._key, self._name)
            stream.write(opening.hello, b"", end)
            proof = opening.prove(_said(stream, CHALLENGE.size, end))
            stream.write(proof, b"", end)
            return stream, opening.lane(_said(stream, MAC_BYTES, end))
        except (OSError, Stranger):
            self._drop(stream)
            raise

    def _give_back(self, stream: Stream, lane: Lane) -> None:
        with self._lock:
            self._busy.discard(stream)
            if not self._closed:
                self._idle.append((stream, lane))
                return
        stream.close()

    def _drop(self, stream: Stream) -> None:
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


def _said(stream: Stream, count: int, end: float) -> bytes:
    """Bytes that a door sends before there is a session. Stranger, with its reason, if it sends
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
    """A connection to an address."""
    return socket.create_connection((host, port), max(0.001, end - time.monotonic()))
