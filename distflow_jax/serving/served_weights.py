"""Served weights and a fair lock on the devices, which a server's services share."""

import collections
import threading
from typing import Any


class Turns:
    """A lock that is granted in the order of requests.

    Threads that run programs on the same devices take it around each call, so that all devices get
    the programs in one order (two collectives in different orders wait for each other for ever),
    and so that a thread that requests it again at once does not starve the others.
    """

    def __init__(self):
        self._mutex = threading.Lock()
        self._gates: collections.deque[threading.Lock] = collections.deque()
        self._taken = False

    def __enter__(self) -> None:
        with self._mutex:
            if not self._taken:
                self._taken = True
                return
            gate = threading.Lock()
            gate.acquire()
            self._gates.append(gate)
        gate.acquire()

    def __exit__(self, *exception) -> None:
        with self._mutex:
            if self._gates:
                self._gates.popleft().release()  # handed on: stays taken
            else:
                self._taken = False


class Weights:
    """The weights that are served, and their version; the thread with the turn reads or swaps them.

    JetStream's threads look their parameters up once, when they start: they get this object, and
    what it holds is looked up at each call.
    """

    def __init__(self, params: Any, version: int):
        """`params` on the engine's mesh; `version`: of whoever loads them, at first the step."""
        self.turns = Turns()
        self.params, self.version = params, version
