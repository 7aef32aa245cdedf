"""Doors of the wire: they answer the calls of those that have the run's token.

One thread of a door talks with all its callers, and never waits for one of them. Whether a frame is
genuine and how large it is are known before one byte of it is read, so that strangers take no
memory. Methods run in a few threads of their own, quick ones in the door's: a thread for each
caller would fight with the others, and with those of the training, for the interpreter.
"""

import contextlib
import errno
import logging
import queue
import resource
import selectors
import socket
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

from distflow_jax.flow.wire.calls import (
    LIMIT_BYTES,
    TEXT_BYTES,
    TURNED_AWAY,
    WELCOME,
    Bytes,
    Method,
    Refused,
    too_large,
)
from distflow_jax.flow.wire.guest import Answer, Conversation, Guest
from distflow_jax.flow.wire.session import (
    FRAME_HEAD_BYTES,
    HELLO,
    MAGIC,
    METHOD_BYTES,
    Frame,
    Reception,
    Session,
    Stranger,
)
from distflow_jax.flow.wire.tls import WireTls, read_wire_tls
from distflow_jax.parsing.addresses import listen
from distflow_jax.parsing.one_line import one_line
from distflow_jax.parsing.token_proof import MAC_BYTES, derive_key

OPENING_SECONDS = 10.0  # for both sides to prove the token
MESSAGE_SECONDS = 60.0  # for the bytes of a frame to come, and for those of an answer to go
IDLE_SECONDS = 900.0  # after which a session ends; its caller begins another one
MOST_SESSIONS = 4096  # or half of the files that the process may open; the one idle longest ends
MOST_STRANGERS = 128  # connections that have not proved the token; beyond it the oldest one ends
METHOD_THREADS = 8
QUICK_BYTES = 256 << 10  # of a frame, at most, whose method is quick
MOST_LOGGED = 100  # refusals that a door's log names: their number is not bounded
LOOK_SECONDS = 0.25  # between two looks at what has taken too long

log = logging.getLogger("distflow_jax")


class Door:
    """Answers the calls of those that have the run's token, until it is closed.

    Args:
      address: HOST:PORT of the interface to listen on; port 0: any free one.
      token: of the run.
      methods: (name of the caller, bytes) -> bytes, by name. One that raises `Refused` sends its
        text to the caller.
      quick: names of methods that wait for nobody, and return within a millisecond.
      limit_bytes: of a frame; a larger one is refused before it is read.
      tls: its certificate; None: that of the environment (tls.py), if it names one.

    Attributes:
      port: where it listens.
      peers: sessions of callers.
    """

    def __init__(
        self,
        address: str,
        token: bytes,
        methods: Mapping[str, Method],
        *,
        quick: Collection[str] = (),
        limit_bytes: int = LIMIT_BYTES,
        tls: WireTls | None = None,
    ):
        if wrong := [name for name in methods if len(name.encode()) > METHOD_BYTES]:
            raise ValueError(f"method {wrong[0]!r} has more than {METHOD_BYTES} bytes")
        self._methods, self._quick, self._limit = dict(methods), frozenset(quick), limit_bytes
        self._key = derive_key("wire", token)
        self._tls = (read_wire_tls() if tls is None else tls).door
        self._listener = listen("the wire", *address.rpartition(":")[::2])
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._log = _RefusalLog(f"{address.rpartition(':')[0]}:{self.port}")
        self._strangers: dict[Guest, None] = {}  # the oldest one first
        self._sessions: dict[Guest, float] = {}  # when each has begun a frame last
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_sessions = min(MOST_SESSIONS, max(files // 2, 1)) if files > 0 else MOST_SESSIONS
        self._ended: queue.SimpleQueue[Guest] = queue.SimpleQueue()  # whose calls have run
        self._ready: list[Guest] = []  # whose bytes may have come already
        self._is_full = False  # no further connection is taken until the next look
        self._selector = selectors.DefaultSelector()
        self._bell, self._rung = socket.socketpair()
        self._bell.setblocking(False)
        self._open = True
        self._pool = ThreadPoolExecutor(METHOD_THREADS, "door-methods")
        self._thread = threading.Thread(target=self._serve, name="door", daemon=True)
        self._thread.start()

    @property
    def peers(self) -> int:
        """Sessions that have not ended."""
        return len(self._sessions)

    def close(self) -> None:
        """Ends the connections, the threads and the port, once the calls that run have returned."""
        if self._open:
            self._open = False
            self._ring()
            self._thread.join()
            self._pool.shutdown(cancel_futures=True)
            self._bell.close()

    # -- connections ------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Talks with all callers until the door is closed."""
        with self._selector, self._listener, self._rung, contextlib.ExitStack() as at_end:
            at_end.callback(lambda: [self._end(guest) for guest in self._guests()])
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._selector.register(self._rung, selectors.EVENT_READ, self._hear)
            look = 0.0
            while self._open:
                waits = self._strangers or self._sessions or self._is_full
                ready, self._ready = self._ready, []
                for guest in ready:
                    self._go_on(guest)
                seconds = 0 if self._ready else LOOK_SECONDS if waits else None
                for key, _ in self._selector.select(seconds):
                    if isinstance(key.data, Guest):
                        self._go_on(key.data)
                    else:
                        key.data()
                if (now := time.monotonic()) >= look:
                    look = now + LOOK_SECONDS
                    self._look(now)

    def _guests(self) -> list[Guest]:
        return [*self._strangers, *self._sessions]

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._log.refused("anybody", f"no connection can be taken ({error.strerror})")
                self._end_oldest_stranger()
                self._selector.unregister(self._listener)
                self._is_full = True
            return  # otherwise the connection has ended again
        host = peer[0] if peer else "a host that has left"
        try:
            guest = Guest(connection, host, self._tls)
        except OSError:  # it has ended
            connection.close()
            return
        if len(self._strangers) >= MOST_STRANGERS:
            self._end_oldest_stranger()
        self._strangers[guest] = None
        guest.until = _soon(OPENING_SECONDS)
        guest.begin(self._converse(guest))
        self._go_on(guest)

    def _go_on(self, guest: Guest, *, answers: bool = False) -> None:
        """Has a conversation go on; `answers`: its call has run."""
        if guest not in self._strangers and guest not in self._sessions:  # it has been ended
            return
        try:
            if answers:
                guest.answer()
            if guest.go_on():
                self._ready.append(guest)
            self._await(guest)
            return
        except Stranger as stranger:
            self._log.refused(guest.host, str(stranger))
        except OSError:  # the connection has ended
            pass
        except Exception:
            log.exception("a connection of %s has failed", guest.host)
        self._end(guest)

    def _await(self, guest: Guest) -> None:
        """Waits for what a conversation needs next."""
        events = selectors.EVENT_READ if guest.stuck is None else selectors.EVENT_WRITE
        if guest.stuck is None and guest.runs is not None:
            events = 0
        if events == guest.events:
            return
        if not guest.events:
            self._selector.register(guest.socket, events, guest)
        elif events:
            self._selector.modify(guest.socket, events, guest)
        else:
            self._selector.unregister(guest.socket)
        guest.events = events

    def _end(self, guest: Guest) -> None:
        self._strangers.pop(guest, None)
        self._sessions.pop(guest, None)
        with contextlib.suppress(KeyError, ValueError, OSError):  # it may wait for nothing
            self._selector.unregister(guest.socket)
        guest.events = 0
        guest.close()

    def _look(self, now: float) -> None:
        """Ends connections whose bytes do not come or go, or whose callers have left."""
        for guest in self._guests():
            is_late = guest.is_gone() if guest.runs is not None else guest.until < now
            if is_late or (guest.stuck is not None and guest.stuck + MESSAGE_SECONDS < now):
                self._end(guest)
        if self._is_full:
            with contextlib.suppress(OSError):  # until the next look
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
                self._is_full = False

    def _end_oldest_stranger(self) -> None:
        for guest in list(self._strangers)[:1]:
            self._end(guest)

    def _ring(self) -> None:
        """Wakes the door's thread."""
        with contextlib.suppress(OSError):  # it is rung already, or the door is closed
            self._bell.send(b"!")

    def _hear(self) -> None:
        self._rung.recv(4096)
        for _ in range(self._ended.qsize()):
            self._go_on(self._ended.get(), answers=True)

    # -- conversations ----------------------------------------------------------------------------

    def _converse(self, guest: Guest) -> Conversation:
        """The conversation with a caller: its session's beginning, then one frame at a time."""
        reception = Reception(self._key, self._limit)
        try:
            hello = yield len(MAGIC)
            if hello == MAGIC:  # others may say less
                hello += yield HELLO.size - len(MAGIC)
            guest.say(WELCOME + reception.challenge(hello))
            proof, session = reception.admit((yield MAC_BYTES))
        except Stranger as stranger:
            self._log.refused(guest.host, str(stranger))
            guest.say(TURNED_AWAY + str(stranger).encode())
            guest.leaves = True
            yield 0
            return
        self._admit(guest)
        guest.say(WELCOME + proof)
        while True:
            guest.until = _soon(IDLE_SECONDS)
            frame = session.begin((yield FRAME_HEAD_BYTES))
            guest.until = _soon(MESSAGE_SECONDS)
            if frame.size > self._limit:
                text = too_large(frame.size, self._limit)
                self._log.refused(f"{session.name}, {guest.host}", text)
                guest.say(*_refusal(session, text))
                guest.leaves = True
                yield 0
                return
            payload = yield frame.size
            self._sessions[guest] = time.monotonic()
            if frame.size <= QUICK_BYTES and frame.method in self._quick:
                answer = self._run(session, frame, payload, guest.host)
            else:
                guest.kept = payload
                run = self._pool.submit(self._run_kept, guest, session, frame)
                del payload
                run.add_done_callback(lambda _: (self._ended.put(guest), self._ring()))
                answer = yield run
            guest.say(*answer)

    def _admit(self, guest: Guest) -> None:
        """Takes a caller in that has proved the token."""
        del self._strangers[guest]
        guest.is_stranger = False
        if len(self._sessions) >= self._most_sessions:
            self._end(min(self._sessions, key=self._sessions.__getitem__))
        self._sessions[guest] = time.monotonic()

    def _run_kept(self, guest: Guest, session: Session, frame: Frame) -> Answer:
        payload, guest.kept = guest.kept, b""
        return self._run(session, frame, payload, guest.host)

    def _run(self, session: Session, frame: Frame, payload: Bytes, host: str) -> Answer:
        """The answer to a genuine frame. Stranger for bytes that are not those of its head."""
        frame.check(payload)
        method = self._methods.get(frame.method)
        if method is None:
            text = f"there is no method {one_line(frame.method)}; use one version on both sides"
            self._log.refused(f"{session.name}, {host}", text)
            return _refusal(session, text)
        try:
            answer = method(session.name, payload)
            return session.answer_head(answer), answer
        except Refused as refused:
            return _refusal(session, str(refused))
        except BaseException as error:  # a fault must not look like one of the network
            log.exception("a call of %s has failed", session.name)
            text = f"the other side has failed: {type(error).__name__}: {error}; see its log"
            return _refusal(session, text)


class _RefusalLog:
    """Warnings of refusals: one for each host and reason, and not without end."""

    def __init__(self, address: str):
        self._address, self._seen = address, set()

    def refused(self, peer: str, reason: str) -> None:
        """A caller, and why it is refused."""
        if (peer, reason) in self._seen or len(self._seen) > MOST_LOGGED:
            return
        self._seen.add((peer, reason))
        if len(self._seen) > MOST_LOGGED:
            log.warning("further refusals at %s are not logged", self._address)
        else:
            log.warning("a call of %s to %s is refused: %s", peer, self._address, reason)


def _refusal(session: Session, text: str) -> Answer:
    data = one_line(text).encode()[:TEXT_BYTES]
    return session.answer_head(data, refused=True), data


def _soon(seconds: float) -> float:
    return time.monotonic() + seconds
