"""Faults of a network between workers and task buffers, drawn by a seed: on real sockets, in one
process.

A `Forwarder` breaks connections, with what is on its way in them. `Faults.client` makes callers
whose frames are lost, whose answers are lost, and which send frames twice, at once or later.
"""

import collections
import random
import socket
import threading
import time

from distflow_jax.stream.wire.calls import LIMIT_BYTES, Unreachable
from distflow_jax.stream.wire.wire_client import WireClient
from support.relay import Relay

LOST, UNANSWERED, TWICE, LATE = "lost", "unanswered", "twice", "late"
SHARES = {LOST: 0.005, UNANSWERED: 0.01, TWICE: 0.05, LATE: 0.02}  # of the calls
BREAKS = 0.0005  # share of the pieces with which a connection breaks
DELAY_SECONDS = 0.002  # of a piece, at most


class Faults:
    """Faults of one network.

    Attributes:
      done: faults by kind.
    """

    def __init__(self, seed: int):
        self._draw, self._lock = random.Random(seed), threading.Lock()
        self._dead: set[str] = set()
        self.done: collections.Counter[str] = collections.Counter()

    def client(
        self, address: str, token: bytes, name: str, *, limit_bytes: int = LIMIT_BYTES
    ) -> WireClient:
        """A caller of a worker, in place of Caller."""
        return _FaultyClient(address, token, name, self, limit_bytes)

    def kill(self, name: str) -> None:
        """Has a worker send nothing from now on, not that it leaves either."""
        self._dead.add(name)

    def is_dead(self, name: str) -> bool:
        """Whether a worker was killed."""
        return name in self._dead

    def uniform(self, low: float, high: float) -> float:
        """A number that is drawn."""
        with self._lock:
            return self._draw.uniform(low, high)

    def draw(self, shares: dict[str, float]) -> str:
        """A fault that happens now; "": none."""
        with self._lock:
            left = self._draw.random()
            for kind, share in shares.items():
                left -= share
                if left < 0:
                    self.done[kind] += 1
                    return kind
        return ""


class _FaultyClient(WireClient):
    """A caller of one worker, whose calls may fail on their way, or come twice."""

    def __init__(self, address: str, token: bytes, name: str, faults: Faults, limit_bytes: int):
        super().__init__(address, token, name, limit_bytes=limit_bytes)
        self._faults, self._worker = faults, name
        self._later: tuple[str, bytes] | None = None  # a frame that will come once more

    def call(self, method: str, payload: bytes, seconds: float) -> bytes:
        """As Caller.call; a frame may be lost, or come twice."""
        if self._faults.is_dead(self._worker):
            raise Unreachable(f"{self.address}: this worker is dead")
        fault = self._faults.draw(SHARES)
        if self._later is not None and self._faults.uniform(0, 1) < 0.3:
            late, self._later = self._later, None
            super().call(*late, seconds)
        if fault == LOST:
            raise Unreachable(f"{self.address}: the frame is lost")
        answer = super().call(method, payload, seconds)
        if self._faults.is_dead(self._worker):
            raise Unreachable(f"{self.address}: this worker has died")
        if fault == UNANSWERED:
            raise Unreachable(f"{self.address}: the answer is lost")
        if fault == TWICE:
            answer = super().call(method, payload, seconds)
        if fault == LATE:
            self._later = method, payload
        return answer

    def close(self) -> None:
        """Ends the connection; a dead worker does not end its sessions before."""
        if self._faults.is_dead(self._worker):
            self._idle.clear()
        super().close()


class Forwarder(Relay):
    """Forwards connections to a port of this machine, late, and breaks some of them."""

    def __init__(self, target: int, faults: Faults):
        self._target, self._faults = target, faults
        super().__init__()

    def serve(self, client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", self._target)) as server:
            self.join(client, server)

    def passes(self) -> bool:
        time.sleep(self._faults.uniform(0, DELAY_SECONDS))
        return not self._faults.draw({"broken": BREAKS})
