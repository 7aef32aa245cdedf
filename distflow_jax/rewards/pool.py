"""RewardPool: scores responses by one reward function, in worker processes with deadlines."""

import collections
import logging
import math
import os
import resource
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from distflow_jax.config.data_config import QUICK, RewardConfig
from distflow_jax.config.sandbox_config import SandboxConfig
from distflow_jax.rewards.function_calls import score_requests
from distflow_jax.rewards.records import ProgramLimits, RewardRequest, RewardResult, VoteRequest
from distflow_jax.rewards.registry import MATHEMATICAL, SANDBOXED, same_answers
from distflow_jax.rewards.reward_function import load_reward
from distflow_jax.rewards.worker_process import (
    CallTimeout,
    WorkerDied,
    WorkerProcess,
    WorkerSettings,
)

log = logging.getLogger("distflow_jax")

MAX_WORKERS = 8  # at most, with num_workers=-1
PROGRAM_SHARE = 0.8  # of a call's deadline, for programs; the rest is for failures of the sandbox
WORKER_BYTES = 32 << 20  # of memory that a worker takes at least
WORKER_FILES = 4  # open files of a worker in its parent: a socket, and three while it starts
_MOST_FILES = 1 << 20  # where there is no limit
CLOSE_SECONDS = 5.0  # for each thread to end after its worker was killed


class Scoring(NamedTuple):
    """Requests that one call of a worker is to score, and the futures of their results."""

    requests: Sequence[RewardRequest | VoteRequest]
    futures: Sequence[Future[RewardResult]]


class JobQueue:
    """Jobs in the order in which they came, for threads that take one, or their share of all."""

    def __init__(self):
        self._jobs: collections.deque[Scoring] = collections.deque()
        self._changed = threading.Condition()
        self._waiting = 0  # threads in `take`
        self._closed = False

    def put(self, job: Scoring) -> None:
        """Adds a job; cancels it if the queue is closed."""
        with self._changed:
            if self._closed:
                _cancel(job)
            else:
                self._jobs.append(job)
                self._changed.notify()

    def take(self) -> Scoring | None:
        """The next job, as soon as there is one; None once the queue is closed."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: self._jobs or self._closed)
            self._waiting -= 1
            return self._jobs.popleft() if self._jobs else None

    def take_share(self) -> list[Scoring]:
        """More jobs for who has taken one: all that are there, less those of threads that wait."""
        with self._changed:
            share = -(-(1 + len(self._jobs)) // (1 + self._waiting)) - 1
            return [self._jobs.popleft() for _ in range(share)]

    def close(self) -> None:
        """Cancels the jobs that are there, and ends all waiting."""
        with self._changed:
            self._closed = True
            for job in self._jobs:
                _cancel(job)
            self._jobs.clear()
            self._changed.notify_all()


def _cancel(job: Scoring) -> None:
    for future in job.futures:
        future.cancel()


class FailedRewards(RuntimeError):
    """More rewards failed than reward.max_error_rate, or the function scored none."""

    metrics: Mapping[str, int] = {}  # numbers of an evaluation's failures


def _check(total: Mapping[str, int], first: str, config: RewardConfig) -> None:
    scored, failed = total["scored"], total["failed"]
    if failed > config.max_error_rate * scored:
        raise FailedRewards(
            f"{failed} of {scored} rewards failed ({total['timeouts']} by timeout), more than "
            f"reward.max_error_rate {config.max_error_rate}; the first: {first}"
        )
    if scored and total["not_scored"] == scored:
        raise FailedRewards(
            f"the reward function {config.function!r} scored none of {scored} responses: it "
            "returned None for each"
        )


class RewardPool:
    """Owns the worker processes of one reward function.

    If a call misses its deadline or its process dies, the process is replaced and only that request
    scores `on_error`. A batch function (TRL's signature) gets the requests of one `score` in one
    contiguous chunk per worker; if a chunk fails, the function is called again for each of its
    requests alone, so that one bad row does not affect the others.

    One thread of the pool waits for each worker; these threads use neither JAX nor NumPy.
    """

    def __init__(self, config: RewardConfig, sandbox: SandboxConfig | None = None):
        """`sandbox`: the run's section, for functions that run programs; None: its defaults."""
        self._config = config
        num_workers = config.num_workers
        if num_workers == -1:
            num_workers = 0 if config.function in QUICK else min(MAX_WORKERS, _num_cores())
        if num_workers > (most := most_workers()):
            raise ValueError(
                f"reward.num_workers={num_workers} is above {most}, the processes for which this "
                "machine has memory and open files: use fewer, or -1"
            )
        self._num_workers = num_workers
        job = _worker_settings(config, sandbox, num_workers)
        self._function = None
        if not num_workers:
            self._function = load_reward(config.function, config.kwargs, config.weights)
        self._looked = False  # at a step's answers, whether there are any
        self._workers = [WorkerProcess(job) for _ in range(num_workers)]
        self._jobs = JobQueue()
        self._closing = threading.Event()
        self._kind: Future[str] = Future()
        # not a bound method: a thread that references the pool would keep it alive forever
        self._threads = [
            threading.Thread(
                target=_serve,
                args=(worker, self._jobs, self._kind, self._closing),
                kwargs={"on_error": job.on_error, "first": i == 0},
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
        """Whether responses may be submitted as they finish, to processes that score each alone.

        False for a batch function, which gets all responses of a step at once, and for quick
        functions, which run in the caller's thread.
        """
        return self._num_workers > 0 and self._kind_of_function() != "batch"

    def check(self, request: RewardRequest) -> RewardResult:
        """Scores one row of the data, as a check before the first step.

        Raises:
          ValueError, FileNotFoundError: the function is missing (the message names the nearest),
            raises, misses the deadline, or does not return a score.
        """
        result = self.submit(request).result()
        if result.error == "timeout":
            raise ValueError(
                f"reward function {self._config.function!r} did not return within "
                f"reward.timeout_seconds {self._config.timeout_seconds} on the first row; fix it, "
                "or raise that"
            )
        if result.error is not None:
            summary = result.error.removeprefix("exception: ").split("\n")[0]
            raise ValueError(
                f"reward function {self._config.function!r} failed on the first row: {summary}"
            )
        if self._config.conversational and self._kind_of_function() != "batch":
            raise ValueError(
                "reward.conversational=True is for functions of (prompts, completions, ..), and "
                f"{self._config.function!r} takes one response at a time: leave it out"
            )
        return result

    def submit(self, request: RewardRequest) -> Future[RewardResult]:
        """Starts to score one response; `.result()` of the future waits for its result."""
        return self._submit([request])[0]

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Scores responses, in order."""
        size = 1
        if requests and self._kind_of_function() != "row":
            size = -(-len(requests) // self._num_workers)
        chunks = [requests[i : i + size] for i in range(0, len(requests), size)]
        futures = [future for chunk in chunks for future in self._submit(chunk)]
        return [future.result() for future in futures]

    def equal_answers(self, groups: Sequence[Sequence[str]]) -> list[tuple[int, ...]]:
        """For each prompt's answers the number of the first one that is equal to each.

        A mathematical function compares in its workers, under their deadline; where that passes,
        and for all other functions, answers are equal as text.
        """
        votes = [VoteRequest(tuple(answers)) for answers in groups]
        if self._config.function not in MATHEMATICAL:
            return [same_answers(len, vote.answers) for vote in votes]
        futures = [self._submit([vote])[0] for vote in votes]
        results = [future.result() for future in futures]
        return [
            same_answers(len, vote.answers) if result.error else result.votes
            for vote, result in zip(votes, results, strict=True)
        ]

    def check_error_rate(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """Counts of a step: `reward/errors` (exceptions and crashes), `reward/timeouts` and others.

        `parts`: `failures` of all its rewards. Raises FailedRewards, with the first traceback, if
        too many failed, or if the function scored none.
        """
        total = collections.Counter()
        for part in parts:
            total.update({name: count for name, count in part.items() if name != "first"})
        scored, failed, timeouts = total["scored"], total["failed"], total["timeouts"]
        first = next((part["first"] for part in parts if part["failed"]), "")
        _check(total, first, self._config)
        no_answer = total["no_answer"]
        if no_answer > scored / 2 and not self._looked:
            log.warning(
                "reward.function=%s finds no answer in %d of %d responses: say how to give it in "
                "data.prompt_suffix, as in ' Put the final answer in \\boxed{}.'",
                self._config.function,
                no_answer,
                scored,
            )
        self._looked = bool(parts) or self._looked
        found = {"reward/errors": failed - timeouts, "reward/timeouts": timeouts}
        if total["names_answers"]:
            found["reward/no_answer"] = no_answer
        rare = ("not_scored", "not_finite")
        return found | {f"reward/{name}": total[name] for name in rare if total[name]}

    def close(self) -> None:
        """Kills the workers and cancels waiting requests. May be called twice."""
        self._finalizer()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _kind_of_function(self) -> str:
        return self._kind.result() if self._num_workers else "row"

    def _submit(
        self, requests: Sequence[RewardRequest | VoteRequest]
    ) -> list[Future[RewardResult]]:
        if self._closing.is_set():
            raise RuntimeError("the reward pool is closed")
        futures: list[Future[RewardResult]] = [Future() for _ in requests]
        if self._num_workers:
            self._jobs.put(Scoring(requests, futures))
        else:
            config = self._config
            results = score_requests(
                self._function,
                requests,
                timeout_seconds=config.timeout_seconds,
                on_error=config.on_error,
            )
            for future, result in zip(futures, results, strict=True):
                future.set_result(result)
        return futures


def _worker_settings(
    config: RewardConfig, sandbox: SandboxConfig | None, num_workers: int
) -> WorkerSettings:
    kwargs, on_error = dict(config.kwargs), config.on_error
    if config.function in SANDBOXED:
        seconds = PROGRAM_SHARE * config.timeout_seconds
        parallel = max(1, _num_cores() // num_workers)
        kwargs["limits"] = ProgramLimits(sandbox or SandboxConfig(), seconds, parallel)
        on_error = math.nan
    return WorkerSettings(
        function=config.function,
        kwargs=kwargs,
        timeout_seconds=config.timeout_seconds,
        start_seconds=config.start_seconds,
        on_error=on_error,
        conversational=config.conversational,
        weights=tuple(config.weights),
    )


def most_workers() -> int:
    """Worker processes for which this machine has memory, and this process open files."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    by_files = _MOST_FILES if files == resource.RLIM_INFINITY else files
    return max(1, min(memory // WORKER_BYTES, by_files // WORKER_FILES))


def failures(results: Sequence[RewardResult]) -> dict[str, Any]:
    """Counts of some rewards, of their errors and gaps, with the first error; JSON-able.

    `names_answers` are those of which the function says what their answer is, `no_answer` those
    that have none; `not_finite` counts logged numbers.
    """
    failed = [result.error for result in results if result.error is not None]
    return {
        "scored": len(results),
        "failed": len(failed),
        "timeouts": failed.count("timeout"),
        "first": failed[0] if failed else "",
        "not_scored": sum(math.isnan(result.score) for result in results),
        "names_answers": sum(result.answer is not None for result in results),
        "no_answer": sum(result.answer == "" for result in results),
        "not_finite": sum(not math.isfinite(x) for r in results for x in r.logged.values()),
    }


def _serve(
    worker: WorkerProcess,
    jobs: JobQueue,
    kind: Future[str],
    closing: threading.Event,
    *,
    on_error: float,
    first: bool,
) -> None:
    """Runs one worker's thread: calls the worker for each job until there are no more.

    Coroutines wait together: a worker gets all jobs that are there at once. The `first` worker's
    thread sets `kind`.
    """
    if first:
        _fulfil([kind], lambda _: [worker.kind()])
    while (job := jobs.take()) is not None:
        taken = [job]
        if kind.done() and kind.exception() is None and kind.result() == "async":
            taken += jobs.take_share()
        requests = [request for job in taken for request in job.requests]
        futures = [future for job in taken for future in job.futures]

        def attempt(places: Sequence[int], requests=requests) -> list[RewardResult]:
            wanted = [requests[i] for i in places]
            return _attempt(worker, wanted, closing, on_error=on_error)

        _fulfil(futures, attempt)
    worker.kill()


def _fulfil(futures: Sequence[Future], work: Callable[[Sequence[int]], Sequence[Any]]) -> None:
    """Gives futures the values of work(places of those that were not cancelled)."""
    places = [i for i, future in enumerate(futures) if future.set_running_or_notify_cancel()]
    if not places:
        return
    try:
        values = work(places)
    except Exception as error:  # any error must reach the threads that wait for the futures
        for i in places:
            futures[i].set_exception(error)
        return
    for i, value in zip(places, values, strict=True):
        futures[i].set_result(value)


def _attempt(
    worker: WorkerProcess,
    requests: Sequence[RewardRequest | VoteRequest],
    closing: threading.Event,
    *,
    on_error: float,
) -> list[RewardResult]:
    if closing.is_set():
        raise RuntimeError("the reward pool was closed before this response was scored")
    kind = worker.kind()
    error = None
    try:
        results = worker.call(requests)
        if len(requests) == 1 or kind != "batch" or not all(r.error for r in results):
            return results
    except CallTimeout:
        error = "timeout"
    except WorkerDied as died:
        error = f"exception: {died}"
    if error is not None and not closing.is_set():
        worker.start()  # now, so that the worker is ready for the next call
    if len(requests) == 1:
        return [RewardResult(on_error, error=error)]
    # coroutines by halves: the good ones of many still wait together
    size = -(-len(requests) // 2) if kind == "async" else 1
    parts = [requests[i : i + size] for i in range(0, len(requests), size)]
    scored = (_attempt(worker, part, closing, on_error=on_error) for part in parts)
    return [result for results in scored for result in results]


def _close(
    jobs: JobQueue,
    closing: threading.Event,
    workers: Sequence[WorkerProcess],
    threads: Sequence[threading.Thread],
) -> None:
    closing.set()
    jobs.close()
    for worker in workers:
        worker.interrupt()
    for thread in threads:
        if thread is not threading.current_thread():  # the garbage collector runs in any thread
            thread.join(CLOSE_SECONDS)


def _num_cores() -> int:
    # a container or a launcher may have given this process fewer than the machine has
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
