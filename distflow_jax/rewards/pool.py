"""Scores of many responses by one reward function, in processes and with deadlines."""

import contextlib
import dataclasses
import functools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from distflow_jax.rewards.call import score_requests
from distflow_jax.rewards.function import check_signature, load_function
from distflow_jax.rewards.records import RewardRequest, RewardResult
from distflow_jax.rewards.registry import QUICK
from distflow_jax.rewards.worker_process import CallTimeout, Job, WorkerDied, WorkerProcess

MAX_WORKERS = 8  # as many as `num_workers=-1` takes at most
CLOSE_SECONDS = 5.0  # for the threads to notice that their workers were killed


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """The reward function, and what becomes of its errors."""

    # gsm8k, math, exact, format, pattern, reasoning_gym, zero (all comes from rollout.environment),
    # my_module:my_function, file.py:function
    function: str = "gsm8k"
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # for the function
    timeout_seconds: float = 10.0  # one call of the function
    start_seconds: float = 60.0  # start of a worker and import of the function's module
    # processes per host process; 0 = none (quick built-in functions only), -1 = none for these, and
    # one per core up to 8 for others
    num_workers: int = -1
    on_error: float = 0.0  # score where the function raises, hangs or crashes
    max_error_rate: float = 0.1  # of one step's responses; the run stops above it
    # tokens before the length limit in which DAPO's penalty grows, or below 1 their share of that
    # limit; 0 = off
    overlong_buffer: float = 0.0
    overlong_penalty: float = 1.0  # that penalty at the length limit
    overlong_cap: bool = False  # that penalty is never below -1

    def __post_init__(self):
        for name in ("timeout_seconds", "start_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"reward.{name} must be positive, got {getattr(self, name)}")
        if self.num_workers < -1:
            raise ValueError(f"reward.num_workers must be at least -1, got {self.num_workers}")
        if not 0 <= self.max_error_rate <= 1:
            raise ValueError(
                f"reward.max_error_rate must be between 0 and 1, got {self.max_error_rate}"
            )
        if self.overlong_buffer < 0:
            raise ValueError(
                f"reward.overlong_buffer must not be negative, got {self.overlong_buffer}"
            )
        if self.overlong_buffer >= 1 and self.overlong_buffer != int(self.overlong_buffer):
            raise ValueError(
                "reward.overlong_buffer must be a whole number of tokens, or below 1 a share, got "
                f"{self.overlong_buffer}"
            )
        if self.num_workers == 0 and self.function not in QUICK:
            raise ValueError(
                f"reward.num_workers 0 is for {', '.join(sorted(QUICK))}; {self.function!r} may "
                "hang or crash and needs at least 1"
            )

    def overlong_tokens(self, limit: int) -> int:
        """`overlong_buffer` in tokens, for responses of up to `limit`."""
        share = 0 < self.overlong_buffer < 1
        return max(1, round(self.overlong_buffer * limit)) if share else int(self.overlong_buffer)


class RewardPool:
    """Owns the worker processes of one reward function.

    A call that hangs past its deadline or kills its process costs that process, which is replaced,
    and only its request scores `on_error`. A batch function (TRL's signature) gets the requests of
    one `score` in as many contiguous parts as there are workers; where a part fails, it is called
    again for each of its requests alone, so that one bad row does not cost the others.

    Threads that wait for the workers belong to the pool; they touch neither JAX nor NumPy.
    """

    def __init__(self, config: RewardConfig):
        self._config = config
        num_workers = config.num_workers
        if num_workers == -1:
            num_workers = 0 if config.function in QUICK else min(MAX_WORKERS, _num_cores())
        self._num_workers = num_workers
        self._function = None
        if not num_workers:
            self._function = load_function(config.function)
            check_signature(config.function, self._function, config.kwargs)
        job = Job(
            function=config.function,
            kwargs=dict(config.kwargs),
            timeout_seconds=config.timeout_seconds,
            start_seconds=config.start_seconds,
            on_error=config.on_error,
        )
        self._workers = [WorkerProcess(job) for _ in range(num_workers)]
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._closing = threading.Event()
        self._kind: Future[str] = Future()
        # Not a bound method: a thread that held the pool would keep it from ever being collected.
        self._threads = [
            threading.Thread(
                target=_serve,
                args=(worker, self._jobs, self._kind if i == 0 else None, self._closing),
                kwargs={"on_error": config.on_error},
                daemon=True,
                name=f"reward-{i}",
            )
            for i, worker in enumerate(self._workers)
        ]
        for worker in self._workers:
            worker.start()
        for thread in self._threads:
            thread.start()
        self._finalizer = weakref.finalize(
            self, _close, self._jobs, self._closing, self._workers, self._threads
        )

    @property
    def one_by_one(self) -> bool:
        """Whether responses may be submitted as they come, to processes that score each alone.

        Not so for a batch function, which sees all responses of a step, nor for the quick ones that
        run in the caller's thread.
        """
        return self._num_workers > 0 and self._kind.result() != "batch"

    def check(self, request: RewardRequest) -> RewardResult:
        """Scores one row of the data, before the first step.

        Raises:
          ValueError, FileNotFoundError: the function is missing (the nearest name is given), raises
            (what and where), hangs (the deadline), or returns something else than a score.
        """
        result = self.submit(request).result()
        if result.error == "timeout":
            raise ValueError(
                f"reward function {self._config.function!r} did not return within "
                f"reward.timeout_seconds {self._config.timeout_seconds} on the first row; mend it, "
                "or raise that"
            )
        if result.error is not None:
            summary = result.error.removeprefix("exception: ").split("\n")[0]
            raise ValueError(
                f"reward function {self._config.function!r} failed on the first row: {summary}"
            )
        return result

    def submit(self, request: RewardRequest) -> Future[RewardResult]:
        """Starts scoring one response; its result comes by `.result()`."""
        return self._submit([request])[0]

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Scores responses, in order."""
        size = 1
        if self._num_workers and requests and self._kind.result() != "row":
            size = -(-len(requests) // self._num_workers)
        parts = [requests[i : i + size] for i in range(0, len(requests), size)]
        futures = [future for part in parts for future in self._submit(part)]
        return [future.result() for future in futures]

    def check_error_rate(self, results: Sequence[RewardResult]) -> None:
        """RuntimeError, with the first traceback, if too many of one step's rewards failed."""
        failed = [result.error for result in results if result.error is not None]
        if len(failed) > self._config.max_error_rate * len(results):
            raise RuntimeError(
                f"{len(failed)} of {len(results)} rewards failed ({failed.count('timeout')} by "
                f"timeout), more than reward.max_error_rate {self._config.max_error_rate}; the "
                f"first: {failed[0]}"
            )

    def close(self) -> None:
        """Kills the workers; what was submitted and not begun is cancelled. May be called twice."""
        self._finalizer()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _submit(self, requests: Sequence[RewardRequest]) -> list[Future[RewardResult]]:
        if self._closing.is_set():
            raise RuntimeError("the reward pool is closed")
        futures: list[Future[RewardResult]] = [Future() for _ in requests]
        if self._num_workers:
            self._jobs.put((requests, futures))
        else:
            config = self._config
            results = score_requests(
                self._function,
                config.kwargs,
                requests,
                timeout_seconds=config.timeout_seconds,
                on_error=config.on_error,
            )
            for future, result in zip(futures, results, strict=True):
                future.set_result(result)
        return futures


def error_counts(results: Sequence[RewardResult]) -> dict[str, int]:
    """The metrics `reward/errors` (exceptions and crashes) and `reward/timeouts`."""
    failed = [result.error for result in results if result.error is not None]
    timeouts = failed.count("timeout")
    return {"reward/errors": len(failed) - timeouts, "reward/timeouts": timeouts}


def _serve(
    worker: WorkerProcess,
    jobs: queue.SimpleQueue,
    kind: Future[str] | None,
    closing: threading.Event,
    *,
    on_error: float,
) -> None:
    """One thread: gives jobs to its worker until a None comes. Sets `kind` when it is known."""
    if kind is not None:
        _fulfil([kind], lambda: [worker.kind()])
    while (job := jobs.get()) is not None:
        requests, futures = job
        attempt = functools.partial(_attempt, worker, requests, closing, on_error=on_error)
        _fulfil(futures, attempt)
    worker.kill()


def _fulfil(futures: Sequence[Future], work: Callable[[], Sequence[Any]]) -> None:
    if not all([future.set_running_or_notify_cancel() for future in futures]):
        return
    try:
        values = work()
    except Exception as error:  # whoever waits for the result gets it, not this thread
        for future in futures:
            future.set_exception(error)
        return
    for future, value in zip(futures, values, strict=True):
        future.set_result(value)


def _attempt(
    worker: WorkerProcess,
    requests: Sequence[RewardRequest],
    closing: threading.Event,
    *,
    on_error: float,
) -> list[RewardResult]:
    if closing.is_set():
        raise RuntimeError("the reward pool was closed before this response was scored")
    is_batch = worker.kind() == "batch"
    error = None
    try:
        results = worker.call(requests)
        if len(requests) == 1 or not is_batch or not all(r.error for r in results):
            return results
    except CallTimeout:
        error = "timeout"
    except WorkerDied as died:
        error = f"exception: {died}"
    if error is not None and not closing.is_set():
        worker.start()  # now, so that the next call finds it ready
    if len(requests) == 1:
        return [RewardResult(on_error, error=error)]
    one_by_one = (_attempt(worker, [r], closing, on_error=on_error) for r in requests)
    return [result for results in one_by_one for result in results]


def _close(
    jobs: queue.SimpleQueue,
    closing: threading.Event,
    workers: Sequence[WorkerProcess],
    threads: Sequence[threading.Thread],
) -> None:
    closing.set()
    with contextlib.suppress(queue.Empty):
        while True:
            for future in jobs.get_nowait()[1]:
                future.cancel()
    for _ in threads:
        jobs.put(None)
    for worker in workers:
        worker.interrupt()
    for thread in threads:
        if thread is not threading.current_thread():  # the garbage collector runs in any thread
            thread.join(CLOSE_SECONDS)


def _num_cores() -> int:
    # not all of the machine's where a container or a launcher gave this process fewer
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
