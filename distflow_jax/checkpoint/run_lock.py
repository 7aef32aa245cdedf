"""Exclusive use of a run's folder: two runs in one would mix their rows and drop checkpoints.

Process 0 holds a lease, FOLDER/run.lock, and counts up its beat. A taker puts its own in place of a
dead one: at once if its flock shows that (trusted under one kernel alone), else after 30 s without
a beat. Without flock a put is Fischer's: write, wait longer than writes take, and read who has it
(L. Lamport, A Fast Mutual Exclusion Algorithm, 1987). A holder that finds another's lease ends.
"""

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from distflow_jax.cluster import processes

NAME = "run.lock"
SETTLE_SECONDS = 2.0  # longer than a write takes to reach another host
EXIT_LOST = 1
log = logging.getLogger("distflow_jax")


class Lease(NamedTuple):
    """The use of a folder by one process; a kernel differs by host and boot, times are local."""

    token: str
    kernel: str
    host: str
    pid: int
    started: str
    beat: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, started {self.started}"

    def runs(self, kernel: str) -> bool:
        """Whether its process may run, as far as one under this kernel sees."""
        return self.kernel != kernel or os.path.exists(f"/proc/{self.pid}")


class RunLock:
    """The lock of an existing folder until `release`; times are in seconds.

    Raises ValueError with the process that holds it, OSError if the folder cannot be written to.
    """

    def __init__(self, folder: Path, beat: float = 5.0, lease: float = 30.0, settle: float = 2.0):
        self._path, self._mine = folder / NAME, _mine()
        self._file = self._take(lease, settle)
        self._released = threading.Event()
        self._thread = threading.Thread(None, self._beat, NAME, (beat, self._mine), daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Frees the folder; does nothing a second time."""
        if not self._released.is_set():
            self._released.set()
            self._thread.join()
            if (found := _read(self._path)) and found.token == self._mine.token:
                self._path.unlink(missing_ok=True)
            os.close(self._file)

    def _take(self, lease: float, settle: float) -> int:
        """The file with this run's lease in place of a dead one."""
        path, mine, flocked = self._path, self._mine, True
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600)) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:  # taken, or a file system without flock
                flocked = False if isinstance(error, BlockingIOError) else None
            now = found = _read(path)
            if flocked is False:  # a dead one's lease is written over a moment later
                now = _watch(path, SETTLE_SECONDS, lambda at: at and at.runs(mine.kernel))
            elif found and not (flocked and found.kernel == mine.kernel):
                message = "%s may still use %s: waiting %.0f s for a sign of life"
                log.warning(message, found, path.parent, lease)
                now = _watch(path, lease, lambda at: at != found)
            if flocked is not False and now in (None, found):
                _write(file.fileno(), mine)
                time.sleep(0.0 if flocked else settle)
                now = _read(path)
                if now == mine:
                    return os.dup(file.fileno())  # which keeps an flock
                if now is None and not path.exists():  # released, and with that removed
                    return self._take(lease, settle)
        raise ValueError(
            f"--workdir {str(path.parent)!r} is in use by "
            f"{now or 'another run, which starts just now'}; stop that run, or choose another "
            "--workdir"
        )

    def _beat(self, seconds: float, lease: Lease) -> None:
        while not self._released.wait(seconds):
            try:
                if (found := _read(self._path)) and found.token != lease.token:
                    log.critical(
                        f"{found} took over {self._path.parent}, because this run gave no sign for "
                        "some time (was it stopped?); this run ends so that the two do not mix"
                    )
                    logging.shutdown()
                    os._exit(EXIT_LOST)
                lease = lease._replace(beat=lease.beat + 1)
                _write(self._file, lease)
            except OSError as error:  # a file system that fails for a while
                log.warning("%s cannot be written (%s); trying again", self._path, error.strerror)


def only_run(folder: Path) -> Callable[[], None]:
    """Keeps other runs out of an existing folder; returns the function that ends this.

    Collective: process 0 locks. Raises ValueError on all processes if it cannot.
    """
    failure, release = "", lambda: None
    try:
        release = RunLock(folder).release if processes.process_index() == 0 else release
    except (ValueError, OSError) as error:
        failure = str(error)
    if failure := processes.all_gather_text(failure)[0]:
        raise ValueError(failure)
    return release


def _mine() -> Lease:
    host, boot = os.uname().nodename, Path("/proc/sys/kernel/random/boot_id")
    kernel = boot.read_text().strip() if boot.exists() else host
    return Lease(os.urandom(8).hex(), kernel, host[:128], os.getpid(), time.strftime("%F %T"))


def _watch(path: Path, seconds: float, ends: Callable[[Lease | None], bool]) -> Lease | None:
    deadline = time.monotonic() + seconds
    while not ends(now := _read(path)) and time.monotonic() < deadline:
        time.sleep(min(0.1, seconds / 20))
    return now


def _write(file: int, lease: Lease) -> None:
    os.pwrite(file, json.dumps(lease._asdict()).encode().ljust(512), 0)  # all of the last one
    os.ftruncate(file, 512)  # and of another file in its place
    os.fsync(file)  # other hosts would see it late, and take the holder for dead


def _read(path: Path) -> Lease | None:
    """The lease of a folder; None if there is none, or the first is being written."""
    try:
        return Lease(**json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError, TypeError, RecursionError):
        return None
