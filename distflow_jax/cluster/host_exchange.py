"""Host data exchanged directly between processes over TCP.

P processes. XLA's collectives move device arrays of fixed shape, whereas host data are ragged and
sparse: lengths, and the sequences that another process needs. A message is sent only where there is
data, so that no process relays data of others. Every call is collective: all processes make the
same calls in the same order, from one thread, and name the senders in advance.
"""

import contextlib
import dataclasses
import selectors
import socket
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence

from distflow_jax.cluster.handshakes import Handshakes
from distflow_jax.parsing.token_proof import same_secret

_SIZE = struct.Struct("<Q")  # before every message
_HELLO = struct.Struct("<I16s")  # index of the connecting process, and the job's token
BACKLOG = 1024
MESSAGE_BYTES = 1 << 36  # longest message; a size above it is damage
FIRST_BYTES = 1 << 26  # of a message's buffer, which grows only as bytes arrive


@dataclasses.dataclass
class Traffic:
    """Bytes that this process received from others."""

    payload: int = 0
    padding: int = 0  # headers, or empty places of a round
    rounds: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            *(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self))
        )


class HostExchange:
    """Connections to the other processes of the job, opened when first needed.

    Args:
      index: of this process.
      addresses: (host, port) on which each process listens, by index.
      listener: this process's own listening socket.
      token: 16 bytes that all processes of the job share; connections without it are closed.

    Methods raise ConnectionError if another process has ended.
    """

    def __init__(
        self,
        index: int,
        addresses: Sequence[tuple[str, int]],
        listener: socket.socket,
        token: bytes,
    ):
        self._index, self._addresses = index, list(addresses)
        self._handshakes = Handshakes(listener, _HELLO.size)
        self._token = token
        self._sockets: dict[int, socket.socket] = {}

    def all_gather(self, data: bytes) -> list[bytes]:
        """Gathers every process's data, by index; sizes may differ.

        By dissemination in log2(P) messages: in round k each process sends its own and the next
        2^k - 1 processes' data to the process 2^k before it. Bruck et al. 1997, sec. 3.
        """
        count = len(self._addresses)
        blocks = [data]  # of the processes me, me + 1, ...
        distance = 1
        while distance < count:
            to, source = (self._index - distance) % count, (self._index + distance) % count
            sent = blocks[: count - distance]
            message = b"".join(field for b in sent for field in (_SIZE.pack(len(b)), b))
            received = self._transfer({to: message}, {source})[source]
            arrived = list(_blocks(received, source))
            if len(arrived) != len(sent):
                raise ConnectionError(
                    f"process {source} sent the data of {len(arrived)} processes instead of "
                    f"{len(sent)}; start the job again, with the same code everywhere"
                )
            blocks += arrived
            distance *= 2
        first = count - self._index  # place of process 0 among the blocks
        return blocks[first:] + blocks[:first]

    def exchange(
        self, blobs: Mapping[int, bytes], sources: Collection[int]
    ) -> tuple[dict[int, bytes], Traffic]:
        """Sends blobs[q] to each process q in it; returns the data sent here by each of `sources`.

        p must be in q's `sources` if and only if q is in p's `blobs`. A blob for this process
        itself is returned with the others.
        """
        others = {q: blob for q, blob in blobs.items() if q != self._index}
        received = self._transfer(others, set(sources) - {self._index})
        payload, headers = sum(map(len, received.values())), _SIZE.size * len(received)
        traffic = Traffic(payload, headers, bool(received))
        if self._index in blobs:
            received[self._index] = blobs[self._index]
        return received, traffic

    def connections(self, peers: Collection[int]) -> dict[int, socket.socket]:
        """Connections to other processes, opened where they are missing: the caller alone reads and
        writes them from then on, without blocking. Each of two processes names the other."""
        self._connect(set(peers))
        return {peer: self._sockets[peer] for peer in peers}

    def interrupt(self) -> None:
        """Ends an exchange under way in another thread, which raises ConnectionError, and those of
        the other processes with it."""
        for connection in list(self._sockets.values()):
            with contextlib.suppress(OSError):  # the other process has ended
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes all connections and the listener."""
        for connection in self._sockets.values():
            connection.close()
        self._handshakes.close()
        self._sockets.clear()

    def _transfer(self, out: Mapping[int, bytes], sources: Collection[int]) -> dict[int, bytes]:
        """Sends and receives one message per process, all at once: none waits for another."""
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
            raise ConnectionError(
                f"process {peer} has ended or is unreachable ({error}); see its log"
            ) from error

    def _connect(self, peers: Collection[int]) -> None:
        """Opens missing connections: the process of lower index connects, the higher accepts."""
        missing = {peer for peer in peers if peer not in self._sockets}
        for peer in sorted(p for p in missing if p > self._index):
            try:
                connection = socket.create_connection(self._addresses[peer])
            except OSError as error:
                host, port = self._addresses[peer]
                raise ConnectionError(
                    f"process {peer} cannot be reached at {host}:{port} ({error}); the hosts of a "
                    "job must reach each other on any port"
                ) from error
            connection.sendall(_HELLO.pack(self._index, self._token))
            self._keep(peer, connection)
        while any(p not in self._sockets for p in missing):
            for arrival in self._handshakes.read():
                index, token = _HELLO.unpack(arrival.greeting)
                # only those of lower index connect, each once
                expected = index < self._index and index not in self._sockets
                if same_secret(token, self._token) and expected:
                    self._keep(index, arrival.connection)
                else:
                    arrival.connection.close()

    def _keep(self, peer: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets[peer] = connection


class _Message:
    """A message being received: its size, then that many bytes."""

    def __init__(self):
        self._buffer, self._filled = bytearray(_SIZE.size), 0
        self._size: int | None = None  # None: its bytes are being read

    def read(self, connection: socket.socket, peer: int) -> bool:
        """Reads the bytes available; returns whether the message is complete."""
        while self._filled < len(self._buffer):
            try:
                count = connection.recv_into(memoryview(self._buffer)[self._filled :])
            except BlockingIOError:
                return False
            except OSError as error:
                raise ConnectionError(
                    f"process {peer} has ended or is unreachable ({error}); see its log"
                ) from error
            if not count:
                raise ConnectionError(
                    f"process {peer} has ended: it closed its connection; see its log"
                )
            self._filled += count
            if self._filled == len(self._buffer):
                self._make_room(peer)
        return True

    def _make_room(self, peer: int) -> None:
        """Makes room for what follows; the bytes that have arrived bound what is allocated."""
        if self._size is None:
            (self._size,) = _SIZE.unpack(self._buffer)
            if self._size > MESSAGE_BYTES:
                raise ConnectionError(
                    f"process {peer} announced a message of {self._size} bytes, above "
                    f"{MESSAGE_BYTES}: its data are damaged; start the job again"
                )
            self._buffer, self._filled = bytearray(min(self._size, FIRST_BYTES)), 0
        elif self._filled < self._size:
            self._buffer += bytes(min(self._filled, self._size - self._filled))

    def data(self) -> bytes:
        """The bytes of the complete message."""
        return bytes(self._buffer)


def _blocks(message: bytes, source: int) -> Iterator[bytes]:
    """The data of several processes in a message of process `source`, each after its size."""
    at = 0
    while at < len(message):
        start = at + _SIZE.size
        size = _SIZE.unpack_from(message, at)[0] if start <= len(message) else 0
        at = start + size
        if at > len(message):
            raise ConnectionError(
                f"process {source} sent {len(message)} bytes that announce {at}: its data are "
                "damaged; start the job again"
            )
        yield message[start:at]


def listen(host: str) -> socket.socket:
    """A listening socket on a free port of this host's address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=BACKLOG)
