"""The programs that a process launches for the job, in order: a log for jobs that hang.

A job hangs when its processes launch programs that communicate in different orders. With
`observe.launches` each process writes a line per launch; the files of a job are equal, and the
first line that differs is where it went wrong. Programs of a sampler on one host are left out: no
other process takes part in them.
"""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import TextIO

_logs: list[TextIO] = []  # the one that is open


def launched(name: str) -> None:
    """Notes that the program of this name is launched next; nothing without an open log."""
    for log in _logs:
        log.write(f"{name}\n")


@contextlib.contextmanager
def launch_log(path: pathlib.Path | None) -> Iterator[None]:
    """A block whose launches are appended to a file, line by line; None: to none."""
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", buffering=1, encoding="utf-8") as log:  # a line at a time
        _logs.append(log)
        try:
            yield
        finally:
            _logs.remove(log)
