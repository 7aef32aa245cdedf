"""One HTTP call with a deadline and a bound on its answer, by the standard library."""

import dataclasses
import http.client
import json
import re
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

from distflow_jax.parsing.addresses import is_address
from distflow_jax.parsing.one_line import one_line, shown

CHUNK = 1 << 16  # bytes of a read
MOST_AGAIN = 60.0  # seconds that a server may ask to wait
_SHOWN = 200  # characters of a server's own message


class CallFailed(Exception):
    """A call without a usable answer; the message is one line.

    `lost`: whether the connection failed, rather than the server saying no. `again`: seconds after
    which the server asks to be called again.
    """

    def __init__(self, reason: str, *, lost: bool = False, again: float = 0.0):
        super().__init__(one_line(reason))
        self.lost, self.again = lost, again


class Connections:
    """The connections of calls under way, which another thread may end together."""

    def __init__(self):
        self._lock, self._socks, self._closed = threading.Lock(), set[socket.socket](), False

    def add(self, sock: socket.socket) -> None:
        """Notes a connection. ConnectionAbortedError if all were ended."""
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("the engine is closed")
            self._socks.add(sock)

    def discard(self, sock: socket.socket) -> None:
        """Forgets a connection."""
        with self._lock:
            self._socks.discard(sock)

    def close(self) -> None:
        """Ends all connections, and those that would be added."""
        with self._lock:
            self._closed = True
            for sock in self._socks:
                _cut(sock)


@dataclasses.dataclass(frozen=True)
class HttpServer:
    """An HTTP server's address, and the key that it wants."""

    url: str  # http://HOST:PORT, with or without a path before those of the calls
    api_key: str = dataclasses.field(default="", repr=False)

    def __post_init__(self):
        found = re.fullmatch(r'https?://([^/?#]+)(/[!"$->@-~]*)?', self.url)
        if not found or not (is_address(found[1]) or is_address(f"{found[1]}:80")):
            raise ValueError(f"{shown(self.url)} is no address of a server; give http://HOST:PORT")

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        seconds: float,
        most_bytes: int,
        among: Connections | None = None,
    ) -> bytes:
        """The body of a 2xx answer that came within so many seconds. CallFailed otherwise.

        `body`: sent as JSON; None: no body. `among`: the connection can be ended with these.
        """
        base = urllib.parse.urlsplit(self.url)
        kind = {"http": http.client.HTTPConnection, "https": _HttpsConnection}[base.scheme]
        connection = kind(base.hostname, base.port, timeout=seconds)
        among = among or Connections()
        end, clock, sock = time.monotonic() + seconds, None, None
        try:
            data = None if body is None else json.dumps(body, allow_nan=False).encode()
            connection.connect()
            sock = connection.sock
            among.add(sock)
            # a server that sends a byte now and then would never meet the timeout of a socket
            clock = threading.Timer(end - time.monotonic(), _cut, [sock])
            clock.daemon = True
            clock.start()
            connection.request(method, base.path.rstrip("/") + path, data, self._headers(data))
            response = connection.getresponse()
            content = _read(response, end, most_bytes)
        except (OSError, http.client.HTTPException, ValueError) as error:  # a chunk of -5 bytes
            if time.monotonic() >= end:
                raise CallFailed(f"no answer within {seconds:g} s") from error
            reason = str(error) or type(error).__name__
            raise CallFailed(f"the connection broke off: {reason}", lost=True) from error
        finally:
            if clock is not None:
                clock.cancel()
            if sock is not None:
                among.discard(sock)
            connection.close()
        if not 200 <= response.status < 300:
            asked = response.headers.get("Retry-After", "")
            again = min(MOST_AGAIN, float(asked)) if re.fullmatch("[0-9]+", asked) else 0.0
            raise CallFailed(f"HTTP {response.status} of {path}: {_shown(content)}", again=again)
        return content

    def call_json(self, method: str, path: str, body: Any = None, **limits: Any) -> Mapping:
        """The JSON object of a 2xx answer. CallFailed for another one."""
        content = self.call(method, path, body, **limits)
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise CallFailed(f"the answer of {path} is no JSON: {_shown(content)}") from error
        if not isinstance(value, Mapping):
            raise CallFailed(f"the answer of {path} is no JSON object: {_shown(content)}")
        return value

    def _headers(self, data: bytes | None) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        if data is not None:
            headers["Content-Type"] = "application/json"
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return headers


class _HttpsConnection(http.client.HTTPSConnection):
    """HTTPS whose certificates are checked by the system's authorities."""

    def __init__(self, host: str, port: int | None, *, timeout: float):
        context = ssl.create_default_context()
        super().__init__(host, port, timeout=timeout, context=context)


def _cut(sock: socket.socket) -> None:
    """Ends a connection in which another thread waits."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has ended


def _read(response: http.client.HTTPResponse, end: float, most: int) -> bytes:
    """The body, of at most `most` bytes, until the time `end`."""
    parts, size = [], 0
    while part := response.read(CHUNK):
        parts.append(part)
        size += len(part)
        if size > most:
            raise CallFailed(f"an answer of more than {most} bytes")
        if time.monotonic() >= end:
            raise TimeoutError
    if response.length:  # bytes that were announced and did not come
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(parts)


def _shown(content: bytes) -> str:
    """The beginning of a server's message."""
    text = " ".join(content[: 4 * _SHOWN].decode(errors="replace").split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
