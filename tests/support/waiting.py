"""Waits of tests: for an event, never for so many seconds.

No verdict of a test may depend on the machine's speed. A deadline here only ends a test that would
hang.
"""

import time

HANG = 600.0  # seconds; nothing that ends at all takes so long, however busy the machine is


def until(condition, told=lambda: "waited in vain", *, pause=0.01):
    """The first value of `condition()` that is true; `told()` says what was there instead."""
    end = time.monotonic() + HANG
    while not (value := condition()):
        assert time.monotonic() < end, told()
        time.sleep(pause)
    return value
