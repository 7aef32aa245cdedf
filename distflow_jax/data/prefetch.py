"""The next step's host data, made while the devices work on this one."""

import concurrent.futures
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
END = object()  # travels through a Future in place of StopIteration


class Prefetch(Generic[T]):
    """An iterator that keeps one item of another ready, made in one background thread.

    Items come in the same order, and an error of the source is raised by the `next` that would have
    returned its item. The source runs one item ahead, so its own position is not that of the last
    item used. With `enabled=False` each item is made when asked for, in the caller's thread.

    Only for NumPy: the thread must not touch JAX.
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
        """Waits for the item that is being made and ends the thread. May be called twice."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Prefetch[T]":
        return self

    def __exit__(self, *_) -> None:
        self.close()
