"""Values gathered from all processes while each goes on with its work."""

import json
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from distflow_jax.cluster.host_exchange import HostExchange


class BackgroundGather:
    """Gathers one value of every process after the other, in a thread of its own.

    A process that has nothing to do before all have come to a point can do something else
    meanwhile. All processes begin the same gathers in the same order, each at its own time.
    """

    def __init__(self, exchange: HostExchange | None):
        """`exchange`: connections that nothing else uses; None in a run of one process.

        Collective: the connections are opened.
        """
        self._exchange = exchange
        if exchange is not None:
            exchange.all_gather(b"")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="background-gather")

    def begin(self, value: Any) -> Future[list[Any]]:
        """Begins to gather a JSON-able value; the future has those of all processes, in order.

        It raises ConnectionError if another process has ended.
        """
        if self._exchange is None:
            alone: Future[list[Any]] = Future()
            alone.set_result([json.loads(json.dumps(value))])
            return alone
        return self._thread.submit(self._gather, json.dumps(value).encode())

    def close(self) -> None:
        """Ends the connections and the thread, and with an error a gather under way."""
        if self._exchange is not None:
            self._exchange.interrupt()
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._exchange is not None:
            self._exchange.close()

    def _gather(self, data: bytes) -> list[Any]:
        return [json.loads(text) for text in self._exchange.all_gather(data)]
