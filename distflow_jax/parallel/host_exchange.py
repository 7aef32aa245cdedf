"""Host data between processes: from each straight to each, over TCP.

P processes. XLA's collectives move device arrays of fixed shape; what hosts exchange is ragged and
sparse: lengths, and the sequences that another process needs. A message goes only where there is
something to send, so that no process carries what is not its own. Every call is collective: all
processes make the same calls in the same order, from one thread, and know whom they hear from.
"""

import dataclasses
import selectors
import socket
import struct
from collections.abc import Collection, Mapping, Sequence

_SIZE = struct.Struct("<Q")  # before every message
_HELLO = struct.Struct("<I16s")  # who connects, and the job's token
BACKLOG = 1024
HELLO_SECONDS = 10.0  # for a stranger that connects and says nothing


@dataclasses.dataclass
class Traffic:
    """What this process received from others, in bytes."""

    payload: int = 0
    padding: int = 0  # headers, or room of a round that carried nothing
    rounds: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            *(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self))
        )


class Peers:
    """Connections to the other processes of the job, opened when first needed.

    `addresses`: (host, port) on which each listens, by index; `listener` is one's own. Strangers,
    who do not know the `token` of 16 bytes, are hung up on.

    Raises ConnectionError where a process has gone.
    """

    def __init__(
        self,
        index: int,
        addresses: Sequence[tuple[str, int]],
        listener: socket.socket,
        token: bytes,
    ):
        self._me, self._addresses, self._listener = index, list(addresses), listener
        self._token = token
        self._sockets: dict[int, socket.socket] = {}

    def all_gather(self, data: bytes) -> list[bytes]:
        """Every process's data, by index; sizes may differ.

        By dissemination: in round k each sends what it has of the 2^k that follow it to the process
        2^k before it, so that log2(P) messages do. Bruck et al. 1997, sec. 3.
        """
        count = len(self._addresses)
        blocks = [data]  # of the processes me, me + 1, ...
        distance = 1
        while distance < count:
            to, source = (self._me - distance) % count, (self._me + distance) % count
            sent = blocks[: count - distance]
            message = b"".join(part for b in sent for part in (_SIZE.pack(len(b)), b))
            came = self._transfer({to: message}, {source})[source]
            at = 0
            while at < len(came):
                (size,) = _SIZE.unpack_from(came, at)
                at += _SIZE.size + size
                blocks.append(came[at - size : at])
            distance *= 2
        first = count - self._me  # where process 0 stands among the blocks
        return blocks[first:] + blocks[:first]

    def exchange(
        self, blobs: Mapping[int, bytes], sources: Collection[int]
    ) -> tuple[dict[int, bytes], Traffic]:
        """Sends blobs[q] to each process q in it; returns what each of `sources` has sent here.

        p is in q's `sources` exactly where q is in p's `blobs`. What is for oneself comes back.
        """
        others = {q: blob for q, blob in blobs.items() if q != self._me}
        came = self._transfer(others, set(sources) - {self._me})
        traffic = Traffic(sum(map(len, came.values())), _SIZE.size * len(came), bool(came))
        if self._me in blobs:
            came[self._me] = blobs[self._me]
        return came, traffic

    def close(self) -> None:
        """Hangs up."""
        for connection in (*self._sockets.values(), self._listener):
            connection.close()
        self._sockets.clear()

    def _transfer(self, out: Mapping[int, bytes], sources: Collection[int]) -> dict[int, bytes]:
        """Sends and receives one message each, side by side: neither waits for the other."""
        self._connect(set(out) | set(sources))
        to_send = {q: memoryview(_SIZE.pack(len(data)) + data) for q, data in out.items()}
        arriving = {p: _Message() for p in sources}
        done: dict[int, bytes] = {}
        with selectors.DefaultSelector() as selector:
            for peer in to_send.keys() | arriving.keys():
                events = selectors.EVENT_WRITE * (peer in to_send)
                events |= selectors.EVENT_READ * (peer in arriving)
                selector.register(self._sockets[peer], events, peer)
            while to_send or arriving:
                for key, ready in selector.select():
                    peer, connection = key.data, key.fileobj
                    if ready & selectors.EVENT_WRITE:
                        to_send[peer] = to_send[peer][self._send(connection, to_send[peer], peer) :]
                        if not to_send[peer]:
                            del to_send[peer]
                    if ready & selectors.EVENT_READ and arriving[peer].read(connection, peer):
                        done[peer] = arriving.pop(peer).data()
                    events = selectors.EVENT_WRITE * (peer in to_send)
                    events |= selectors.EVENT_READ * (peer in arriving)
                    if not events:
                        selector.unregister(connection)
                    elif events != key.events:
                        selector.modify(connection, events, peer)
        return done

    @staticmethod
    def _send(connection: socket.socket, data: memoryview, peer: int) -> int:
        try:
            return connection.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConnectionError(f"process {peer} has gone ({error})") from error

    def _connect(self, peers: Collection[int]) -> None:
        """Opens what is missing: the lower index calls, the higher answers."""
        missing = {peer for peer in peers if peer not in self._sockets}
        for peer in sorted(p for p in missing if p > self._me):
            try:
                connection = socket.create_connection(self._addresses[peer])
            except OSError as error:
                host, port = self._addresses[peer]
                raise ConnectionError(
                    f"process {peer} cannot be reached at {host}:{port} ({error}); the hosts of a "
                    "job must reach each other on any port"
                ) from error
            connection.sendall(_HELLO.pack(self._me, self._token))
            self._keep(peer, connection)
        while any(p not in self._sockets for p in missing):
            connection, _ = self._listener.accept()
            connection.settimeout(HELLO_SECONDS)
            try:
                hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
            except OSError:
                hello = b""
            index, token = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (-1, b"")
            if token == self._token and 0 <= index < len(self._addresses):
                self._keep(index, connection)
            else:
                connection.close()

    def _keep(self, peer: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets[peer] = connection


class _Message:
    """A message on its way in: its size, then that many bytes."""

    def __init__(self):
        self._buffer, self._filled, self._has_size = bytearray(_SIZE.size), 0, False

    def read(self, connection: socket.socket, peer: int) -> bool:
        """Takes what there is; whether the message is complete."""
        while self._filled < len(self._buffer):
            try:
                count = connection.recv_into(memoryview(self._buffer)[self._filled :])
            except BlockingIOError:
                return False
            except OSError as error:
                raise ConnectionError(f"process {peer} has gone ({error})") from error
            if not count:
                raise ConnectionError(f"process {peer} has gone: it closed its connection")
            self._filled += count
            if self._filled == len(self._buffer) and not self._has_size:
                (size,) = _SIZE.unpack(self._buffer)
                self._buffer, self._filled, self._has_size = bytearray(size), 0, True
        return True

    def data(self) -> bytes:
        """What came."""
        return bytes(self._buffer)


def listen(host: str) -> socket.socket:
    """A listening socket on a free port of this host's address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=BACKLOG)
