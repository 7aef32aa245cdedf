"""A proxy between a worker and the homes, which loses what it should forward on demand."""

import contextlib
import socket
import threading


class CutNetwork:
    """An HTTP proxy of CONNECT on a loopback port; `cut` and `heal` are called from one thread.

    Attributes:
      port: where it listens.
    """

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._whole = threading.Event()
        self._whole.set()
        self._refuses = False
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

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
        self._listener.close()
        self._refuses = True
        self.heal()

    def _break_all(self) -> None:
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if not self._whole.is_set() and self._refuses:
                    client.close()
                    continue
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), client:
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
                    back = threading.Thread(target=self._copy, args=(server, client), daemon=True)
                    back.start()
                    self._copy(client, server)
                    back.join()
                    self._open.discard(server)
            finally:
                self._open.discard(client)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._whole.wait()
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
