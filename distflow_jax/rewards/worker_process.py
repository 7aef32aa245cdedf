"""The pool's handle on one worker process: start, call with a deadline, kill."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from distflow_jax.parsing.bounded_child import module_path
from distflow_jax.rewards.records import RewardRequest, RewardResult, VoteRequest

ASYNC_GRACE_SECONDS = 1.0  # coroutines have deadlines of their own, which should expire first

END_SECONDS = 5.0  # for a process that has closed its connection


class CallTimeout(Exception):
    """The function did not return in time; the process is gone."""


class WorkerDied(Exception):
    """The process ended by itself during a call (os._exit, a crash of C code, out of memory)."""


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """Settings of a worker."""

    function: str
    kwargs: Mapping[str, Any]
    timeout_seconds: float  # of one call
    start_seconds: float  # for the start of Python and the import of the function's module
    on_error: float  # score of a response whose call fails
    conversational: bool = False  # a batch function gets lists of messages
    weights: tuple[float, ...] = ()  # of several functions

    @property
    def options(self) -> dict[str, Any]:
        """Options of `score_requests`."""
        names = ("timeout_seconds", "on_error", "conversational")
        return {name: getattr(self, name) for name in names}


class WorkerProcess:
    """One process with one reward function; a call after a failed one starts a new process.

    Used by one thread at a time, apart from `interrupt`.
    """

    def __init__(self, job: WorkerSettings):
        self._job = job
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None
        self._kind: str | None = None

    def start(self) -> None:
        """Starts the process without waiting for it."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",  # PYTHONPATH below has the working folder if this process has it
                    "-m",
                    "distflow_jax.rewards.worker_main",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # its own session: Ctrl-C reaches the parent alone, and a kill reaches all processes
                # that the function started
                start_new_session=True,
                # no accelerator if the function uses JAX
                env=os.environ | {"PYTHONPATH": module_path(), "JAX_PLATFORMS": "cpu"},
            )
        self._connection = Connection(ours.detach())
        self._kind = None
        job = self._job
        self._connection.send(((job.function, job.kwargs, job.weights), job.options))

    def kind(self) -> str:
        """The function's kind, "row", "async" or "batch"; waits for the process to be ready.

        Raises:
          ValueError, FileNotFoundError: the function cannot be loaded.
        """
        if self._process is None or (self._kind is not None and _has_ended(self._process)):
            self.kill()  # it died between two calls: no request is to blame
            self.start()
        if self._kind is None:
            seconds = self._job.start_seconds
            try:
                answer, value = self._receive(seconds)
            except CallTimeout:
                raise ValueError(
                    f"importing the reward function {self._job.function!r} took more than "
                    f"reward.start_seconds {seconds}; raise that"
                ) from None
            except WorkerDied as error:
                raise ValueError(
                    f"importing the reward function {self._job.function!r}: {error}"
                ) from None
            if answer == "error":
                self.kill()
                raise value
            self._kind = value
        return self._kind

    def call(self, requests: Sequence[RewardRequest | VoteRequest]) -> list[RewardResult]:
        """One result per request, in order.

        Raises:
          CallTimeout, WorkerDied: the process is gone, and no request was scored.
        """
        grace = ASYNC_GRACE_SECONDS if self.kind() == "async" else 0.0
        with contextlib.suppress(OSError):  # it has died: receiving raises WorkerDied
            self._connection.send(list(requests))
        return self._receive(self._job.timeout_seconds + grace)

    def kill(self) -> None:
        """Ends the process and all that it started; does nothing without a process."""
        self.interrupt()
        if self._process is not None:
            self._process.wait()
            self._connection.close()
        self._process = None

    def interrupt(self) -> None:
        """Ends the process from another thread: a running call raises WorkerDied.

        What an ended process had started ends too: until that process is waited for, its group
        keeps its number.
        """
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def _receive(self, seconds: float) -> Any:
        try:
            if not self._connection.poll(seconds):
                self.kill()
                raise CallTimeout
            return self._connection.recv()
        except (EOFError, OSError):
            process = self._process
            end = time.monotonic() + END_SECONDS
            while not _has_ended(process) and time.monotonic() < end:
                time.sleep(0.002)  # it has closed its connection, as the last or nearly so
            self.kill()
            code = process.returncode
            raise WorkerDied(f"the worker process ended with exit code {code}") from None


def _has_ended(process: subprocess.Popen) -> bool:
    """Whether a process has ended, without waiting for it: the number of its group stays taken."""
    if process.returncode is not None:
        return True
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, options) is not None
