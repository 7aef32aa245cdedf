"""Threads that wait for a server's answers, and the queue through which the answers come back."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from distflow_jax.rollout.foreign.engine_protocol import Answer, Failure


class AnswerThreads:
    """Runs calls of a server, each in a thread. Every request of a call ends exactly once.

    Attributes:
      closing: set when nobody waits any more.
    """

    def __init__(self, threads: int):
        self.closing = threading.Event()
        self._ended: queue.SimpleQueue[Answer | Failure] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(threads, "engine")

    def start(self, numbers: Iterable[int], call: Callable[[], Iterator[Answer | Failure]]) -> None:
        """Starts a call that answers these requests.

        Those that it does not answer have failed, by its own error if it raises one.
        """
        left = set(numbers)

        def run() -> None:
            if self.closing.is_set():
                return
            for entry in call():
                if entry.id in left:
                    left.discard(entry.id)
                    self._ended.put(entry)

        def end(future: Future) -> None:
            error = None if future.cancelled() else future.exception()
            reason = "the server ended the call before this response"
            if error is not None:  # whatever it is, nobody must wait for ever
                reason = f"{type(error).__name__}: {error}"
            for number in sorted(left):
                self._ended.put(Failure(number, reason))

        self._threads.submit(run).add_done_callback(end)

    def results(self, seconds: float) -> list[Answer | Failure]:
        """Answers and failures since the last call; waits so long for a first one."""
        found = []
        try:
            found.append(self._ended.get(timeout=seconds))
            while True:
                found.append(self._ended.get_nowait())
        except queue.Empty:
            return found

    def close(self) -> None:
        """Starts no other call; the threads end with those that run."""
        self.closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
