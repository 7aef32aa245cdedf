"""The processes below this one: what they use, and their end.

This process is their subreaper: one whose parent has ended becomes its child.
"""

import contextlib
import os
import signal
import stat
import time
from collections.abc import Iterable
from typing import NamedTuple

from distflow_jax.sandbox.system_calls import WAIT_ALL

_GONE = (FileNotFoundError, ProcessLookupError)
_PAGE, _TICK = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


def children(process: int) -> list[int]:
    """The children of a process, of all of its threads; none of a process that has ended."""
    found = []
    with contextlib.suppress(*_GONE):
        for thread in os.listdir(f"/proc/{process}/task"):
            found += map(int, _fields(process, f"task/{thread}/children"))
    return found


def _fields(process: int, name: str) -> list[bytes]:
    """Fields of a file of /proc, those of `stat` behind the process's name."""
    with open(f"/proc/{process}/{name}", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def descendants() -> list[int]:
    """All processes below this one, zombies included."""
    found, new = [], children(os.getpid())
    while new:
        found += new
        new = [child for process in new for child in children(process)]
    return found


class Usage(NamedTuple):
    """The use of a process: bytes of memory that it shares with no file, a page of several
    processes in equal parts; seconds of CPU of its own, and of children that it has waited for."""

    memory: int = 0
    own: float = 0.0
    waited: float = 0.0
    begun: int = 0  # by the clock of the system: a number of a process may be another's later


def usage(process: int) -> Usage:
    """The use of a process; nothing of one that has ended."""
    try:
        fields = _fields(process, "stat")
        user, system, *waited, begun = map(int, (*fields[11:15], fields[19]))
        return Usage(_memory(process), (user + system) / _TICK, sum(waited) / _TICK, begun)
    except _GONE:
        return Usage()


def _memory(process: int) -> int:
    try:
        with open(f"/proc/{process}/smaps_rollup", "rb") as file:
            parts = dict(line.split()[:2] for line in file.read().splitlines()[1:])
        return sum(int(parts[name]) for name in (b"Pss_Anon:", b"Pss_Shmem:")) << 10
    except (PermissionError, KeyError):  # of an older kernel, or not shown
        _, resident, shared, *_ = map(int, _fields(process, "statm"))
        return (resident - shared) * _PAGE


def reap(but: int) -> None:
    """Takes the ends of this process's children but one, which would count as processes."""
    for child in children(os.getpid()):
        if child != but:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG | WAIT_ALL)


def deleted_bytes(processes: Iterable[int], device: int) -> int:
    """Bytes on a disk of files without a name that processes have open."""
    sizes = {}
    for process in processes:
        with contextlib.suppress(*_GONE, PermissionError):  # the latter of a zombie
            for number in os.listdir(f"/proc/{process}/fd"):
                found = os.stat(f"/proc/{process}/fd/{number}")
                if found.st_dev == device and stat.S_ISREG(found.st_mode) and not found.st_nlink:
                    sizes[found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())


def kill_all() -> None:
    """Kills all processes below this one.

    None is waited for: while others live, they count against the limit of processes, so that a
    program that forks again and again runs out of them.
    """
    while living := [one for one in descendants() if _is_living(one)]:
        for process in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.0005)


def end_all() -> None:
    """Kills all processes below this one, and waits for them."""
    with contextlib.suppress(ChildProcessError):
        while True:
            kill_all()
            while os.waitpid(-1, os.WNOHANG | WAIT_ALL)[0]:
                pass


def _is_living(process: int) -> bool:
    with contextlib.suppress(*_GONE):
        return _fields(process, "stat")[0] not in (b"Z", b"X")
    return False


def count_tasks(user: int) -> int:
    """Processes and threads of a user."""
    count = 0
    for entry in os.scandir("/proc"):
        with contextlib.suppress(*_GONE):
            if entry.name.isdigit() and entry.stat().st_uid == user:
                count += len(os.listdir(f"{entry.path}/task"))
    return count
