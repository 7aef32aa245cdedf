"""Prefetch of the next step's host data while the devices compute this step."""

import concurrent.futures
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
END = object()  # stands for StopIteration, which a Future cannot carry


class Prefetch(Generic[T]):
    """Iterator that computes the next item of a source in one background thread.

    The order of items is kept, and an error of the source is raised by the `next` that would have
    returned its item. The source is one item ahead of the last item used. With `enabled=False`
    each `next` computes its item in the caller's thread.

    Only for NumPy: the thread must not use JAX.
    """

    def __init__(self, source: Iterator[T], *, enabled: bool = True):
        self._source = source
        self._executor = None
        if enabled:
            self._executor = concurrent.futures.ThreadPoolExecutor(1, "prefetch")
            self._pending = self._executor.submit(next, source, END)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._executor is None:
            return next(self._source)
        item = self._pending.result()
        if item is END:
            raise StopIteration
        self._pending = self._executor.submit(next, self._source, END)
        return item

    def close(self) -> None:
        """Waits for the item in flight and ends the thread. May be called twice."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Prefetch[T]":
        return self

    def __exit__(self, *_) -> None:
        self.close()
