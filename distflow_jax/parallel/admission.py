"""Admission to a job, before JAX is reached: each number once, and only with the job's token.

JAX's coordination service believes every connection. One that says it is process 1 while process 1
runs aborts all processes. Therefore that service listens on a port of its own, on the job's
interface only, and the coordinator's address belongs to process 0's `Gate`. It gives the service's
address to each process of the job once. P processes.

  gate       MAGIC, a nonce
  process    its index, P, its host and pid, a nonce, HMAC-SHA256 of this and the gate's bytes
  gate       whether it is admitted, the service's address or the reason, HMAC of all of the above

The connection stays open while the process runs: a number is free again when its process has ended,
and until the watchdogs have met it is how the others hear of that (parallel/roll_call.py).
"""

import contextlib
import errno
import ipaddress
import logging
import os
import secrets
import socket
import struct
import threading
import time
from typing import NamedTuple

from distflow_jax.parallel.greetings import Greetings, Guest
from distflow_jax.parallel.roll_call import SAY_SECONDS, RollCall
from distflow_jax.parsing.token_proof import MAC_BYTES, derive_key, is_signed, sign

_MAGIC = b"distflow job 1\n"
_NONCE_BYTES, _TEXT_BYTES, _NAME_BYTES = 16, 400, 80
_APPLICATION = struct.Struct(f">II{_NAME_BYTES}s{_NONCE_BYTES}s")  # index, P, name, nonce
_REPLY = struct.Struct(f">?{_TEXT_BYTES}s")  # admitted, text
TRY_SECONDS = 0.25  # between two attempts to connect
ANSWER_SECONDS = 10.0  # for the gate's bytes to come
# for an earlier run's process 0 to release the address
RELEASE_SECONDS = 10.0
NAMED_STRANGERS = 10  # that the log names: their number is not bounded
LOOK_SECONDS = 1.0  # between two looks of the gate's thread at whether it is closed

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


class Gate:
    """Process 0's side: admits the other processes from a thread of its own until it is closed.

    Args:
      listener: from `open_listener`.
      service: HOST:PORT of JAX's coordination service, which every admitted process gets.
      roll: of the job, whose processes it watches.
      token: of the job.
    """

    def __init__(self, listener: socket.socket, service: str, roll: RollCall, token: str):
        self._listener, self._service, self._roll = listener, service, roll
        self._key, self._closed, self._strangers = derive_key("job", token), False, 0
        self._greetings = Greetings(
            listener,
            _APPLICATION.size + MAC_BYTES,
            lambda: _MAGIC + secrets.token_bytes(_NONCE_BYTES),
        )
        threading.Thread(target=self._run, name="job's gate", daemon=True).start()

    def met(self) -> None:
        """Process 0 has met the others, and needs no watch over their start any more."""
        self._roll.met()

    def stopped(self) -> None:
        """SIGTERM ends process 0, and with it the others."""
        self._roll.stopped()

    def close(self) -> None:
        """Lets the thread end, which closes all connections."""
        self._closed = True
        with contextlib.suppress(OSError):  # not on every system
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread

    def _run(self) -> None:
        while not self._closed:
            try:
                guests = self._greetings.read(LOOK_SECONDS)
            except OSError as error:
                if not self._closed:
                    log.warning("no further process can join this job: %s", error)
                break
            self._look()  # first: a process that has ended makes room for another one
            for guest in guests:
                self._answer(guest)
        self._roll.close()
        self._greetings.close()

    def _look(self) -> None:
        for connection in self._roll.look():
            self._greetings.ignore(connection)
            connection.close()

    def _answer(self, guest: Guest) -> None:
        application, mac = guest.greeting[:-MAC_BYTES], guest.greeting[-MAC_BYTES:]
        if not is_signed(self._key, mac, guest.opening, application):
            self._strangers += 1
            if self._strangers <= NAMED_STRANGERS:
                log.warning("a process with another token is refused: %s", _peer(guest.connection))
            # sealed with this job's token: the process finds that the tokens differ
            self._reply(guest, application, False, "")
            return
        index, count, name, _ = _APPLICATION.unpack(application)
        name = name.rstrip(b"\0").decode(errors="replace")
        if refused := self._refusal(index, count):
            log.warning("process %d (%s) is refused: %s", index, name, refused)
            self._reply(guest, application, False, refused)
        else:
            self._reply(guest, application, True, self._service)
            self._roll.admit(index, name, guest.connection)
            self._greetings.heed(guest.connection)

    def _refusal(self, index: int, count: int) -> str:
        """The reason against a process; "": there is none."""
        if count != self._roll.count:
            return f"it was started for {count} processes, and this job has {self._roll.count}"
        if index == 0:
            return f"process 0 of this job is running already ({_own_name()})"
        if name := self._roll.running(index):
            return f"process {index} of this job is running already ({name})"
        return ""

    def _reply(self, guest: Guest, application: bytes, admitted: bool, text: str) -> None:
        reply = _REPLY.pack(admitted, text.encode()[:_TEXT_BYTES])
        with contextlib.suppress(OSError):  # the process has ended
            guest.connection.send(reply + sign(self._key, guest.opening, application, reply))
        if not admitted:
            guest.connection.close()


def apply(
    coordinator: str, index: int, count: int, token: str, seconds: float
) -> tuple[str, socket.socket]:
    """Joins the job whose gate listens on `coordinator`, within `seconds`.

    Returns HOST:PORT of JAX's coordination service, and a connection to keep open while this
    process runs. Raises ValueError for a process that is refused, and ConnectionError if process 0
    is not there in time.
    """
    began = said = time.monotonic()
    while True:
        try:
            return _apply_once(Address.parse(coordinator), index, count, token)
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


def _apply_once(address: Address, index: int, count: int, token: str) -> tuple[str, socket.socket]:
    with contextlib.ExitStack() as on_failure:
        connection = socket.create_connection(address, timeout=ANSWER_SECONDS)
        on_failure.callback(connection.close)
        opening = _receive(connection, len(_MAGIC) + _NONCE_BYTES)
        if not opening.startswith(_MAGIC):
            raise ConnectionError("another service has this port")
        name = _own_name().encode()[:_NAME_BYTES]
        application = _APPLICATION.pack(index, count, name, secrets.token_bytes(_NONCE_BYTES))
        key = derive_key("job", token)
        connection.sendall(application + sign(key, opening, application))
        reply = _receive(connection, _REPLY.size)
        mac = _receive(connection, MAC_BYTES)
        if not is_signed(key, mac, opening, application, reply):
            raise ValueError(
                f"process {index} and process 0 at {address} have different tokens: another job "
                "has this address, or DISTFLOW_JOB_TOKEN differs; set both alike on all processes"
            )
        admitted, text = _REPLY.unpack(reply)
        text = text.rstrip(b"\0").decode()
        if not admitted:
            raise ValueError(
                f"process {index} cannot join the job at {address}: {text}; start each process "
                "once, with a number of its own"
            )
        connection.settimeout(None)
        on_failure.pop_all()
        return text, connection


def open_listener(coordinator: str) -> socket.socket:
    """The gate's listening socket, on the interface of the coordinator's address.

    Raises ValueError if another process has the address.
    """
    address = Address.parse(coordinator)
    try:
        family, _, _, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(f"process 0 cannot listen on {coordinator} ({error.strerror})") from error
    if ipaddress.ip_address(place[0]).is_loopback and not _names_loopback(address.host):
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
def reserved_port(host: str):
    """HOST:PORT of a free port, which no other process gets while the body runs.

    A server that sets SO_REUSEPORT, as gRPC does, can listen on it within the body.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, 0))
        yield str(Address(host, holder.getsockname()[1]))


def _names_loopback(host: str) -> bool:
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


def _peer(connection: socket.socket) -> str:
    """The address of the other side."""
    try:
        return str(Address(*connection.getpeername()[:2]))
    except OSError:
        return "it is gone"


def _own_name() -> str:
    return f"host {socket.gethostname()}, pid {os.getpid()}"
