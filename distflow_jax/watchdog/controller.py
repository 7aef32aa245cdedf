"""Who died, who is stuck: a watchdog process beside each controller, seen from the controller.

When one process of a JAX job dies, the runtime aborts all the others within half a second and names
nobody; when one hangs, all wait without end. Therefore each controller (one training process per
host, P of them) starts a small process that outlives it (watchdog/monitor.py). No watchdog
leads: each tells the others how its controller is (watchdog/gossip.py), and the first to
see one of these says so to all:

  died         a controller ended without close(), or reported an exception; at once
  silent       no beat from a controller for dead_seconds, while its watchdog answers: it is
               stopped, swapping, or in a call that holds the interpreter's lock
  unreachable  neither a controller nor its watchdog was heard for dead_seconds: the host is gone.
               In jobs of more than 16 processes the news go by gossip, and the deadline is longer
               by 2 log2(P) beats
  stuck        all beat, but no process has begun or ended a phase for stuck_seconds; the ones that
               the others wait for have the lowest number of phases

All watchdogs then print the same sentence on stderr, with what their own controller is doing and
its stack traces if it still runs, and end it with SIGKILL:

  watchdog 0: process 2 died at step 7 in node 'rollout', 12:03:04 (SIGKILL; last beat 0.4 s before;
  host b, pid 71); after that ended 1 (+0.21 s), 3 (+0.22 s)
  watchdog 0: this process (0) is at step 7 in node 'actor_train' since 12:03:01:
  watchdog 0:   Current thread 0x00007f5c (most recent call first): ...
  watchdog 0: process 0 (host a, pid 64) ended by SIGKILL

A controller beats from a thread, so that a stopped process and one whose interpreter hangs do not.
Stack traces come from faulthandler on SIGUSR1, whatever the main thread is doing in C++.
"""

import dataclasses
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

START_SECONDS = 60.0  # for a child to start on a loaded host
CLOSE_SECONDS = 1.0  # for the last message, if the pipe is full
# isolated and without site-packages: nothing of the user's may run in the watchdog
PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from distflow_jax.watchdog.monitor import main; main(sys.argv[2])"
)

log = logging.getLogger("distflow_jax")


@dataclasses.dataclass(frozen=True)
class HealthConfig:
    """When a process counts as dead or stuck."""

    enabled: bool = True  # a watchdog process beside each controller
    heartbeat_seconds: float = 1.0  # between two beats
    # without a beat: process stopped, or host gone; above the longest pause of a busy host
    dead_seconds: float = 30.0
    # without a new phase on any process; above the longest compilation, which is no progress
    stuck_seconds: float = 1800.0

    def __post_init__(self):
        for name in ("heartbeat_seconds", "dead_seconds", "stuck_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"health.{name} must be positive, got {getattr(self, name)}")
        if self.dead_seconds < 3 * self.heartbeat_seconds:
            raise ValueError(
                f"health.dead_seconds={self.dead_seconds:g} must be at least 3 beats: use "
                f"{3 * self.heartbeat_seconds:g} or more, or lower health.heartbeat_seconds="
                f"{self.heartbeat_seconds:g}"
            )
        if self.stuck_seconds <= self.dead_seconds:
            raise ValueError(
                f"health.stuck_seconds={self.stuck_seconds:g} must be more than "
                f"health.dead_seconds={self.dead_seconds:g}"
            )


class Watchdog:
    """A controller's hold on its watchdog process.

    watchdog = Watchdog.start(config, index=0, count=4, host="10.0.0.7")
    watchdog.connect(all_gather_text(watchdog.address), token)
    with watchdog:
        watchdog.progress(step, "rollout")

    Leaving the block closes it, with an exception after `failed`. Where config.enabled is False
    there is no process, `address` is "", and nothing happens.
    """

    def __init__(self, config: HealthConfig, count: int):
        self._count = count
        self._address = ""
        self._child: subprocess.Popen | None = None
        self._at = (0, 0, "start")  # phases begun or ended, step, phase
        self._lock = threading.Lock()
        self._unsent = b""
        self._closed = threading.Event()
        self._beat_seconds = config.heartbeat_seconds
        self._stacks_fd = -1

    @classmethod
    def start(cls, config: HealthConfig, *, index: int, count: int, host: str) -> "Watchdog":
        """Starts the watchdog of process `index` of `count`; it listens on the address `host`.

        Raises OSError if it cannot listen there.
        """
        watchdog = cls(config, count)
        if config.enabled:
            watchdog._start(config, index, host)
        return watchdog

    def _start(self, config: HealthConfig, index: int, host: str) -> None:
        self._stacks_fd = _anonymous_file()
        faulthandler.register(signal.SIGUSR1, file=self._stacks_fd, all_threads=True)
        settings = {
            "pid": os.getpid(),
            "index": index,
            "count": self._count,
            "host": host,
            "heartbeat_seconds": config.heartbeat_seconds,
            "dead_seconds": config.dead_seconds,
            "stuck_seconds": config.stuck_seconds,
            "stacks_fd": self._stacks_fd,
            "main_thread": threading.main_thread().ident,
        }
        root = str(pathlib.Path(__file__).resolve().parents[2])
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", PROGRAM, root, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self._stacks_fd,),
            cwd="/",
            # a launcher kills the controller's process group, terminals interrupt it
            start_new_session=True,
        )
        self._address = self._read_address(host)
        # a watchdog that does not read must not stop the training
        os.set_blocking(self._child.stdin.fileno(), False)
        thread = threading.Thread(target=self._send_beats, name="watchdog beats", daemon=True)
        thread.start()

    def _read_address(self, host: str) -> str:
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
            raise OSError(f"no watchdog on {host!r}: {answer['error']}")
        return answer["address"]

    @property
    def address(self) -> str:
        """host:port on which this watchdog hears the others; "" if there is none."""
        return self._address

    def connect(self, addresses: Sequence[str], token: str) -> None:
        """Names the watchdogs of all processes, by index, and a secret that the job shares.

        From now on the others are watched too: call it at about the same time everywhere.
        """
        if len(addresses) != self._count:
            raise ValueError(f"{len(addresses)} watchdog addresses for {self._count} processes")
        self._send("connect", token, list(addresses))

    def progress(self, step: int, phase: str) -> None:
        """Says that this process begins `phase` of `step`; takes tens of microseconds.

        All processes must go through the same steps and phases: who has passed fewer is waited for.
        """
        self._at = (self._at[0] + 1, step, phase)
        self._send("at", *self._at)

    def failed(self, message: str) -> None:
        """Says that an exception ends this process ("ValueError: ..."), and with it the job.

        The others are ended within a second, this process if it does not end within 5.
        """
        self._send("failed", message, last=True)

    def close(self, code: int = 0) -> None:
        """Orderly end, with the exit code that will follow. Nobody watches this process any more.

        Does nothing after `failed`, so that whoever cleans up need not know.
        """
        self._send("done", code, last=True)

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if error is None or isinstance(error, SystemExit) and not error.code:
            self.close()
        else:
            self.failed(f"{kind.__name__}: {error}".rstrip(": "))

    def _send_beats(self) -> None:
        while not self._closed.wait(self._beat_seconds):
            self._send("at", *self._at)

    def _send(self, *message: object, last: bool = False) -> None:
        """Writes a line without waiting; what does not fit goes out before the next line."""
        with self._lock:
            if self._child is None or self._closed.is_set():
                return
            if not (message[0] == "at" and self._unsent):  # beats need not queue
                self._unsent += json.dumps(message).encode() + b"\n"
            try:
                self._flush(CLOSE_SECONDS if last else 0.0)
            except BrokenPipeError:
                log.warning("the watchdog of this process has ended; nobody watches it any more")
                last = True
            if last:
                self._closed.set()
                self._child.stdin.close()
                if message[0] == "done":
                    self._release()

    def _flush(self, seconds: float) -> None:
        """Writes what is unsent, as far as the pipe takes it within `seconds`."""
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
    """A descriptor of a file without a name, in memory where the system has that."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("stack traces")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
