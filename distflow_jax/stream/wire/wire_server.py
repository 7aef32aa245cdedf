"""Servers of the wire protocol: they answer clients that hold the run's token.

One thread of a server serves all clients, and never waits for one of them. Authenticity and size of
a frame are known before a byte of it is read, so unauthenticated clients take no memory. Methods
run in a small thread pool, quick ones in the server's thread: a thread per client would contend
with the others, and with those of training, for the interpreter.
"""

import contextlib
import errno
import functools
import logging
import queue
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from distflow_jax.parsing.addresses import listen
from distflow_jax.parsing.one_line import one_line
from distflow_jax.parsing.token_proof import MAC_BYTES, derive_key
from distflow_jax.stream.wire.calls import (
    LIMIT_BYTES,
    TEXT_BYTES,
    TURNED_AWAY,
    WELCOME,
    Bytes,
    Method,
    Refused,
    too_large,
)
from distflow_jax.stream.wire.connection import Answer, Connection, Conversation
from distflow_jax.stream.wire.session import (
    FRAME_HEAD_BYTES,
    HELLO,
    MAGIC,
    Head,
    Reception,
    Session,
    Stranger,
)
from distflow_jax.stream.wire.tls import read_wire_tls

OPENING_SECONDS = 10.0  # for both sides to prove the token
MESSAGE_SECONDS = 60.0  # for the bytes of a frame to come, and for those of an answer to go
IDLE_SECONDS = 900.0  # after which a session ends; its caller begins another one
MOST_SESSIONS = 4096  # or half of the files that the process may open; the one idle longest ends
MOST_STRANGERS = 128  # connections that have not proved the token; beyond it the oldest one ends
METHOD_THREADS = 8
QUICK_BYTES = 256 << 10  # of a frame, at most, whose method is quick
MOST_LOGGED = 100  # refusals that a server's log names: their number is not bounded
LOOK_SECONDS = 0.25  # between two looks at what has taken too long

log = logging.getLogger("distflow_jax")

T = TypeVar("T")


class WireServer:
    """Answers clients that hold the run's token, until it is closed.

    Args:
      address: HOST:PORT of the interface to listen on; port 0: any free one.
      token: of the run.
      methods: (name of the client, bytes) -> bytes, by name. One that raises `Refused` sends its
        text to the client.
      quick: names of methods that return within a millisecond; a Future is answered once it is
        done.
      limit_bytes: of a frame; a larger one is refused before it is read.
      know: called with name and host of each client that has proved the token.

    The environment may name its certificate (tls.py).

    Attributes:
      port: where it listens.
      peers: sessions of clients.
    """

    def __init__(
        self,
        address: str,
        token: bytes,
        methods: Mapping[str, Method],
        *,
        quick: Collection[str] = (),
        limit_bytes: int = LIMIT_BYTES,
        know: Callable[[str, str], None] = lambda name, host: None,
    ):
        self._methods, self._quick, self._limit = dict(methods), frozenset(quick), limit_bytes
        self._key, self._know = derive_key("wire", token), know
        self._tls = read_wire_tls().server
        self._listener = listen("the wire", *address.rpartition(":")[::2])
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._log = _RefusalLog(f"{address.rpartition(':')[0]}:{self.port}")
        self._strangers: dict[Connection, None] = {}  # the oldest one first
        self._sessions: dict[Connection, float] = {}  # when each has begun a frame last
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_sessions = min(MOST_SESSIONS, max(files // 2, 1)) if files > 0 else MOST_SESSIONS
        self._ended: queue.SimpleQueue[Connection] = queue.SimpleQueue()  # whose calls have run
        self._ready: list[Connection] = []  # whose bytes may have come already
        self._is_full = False  # no further connection is taken until the next look
        self._selector = selectors.DefaultSelector()
        self._bell, self._rung = socket.socketpair()
        self._bell.setblocking(False)
        self._open = True
        self._pool = ThreadPoolExecutor(METHOD_THREADS, "server-methods")
        self._thread = threading.Thread(target=self._serve, name="server", daemon=True)
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
        """Talks with all callers until the server is closed."""
        with self._selector, self._listener, self._rung, contextlib.ExitStack() as at_end:
            at_end.callback(lambda: [self._end(connection) for connection in self._connections()])
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._selector.register(self._rung, selectors.EVENT_READ, self._hear)
            look = 0.0
            while self._open:
                waits = self._strangers or self._sessions or self._is_full
                ready, self._ready = self._ready, []
                for connection in ready:
                    self._go_on(connection)
                seconds = 0 if self._ready else LOOK_SECONDS if waits else None
                for key, _ in self._selector.select(seconds):
                    key.data()
                if (now := time.monotonic()) >= look:
                    look = now + LOOK_SECONDS
                    self._look(now)

    def _connections(self) -> list[Connection]:
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
            connection = Connection(connection, host, self._tls)
        except OSError:  # it has ended
            connection.close()
            return
        if len(self._strangers) >= MOST_STRANGERS:
            self._end_oldest_stranger()
        self._strangers[connection] = None
        connection.until = _soon(OPENING_SECONDS)
        connection.begin(self._converse(connection))
        self._go_on(connection)

    def _go_on(self, connection: Connection, *, answers: bool = False) -> None:
        """Has a conversation go on; `answers`: its call has run."""
        if (
            connection not in self._strangers and connection not in self._sessions
        ):  # it has been ended
            return
        try:
            if answers:
                connection.answer()
            if connection.go_on():
                self._ready.append(connection)
            self._await(connection)
            return
        except Stranger as stranger:
            self._log.refused(connection.host, str(stranger))
        except OSError:  # the connection has ended
            pass
        except Exception:
            log.exception("a connection of %s has failed", connection.host)
        self._end(connection)

    def _await(self, connection: Connection) -> None:
        """Waits for what a conversation needs next."""
        events = selectors.EVENT_READ if connection.stuck is None else selectors.EVENT_WRITE
        if connection.stuck is None and connection.runs is not None:
            events = 0
        if events == connection.events:
            return
        go_on = functools.partial(self._go_on, connection)
        if not connection.events:
            self._selector.register(connection.socket, events, go_on)
        elif events:
            self._selector.modify(connection.socket, events, go_on)
        else:
            self._selector.unregister(connection.socket)
        connection.events = events

    def _end(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        self._sessions.pop(connection, None)
        with contextlib.suppress(KeyError, ValueError, OSError):  # it may wait for nothing
            self._selector.unregister(connection.socket)
        connection.events = 0
        connection.close()

    def _look(self, now: float) -> None:
        """Ends connections whose bytes do not come or go, or whose callers have left."""
        for connection in self._connections():
            is_late = (
                connection.is_gone() if connection.runs is not None else connection.until < now
            )
            if is_late or (
                connection.stuck is not None and connection.stuck + MESSAGE_SECONDS < now
            ):
                self._end(connection)
        if self._is_full:
            with contextlib.suppress(OSError):  # until the next look
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
                self._is_full = False

    def _end_oldest_stranger(self) -> None:
        for connection in list(self._strangers)[:1]:
            self._end(connection)

    def _ring(self) -> None:
        """Wakes the server's thread."""
        with contextlib.suppress(OSError):  # it is rung already, or the server is closed
            self._bell.send(b"!")

    def _hear(self) -> None:
        self._rung.recv(4096)
        for _ in range(self._ended.qsize()):
            self._go_on(self._ended.get(), answers=True)

    # -- conversations ----------------------------------------------------------------------------

    def _converse(self, connection: Connection) -> Conversation:
        """The conversation with a caller: its session's beginning, then one frame at a time."""
        reception = Reception(self._key, self._limit)
        try:
            hello = yield len(MAGIC)
            if hello == MAGIC:  # others may say less
                hello += yield HELLO.size - len(MAGIC)
            connection.say(WELCOME + reception.challenge(hello))
            proof, session = reception.admit((yield MAC_BYTES))
        except Stranger as stranger:
            self._log.refused(connection.host, str(stranger))
            connection.say(TURNED_AWAY + str(stranger).encode())
            connection.leaves = True
            yield 0
            return
        self._admit(connection)
        self._know(session.name, connection.host)
        connection.say(WELCOME + proof)
        while True:
            connection.until = _soon(IDLE_SECONDS)
            frame = session.begin((yield FRAME_HEAD_BYTES))
            connection.until = _soon(MESSAGE_SECONDS)
            if frame.size > self._limit:
                text = too_large(frame.size, self._limit)
                self._log.refused(f"{session.name}, {connection.host}", text)
                connection.say(*_refusal(session, text))
                connection.leaves = True
                yield 0
                return
            payload = yield frame.size
            self._sessions[connection] = time.monotonic()
            if frame.size <= QUICK_BYTES and frame.method in self._quick:
                answer = self._run(session, frame, payload, connection.host)
            else:
                connection.kept = payload
                run = self._pool.submit(self._run_kept, connection, session, frame)
                del payload
                answer = yield self._heard(connection, run)
            if isinstance(answer, Future):
                data = yield self._heard(connection, answer)
                answer = session.answer_head(data), data
            connection.say(*answer)

    def _heard(self, connection: Connection, run: Future[T]) -> Future[T]:
        """A call whose end is heard."""
        run.add_done_callback(lambda _: (self._ended.put(connection), self._ring()))
        return run

    def _admit(self, connection: Connection) -> None:
        """Takes a caller in that has proved the token."""
        del self._strangers[connection]
        connection.is_stranger = False
        if len(self._sessions) >= self._most_sessions:
            self._end(min(self._sessions, key=self._sessions.__getitem__))
        self._sessions[connection] = time.monotonic()

    def _run_kept(
        self, connection: Connection, session: Session, frame: Head
    ) -> Answer | Future[bytes]:
        payload, connection.kept = connection.kept, b""
        return self._run(session, frame, payload, connection.host)

    def _run(
        self, session: Session, frame: Head, payload: Bytes, host: str
    ) -> Answer | Future[bytes]:
        """The answer to a genuine frame, or its bytes to come. Stranger for other bytes than those
        of its head."""
        frame.check(payload)
        method = self._methods.get(frame.method)
        if method is None:
            text = f"there is no method {one_line(frame.method)}; use one version on both sides"
            self._log.refused(f"{session.name}, {host}", text)
            return _refusal(session, text)
        try:
            answer = method(session.name, payload)
            if isinstance(answer, Future):
                return answer
            return session.answer_head(answer), answer
        except Refused as refused:
            return _refusal(session, str(refused))
        except BaseException as error:  # a fault must not look like one of the network
            log.exception("a call of %s has failed", session.name)
            text = f"the other side has failed: {type(error).__name__}: {error}; see its log"
            return _refusal(session, text)


class _RefusalLog:
    """Rate-limited warnings of refusals: one for each host and reason."""

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
