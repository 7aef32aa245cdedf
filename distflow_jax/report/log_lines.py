"""Log messages as lines of one style, without the harmless ones of other packages.

`warning: 3 overlong prompts were dropped`; where standard error is no terminal, the time stands
before it. Warnings of Python's module `warnings` have the same form. INFO and DEBUG of installed
packages are left out: they say how JAX, Orbax and others set themselves up.
"""

import logging
import sys
import sysconfig
import textwrap
import time
import warnings
from typing import TextIO

STAMP = "%m-%d %H:%M:%S"  # before lines that no terminal shows
OWN = "distflow_jax"
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
_WIDTH = 80


class LineHandler(logging.StreamHandler):
    """Writes records to standard error, whatever that is at the time."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)  # StreamHandler's would keep today's stream

    @property
    def stream(self) -> TextIO:
        """Standard error; a progress line on a terminal stands in for it while it is redrawn."""
        return sys.stderr


class LineFormatter(logging.Formatter):
    """`warning: MESSAGE`, wrapped on a terminal and one line with the time elsewhere."""

    def format(self, record: logging.LogRecord) -> str:
        """The text of one record."""
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        whole = record.exc_info or record.stack_info
        message = super().format(record).rstrip() if whole else record.getMessage().strip()
        if not sys.stderr.isatty():
            return f"{time.strftime(STAMP)} {level}{message}"
        if whole:
            return f"{level}{message}"
        return textwrap.fill(
            f"{level}{message}",
            _WIDTH,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )


def use_lines() -> None:
    """Gives all log messages of this process this form. For programs, not for libraries."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    handler = LineHandler()
    handler.setFormatter(LineFormatter())
    handler.addFilter(_matters)
    root.addHandler(handler)
    if root.level > logging.INFO or root.level == logging.NOTSET:
        logging.getLogger(OWN).setLevel(logging.INFO)
    logging.captureWarnings(True)
    warnings.formatwarning = _warning_line


def only_errors() -> None:
    """Leaves out everything below errors: for the other processes of a job."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LineHandler):
            handler.setLevel(logging.ERROR)


def _matters(record: logging.LogRecord) -> bool:
    if record.levelno >= logging.WARNING or record.name.split(".")[0] == OWN:
        return True
    return not record.pathname.startswith(_INSTALLED)


def _warning_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    text = " ".join(str(message).split())
    return f"{text} ({category.__name__}, {filename}, line {lineno})"
