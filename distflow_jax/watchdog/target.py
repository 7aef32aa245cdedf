"""The controller as its watchdog sees it: liveness, exit status, kernel state, stack traces.

Standard library only, as in all of the watchdog process.
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
    """The watched process, which is the watchdog's parent."""

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
        """Whether the process has ended; detected at once where pidfds exist."""
        if not self.gone:
            # an ended process, even one not waited for, is no parent any more
            ended = self.pidfd is not None and select.select([self.pidfd], [], [], 0)[0]
            self.gone = bool(ended) or os.getppid() != self.pid
        return self.gone

    def signal(self, number: int) -> None:
        """Sends a signal, never to another process that got the same pid."""
        try:
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, number)
            elif not self.is_gone():
                os.kill(self.pid, number)
        except ProcessLookupError:
            pass  # ended in between

    def where(self) -> str:
        """The process's host and pid."""
        return f"host {socket.gethostname()}, pid {self.pid}"

    def state(self) -> str:
        """The process's state according to the kernel."""
        fields = self._stat()
        return PROCESS_STATES.get(fields[0], fields[0]) if fields else "state unknown"

    def exit_status(self) -> str:
        """The exit status: "SIGKILL", "exit code 1", or "" if unknown.

        Unknown if the process's parent has collected the status already.
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
        """Stack traces by the process's faulthandler; "" if it writes nothing in time."""
        start = size = os.fstat(fd).st_size
        self.signal(signal.SIGUSR1)
        deadline = time.monotonic() + STACK_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.2)  # a busy machine may take the core between two lines
            before, size = size, os.fstat(fd).st_size
            if start < before == size:  # no more is coming
                break
        return os.pread(fd, size - start, start).decode(errors="replace")


def arrange_stacks(text: str, main_thread: int) -> list[str]:
    """faulthandler's output as at most STACK_LINES lines, the main thread first.

    The thread that sends beats is left out. `main_thread` is threading's ident of the main thread.
    """
    threads = [part.splitlines() for part in text.strip().split("\n\n")]
    threads = [lines for lines in threads if not any("_send_beats" in line for line in lines)]
    threads.sort(key=lambda lines: f"{main_thread:016x}" not in lines[0])
    lines = [line for lines in threads for line in lines]
    if len(lines) > STACK_LINES:
        lines[STACK_LINES:] = [f"({len(lines) - STACK_LINES} more lines)"]
    return [f"  {line}" for line in lines]


def print_lines(index: int, lines: list[str]) -> None:
    """Prints lines on stderr; gives up if it blocks, since the controller must end anyway."""
    for line in lines:
        if not select.select([], [2], [], WRITE_SECONDS)[1]:
            return
        try:
            # select guarantees room for PIPE_BUF bytes, which are written atomically
            os.write(2, f"watchdog {index}: {line}\n".encode()[: select.PIPE_BUF])
        except OSError:  # the reader is gone
            return
