"""Silence about what follows from a save that failed: the error itself is raised, once.

Orbax closes its event loop at the first array that cannot be written. Of every other array of that
checkpoint TensorStore then reports to the closed loop, for which Python prints a traceback, or
asyncio logs that nobody took the error.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any


def leave_out() -> None:
    """Leaves these out of stderr and of the log from now on; does nothing a second time."""
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(sys.unraisablehook)
    logging.getLogger("asyncio").addFilter(_is_news)


class _Hook:
    """A sys.unraisablehook before another one."""

    def __init__(self, other: Callable[[Any], object]):
        self._other = other

    def __call__(self, found: Any) -> None:
        late = isinstance(found.exc_value, RuntimeError) and found.object is None
        if not (late and str(found.exc_value) == "Event loop is closed"):
            self._other(found)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a message of asyncio says more than that an array was not written."""
    error = record.exc_info[1] if record.exc_info else None
    late = "never retrieved" in record.getMessage() and isinstance(error, ValueError)
    return not (late and "Error writing" in str(error))
