"""Processes of a job within one: gathers as events of a test, or exchanges by connections."""

import concurrent.futures
import random
import types

from distflow_jax.cluster.host_exchange import HostExchange, listen
from support.waiting import HANG


def exchanges(count, token=bytes(16)):
    """The ends of so many processes, each connected to all others."""
    listeners = [listen("127.0.0.1") for _ in range(count)]
    addresses = [("127.0.0.1", listener.getsockname()[1]) for listener in listeners]
    return [HostExchange(i, addresses, each, token) for i, each in enumerate(listeners)]


def together(count, function):
    """The results of function(index) for so many processes, side by side."""
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(function, index) for index in range(count)]
        return [future.result(timeout=HANG) for future in futures]


def dealt(counter, groups, processes, salt):
    """The process of a group: of each batch every process has one at least."""
    batch, place = divmod(counter, groups)
    buffers = [i % processes for i in range(groups)]
    return random.Random(f"{salt}{batch}").sample(buffers, groups)[place]


class Gathers:
    """Gathers of a model: number n ends when all processes have begun it, and an event says so."""

    def __init__(self, processes):
        self.processes, self.begun = processes, []

    def of(self, process):
        """The gathers as one process sees them."""
        count = 0

        def begin(value):
            nonlocal count
            if count == len(self.begun):
                self.begun.append(
                    ({}, [concurrent.futures.Future() for _ in range(self.processes)])
                )
            values, futures = self.begun[count]
            values[process], count = value, count + 1
            return futures[process]

        return types.SimpleNamespace(begin=begin)

    def ready(self):
        """Futures that may end now."""
        return [
            (future, [values[p] for p in range(self.processes)])
            for values, futures in self.begun[-2:]
            if len(values) == self.processes
            for future in futures
            if not future.done()
        ]
