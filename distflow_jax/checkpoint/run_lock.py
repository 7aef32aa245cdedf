"""Exclusive use of a run's folder: two runs in one would mix their rows and drop checkpoints.

Process 0 of a run holds FOLDER/run.lock, which names its host, process and start:

  flock   where the file system has it; the kernel frees the lock of a process that dies. It is
          trusted alone if holder and taker run under one kernel.
  lease   otherwise (no flock, or perhaps one for each host): the holder counts up a beat in the
          file. A taker observes it for `lease_seconds`; if it moves, the folder is in use, else
          the holder is dead. A holder that finds another's name in the file ends its process.

Without flock, takers that arrive together are told apart as in Fischer's algorithm (L. Lamport, A
Fast Mutual Exclusion Algorithm, 1987, section 2): each writes its name, waits longer than a write
takes, and has the lock if its name is still there.
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import pathlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator

from distflow_jax.parallel import processes

NAME = "run.lock"
BEAT_SECONDS = 5.0
LEASE_SECONDS = 30.0  # without a beat, after which a holder on another host counts as dead
SETTLE_SECONDS = 2.0  # longer than a write takes to reach another host
EXIT_LOST = 1
_RECORD_BYTES = 512  # of the file: fixed, so that a record is written over the one before at once
_NO_FLOCK = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOLCK}

log = logging.getLogger("distflow_jax")


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that uses a folder, as run.lock describes it."""

    token: str  # of this use
    kernel: str  # differs from host to host, and from boot to boot
    host: str
    pid: int
    started: str  # local time
    beat: int = 0

    def describe(self) -> str:
        """The holder in words.

        >>> Holder("t", "k", "tpu-3", 71, "2026-11-23 05:40:12").describe()
        'process 71 on tpu-3, started 2026-11-23 05:40:12'
        """
        return f"process {self.pid} on {self.host}, started {self.started}"


class RunLock:
    """The lock of one folder, held from `acquire` to `release`."""

    def __init__(self, path: pathlib.Path, file: int, me: Holder, beat_seconds: float):
        self._path, self._file, self._me = path, file, me
        self._released = threading.Event()
        self._thread = threading.Thread(
            target=self._beat, args=(beat_seconds,), name="run lock", daemon=True
        )
        self._thread.start()

    @classmethod
    def acquire(
        cls,
        folder: str | os.PathLike,
        *,
        beat_seconds: float = BEAT_SECONDS,
        lease_seconds: float = LEASE_SECONDS,
        settle_seconds: float = SETTLE_SECONDS,
    ) -> "RunLock":
        """Locks an existing folder; waits `lease_seconds` where a dead holder was on another host.

        Raises:
          ValueError: another run holds the folder; the message names its process.
          OSError: the folder cannot be written to.
        """
        path, me = pathlib.Path(folder) / NAME, _me()
        while True:
            with contextlib.ExitStack() as opened:
                file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                opened.callback(os.close, file)
                flocked = _flock(file)
                if flocked is False:
                    raise ValueError(_in_use(path, _holder(file, me)))
                before = _read(file)
                if before and not (flocked and before.kernel == me.kernel):
                    _observe(path, before, lease_seconds)
                if not _is_at(file, path):  # released, and with that removed
                    continue
                _write(file, me)
                if not flocked:
                    time.sleep(settle_seconds)
                    now = _read_path(path)
                    if now is None or now.token != me.token:
                        raise ValueError(_in_use(path, now))
                opened.pop_all()
                return cls(path, file, me, beat_seconds)

    def release(self) -> None:
        """Frees the folder; does nothing a second time."""
        if self._released.is_set():
            return
        self._released.set()
        self._thread.join()
        now = _read_path(self._path)
        if now is not None and now.token == self._me.token:
            self._path.unlink(missing_ok=True)
        os.close(self._file)

    def _beat(self, seconds: float) -> None:
        me = self._me
        while not self._released.wait(seconds):
            try:
                now = _read_path(self._path)
                if now is not None and now.token != me.token:
                    _lost(self._path, now)
                me = dataclasses.replace(me, beat=me.beat + 1)
                _write(self._file, me)
            except OSError as error:  # a file system that fails for a while
                log.warning("%s cannot be written (%s); trying again", self._path, error.strerror)


@contextlib.contextmanager
def only_run(folder: str | os.PathLike) -> Iterator[Callable[[], None]]:
    """A block in which no other run uses an existing folder. Collective: process 0 locks.

    It is given a function that unlocks before its end. Raises ValueError on all processes if
    another run uses the folder, or if it cannot be locked.
    """
    lock, failure = None, ""
    if processes.process_index() == 0:
        try:
            lock = RunLock.acquire(folder)
        except (ValueError, OSError) as error:
            failure = str(error)
    if failure := processes.all_gather_text(failure)[0]:
        raise ValueError(failure)
    release = lock.release if lock is not None else _nothing
    try:
        yield release
    finally:
        release()


def _nothing() -> None:
    """Releases the lock that this process does not have."""


def _lost(path: pathlib.Path, holder: Holder) -> None:
    """Ends this process, which must not write into the folder any more."""
    log.critical(
        "%s took over %s, because this run gave no sign for some time (was it stopped?); this run "
        "ends so that the two do not mix",
        holder.describe(),
        path.parent,
    )
    logging.shutdown()
    os._exit(EXIT_LOST)


def _me() -> Holder:
    kernel = socket.gethostname()
    with contextlib.suppress(OSError):
        kernel = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return Holder(
        token=secrets.token_hex(8),
        kernel=kernel,
        host=socket.gethostname()[:128],
        pid=os.getpid(),
        started=time.strftime("%Y-%m-%d %H:%M:%S"),
    )


def _flock(file: int) -> bool | None:
    """Whether the lock was free; None where the file system has none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_FLOCK:
            return None
        raise


def _is_at(file: int, path: pathlib.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _holder(file: int, me: Holder) -> Holder | None:
    """The holder of a lock that is taken.

    Who has just taken it writes its name a moment later, over that of one that has died.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        found = _read(file)
        if found is not None and (found.kernel != me.kernel or _runs(found.pid)):
            return found
        if time.monotonic() >= deadline:
            return found
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    """Whether a process of this host runs; a process of another container seems not to."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _observe(path: pathlib.Path, before: Holder, seconds: float) -> None:
    """Returns once the holder is dead or has gone; raises ValueError if it gives a sign of life."""
    log.warning(
        "%s may still use %s: waiting %.0f s for a sign of life",
        before.describe(),
        path.parent,
        seconds,
    )
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(min(0.2, seconds / 20))
        now = _read_path(path)
        if now is None:
            return
        if (now.token, now.beat) != (before.token, before.beat):
            raise ValueError(_in_use(path, now))


def _in_use(path: pathlib.Path, holder: Holder | None) -> str:
    who = holder.describe() if holder else "another run, which starts just now"
    return (
        f"--workdir {str(path.parent)!r} is in use by {who}; stop that run, or choose another "
        "--workdir"
    )


def _write(file: int, holder: Holder) -> None:
    os.pwrite(file, json.dumps(dataclasses.asdict(holder)).encode().ljust(_RECORD_BYTES), 0)


def _read(file: int) -> Holder | None:
    """The holder in the file; None in a new file, or in one whose first record is being written."""
    try:
        return Holder(**json.loads(os.pread(file, _RECORD_BYTES, 0)))
    except (ValueError, TypeError):
        return None


def _read_path(path: pathlib.Path) -> Holder | None:
    """The holder in the file that has the name now: not through a descriptor that may be old."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return _read(file)
    finally:
        os.close(file)
