"""The controller as its watchdog sees it: is it there, how did it end, what is it doing.

Standard library only, as for all of the watchdog process.
"""

import os
import select
import signal
import socket
import time

STACK_SECONDS = 1.0  # waiting for stack traces
STACK_LINES = 60
WRITE_SECONDS = 1.0  # waiting for a reader of stderr

# the third field of /proc/PID/stat
PROCESS_STATES = {
    "R": "running: a call holds the interpreter's lock, or the host is overloaded",
    "S": "sleeping: a call holds the interpreter's lock",
    "D": "waiting in the kernel: disk, network file system or swap",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
}

SIGNAL_NAMES = {number.value: number.name for number in signal.Signals}


class Target:
    """The process that is watched: our parent."""

    def __init__(self, pid: int):
        self.pid = pid
        self.gone = False
        self.pidfd = None
        if hasattr(os, "pidfd_open"):
            try:
                self.pidfd = os.pidfd_open(pid)
            except OSError:  # an old kernel, or it is gone already
                pass

    def is_gone(self) -> bool:
        """Whether it has ended; at once where there are pidfds."""
        if not self.gone:
            # an ended process, even one that nobody has waited for yet, is no parent any more
            ended = self.pidfd is not None and select.select([self.pidfd], [], [], 0)[0]
            self.gone = bool(ended) or os.getppid() != self.pid
        return self.gone

    def signal(self, number: int) -> None:
        """Sends a signal; never to another process that got the same pid."""
        try:
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, number)
            elif not self.is_gone():
                os.kill(self.pid, number)
        except ProcessLookupError:
            pass  # ended in between

    def where(self) -> str:
        """How a person finds it."""
        return f"host {socket.gethostname()}, pid {self.pid}"

    def state(self) -> str:
        """What the kernel says that it does."""
        fields = self._stat()
        return PROCESS_STATES.get(fields[0], fields[0]) if fields else "state not known"

    def exit_status(self) -> str:
        """How it ended: "SIGKILL", "exit code 1", or "".

        Not known if the one who started it has taken the status already, which nobody else can.
        """
        fields = self._stat()
        if not fields or fields[0] != "Z":
            return ""
        status = int(fields[49])  # proc(5): field 52, of which these are 3 and later
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return SIGNAL_NAMES.get(number, f"signal {number}")
        return f"exit code {os.WEXITSTATUS(status)}"

    def _stat(self) -> list[str]:
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                return file.read().rpartition(")")[2].split()
        except OSError:  # not Linux, or the process is gone
            return []

    def stacks(self, fd: int) -> str:
        """The stack traces that its faulthandler writes; "" if it writes nothing in time."""
        start = size = os.fstat(fd).st_size
        self.signal(signal.SIGUSR1)
        deadline = time.monotonic() + STACK_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.05)
            before, size = size, os.fstat(fd).st_size
            if start < before == size:  # no more is coming
                break
        return os.pread(fd, size - start, start).decode(errors="replace")


def arrange_stacks(text: str, main_thread: int) -> list[str]:
    """faulthandler's output as lines: the main thread first, our own left out, STACK_LINES at most.

    `main_thread` is threading's ident of it.
    """
    threads = [part.splitlines() for part in text.strip().split("\n\n")]
    threads = [lines for lines in threads if not any("_send_beats" in line for line in lines)]
    threads.sort(key=lambda lines: f"{main_thread:016x}" not in lines[0])
    lines = [line for lines in threads for line in lines]
    if len(lines) > STACK_LINES:
        lines[STACK_LINES:] = [f"({len(lines) - STACK_LINES} more lines)"]
    return [f"  {line}" for line in lines]


def say(index: int, lines: list[str]) -> None:
    """Prints lines on stderr; gives up when nobody reads it, as the controller must end anyway."""
    for line in lines:
        if not select.select([], [2], [], WRITE_SECONDS)[1]:
            return
        try:
            # so much fits into a pipe that select calls writable, and stays in one piece
            os.write(2, f"watchdog {index}: {line}\n".encode()[: select.PIPE_BUF])
        except OSError:  # the reader is gone
            return
