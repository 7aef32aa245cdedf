"""A proxy between a worker and the task buffers, which loses what it should forward on demand."""

import contextlib
import socket
import threading

from support.relay import Relay


class CutNetwork(Relay):
    """An HTTP proxy of CONNECT on a loopback port; `cut` and `heal` are called from one thread."""

    def __init__(self):
        self._whole = threading.Event()
        self._whole.set()
        self._refuses = False
        self._open: set[socket.socket] = set()
        super().__init__()

    def cut(self, *, refuses: bool) -> None:
        """Forwards nothing from now on; `refuses`: connections break, otherwise they hang."""
        self._refuses = refuses
        self._whole.clear()
        if refuses:
            self._break_all()

    def heal(self) -> None:
        """Forwards again, in new connections."""
        self._whole.set()
        self._break_all()

    def close(self) -> None:
        """Ends all connections."""
        super().close()
        self._refuses = True
        self.heal()

    def _break_all(self) -> None:
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def serve(self, client: socket.socket) -> None:
        if not self._whole.is_set() and self._refuses:
            return
        self._open.add(client)
        try:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                piece = client.recv(1)
                if not piece:
                    return
                head += piece
            self._whole.wait()
            method, address, *_ = head.decode().split()
            assert method == "CONNECT", head
            host, _, port = address.rpartition(":")
            with socket.create_connection((host, int(port))) as server:
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                self._open.add(server)
                self.join(client, server)
                self._open.discard(server)
        finally:
            self._open.discard(client)

    def passes(self) -> bool:
        return self._whole.wait()
