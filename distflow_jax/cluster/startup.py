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
waits for minutes and names none), so both sides go on with lines: "" each BEAT_SECONDS, "met" once
they need this watch no more (the registrar: once all have met), "stop" on SIGTERM; and "say TEXT"
and "end TEXT" from the registrar, who sees them all. Processes that come later are not watched.
"""

import contextlib
import errno
import ipaddress
import logging
import os
import secrets
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from multiprocessing.connection import wait
from typing import NamedTuple

from distflow_jax.cluster.job import Job
from distflow_jax.parsing.token_proof import MAC_BYTES, derive_key, is_signed, sign

_MAGIC = b"distflow job 2\n"
_NONCE_BYTES, _TEXT_BYTES, _PLACE_BYTES, _LINE_CHARS = 16, 400, 80, 800
_APPLICATION = struct.Struct(f">II{_PLACE_BYTES}s{_NONCE_BYTES}s")  # index, P, place, nonce
_REPLY = struct.Struct(f">?{_TEXT_BYTES}s")  # admitted, text
JOIN_SECONDS = 300.0  # for all processes of a job to be there
TRY_SECONDS = 0.25  # between two attempts to connect, or to listen
ANSWER_SECONDS = 10.0  # for the registrar's bytes to come
RELEASE_SECONDS = 10.0  # for an earlier run's process 0 to release the address
GREETING_SECONDS = 10.0  # after which a connection without a whole greeting is closed
MOST_WAITING = 256  # connections without a whole greeting; beyond it the oldest ones are closed
ACCEPTED_AT_ONCE = 64  # between two looks at the greetings that have arrived
LOOK_SECONDS = 0.2  # between two looks at all processes
BEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0  # without a beat, after which a process is named
LOST_SECONDS = 60.0  # without a beat, after which the job ends: no call holds Python for so long
SAY_SECONDS = 10.0  # between two lines about the same
LEAVE_SECONDS = 1.0  # in which whoever started the processes sees the first end before the others
EXIT_LOST = 1
NAMED = 8  # missing processes that a line lists, and strangers that the log names

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


class Arrival:
    """A connection, which does not block, and its greeting; whoever takes it closes it."""

    def __init__(self, connection: socket.socket, peer: Address, opening: bytes):
        self.connection, self.peer, self.opening, self.greeting = connection, peer, opening, b""
        self.deadline = time.monotonic() + GREETING_SECONDS


class Handshakes:
    """Accepts connections and reads their greetings side by side, of `size` bytes each.

    A port that is open to a network is also open to port scanners, to processes of an earlier job
    and to connections that never send a byte. None of them delays the processes of the job.
    `opening` makes the bytes that are sent to each connection first, at most a few hundred.
    """

    def __init__(
        self, listener: socket.socket, size: int, opening: Callable[[], bytes] = lambda: b""
    ):
        self._listener, self._size, self._opening = listener, size, opening
        listener.setblocking(False)
        self._waiting: dict[socket.socket, Arrival] = {}  # the oldest first

    def read(
        self, seconds: float = LOOK_SECONDS, members: Iterable[socket.socket] = ()
    ) -> list[Arrival]:
        """Arrivals whose greetings are complete, perhaps none after at most `seconds`, or as soon
        as one of `members` hangs up."""
        ready, complete = _ready([self._listener, *self._waiting], members, seconds), []
        for arrival in [self._waiting[one] for one in self._waiting if one in ready]:
            try:
                data = arrival.connection.recv(self._size - len(arrival.greeting))
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            arrival.greeting += data
            if len(arrival.greeting) == self._size:
                complete.append(self._waiting.pop(arrival.connection))
            elif not data:
                self._drop(arrival)
        if self._listener in ready:
            self._accept()
        for place, arrival in enumerate(tuple(self._waiting.values()), -len(self._waiting)):
            if place < -MOST_WAITING or arrival.deadline < time.monotonic():
                self._drop(arrival)
        return complete

    def close(self) -> None:
        """Closes the listener and all connections that have not been returned."""
        for arrival in tuple(self._waiting.values()):
            self._drop(arrival)
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, peer = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:  # gone while it waited in the kernel's queue
                continue
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._waiting:
                    raise
                return self._drop(next(iter(self._waiting.values())))
            connection.setblocking(False)
            arrival = Arrival(connection, Address(*peer[:2]), self._opening())
            self._waiting[connection] = arrival
            with contextlib.suppress(OSError):  # it has ended, which reading finds
                connection.send(arrival.opening)

    def _drop(self, arrival: Arrival) -> None:
        del self._waiting[arrival.connection]
        arrival.connection.close()


def _ready(
    sources: Iterable[socket.socket], members: Iterable[socket.socket], seconds: float
) -> set[socket.socket]:
    """The sources that can be read; what members send wakes nobody, their end does."""
    poll, found = select.poll(), {one.fileno(): one for one in sources}
    for one in found:
        poll.register(one, select.POLLIN)
    for member in members:
        poll.register(member, getattr(select, "POLLRDHUP", select.POLLHUP))
    return {found[number] for number, _ in poll.poll(1000 * seconds) if number in found}


class _Member:
    """Another process, and the connection over which both send lines; `place`: its host and pid."""

    def __init__(self, name: str, connection: socket.socket, place: str = ""):
        connection.setblocking(False)
        self.name, self.connection, self.place, self._rest = name, connection, place, b""
        self.heard = time.monotonic()
        self.met = self.ended = False
        # a process that got no answer in time applies again; its first connection is no process
        self.confirmed = not place

    def read(self, now: float) -> list[str]:
        """The lines that have arrived."""
        try:
            while data := self.connection.recv(4096):
                self._rest += data
                self.heard, self.confirmed = now, True
            self.ended = True
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        *lines, self._rest = self._rest.split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def send(self, line: str) -> None:
        """Sends a line, unless the process has ended or does not read."""
        with contextlib.suppress(OSError):
            self.connection.send(line[:_LINE_CHARS].encode() + b"\n")


class StartMonitor:
    """Watches a job's start in a thread of its own: by itself it sees process 0 alone.

    `connection` is from `register`; `leave` gets the reason if the job ends while it starts.
    """

    def __init__(self, job: Job, leave: Callable[[str], None], connection: socket.socket | None):
        self.members: dict[int, _Member] = {}  # the other processes that this one sees
        if connection is not None:
            self.members[0] = _Member(f"process 0 at {job.coordinator}", connection)
        self.done = False  # all have met, or the job ends
        self._leave, self._closed, self._next_beat = leave, False, 0.0
        self._said: dict[str, float] = {}  # subject -> time of the last line about it
        self._thread = threading.Thread(target=self._run, name="start of the job", daemon=True)
        self._thread.start()

    def met(self) -> None:
        """This process has met the others, and needs no watch any more; the others may."""
        self._send("met")

    def stopped(self) -> None:
        """SIGTERM ends this process, and with it the others."""
        self.done = True
        self._send("stop")

    def close(self) -> None:
        """Leaves the others, in order, and closes all connections."""
        self._closed = True
        self._thread.join()
        for member in self.members.values():
            member.connection.close()

    def _run(self) -> None:
        while not (self._closed or self.done or self.members[0].met):
            wait([self.members[0].connection], LOOK_SECONDS)
            self._look()

    def _look(self) -> None:
        """Reads all lines and says what there is to say."""
        now = time.monotonic()
        for index, member in tuple(self.members.items()):
            for line in member.read(now):
                self._obey(member, line)
            silent = now - member.heard
            line = f"{member.name} has given no sign of life for {silent:.0f} s"
            if member.ended:
                member.connection.close()
                if not member.confirmed:
                    del self.members[index]
                elif not member.met:
                    self._end(f"{member.name} ended while the job was starting")
            elif not member.met and silent > LOST_SECONDS:
                self._end(line)
            elif not member.met and silent > SILENT_SECONDS:
                self._say(member.name, f"{line}: it is stopped, or its host is overloaded")
        if not self.done and now >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            self._send("")

    def _obey(self, member: _Member, line: str) -> None:
        kind, _, text = line.partition(" ")
        member.met |= kind == "met"
        if kind == "say":
            log.warning(text)
        elif kind == "end":
            self._end(text)
        elif kind == "stop" and not self.done:
            self.stopped()
            os.kill(os.getpid(), signal.SIGTERM)

    def _say(self, subject: str, line: str) -> bool:
        """Logs a line unless it has just logged one about the same; returns whether it did."""
        now = time.monotonic()
        if self.done or now - self._said.get(subject, -SAY_SECONDS) < SAY_SECONDS:
            return False
        self._said[subject] = now
        log.warning(line)
        return True

    def _end(self, line: str) -> None:
        if not self.done:
            self.done = True
            self._leave(line)

    def _send(self, line: str) -> None:
        for member in tuple(self.members.values()):
            member.send(line)


class Registrar(StartMonitor):
    """Process 0's side: registers the others, watches them, and tells each of them of the rest.

    Args:
      job: of which this process is number 0.
      leave: is called with the reason when the job ends while it starts.
      listener: from `open_listener`.
      service: HOST:PORT of JAX's coordination service, which every admitted process gets.
    """

    def __init__(
        self, job: Job, leave: Callable[[str], None], listener: socket.socket, service: str
    ):
        self._count, self._key = job.num_processes, derive_key("job", job.token)
        self._service, self._strangers = service, 0
        self._began, self._own_met = time.monotonic(), False
        size = _APPLICATION.size + MAC_BYTES
        self._handshakes = Handshakes(
            listener, size, lambda: _MAGIC + secrets.token_bytes(_NONCE_BYTES)
        )
        super().__init__(job, leave, None)

    def met(self) -> None:
        """Process 0 has met the others; they hear of it once all have."""
        self._own_met = True

    def _run(self) -> None:
        try:
            while not self._closed:
                watched = () if self.done else self.members.values()
                arrivals = self._handshakes.read(
                    members=[member.connection for member in watched if not member.ended]
                )
                if arrivals or not self.done:
                    self._look()  # first: a process that has ended makes room for another one
                for arrival in arrivals:
                    self._answer(arrival)
        except OSError as error:
            log.warning("no further process can join this job: %s", error)
        if not self.done:
            self._send("met")
        self._handshakes.close()

    def _look(self) -> None:
        super()._look()
        missing = [i for i in range(1, self._count) if i not in self.members]
        more = f" and {len(missing) - NAMED} more" * (len(missing) > NAMED)
        names = f"process{'es' * (len(missing) > 1)} {', '.join(map(str, missing[:NAMED]))}{more}"
        waited = time.monotonic() - self._began
        if missing and waited > JOIN_SECONDS:
            self._end(f"{names} of {self._count} did not come within {waited:.0f} s")
        elif missing and waited > SAY_SECONDS:
            line = f"waiting for {names} of {self._count}, for {waited:.0f} s so far"
            self._say("missing", f"{line}: start what is missing, or see its log")
        elif self._own_met and not (missing or self.done):
            self.done = all(member.met for member in self.members.values())
            self._send("met" * self.done)

    def _say(self, subject: str, line: str) -> bool:
        if said := super()._say(subject, line):
            self._send(f"say {line}")
        return said

    def _end(self, line: str) -> None:
        if not self.done:
            self._send(f"end {line}")
        super()._end(line)

    def _answer(self, arrival: Arrival) -> None:
        application, mac = arrival.greeting[:-MAC_BYTES], arrival.greeting[-MAC_BYTES:]
        index, count, place, _ = _APPLICATION.unpack(application)
        where = place.rstrip(b"\0").decode(errors="replace")
        name, admitted, answer = f"process {index} ({where})", False, ""
        if not is_signed(self._key, mac, arrival.opening, application):
            self._strangers += 1
            if self._strangers <= NAMED:
                log.warning("a process with another token is refused: %s", arrival.peer)
        elif answer := self._refusal(index, count):
            log.warning("%s is refused: %s", name, answer)
        else:
            admitted, answer = True, self._service
        reply = _REPLY.pack(admitted, answer.encode()[:_TEXT_BYTES])
        # signed with this job's token always: who has another one finds that the tokens differ
        with contextlib.suppress(OSError):  # the process has ended
            mac = sign(self._key, arrival.opening, application, reply)
            arrival.connection.send(reply + mac)
        if admitted:
            self.members[index] = _Member(name, arrival.connection, where)
        else:
            arrival.connection.close()

    def _refusal(self, index: int, count: int) -> str:
        """The reason against a process; "": there is none."""
        if count != self._count:
            return f"it was started for {count} processes, and this job has {self._count}"
        member = self.members.get(index)
        place = _own_place() if index == 0 else member.place if member and not member.ended else ""
        return place and f"process {index} of this job is running already ({place})"


def register(job: Job, seconds: float = JOIN_SECONDS) -> tuple[str, socket.socket]:
    """Joins a job that has a coordinator, within `seconds`.

    Returns HOST:PORT of JAX's coordination service, and a connection to keep open while this
    process runs. Raises ValueError for a process that is refused, and ConnectionError if process 0
    is not there in time.
    """
    began = said = time.monotonic()
    while True:
        try:
            return _register_once(job, Address.parse(job.coordinator))
        except OSError as error:  # process 0, or the name of its host, is not there yet
            now = time.monotonic()
            first, waited = f"process 0 at {job.coordinator}", f"{now - began:.0f} s so far"
            if now - said >= SAY_SECONDS:
                said = now
                line = f"process {job.process_id} waits for {first}, for {waited} ({error})"
                log.warning("%s: start process 0, or see its log", line)
            if now - began >= seconds:
                raise ConnectionError(
                    f"process {job.process_id} cannot reach {first} ({error}); see the log of "
                    "process 0"
                ) from error
        time.sleep(TRY_SECONDS)


def _register_once(job: Job, address: Address) -> tuple[str, socket.socket]:
    with contextlib.ExitStack() as on_failure:
        connection = socket.create_connection(address, timeout=ANSWER_SECONDS)
        on_failure.callback(connection.close)
        opening = _receive(connection, len(_MAGIC) + _NONCE_BYTES)
        if not opening.startswith(_MAGIC):
            raise ConnectionError("another service has this port")
        place, nonce = _own_place().encode()[:_PLACE_BYTES], secrets.token_bytes(_NONCE_BYTES)
        application = _APPLICATION.pack(job.process_id, job.num_processes, place, nonce)
        key = derive_key("job", job.token)
        connection.sendall(application + sign(key, opening, application))
        reply = _receive(connection, _REPLY.size)
        if not is_signed(key, _receive(connection, MAC_BYTES), opening, application, reply):
            raise ValueError(
                f"process {job.process_id} and process 0 at {address} have different tokens: "
                "another job has this address, or DISTFLOW_JOB_TOKEN differs; set both alike on "
                "all processes"
            )
        admitted, answer = _REPLY.unpack(reply)
        text = answer.rstrip(b"\0").decode()
        if not admitted:
            raise ValueError(
                f"process {job.process_id} cannot join the job at {address}: {text}; start each "
                "process once, with a number of its own"
            )
        on_failure.pop_all()
        return text, connection


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("it closed the connection")
        data += part
    return data


def leave_job(reason: str, before: Collection[Callable[[], object]] = ()) -> None:
    """Ends this process, which cannot go on without another one; calls `before` first."""
    log.error("%s; this process ends too", reason)
    for call in before:
        call()
    time.sleep(LEAVE_SECONDS)
    logging.shutdown()
    os._exit(EXIT_LOST)


def open_listener(coordinator: str) -> socket.socket:
    """The registrar's listening socket, on the interface of the coordinator's address.

    Raises ValueError if another process has the address.
    """
    address = Address.parse(coordinator)
    fails = f"process 0 cannot listen on {coordinator}"
    try:
        family, _, _, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(f"{fails} ({error.strerror})") from error
    if _is_loopback(str(place[0])) and not _is_loopback(address.host):
        log.warning(
            f"{address.host} is {place[0]} on this host: no process on another host can reach it; "
            "name the job by an address of the network"
        )
    deadline = time.monotonic() + RELEASE_SECONDS
    while True:
        try:
            return socket.create_server(place[:2], family=family)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:  # forwarded to this host
                log.warning(f"{address.host} is no address of this host; listening on all of them")
                place, family = ("", address.port), socket.AF_INET
            elif error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                raise ValueError(
                    f"{fails} ({error.strerror}): end the process that has this port, perhaps "
                    "process 0 of the same job, or choose another"
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


def _own_place() -> str:
    return f"host {socket.gethostname()}, pid {os.getpid()}"
