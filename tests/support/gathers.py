"""Gathers of modelled processes: what BackgroundGather does, as events of a test."""

import concurrent.futures
import types


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
