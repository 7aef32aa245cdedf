"""Numbers that spread from any process to all others, without a collective call.

A process that waits can be told that there is something to do, by a process that does not know who
waits. A number only rises: each process passes a new one on to the processes 1, 2, 4, ... after it,
so that it reaches P processes in at most log2(P) hops, whoever began.
"""

import contextlib
import selectors
import socket
import struct
import threading
from collections.abc import Callable

from distflow_jax.cluster.host_exchange import HostExchange

_MESSAGE = struct.Struct("<IQ")  # kind, number


class Peers:
    """The numbers of one process, one of each kind (a number below 2**32); they begin at 0.

    Attributes:
      index: number of this process.
      count: of processes.
    """

    def __init__(
        self, exchange: HostExchange | None, index: int, count: int, heard: Callable[[], object]
    ):
        """Collective. `exchange`: connections that nothing else uses, between `count` processes;
        None in a run of one. `heard()` is called in a thread when a number has risen, or a peer has
        ended."""
        self.index, self.count = index, count
        self._exchange, self._heard = exchange, heard
        self._numbers: dict[int, int] = {}  # those above 0
        self._lock = threading.Lock()
        self._error: ConnectionError | None = None
        self._closing = False
        distances = [1 << k for k in range((count - 1).bit_length())]
        after = {(index + d) % count for d in distances} - {index}
        before = {(index - d) % count for d in distances} - {index}
        sockets = exchange.connections(after | before) if exchange is not None else {}
        self._after = sorted(after & sockets.keys())
        self._sockets = sockets
        self._unsent: dict[int, bytes] = dict.fromkeys(self._after, b"")
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="peers", daemon=True)
        if sockets:
            self._thread.start()

    def seen(self, kind: int) -> int:
        """The highest number of a kind that this process has heard of."""
        return self._numbers.get(kind, 0)

    def raise_to(self, kind: int, number: int) -> None:
        """Raises a number, here and soon on all processes; nothing if it is that high already."""
        with self._lock:
            if not self._rises(kind, number):
                return
        self._nudge()

    def check(self) -> None:
        """Raises ConnectionError if a peer has ended."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Ends the thread and the connections."""
        self._closing = True
        self._nudge()
        if self._thread.is_alive():
            self._thread.join()
        for end in (self._wake, self._woken):
            end.close()
        if self._exchange is not None:
            self._exchange.close()

    def _rises(self, kind: int, number: int) -> bool:
        """Notes a number and has it sent on; whether it is new. Under the lock."""
        if number <= self._numbers.get(kind, 0):
            return False
        self._numbers[kind] = number
        for peer in self._after:
            self._unsent[peer] += _MESSAGE.pack(kind, number)
        return True

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread wakes anyway
            self._wake.send(b"\0")

    def _serve(self) -> None:
        arrived = dict.fromkeys(self._sockets, b"")
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ, None)
            for peer, connection in self._sockets.items():
                selector.register(connection, selectors.EVENT_READ, peer)
            try:
                while not self._closing:
                    self._send(selector)
                    for key, ready in selector.select():
                        if key.data is None:
                            self._woken.recv(4096)
                        elif ready & selectors.EVENT_READ:
                            data = self._receive(key.data, key.fileobj)
                            arrived[key.data] = self._take(arrived[key.data] + data)
            except ConnectionError as error:
                if not self._closing:
                    self._error = error
                    self._heard()

    def _send(self, selector: selectors.BaseSelector) -> None:
        """Sends what it can; a connection that is full is watched until it takes more."""
        for peer in self._after:
            connection = self._sockets[peer]
            with self._lock:
                data = self._unsent[peer]
            if data:
                try:
                    count = connection.send(data)
                except BlockingIOError:
                    count = 0
                except OSError as error:
                    raise _ended(peer) from error
                with self._lock:
                    self._unsent[peer] = self._unsent[peer][count:]
                    data = self._unsent[peer]
            events = selectors.EVENT_READ | selectors.EVENT_WRITE * bool(data)
            selector.modify(connection, events, peer)

    def _receive(self, peer: int, connection: socket.socket) -> bytes:
        try:
            data = connection.recv(4096)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise _ended(peer) from error
        if not data:
            raise _ended(peer)
        return data

    def _take(self, data: bytes) -> bytes:
        """Notes the numbers in what has arrived; returns the beginning of a message, if one is
        there."""
        whole = len(data) // _MESSAGE.size * _MESSAGE.size
        with self._lock:
            rose = [self._rises(*message) for message in _MESSAGE.iter_unpack(data[:whole])]
        if any(rose):
            self._heard()
        return data[whole:]


def _ended(peer: int) -> ConnectionError:
    return ConnectionError(f"process {peer} has ended: it closed its connection; see its log")
