"""A relay between two ends of connections on this machine."""

import contextlib
import socket
import threading


class Relay:
    """Takes connections at a port of this machine; a subclass says in `serve` where they lead.

    Attributes:
      port: where it listens.
    """

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def serve(self, client: socket.socket) -> None:
        """Opens the other end of a connection and joins the two."""
        raise NotImplementedError

    def passes(self) -> bool:
        """Whether the next piece goes on; a connection whose piece does not is broken."""
        return True

    def join(self, client: socket.socket, server: socket.socket) -> None:
        """Copies both ways until one end is closed or broken."""
        back = threading.Thread(target=self._copy, args=(server, client), daemon=True)
        back.start()
        self._copy(client, server)
        back.join()

    def close(self) -> None:
        """Takes no connection any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._begin, args=(client,), daemon=True).start()

    def _begin(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), client:
            self.serve(client)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (data := source.recv(1 << 16)) and self.passes():
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
