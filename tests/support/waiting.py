"""Waits of tests: for an event, never for so many seconds.

No filter decision of a test may depend on the machine's speed. A deadline here only ends a test
that would hang.
"""

import contextlib
import faulthandler
import sys
import threading
import time

HANG = 600.0  # seconds; nothing that ends at all takes so long, however busy the machine is


def until(condition, told=lambda: "waited in vain", *, pause=0.01):
    """The first value of `condition()` that is true; `told()` says what was there instead."""
    end = time.monotonic() + HANG
    while not (value := condition()):
        assert time.monotonic() < end, told()
        time.sleep(pause)
    return value


def rest_of(process):
    """The rest of a process's output, until it ends; it has one pipe.

    Popen.communicate with a timeout would lose lines that came with one already read.
    """
    hangs = threading.Timer(HANG, process.kill)
    hangs.start()
    try:
        return process.communicate()[0]
    finally:
        hangs.cancel()


@contextlib.contextmanager
def ends():
    """A block of C code that ends soon or hardly ever; then this process ends, with a traceback."""
    faulthandler.dump_traceback_later(HANG, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def calls_of(run):
    """How many calls, of Python and of C, `run()` makes; it may raise a ValueError."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        with contextlib.suppress(ValueError):
            run()
    finally:
        sys.setprofile(None)
    return count
