"""Supervision of this process of a run: its watchdog, and the signals that stop it."""

import contextlib
import logging
import math
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from distflow_jax.cluster import processes
from distflow_jax.cluster.job import GRACE, Job
from distflow_jax.config.upkeep_config import HealthConfig
from distflow_jax.watchdog.controller import Watchdog
from distflow_jax.watchdog.exit_codes import EXIT_INTERRUPTED, EXIT_PREEMPTED

NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
GRACE_SECONDS = 30.0  # between SIGTERM and SIGKILL, where no launcher says it
GRACE_SHARE = 0.7  # of these seconds, for samples; the rest is left to the disk
LEAVE_SECONDS = 2.0  # for what is done before a process ends that has not finished a step
OF_A_RUN = "the run ends after this step", "; a restart continues from the last checkpoint"
OF_A_WORKER = "the worker leaves once it has submitted its responses", ""

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
    """An event that SIGTERM sets, and Ctrl-C; before the first finished step both end the process.

    A process that starts or compiles has nothing to save, and may be in a call of minutes that no
    Python code interrupts. From `step_finished` on, whoever runs the steps ends them in order; a
    second Ctrl-C ends the process at once. `before_leaving` are called, the last one first, before
    the process ends by itself. `words`: what the first Ctrl-C does, and what follows the second.
    """

    def __init__(self, words: tuple[str, str] = OF_A_RUN):
        super().__init__()
        self.before_leaving: list[Callable[[], object]] = []
        self._words = words
        self._when_stopped: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._may_leave = self._interrupted = self._has_told = False
        self._grace = _grace_seconds()
        self._received: float | None = None  # when, by time.monotonic()

    def leave_at_once(self) -> None:
        """From now on a signal ends the process."""
        with self._lock:
            self._may_leave = True

    def step_finished(self) -> None:
        """From now on a signal only sets the event."""
        with self._lock:
            self._may_leave = False

    def when_stopped(self, call: Callable[[], object]) -> None:
        """Has `call`, which must be quick, made by the thread that receives the first signal."""
        with self._lock:
            self._when_stopped.append(call)
            is_late = self._has_told
        if is_late:
            call()

    def deadline(self) -> float:
        """Until when a process that was told to end has time to write what it has, as a time of
        time.monotonic(): most of what its launcher gives it (GRACE)."""
        began = self._received if self._received is not None else time.monotonic()
        return began + GRACE_SHARE * self._grace

    def receive(self, number: int = signal.SIGTERM) -> None:
        """Sets the event, or ends the process: with EXIT_PREEMPTED before the end of a step, with
        EXIT_INTERRUPTED if this is the second Ctrl-C."""
        if self._received is None:  # what sent the first one counts from then
            self._received = time.monotonic()
        self.set()
        with self._lock:
            interrupted = number == signal.SIGINT
            if self._may_leave:
                words = f"stopped by {NAMES[number]} before a step had ended; start again to go on"
                code = EXIT_PREEMPTED
            elif interrupted and self._interrupted:
                words = f"stopped by a second Ctrl-C{self._words[1]}"
                code = EXIT_INTERRUPTED
            else:
                self._interrupted |= interrupted
                if interrupted:
                    log.warning("Ctrl-C: %s; another one ends it at once", self._words[0])
                self._has_told = True
                for call in self._when_stopped:
                    call()
                return
            log.warning(words)
            # one of them may wait for what the main thread holds
            leaving = threading.Thread(target=self._leave, daemon=True)
            leaving.start()
            leaving.join(LEAVE_SECONDS)
            logging.shutdown()
            os._exit(code)

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
def stop_on_signals(
    *numbers: signal.Signals, words: tuple[str, str] = OF_A_RUN
) -> Iterator[StopSignal]:
    """Yields what any of these signals sets, of NAMES; outside the main thread it is never set.

    `words`: see StopSignal.

    Signals are received by a thread, since the main thread may be in a long call of C++.
    """
    stop = StopSignal(words)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    thread = threading.Thread(
        target=_receive, args=(read, stop, numbers), name="signals", daemon=True
    )
    thread.start()
    # a handler in Python must exist, and must not be Python's default, which ends the process
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(write)  # ends the thread
        thread.join()


def _receive(read: int, stop: StopSignal, wanted: Sequence[signal.Signals]) -> None:
    """Hands signals on. Others that Python handles arrive too."""
    with open(read, "rb", buffering=0) as signals:
        while numbers := signals.read(64):
            for number in numbers:
                if number in wanted:
                    stop.receive(number)
