"""A controller's watchdog: the process that reports which controller died or hangs, and its handle.

When one process of a JAX job dies, the runtime aborts all others within half a second without
naming the first; when one hangs, all wait without end. Therefore each controller (one training
process per host, P of them) starts a small process that outlives it (watchdog/monitor.py).
Watchdogs have no leader: each sends the others the state of its controller (watchdog/gossip.py),
and the first to observe one of these declares it to all:

  died         a controller ended without close(), or reported an exception; declared at once
  silent       no beat from a controller for dead_seconds, while its watchdog responds: the
               controller is stopped, swapping, or in a call that holds the interpreter's lock
  unreachable  neither a controller nor its watchdog was heard for dead_seconds: the host is gone.
               In jobs of more than 16 processes news spreads by gossip, and the deadline is longer
               by 2 log2(P) beats
  stuck        all beat, but no process has begun or ended a phase for stuck_seconds; the processes
               that the others wait for have the lowest number of phases

All watchdogs then print the same sentence on stderr, with the position of their own controller and
its stack traces if it still runs, and end it with SIGKILL:

  watchdog 0: process 2 died at step 7 in node 'rollout', 12:03:04 (SIGKILL; last beat 0.4 s before;
  host b, pid 71); after that ended 1 (+0.21 s), 3 (+0.22 s)
  watchdog 0: this process (0) is at step 7 in node 'actor_train' since 12:03:01:
  watchdog 0:   Current thread 0x00007f5c (most recent call first): ...
  watchdog 0: process 0 (host a, pid 64) ended by SIGKILL

A controller beats from a Python thread, so that beats stop when the process is stopped or its
interpreter hangs. faulthandler writes the stack traces on SIGUSR1, even while the main thread runs
C++ code.
"""

import faulthandler
import json
import logging
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

from distflow_jax.config.upkeep_config import HealthConfig
from distflow_jax.watchdog.gossip import NOTE

START_SECONDS = 60.0  # for a child to start on a loaded host
NEWS_SECONDS = 1.0  # for news to reach the watchdogs of all processes
CLOSE_SECONDS = 1.0  # for the last message, if the pipe is full
# isolated and without site-packages: no code of the user may run in the watchdog
PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from distflow_jax.watchdog.monitor import main; main(sys.argv[2])"
)

log = logging.getLogger("distflow_jax")


class Watchdog:
    """A controller's handle on its watchdog process.

    watchdog = Watchdog.start(config, index=0, count=4, host="10.0.0.7")
    watchdog.connect(all_gather_text(watchdog.address), token)
    with watchdog:
        watchdog.progress(step, "rollout")

    Leaving the block calls `close`, or `failed` after an exception. With config.enabled=False no
    process is started, and all methods do nothing.

    `address` is host:port on which this watchdog receives datagrams; "" without a watchdog.
    """

    def __init__(self, config: HealthConfig, count: int):
        self._count = count
        self.address = ""
        self._child: subprocess.Popen | None = None
        self._at = (0, 0, "start")  # phases begun or ended, step, phase
        self._lock = threading.Lock()
        self._unsent = b""
        self._closed = threading.Event()
        self._beat_seconds = config.heartbeat_seconds
        self._stacks_fd = -1
        self._settings: dict[str, object] = {}  # of the watchdog process
        self._peers: tuple[str, list[str]] | None = None  # token and addresses, once connected
        self._lost = False  # the watchdog process has ended by itself

    @classmethod
    def start(cls, config: HealthConfig, *, index: int, count: int, host: str) -> "Watchdog":
        """Starts the watchdog of process `index` of `count`, which listens on the address `host`.

        Raises OSError if it cannot listen there.
        """
        watchdog = cls(config, count)
        if config.enabled:
            watchdog._start(config, index, host)
        return watchdog

    def _start(self, config: HealthConfig, index: int, host: str) -> None:
        self._stacks_fd = _anonymous_file()
        faulthandler.register(signal.SIGUSR1, file=self._stacks_fd, all_threads=True)
        self._settings = {
            "pid": os.getpid(),
            "index": index,
            "count": self._count,
            "host": host,
            "port": 0,
            "generation": 0,
            "limits": (config.heartbeat_seconds, config.dead_seconds, config.stuck_seconds),
            "stacks_fd": self._stacks_fd,
            "main_thread": threading.main_thread().ident,
        }
        self._spawn()
        thread = threading.Thread(target=self._send_beats, name="watchdog beats", daemon=True)
        thread.start()

    def _spawn(self) -> None:
        """Starts the watchdog process. Raises OSError if it cannot listen on its address."""
        root = str(pathlib.Path(__file__).resolve().parents[2])
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", PROGRAM, root, json.dumps(self._settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self._stacks_fd,),
            cwd="/",
            # a launcher kills the controller's process group, terminals interrupt it
            start_new_session=True,
        )
        self.address = self._read_address()
        # a watchdog that does not read must not stop the training
        os.set_blocking(self._child.stdin.fileno(), False)

    def _restart(self) -> None:
        """Starts another watchdog process where the one before was; the others keep its address."""
        with self._lock:
            self._child.stdin.close()
            self._child.wait()
            self._settings["port"] = int(self.address.rpartition(":")[2])
            self._settings["generation"] += 1
            self._unsent = b""
            try:
                self._spawn()
            except OSError as error:
                log.warning("%s; this process is not watched any more", error)
                self._closed.set()
                return
            self._lost = False
        log.warning("the watchdog of this process had ended; another one is started")
        if self._peers is not None:
            self._send("connect", *self._peers)

    def _read_address(self) -> str:
        with self._child.stdout as answers:
            poll = select.poll()  # select() takes no descriptors above 1,023
            poll.register(answers, select.POLLIN)
            line = answers.readline() if poll.poll(START_SECONDS * 1000) else b""
        answer = json.loads(line) if line else {"error": "the watchdog process did not start"}
        if "error" in answer:
            self._child.kill()
            self._child.wait()
            self._child.stdin.close()
            self._release()
            raise OSError(f"no watchdog on {self._settings['host']!r}: {answer['error']}")
        return answer["address"]

    def connect(self, addresses: Sequence[str], token: str) -> None:
        """Connects to the watchdogs of all processes.

        From now on the other processes are watched too: call it at about the same time on all.

        Args:
          addresses: the watchdogs' addresses, by process index.
          token: a secret that all processes of the job share.

        Raises:
          ValueError: the number of addresses is not the number of processes.
        """
        if len(addresses) != self._count:
            raise ValueError(f"{len(addresses)} watchdog addresses for {self._count} processes")
        self._peers = token, list(addresses)
        self._send("connect", *self._peers)

    def progress(self, step: int, phase: str) -> None:
        """Reports that this process begins `phase` of `step`; takes tens of microseconds.

        All processes must go through the same steps and phases: the watchdogs compare their counts
        to find the process that the others wait for.
        """
        self._at = (self._at[0] + 1, step, phase)
        self._send("at", *self._at)

    def note(self, what: str) -> None:
        """Adds to the phase what it waits for, with the next beat; this is no progress.

        "": nothing, from now on.
        OTHERS of watchdog/gossip.py says that it is other processes.
        """
        sequence, step, phase = self._at
        phase = phase.partition(NOTE)[0]
        self._at = (sequence, step, f"{phase}{NOTE}{what}" if what else phase)

    def failed(self, message: str) -> None:
        """Reports that an exception ends this process ("ValueError: ..."), and with it the job.

        The other processes are ended within a second, this one if it does not end within 5 s.
        """
        self._send("failed", message, last=True)

    def stopped(self) -> None:
        """Reports that SIGTERM ends this process before a step had ended: the others get one too.

        Returns when the news is likely to have reached them, which an end would otherwise overtake.
        """
        self._send("stopped", last=True)
        if self._count > 1 and self._child is not None:
            time.sleep(NEWS_SECONDS)

    def close(self) -> None:
        """Ends the watch before an orderly exit.

        Does nothing after `failed`, so that cleanup code may always call it.
        """
        self._send("done", last=True)

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if error is None or isinstance(error, SystemExit) and not error.code:
            self.close()
        else:
            self.failed(f"{kind.__name__}: {error}".rstrip(": "))

    def _send_beats(self) -> None:
        while not self._closed.wait(self._beat_seconds):
            if self._lost:
                self._restart()
            self._send("at", *self._at)

    def _send(self, *message: object, last: bool = False) -> None:
        """Writes a line without blocking; the rest of a full pipe's line precedes the next one."""
        with self._lock:
            if self._child is None or self._closed.is_set() or (self._lost and not last):
                return
            if not (message[0] == "at" and self._unsent):  # a beat behind unsent lines is redundant
                self._unsent += json.dumps(message).encode() + b"\n"
            try:
                self._flush(CLOSE_SECONDS if last else 0.0)
            except BrokenPipeError:
                self._lost = True  # the thread that beats starts another
            if last:
                self._closed.set()
                self._child.stdin.close()
                if message[0] == "done":
                    self._release()

    def _flush(self, seconds: float) -> None:
        """Writes unsent bytes, as many as the pipe takes within `seconds`."""
        deadline = time.monotonic() + seconds
        while self._unsent:
            try:
                self._unsent = self._unsent[os.write(self._child.stdin.fileno(), self._unsent) :]
            except BlockingIOError:  # full
                if time.monotonic() >= deadline:
                    return
                time.sleep(0.01)

    def _release(self) -> None:
        faulthandler.unregister(signal.SIGUSR1)
        os.close(self._stacks_fd)


def _anonymous_file() -> int:
    """A descriptor of a file without a name, in memory where memfd_create exists."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("stack traces")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
