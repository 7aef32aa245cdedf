"""Supervision of this process of a run: its watchdog, and the handling of SIGTERM."""

import contextlib
import logging
import math
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator

from distflow_jax.cluster import processes
from distflow_jax.cluster.job import GRACE, Job
from distflow_jax.config.upkeep_config import HealthConfig
from distflow_jax.watchdog.controller import Watchdog
from distflow_jax.watchdog.exit_codes import EXIT_PREEMPTED

GRACE_SECONDS = 30.0  # between SIGTERM and SIGKILL, where no launcher says it
GRACE_SHARE = 0.7  # of these seconds, for samples; the rest is left to the disk
LEAVE_SECONDS = 2.0  # for what is done before a process ends that has not finished a step

log = logging.getLogger("distflow_jax")


def watched(config: HealthConfig, job: Job) -> Watchdog:
    """Starts this process's watchdog and connects it to those of the others. Collective."""
    index, count = processes.process_index(), processes.process_count()
    host = processes.reachable_host(job)
    watchdog = Watchdog.start(config, index=index, count=count, host=host)
    processes.before_leaving(watchdog.close)  # it must not name this process for another's end
    if count > 1:
        gathered = processes.all_gather_text(f"{watchdog.address} {secrets.token_hex(16)}")
        addresses, tokens = zip(*(text.rsplit(" ", 1) for text in gathered), strict=True)
        if config.enabled:
            watchdog.connect(addresses, tokens[0])
    processes.met_others()
    return watchdog


class StopSignal(threading.Event):
    """An event that SIGTERM sets; before the first finished step SIGTERM ends the process.

    A process that starts or compiles has nothing to save, and may be in a call of minutes that no
    Python code interrupts. From `step_finished` on, whoever runs the steps ends them in order.
    `before_leaving` are called, the last one first, before the process ends by itself.
    """

    def __init__(self):
        super().__init__()
        self.before_leaving: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._may_leave = False
        self._grace = _grace_seconds()
        self._received: float | None = None  # when, by time.monotonic()

    def leave_at_once(self) -> None:
        """From now on SIGTERM ends the process."""
        with self._lock:
            self._may_leave = True

    def step_finished(self) -> None:
        """From now on SIGTERM only sets the event."""
        with self._lock:
            self._may_leave = False

    def deadline(self) -> float:
        """Until when a process that was told to end has time to write what it has, as a time of
        time.monotonic(): most of what its launcher gives it (GRACE)."""
        began = self._received if self._received is not None else time.monotonic()
        return began + GRACE_SHARE * self._grace

    def receive(self) -> None:
        """Sets the event, or ends the process with EXIT_PREEMPTED."""
        self._received = time.monotonic()
        self.set()
        with self._lock:
            if not self._may_leave:
                return
            log.warning("stopped by SIGTERM before a step had ended; start again to go on")
            # one of them may wait for what the main thread holds
            leaving = threading.Thread(target=self._leave, daemon=True)
            leaving.start()
            leaving.join(LEAVE_SECONDS)
            logging.shutdown()
            os._exit(EXIT_PREEMPTED)

    def _leave(self) -> None:
        for call in reversed(self.before_leaving):
            call()


def _grace_seconds() -> float:
    text = os.environ.get(GRACE, f"{GRACE_SECONDS:g}")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{GRACE}={text!r} must be a number of seconds above 0")
    return seconds


@contextlib.contextmanager
def stop_on_sigterm() -> Iterator[StopSignal]:
    """Yields what SIGTERM sets; outside the main thread it is never set.

    The signal is received by a thread, since the main thread may be in a long call of C++.
    """
    stop = StopSignal()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    thread = threading.Thread(target=_receive, args=(read, stop), name="SIGTERM", daemon=True)
    thread.start()
    # a handler in Python must exist, and must not be Python's default, which ends the process
    before = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, before)
        os.close(write)  # ends the thread
        thread.join()


def _receive(read: int, stop: StopSignal) -> None:
    with open(read, "rb", buffering=0) as signals:
        while numbers := signals.read(64):
            if signal.SIGTERM in numbers:
                stop.receive()
