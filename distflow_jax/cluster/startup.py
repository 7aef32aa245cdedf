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
import logging
import os
import secrets
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait

from distflow_jax.cluster import handshakes
from distflow_jax.cluster.job import Job
from distflow_jax.parsing.addresses import Address
from distflow_jax.parsing.token_proof import MAC_BYTES, derive_key, is_signed, sign

_MAGIC = b"distflow job 2\n"
_NONCE_BYTES, _TEXT_BYTES, _PLACE_BYTES, _LINE_CHARS = 16, 400, 80, 800
_APPLICATION = struct.Struct(f">II{_PLACE_BYTES}s{_NONCE_BYTES}s")  # index, P, place, nonce
_REPLY = struct.Struct(f">?{_TEXT_BYTES}s")  # admitted, text
JOIN_SECONDS = 300.0  # for all processes of a job to be there
ANSWER_SECONDS = 10.0  # for the registrar's bytes to come
BEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0  # without a beat, after which a process is named
LOST_SECONDS = 60.0  # without a beat, after which the job ends: no call holds Python for so long
SAY_SECONDS = 10.0  # between two lines about the same
NAMED = 8  # missing processes that a line lists, and strangers that the log names

log = logging.getLogger("distflow_jax")


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
        while data := handshakes.arrived(self.connection, 4096):
            self._rest += data
            self.heard, self.confirmed = now, True
        self.ended |= data == b""
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

    _relays = False  # whether the others see each other through this process alone

    def __init__(self, job: Job, leave: Callable[[str], None], connection: socket.socket | None):
        self.members: dict[int, _Member] = {}  # the other processes that this one sees
        if connection is not None:
            self.members[0] = _Member(f"process 0 at {job.coordinator}", connection)
        self.done = self._has_met = False  # all have met, or the job ends; this process has
        self._leave, self._closed, self._next_beat = leave, False, 0.0
        self._said: dict[int | None, float] = {}  # times of the last lines, see _say
        self._thread = threading.Thread(target=self._run, name="start of the job", daemon=True)
        self._thread.start()

    def met(self) -> None:
        """This process has met the others, and needs no watch any more; the others may."""
        self._has_met = True
        if not self._relays:  # the others hear of process 0's once all have met
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
            wait([self.members[0].connection], handshakes.LOOK_SECONDS)
            self._look()

    def _look(self) -> None:
        """Reads all lines and says what there is to say."""
        now = time.monotonic()
        for index, member in tuple(self.members.items()):
            for line in member.read(now):
                self._obey(member, line)
            if member.ended:
                member.connection.close()
                if not member.confirmed:
                    del self.members[index]
                elif not member.met:
                    self._end(f"{member.name} ended while the job was starting")
            elif not member.met and (silent := now - member.heard) > SILENT_SECONDS:
                line = f"{member.name} has given no sign of life for {silent:.0f} s"
                if silent > LOST_SECONDS:
                    self._end(line)
                self._say(index, f"{line}: it is stopped, or its host is overloaded")
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

    def _say(self, subject: int | None, line: str) -> None:
        """Warns of a process, or (None) of missing ones, not too often."""
        now = time.monotonic()
        if not self.done and now - self._said.get(subject, -SAY_SECONDS) >= SAY_SECONDS:
            self._said[subject] = now
            log.warning(line)
            if self._relays:
                self._send(f"say {line}")

    def _end(self, line: str) -> None:
        if not self.done:
            self.done = True
            if self._relays:
                self._send(f"end {line}")
            self._leave(line)

    def _send(self, line: str) -> None:
        for member in tuple(self.members.values()):
            member.send(line)


class Registrar(StartMonitor):
    """Process 0's side: registers the others, watches them, and tells each of them of the rest.

    `listener` is from `open_listener`; every admitted process gets `service`, HOST:PORT of JAX's
    coordination service.
    """

    _relays = True

    def __init__(
        self, job: Job, leave: Callable[[str], None], listener: socket.socket, service: str
    ):
        self._count, self._key = job.num_processes, derive_key("job", job.token)
        self._service, self._strangers = service, 0
        self._began = time.monotonic()
        size = _APPLICATION.size + MAC_BYTES
        self._handshakes = handshakes.Handshakes(
            listener, size, lambda: _MAGIC + secrets.token_bytes(_NONCE_BYTES)
        )
        super().__init__(job, leave, None)

    def _run(self) -> None:
        try:
            while not self._closed:
                watched = [m for m in self.members.values() if not (m.ended or self.done)]
                arrivals = self._handshakes.read(members=[m.connection for m in watched])
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
            self._say(None, f"{line}: start what is missing, or see its log")
        elif not missing and self._has_met and all(m.met for m in self.members.values()):
            if not self.done:
                self._send("met")
            self.done = True

    def _answer(self, arrival: handshakes.Arrival) -> None:
        application, mac = arrival.greeting[:-MAC_BYTES], arrival.greeting[-MAC_BYTES:]
        index, count, place, _ = _APPLICATION.unpack(application)
        where = place.rstrip(b"\0").decode(errors="replace")
        name, refusal = f"process {index} ({where})", self._refusal(index, count)
        if not is_signed(self._key, mac, arrival.opening, application):
            refusal = "its token is another one"
            self._strangers += 1
            if self._strangers <= NAMED:
                log.warning("a process with another token is refused: %s", arrival.peer)
        elif refusal:
            log.warning("%s is refused: %s", name, refusal)
        reply = _REPLY.pack(not refusal, (refusal or self._service).encode()[:_TEXT_BYTES])
        # signed with this job's token always: who has another one finds that the tokens differ
        with contextlib.suppress(OSError):  # the process has ended
            mac = sign(self._key, arrival.opening, application, reply)
            arrival.connection.send(reply + mac)
        if refusal:
            arrival.connection.close()
        else:
            self.members[index] = _Member(name, arrival.connection, where)

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
    own, first = f"process {job.process_id}", f"process 0 at {job.coordinator}"
    began = said = time.monotonic()
    while True:
        try:
            return _register_once(job, own, first)
        except OSError as error:  # process 0, or the name of its host, is not there yet
            now = time.monotonic()
            if now - began >= seconds:
                text = f"{own} cannot reach {first} ({error}); see the log of process 0"
                raise ConnectionError(text) from error
            if now - said >= SAY_SECONDS:
                said = now
                line = f"{own} waits for {first}, for {now - began:.0f} s so far"
                log.warning("%s (%s): start process 0, or see its log", line, error)
        time.sleep(handshakes.TRY_SECONDS)


def _register_once(job: Job, own: str, first: str) -> tuple[str, socket.socket]:
    address = Address.parse(job.coordinator)
    with socket.create_connection(address, timeout=ANSWER_SECONDS) as connection:
        opening = _receive(connection, len(_MAGIC) + _NONCE_BYTES)
        if not opening.startswith(_MAGIC):
            raise ConnectionError("another service has this port")
        place, nonce = _own_place().encode()[:_PLACE_BYTES], secrets.token_bytes(_NONCE_BYTES)
        application = _APPLICATION.pack(job.process_id, job.num_processes, place, nonce)
        key = derive_key("job", job.token)
        connection.sendall(application + sign(key, opening, application))
        reply, mac = _receive(connection, _REPLY.size), _receive(connection, MAC_BYTES)
        if not is_signed(key, mac, opening, application, reply):
            raise ValueError(
                f"{own} and {first} have different tokens: another job has this address, or "
                "DISTFLOW_JOB_TOKEN differs; set both alike on all processes"
            )
        admitted, answer = _REPLY.unpack(reply)
        text = answer.rstrip(b"\0").decode()
        if not admitted:
            raise ValueError(
                f"{own} cannot join the job at {address}: {text}; start each process once, with a "
                "number of its own"
            )
        return text, socket.socket(fileno=connection.detach())


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
