"""Watch over the processes of a job while they start, until their watchdogs have met.

Before that nobody else notices a process that ends, stops or never comes: JAX waits for minutes and
names none. It runs over the connections that process 0's gate keeps (parallel/admission.py):

  process    BEAT every BEAT_SECONDS; MET once it needs this watch no more; STOPPED by SIGTERM
  gate       lines: "" as a beat, "say TEXT", "end TEXT", "stop", and "met" once all have met

Whoever comes after that is none of this watch's business.
"""

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable

BEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0  # without a beat, after which a process is named
LOST_SECONDS = 60.0  # without a beat, after which the job ends: no call holds Python for so long
SAY_SECONDS = 10.0  # between two lines about the same
LEAVE_SECONDS = 1.0  # in which whoever started the processes sees the first end before the others
EXIT_LOST = 1
BEAT, MET, STOPPED = b".", b"!", b"T"
NAMED = 8  # processes that a line lists before it says "and N more"
_LINE_CHARS = 800

log = logging.getLogger("distflow_jax")


class RollCall:
    """Process 0's side: knows who is there. Not thread-safe.

    Args:
      count: number of processes of the job.
      seconds: after which a job whose processes are not all there ends.
      leave: is called with the reason when the job ends.
    """

    def __init__(self, count: int, seconds: float, leave: Callable[[str], None]):
        self.count, self._seconds, self._leave = count, seconds, leave
        self._members: dict[int, _Member] = {}
        self._began = time.monotonic()
        self._said: dict[str, float] = {}  # subject -> time of the last line about it
        self._next_beat = 0.0
        self._own_met = self.done = False  # done: all have met, or the job ends

    def admit(self, index: int, name: str, connection: socket.socket) -> None:
        """Begins to watch process `index`, through a connection that does not block."""
        self._members[index] = _Member(name, connection)

    def running(self, index: int) -> str:
        """The host and pid of process `index`; "" if it is not there, or has ended."""
        member = self._members.get(index)
        return member.name if member and not member.ended else ""

    def met(self) -> None:
        """Process 0 itself needs this watch no more."""
        self._own_met = True

    def stopped(self) -> None:
        """SIGTERM ends process 0, and with it the others."""
        self._send("stop")

    def look(self) -> list[socket.socket]:
        """Reads all beats and says what there is to say; returns the connections that ended."""
        now, ended = time.monotonic(), []
        for index, member in tuple(self._members.items()):
            if not member.ended and member.read(now):
                ended.append(member.connection)
                if not member.confirmed:
                    del self._members[index]
                    continue
                if member.stopped and not self.done:
                    self.done = True
                    self._send("stop")
                    os.kill(os.getpid(), signal.SIGTERM)
                elif not (member.met or self.done):
                    self._end(f"{_who(index, member)} ended while the job was starting")
        if not self.done:
            self._judge(now)
        if not self.done and now >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            self._send("")
        return ended

    def close(self) -> None:
        """Leaves the others, in order, and closes all connections."""
        if not self.done:
            self._send("met")
        for member in self._members.values():
            member.connection.close()

    def _judge(self, now: float) -> None:
        missing = [i for i in range(1, self.count) if i not in self._members]
        waited = now - self._began
        if missing and waited > self._seconds:
            self._end(f"{_names(missing)} of {self.count} did not come within {waited:.0f} s")
        elif missing and waited > SAY_SECONDS:
            self._say(
                "missing",
                f"waiting for {_names(missing)} of {self.count}, for {waited:.0f} s so far: start "
                "what is missing, or see its log",
            )
        for index, member in self._members.items():
            silent = now - member.heard
            if member.met or member.ended or silent < SILENT_SECONDS:
                continue
            line = f"{_who(index, member)} has given no sign of life for {silent:.0f} s"
            if silent > LOST_SECONDS and not self.done:
                self._end(line)
            self._say(f"silent {index}", f"{line}: it is stopped, or its host is overloaded")
        if self._own_met and not missing and all(m.met for m in self._members.values()):
            self.done = True
            self._send("met")

    def _say(self, subject: str, line: str) -> None:
        now = time.monotonic()
        if not self.done and now - self._said.get(subject, -SAY_SECONDS) >= SAY_SECONDS:
            self._said[subject] = now
            log.warning(line)
            self._send(f"say {line}")

    def _end(self, line: str) -> None:
        self.done = True
        self._send(f"end {line}")
        self._leave(line)

    def _send(self, line: str) -> None:
        for member in tuple(self._members.values()):
            with contextlib.suppress(OSError):  # it has ended, or does not read
                if not member.ended:
                    member.connection.send(line[:_LINE_CHARS].encode() + b"\n")


class _Member:
    """A process as the gate sees it."""

    def __init__(self, name: str, connection: socket.socket):
        self.name, self.connection = name, connection
        self.heard = time.monotonic()
        self.met = self.stopped = self.ended = False
        # a process that got no answer in time applies again; its first connection is no process
        self.confirmed = False

    def read(self, now: float) -> bool:
        """Reads what has arrived; returns whether the process has ended."""
        while not self.ended:
            try:
                data = self.connection.recv(4096)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.heard, self.ended = now, not data
            self.confirmed |= bool(data)
            self.met |= MET in data
            self.stopped |= STOPPED in data
        return self.ended


class Answer:
    """The side of the other processes: a thread that beats, and prints what the gate says.

    Args:
      connection: to the gate, from admission.apply.
      coordinator: HOST:PORT of process 0.
      leave: is called with the reason when the job ends.
    """

    def __init__(self, connection: socket.socket, coordinator: str, leave: Callable[[str], None]):
        self._connection, self._leave, self._closed = connection, leave, False
        self._gate = f"process 0 at {coordinator}"
        connection.settimeout(BEAT_SECONDS)
        threading.Thread(target=self._run, name="roll call", daemon=True).start()

    def met(self) -> None:
        """This process needs this watch no more; the others may."""
        with contextlib.suppress(OSError):
            self._connection.send(MET)

    def stopped(self) -> None:
        """SIGTERM ends this process, and with it the others."""
        with contextlib.suppress(OSError):
            self._connection.send(STOPPED)

    def close(self) -> None:
        """Ends this process's part in order."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._connection.close()

    def _run(self) -> None:
        heard, said, rest = time.monotonic(), 0.0, b""
        while not self._closed:
            data, ended = self._receive()
            now = time.monotonic()
            *lines, rest = (rest + data).split(b"\n")
            if any(self._obey(line.decode(errors="replace")) for line in lines) or self._closed:
                return
            if ended:
                self._leave(f"{self._gate} ended while the job was starting")
                return
            heard = now if data else heard
            if now - heard > LOST_SECONDS:
                self._leave(f"{self._gate} has given no sign of life for {now - heard:.0f} s")
                return
            if now - heard > SILENT_SECONDS and now - said > SAY_SECONDS:
                said = now
                log.warning(
                    "%s has given no sign of life for %.0f s: it is stopped, or its host is "
                    "overloaded",
                    self._gate,
                    now - heard,
                )

    def _receive(self) -> tuple[bytes, bool]:
        """Beats, then waits for what the gate sends: the bytes, and whether the gate has ended."""
        try:
            self._connection.send(BEAT)
            data = self._connection.recv(4096)
            return data, not data
        except TimeoutError:
            return b"", False
        except OSError:
            return b"", True

    def _obey(self, line: str) -> bool:
        """Whether the watch ends by this line of the gate."""
        kind, _, text = line.partition(" ")
        if kind == "say":
            log.warning(text)
        elif kind == "end":
            self._leave(text)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        return kind in ("met", "end", "stop")


def leave_job(reason: str, before: Collection[Callable[[], object]] = ()) -> None:
    """Ends this process, which cannot go on without another one; calls `before` first."""
    log.error("%s; this process ends too", reason)
    for call in before:
        call()
    time.sleep(LEAVE_SECONDS)
    logging.shutdown()
    os._exit(EXIT_LOST)


def _who(index: int, member: _Member) -> str:
    return f"process {index} ({member.name})"


def _names(indices: Iterable[int]) -> str:
    indices = list(indices)
    shown = ", ".join(map(str, indices[:NAMED]))
    more = f" and {len(indices) - NAMED} more" if len(indices) > NAMED else ""
    return f"process{'es' if len(indices) > 1 else ''} {shown}{more}"
