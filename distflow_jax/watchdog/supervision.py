"""Supervision of this process of a run: its watchdog, and the handling of SIGTERM."""

import contextlib
import secrets
import signal
import threading
from collections.abc import Iterator

from distflow_jax.parallel import processes
from distflow_jax.parallel.job import Job
from distflow_jax.watchdog.controller import HealthConfig, Watchdog


def watched(config: HealthConfig, job: Job) -> Watchdog:
    """Starts this process's watchdog and connects it to those of the others. Collective."""
    index, count = processes.process_index(), processes.process_count()
    host = processes.reachable_host(job)
    watchdog = Watchdog.start(config, index=index, count=count, host=host)
    if count > 1:
        gathered = processes.all_gather_text(f"{watchdog.address} {secrets.token_hex(16)}")
        addresses, tokens = zip(*(text.rsplit(" ", 1) for text in gathered), strict=True)
        if config.enabled:
            watchdog.connect(addresses, tokens[0])
    return watchdog


@contextlib.contextmanager
def stop_on_sigterm() -> Iterator[threading.Event]:
    """Yields an event that SIGTERM sets; outside the main thread it is never set."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.signal(signal.SIGTERM, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGTERM, before)
