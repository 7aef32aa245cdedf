"""The wire: calls with bytes between trainers and workers, over gRPC.

A `Door` answers the calls of those that have the run's token; a `Caller` makes them. Heads of
frames travel as metadata: whether a frame is genuine and how large it is are known before one byte
of it is read, so that strangers take no memory. All doors of a process share one thread, which
never runs a method: methods run in a few threads of their door.
"""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from distflow_jax.flow.workers.wire_session import (
    Frame,
    Lane,
    NoSession,
    Opening,
    Sessions,
    Stranger,
    answer_head,
)
from distflow_jax.flow.workers.wire_tls import WireTls, read_wire_tls
from distflow_jax.parsing.one_line import one_line

LIMIT_BYTES = 64 << 20  # of an answer, and by default of a frame
METHOD_THREADS = 8
MESSAGE_SECONDS = 60.0  # for the bytes of a frame to come
TEXT_BYTES = 4096  # of a refusal
MOST_LOGGED = 100  # refusals that a door's log names: their number is not bounded
BYE_SECONDS = 1.0

_SERVICE = "/distflow.Wire/"
_HELLO, _PROOF, _BYE = "-hello", "-proof", "-bye"  # no method of a door begins with a dash
_HEAD = "distflow-bin"
_ENDED = "session ended"
_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.enable_retries", 0),  # a frame sent again would be refused
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", -1),
    # a host that has failed closes nothing
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]
_DOOR_OPTIONS = [
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_concurrent_streams", 256),
    ("grpc.max_metadata_size", 4096),
]
_CALLER_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own, which ends with the caller
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]

log = logging.getLogger("distflow_jax")

Method = Callable[[str, bytes], bytes]


class Refused(Exception):
    """A call that the other side has refused; the text is its own."""


class Unreachable(Exception):
    """A call without an answer; the text has address and reason."""


class Door:
    """Answers the calls of those that have the run's token, until it is closed.

    Args:
      address: HOST:PORT of the interface to listen on; port 0: any free one.
      token: of the run.
      methods: (name of the caller, bytes) -> bytes, by name. They run in a few threads and should
        soon return. One that raises `Refused` sends its text to the caller.
      limit_bytes: of a frame; a larger one is refused before it is read.
      tls: its certificate; None: that of the environment (wire_tls.py), if it names one.

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
        limit_bytes: int = LIMIT_BYTES,
        tls: WireTls | None = None,
    ):
        self._address, self._methods, self._limit = address, dict(methods), limit_bytes
        self._sessions = Sessions(token)
        self._tls = read_wire_tls() if tls is None else tls
        _check_free(address)
        with contextlib.ExitStack() as on_failure:
            self._pool = on_failure.enter_context(ThreadPoolExecutor(METHOD_THREADS, "door"))
            on_failure.callback(_shared_loop.give_back)
            self._loop = _shared_loop.take()
            start = self._start()
            self.port = asyncio.run_coroutine_threadsafe(start, self._loop).result()
            on_failure.pop_all()
        self._log = _RefusalLog(f"{address.rpartition(':')[0]}:{self.port}")
        self._open = True

    @property
    def peers(self) -> int:
        """Sessions that have not ended."""
        return len(self._sessions)

    def close(self) -> None:
        """Ends the calls that run, the threads and the port."""
        if self._open:
            self._open = False
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
            self._pool.shutdown(cancel_futures=True)
            _shared_loop.give_back()

    async def _start(self) -> int:
        limit = ("grpc.max_receive_message_length", self._limit)
        self._server = grpc.aio.server(options=[*_OPTIONS, *_DOOR_OPTIONS, limit])
        self._server.add_generic_rpc_handlers((_Handlers(self._answer),))
        credentials = self._tls.server_credentials()
        try:
            if credentials is None:
                port = self._server.add_insecure_port(self._address)
            else:
                port = self._server.add_secure_port(self._address, credentials)
        except RuntimeError as error:
            reason = "choose another port, or check that the TLS key is the certificate's"
            raise ValueError(f"cannot listen on {self._address}: {reason}") from error
        await self._server.start()
        return port

    async def _stop(self) -> None:
        await self._server.stop(grace=0.2)
        del self._server

    async def _answer(self, method: str, context: grpc.aio.ServicerContext) -> bytes:
        head = dict(context.invocation_metadata() or ()).get(_HEAD, b"")
        peer = context.peer()  # now: a call that has ended has none
        try:
            if method == _HELLO:
                return self._sessions.challenge(head)
            if method == _PROOF:
                return self._sessions.admit(head)
            frame = self._sessions.begin(method, head)
            if method == _BYE:
                self._sessions.end(frame)
                return b""
            answer, refused = await self._run(method, frame, context)
        except NoSession:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, _ENDED)
        except Stranger as stranger:
            self._log.refused(peer, str(stranger))
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(stranger))
        context.set_trailing_metadata(((_HEAD, answer_head(frame, answer, refused=refused)),))
        return answer

    async def _run(
        self, method: str, frame: Frame, context: grpc.aio.ServicerContext
    ) -> tuple[bytes, bool]:
        """(answer, whether it is a refusal) to a genuine frame, which is read now."""
        who = f"{frame.name}, {context.peer()}"
        if frame.size > self._limit:
            text = f"a frame of {frame.size} bytes is above the limit of {self._limit}"
            self._log.refused(who, text)
            return text.encode(), True
        if method not in self._methods:
            text = f"there is no method {one_line(method)}; use one version on both sides"
            self._log.refused(who, text)
            return text.encode(), True
        try:
            payload = await asyncio.wait_for(context.read(), MESSAGE_SECONDS)
        except (TimeoutError, grpc.RpcError) as error:
            raise Stranger("its frame did not come") from error
        if not isinstance(payload, bytes):
            raise Stranger("its frame did not come, or is larger than it says")
        run = self._loop.run_in_executor(
            self._pool, _checked_call, self._methods[method], frame, payload
        )
        run.add_done_callback(_noted)  # its caller may wait no longer
        await asyncio.wait([run])
        error = run.exception()
        if error is None:
            return run.result(), False
        if isinstance(error, Stranger):
            raise error
        text = str(error)
        if not isinstance(error, Refused):  # a fault must not look like one of the network
            log.error("a call of %s has failed", frame.name, exc_info=error)
            text = f"the other side has failed: {type(error).__name__}: {error}; see its log"
        return one_line(text).encode()[:TEXT_BYTES], True


class Caller:
    """Calls the methods of one door, from any number of threads.

    A session has one frame in flight at a time; further ones begin as threads call at once.

    Args:
      address: HOST:PORT of the door.
      token: of the run.
      name: of this process, for the door's log.
      limit_bytes: of an answer.
      tls: with the authorities that the door's certificate is checked by; None: those of the
        environment, if it names some.

    Attributes:
      address: as given.
    """

    def __init__(
        self,
        address: str,
        token: bytes,
        name: str,
        *,
        limit_bytes: int = LIMIT_BYTES,
        tls: WireTls | None = None,
    ):
        self.address, self._token, self._name = address, token, name
        options = [*_OPTIONS, *_CALLER_OPTIONS, ("grpc.max_receive_message_length", limit_bytes)]
        credentials = (read_wire_tls() if tls is None else tls).caller_credentials()
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options)
        self._stubs: dict[str, Any] = {}
        self._idle: list[Lane] = []
        self._closed = False

    def call(self, method: str, payload: bytes, seconds: float) -> bytes:
        """The answer to one call.

        Raises Refused with the other side's text, and Unreachable if there is no genuine answer in
        time; whether the call was made is then not known.
        """
        end = time.monotonic() + seconds
        with contextlib.suppress(IndexError, _SessionEnded):
            return self._frame(self._idle.pop(), method, payload, end)
        try:
            return self._frame(self._new_lane(end), method, payload, end)
        except _SessionEnded:
            raise self._unreachable("it ends every session at once") from None

    def close(self) -> None:
        """Ends the sessions and the connection. Calls that run end as Unreachable."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(IndexError, Refused, Unreachable, _SessionEnded):
            while True:
                self._send(_BYE, self._idle.pop().head(_BYE, b""), b"", _soon(BYE_SECONDS))
        self._channel.close()

    def _frame(self, lane: Lane, method: str, payload: bytes, end: float) -> bytes:
        answer, head = self._send(method, lane.head(method, payload), payload, end)
        try:
            refused = lane.is_refusal(head, answer)
        except Stranger as error:
            raise self._unreachable(str(error)) from None
        self._idle.append(lane)  # only now: after a lost answer the numbers may differ
        if refused:
            raise Refused(one_line(answer.decode(errors="replace")))
        return answer

    def _new_lane(self, end: float) -> Lane:
        opening = Opening(self._token, self._name)
        try:
            challenge, _ = self._send(_HELLO, opening.hello(), b"", end)
            proof, _ = self._send(_PROOF, opening.prove(challenge), b"", end)
            return opening.lane(proof)
        except Stranger as error:
            raise Refused(f"{self.address}: {error}") from None

    def _send(self, method: str, head: bytes, payload: bytes, end: float) -> tuple[bytes, bytes]:
        """(answer, its head)."""
        stub = self._stubs.get(method)
        if stub is None:
            stub = self._stubs[method] = self._channel.unary_unary(_SERVICE + method)
        try:
            answer, call = stub.with_call(
                payload, timeout=max(0.001, end - time.monotonic()), metadata=((_HEAD, head),)
            )
        except grpc.RpcError as error:
            raise self._error(error) from None
        except ValueError:  # the channel is closed
            raise self._unreachable("this process has closed the connection") from None
        return answer, dict(call.trailing_metadata() or ()).get(_HEAD, b"")

    def _error(self, error: grpc.RpcError) -> Exception:
        code, details = error.code(), one_line(error.details() or "")
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return _SessionEnded() if details == _ENDED else Refused(f"{self.address}: {details}")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return self._unreachable("no answer in time")
        return self._unreachable(details or code.name)

    def _unreachable(self, reason: str) -> Unreachable:
        return Unreachable(f"{self.address}: {reason}")


class _SessionEnded(Exception):
    """The door has forgotten a session: begin another one, the frame was not taken."""


class _Handlers(grpc.GenericRpcHandler):
    """Has every method of the service answered by one function."""

    def __init__(self, answer: Callable[[str, grpc.aio.ServicerContext], Any]):
        self._answer = answer

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """The handler of a call."""
        if not details.method.startswith(_SERVICE):
            return None
        method = details.method.removeprefix(_SERVICE)

        async def answer(_: Any, context: grpc.aio.ServicerContext) -> bytes:
            return await self._answer(method, context)

        # of a stream, whose message is read when the handler wants it
        return grpc.stream_unary_rpc_method_handler(answer)


class _RefusalLog:
    """Warnings of refusals: one for each host and reason, and not without end."""

    def __init__(self, address: str):
        self._address, self._seen = address, set()

    def refused(self, peer: str, reason: str) -> None:
        """A caller, and why it is refused."""
        host = one_line(peer).rpartition(":")[0]
        if (host, reason) in self._seen or len(self._seen) > MOST_LOGGED:
            return
        self._seen.add((host, reason))
        if len(self._seen) > MOST_LOGGED:
            log.warning("further refusals at %s are not logged", self._address)
        else:
            log.warning("a call of %s to %s is refused: %s", host, self._address, reason)


class _SharedLoop:
    """The event loop of all doors of a process, and its thread, while there are doors."""

    def __init__(self):
        self._lock, self._users = threading.Lock(), 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def take(self) -> asyncio.AbstractEventLoop:
        """The loop, until it is given back."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._run, name="doors", daemon=True)
                self._thread.start()
            self._users += 1
            return self._loop

    def give_back(self) -> None:
        """One user less; the last one ends the thread."""
        with self._lock:
            self._users -= 1
            if self._users or self._loop is None:
                return
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop = self._thread = None

    def _run(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()


_shared_loop = _SharedLoop()


def _checked_call(method: Method, frame: Frame, payload: bytes) -> bytes:
    frame.check(payload)
    return method(frame.name, payload)


def _noted(run: asyncio.Future) -> None:
    """Marks the error of a call as seen."""
    if not run.cancelled():
        run.exception()


def _check_free(address: str) -> None:
    """Raises ValueError for an address that cannot be had; gRPC would write pages to stderr."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, _, _, place = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"cannot listen on {address} ({reason}); name an address of this host and a free port, "
            "or port 0"
        ) from error


def _soon(seconds: float) -> float:
    return time.monotonic() + seconds
