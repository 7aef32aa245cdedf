"""Start of a job: each process registers once, and all are watched until they have met.

JAX's coordination service believes every connection. One that says it is process 1 while process 1
runs aborts all processes. Therefore that service listens on a port of its own, on the job's
interface only, and the coordinator's address belongs to process 0's `Registrar`. It gives the
service's address to each process of the job once. P processes.

  registrar  MAGIC, a nonce
  process    its index, P, its host and pid, a nonce, HMAC-SHA256 of this and the registrar's bytes
  registrar  whether it is admitted, the service's address or the reason, HMAC of all of the above

The connection stays open while the process runs: a number is free again when its process has ended.
Until the watchdogs have met nobody else notices a process that ends, stops or never comes (JAX
waits for minutes and names none), so both sides go on:

  process    BEAT every BEAT_SECONDS; MET once it needs this watch no more; STOPPED by SIGTERM
  registrar  lines: "" as a beat, "say TEXT", "end TEXT", "stop", and "met" once all have met

Processes that register later are not monitored.
"""

import contextlib
import errno
import ipaddress
import logging
import os
import secrets
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from distflow_jax.parallel.handshake import Arrival, Handshakes
from distflow_jax.parsing.token_proof import MAC_BYTES, derive_key, is_signed, sign

_MAGIC = b"distflow job 1\n"
_NONCE_BYTES, _TEXT_BYTES, _PLACE_BYTES = 16, 400, 80
_APPLICATION = struct.Struct(f">II{_PLACE_BYTES}s{_NONCE_BYTES}s")  # index, P, place, nonce
_REPLY = struct.Struct(f">?{_TEXT_BYTES}s")  # admitted, text
JOIN_SECONDS = 300.0  # for all processes of a job to be there
TRY_SECONDS = 0.25  # between two attempts to connect, or to listen
ANSWER_SECONDS = 10.0  # for the registrar's bytes to come
RELEASE_SECONDS = 10.0  # for an earlier run's process 0 to release the address
LOOK_SECONDS = 0.2  # between two looks of the registrar at all processes
NAMED_STRANGERS = 10  # that the log names: their number is not bounded
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


class Address(NamedTuple):
    """Where a service listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """HOST:PORT, IPv6 in brackets."""
        host, _, port = text.rpartition(":")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class _Member:
    """A process as the registrar sees it."""

    def __init__(self, index: int, place: str, connection: socket.socket):
        self.place, self.connection = place, connection  # place: host and pid
        self.name = f"process {index} ({place})"
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


class Registrar:
    """Process 0's side: registers the others and watches their start, in a thread of its own.

    Args:
      listener: from `open_listener`.
      service: HOST:PORT of JAX's coordination service, which every admitted process gets.
      count: number of processes of the job.
      token: of the job.
      leave: is called with the reason when the job ends while it starts.
    """

    def __init__(
        self,
        listener: socket.socket,
        service: str,
        count: int,
        token: str,
        leave: Callable[[str], None],
    ):
        self._service, self._count, self._leave = service, count, leave
        self._key = derive_key("job", token)
        self._members: dict[int, _Member] = {}
        self._said: dict[str, float] = {}  # subject -> time of the last line about it
        self._began, self._next_beat, self._strangers = time.monotonic(), 0.0, 0
        self._own_met = self._closed = False
        self.done = False  # all have met, or the job ends
        self._handshakes = Handshakes(
            listener,
            _APPLICATION.size + MAC_BYTES,
            lambda: _MAGIC + secrets.token_bytes(_NONCE_BYTES),
        )
        self._thread = threading.Thread(target=self._run, name="registrar", daemon=True)
        self._thread.start()

    def met(self) -> None:
        """Process 0 has met the others, and needs no watch over their start any more."""
        self._own_met = True

    def stopped(self) -> None:
        """SIGTERM ends process 0, and with it the others."""
        self._send("stop")

    def close(self) -> None:
        """Leaves the others, in order, and closes all connections."""
        self._closed = True
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            try:
                arrivals = self._handshakes.read(LOOK_SECONDS)
            except OSError as error:
                log.warning("no further process can join this job: %s", error)
                break
            self._look()  # first: a process that has ended makes room for another one
            for arrival in arrivals:
                self._answer(arrival)
        if not self.done:
            self._send("met")
        for member in self._members.values():
            member.connection.close()
        self._handshakes.close()

    def _answer(self, arrival: Arrival) -> None:
        application, mac = arrival.greeting[:-MAC_BYTES], arrival.greeting[-MAC_BYTES:]
        connection = arrival.connection
        index, count, place, _ = _APPLICATION.unpack(application)
        where, refused = place.rstrip(b"\0").decode(errors="replace"), ""
        signed = is_signed(self._key, mac, arrival.opening, application)
        if not signed:
            self._strangers += 1
            if self._strangers <= NAMED_STRANGERS:
                peer = Address(*arrival.peer[:2])
                log.warning("a process with another token is refused: %s", peer)
        elif refused := self._refusal(index, count):
            log.warning("process %d (%s) is refused: %s", index, where, refused)
        admitted = signed and not refused
        answer = self._service if admitted else refused
        reply = _REPLY.pack(admitted, answer.encode()[:_TEXT_BYTES])
        # signed with this job's token always: who has another one finds that the tokens differ
        with contextlib.suppress(OSError):  # the process has ended
            connection.send(reply + sign(self._key, arrival.opening, application, reply))
        if admitted:
            self._members[index] = _Member(index, where, connection)
        else:
            connection.close()

    def _refusal(self, index: int, count: int) -> str:
        """The reason against a process; "": there is none."""
        if count != self._count:
            return f"it was started for {count} processes, and this job has {self._count}"
        member = self._members.get(index)
        place = _own_place() if index == 0 else member.place if member and not member.ended else ""
        return place and f"process {index} of this job is running already ({place})"

    def _look(self) -> None:
        """Reads all beats and says what there is to say."""
        now = time.monotonic()
        for index, member in tuple(self._members.items()):
            if member.ended or not member.read(now):
                continue
            member.connection.close()
            if not member.confirmed:
                del self._members[index]
            elif member.stopped and not self.done:
                self.done = True
                self._send("stop")
                os.kill(os.getpid(), signal.SIGTERM)
            elif not (member.met or self.done):
                self._end(f"{member.name} ended while the job was starting")
        if not self.done:
            self._judge(now)
        if not self.done and now >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            self._send("")

    def _judge(self, now: float) -> None:
        missing = [i for i in range(1, self._count) if i not in self._members]
        waited = now - self._began
        if missing and waited > JOIN_SECONDS:
            self._end(f"{_names(missing)} of {self._count} did not come within {waited:.0f} s")
        elif missing and waited > SAY_SECONDS:
            self._say(
                "missing",
                f"waiting for {_names(missing)} of {self._count}, for {waited:.0f} s so far: start "
                "what is missing, or see its log",
            )
        for member in self._members.values():
            silent = now - member.heard
            if member.met or member.ended or silent < SILENT_SECONDS:
                continue
            line = f"{member.name} has given no sign of life for {silent:.0f} s"
            if silent > LOST_SECONDS and not self.done:
                self._end(line)
            self._say(member.name, f"{line}: it is stopped, or its host is overloaded")
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
                member.connection.send(line[:_LINE_CHARS].encode() + b"\n")


class StartMonitor:
    """The side of the other processes: a thread that beats, and prints what the registrar says.

    Args:
      connection: to the registrar, from `register`.
      coordinator: HOST:PORT of process 0.
      leave: is called with the reason when the job ends while it starts.
    """

    def __init__(self, connection: socket.socket, coordinator: str, leave: Callable[[str], None]):
        self._connection, self._leave, self._closed = connection, leave, False
        self._process_0 = f"process 0 at {coordinator}"
        connection.settimeout(BEAT_SECONDS)
        threading.Thread(target=self._run, name="start monitor", daemon=True).start()

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
                self._leave(f"{self._process_0} ended while the job was starting")
                return
            heard = now if data else heard
            line = f"{self._process_0} has given no sign of life for {now - heard:.0f} s"
            if now - heard > LOST_SECONDS:
                self._leave(line)
                return
            if now - heard > SILENT_SECONDS and now - said > SAY_SECONDS:
                said = now
                log.warning("%s: it is stopped, or its host is overloaded", line)

    def _receive(self) -> tuple[bytes, bool]:
        """Beats, then waits for the registrar's lines: the bytes, and whether process 0 ended."""
        try:
            self._connection.send(BEAT)
            data = self._connection.recv(4096)
            return data, not data
        except TimeoutError:
            return b"", False
        except OSError:
            return b"", True

    def _obey(self, line: str) -> bool:
        """Whether the watch ends by this line of the registrar."""
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


def register(
    coordinator: str, index: int, count: int, token: str, seconds: float = JOIN_SECONDS
) -> tuple[str, socket.socket]:
    """Joins the job whose registrar listens on `coordinator`, within `seconds`.

    Returns HOST:PORT of JAX's coordination service, and a connection to keep open while this
    process runs. Raises ValueError for a process that is refused, and ConnectionError if process 0
    is not there in time.
    """
    began = said = time.monotonic()
    while True:
        try:
            return _register_once(Address.parse(coordinator), index, count, token)
        except OSError as error:  # process 0, or the name of its host, is not there yet
            now = time.monotonic()
            if now - said >= SAY_SECONDS:
                said = now
                log.warning(
                    "process %d waits for process 0 at %s, for %.0f s so far (%s): start process "
                    "0, or see its log",
                    index,
                    coordinator,
                    now - began,
                    error,
                )
            if now - began >= seconds:
                raise ConnectionError(
                    f"process {index} cannot reach process 0 at {coordinator} ({error}); see the "
                    "log of process 0"
                ) from error
        time.sleep(TRY_SECONDS)


def _register_once(
    address: Address, index: int, count: int, token: str
) -> tuple[str, socket.socket]:
    with contextlib.ExitStack() as on_failure:
        connection = socket.create_connection(address, timeout=ANSWER_SECONDS)
        on_failure.callback(connection.close)
        opening = _receive(connection, len(_MAGIC) + _NONCE_BYTES)
        if not opening.startswith(_MAGIC):
            raise ConnectionError("another service has this port")
        place = _own_place().encode()[:_PLACE_BYTES]
        application = _APPLICATION.pack(index, count, place, secrets.token_bytes(_NONCE_BYTES))
        key = derive_key("job", token)
        connection.sendall(application + sign(key, opening, application))
        reply = _receive(connection, _REPLY.size)
        if not is_signed(key, _receive(connection, MAC_BYTES), opening, application, reply):
            raise ValueError(
                f"process {index} and process 0 at {address} have different tokens: another job "
                "has this address, or DISTFLOW_JOB_TOKEN differs; set both alike on all processes"
            )
        admitted, answer = _REPLY.unpack(reply)
        text = answer.rstrip(b"\0").decode()
        if not admitted:
            raise ValueError(
                f"process {index} cannot join the job at {address}: {text}; start each process "
                "once, with a number of its own"
            )
        connection.settimeout(None)
        on_failure.pop_all()
        return text, connection


def open_listener(coordinator: str) -> socket.socket:
    """The registrar's listening socket, on the interface of the coordinator's address.

    Raises ValueError if another process has the address.
    """
    address = Address.parse(coordinator)
    try:
        family, _, _, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(f"process 0 cannot listen on {coordinator} ({error.strerror})") from error
    if _is_loopback(str(place[0])) and not _is_loopback(address.host):
        log.warning(
            "%s is %s on this host: no process on another host can reach it; name the job by an "
            "address of the network",
            address.host,
            place[0],
        )
    deadline = time.monotonic() + RELEASE_SECONDS
    while True:
        try:
            return socket.create_server(place[:2], family=family)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:  # forwarded to this host
                log.warning(
                    "%s is no address of this host; listening on all interfaces", address.host
                )
                place, family = ("", address.port), socket.AF_INET
            elif error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                raise ValueError(
                    f"process 0 cannot listen on {coordinator} ({error.strerror}): end the process "
                    "that has this port, perhaps process 0 of the same job, or choose another"
                ) from error
        time.sleep(TRY_SECONDS)


@contextlib.contextmanager
def reserved_port(host: str) -> Iterator[str]:
    """HOST:PORT of a free port, which no other process gets while the body runs.

    A server that sets SO_REUSEPORT, as gRPC does, can listen on it within the body.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, 0))
        yield str(Address(host, holder.getsockname()[1]))


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("it closed the connection")
        data += part
    return data


def _own_place() -> str:
    return f"host {socket.gethostname()}, pid {os.getpid()}"


def _names(indices: Iterable[int]) -> str:
    indices = list(indices)
    shown = ", ".join(map(str, indices[:NAMED]))
    more = f" and {len(indices) - NAMED} more" if len(indices) > NAMED else ""
    return f"process{'es' if len(indices) > 1 else ''} {shown}{more}"
