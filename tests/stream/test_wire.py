"""The wire answers those that have the run's token, each frame once, and nobody else."""

import contextlib
import errno
import hashlib
import hmac
import secrets
import socket
import struct
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import programs
from support.sockets import resident_bytes, settle
from support.waiting import HANG, until

from distflow_jax.parsing.token_proof import MAC_BYTES, derive_key
from distflow_jax.stream.wire import wire_client as client_module
from distflow_jax.stream.wire import wire_server as wire
from distflow_jax.stream.wire.calls import Refused, Unreachable
from distflow_jax.stream.wire.session import (
    ANSWER_HEAD_BYTES,
    CHALLENGE,
    MAGIC,
    Lane,
    Opening,
    Reception,
    Stranger,
    _own,
)
from distflow_jax.stream.wire.tls import read_wire_tls
from distflow_jax.stream.wire.wire_client import WireClient
from distflow_jax.stream.wire.wire_server import MOST_STRANGERS, WireServer

TOKEN = b"the token of a run, 32 bytes long"
KEY = derive_key("wire", TOKEN)
LIMIT = 1 << 20


def no(name, payload):
    raise Refused(f"not for {name}")


def broken(name, payload):
    return payload[1 << 40]


def slow(name, payload):
    GOES_ON.wait(HANG)
    return payload


METHODS = {
    "echo": lambda name, payload: payload,
    "no": no,
    "broken": broken,
    "slow": slow,
    "exit": lambda name, payload: sys.exit(3),
    "no bytes": lambda name, payload: 3,
}
QUICK = ("echo", "no", "broken")
GOES_ON = threading.Event()  # what the slow one waits for; another one in each test


@pytest.fixture(autouse=True, params=["quick", "in threads"])
def quick(request, monkeypatch):
    """Methods run in the server's thread, or in others. Nobody is late."""
    monkeypatch.setitem(globals(), "QUICK", QUICK if request.param == "quick" else ())
    monkeypatch.setitem(globals(), "GOES_ON", threading.Event())
    monkeypatch.setattr(wire, "OPENING_SECONDS", HANG)
    monkeypatch.setattr(wire, "MESSAGE_SECONDS", HANG)


@contextlib.contextmanager
def environment(variables):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@contextlib.contextmanager
def server(address="127.0.0.1:0", tls=None, **options):
    with environment(tls or {}):
        opened = WireServer(address, TOKEN, METHODS, quick=QUICK, limit_bytes=LIMIT, **options)
    opened.at = f"127.0.0.1:{opened.port}"
    try:
        yield opened
    finally:
        opened.close()


@contextlib.contextmanager
def client(address, token=TOKEN, name="a worker", tls=None, **options):
    with environment(tls or {}):
        made = WireClient(address, token, name, **options)
    try:
        yield made
    finally:
        made.close()


class Raw:
    """A connection by hand, which sends what it is told to, whatever it is worth."""

    def __init__(self, opened):
        self._socket = socket.create_connection(("127.0.0.1", opened.port))
        self._socket.settimeout(HANG)

    def send(self, *parts):
        with contextlib.suppress(OSError):  # the other side may have ended it
            self._socket.sendall(b"".join(parts))

    def read(self, count):
        """So many bytes, or those that come before the end."""
        data = b""
        with contextlib.suppress(ConnectionError):
            while len(data) < count and (more := self._socket.recv(count - len(data))):
                data += more
        return data

    def told(self):
        """The server's words as it ends the connection before there is a session."""
        said = self.read(5000)
        assert said[:1] == b"\0"
        return said[1:].decode()

    def is_ended(self):
        return self.read(1) == b""

    def begin(self, opening=None):
        """(the caller's side of a session, the bytes that began it)."""
        opening = opening or Opening(KEY, "by hand")
        self.send(opening.hello)
        proof = opening.prove(self.read(1 + CHALLENGE.size)[1:])
        self.send(proof)
        return opening.lane(self.read(1 + MAC_BYTES)[1:]), proof

    def answered(self, lane, head, payload=b""):
        """(the bytes of the answer, whether it is a refusal)."""
        self.send(head, payload)
        answer = lane.answer(self.read(ANSWER_HEAD_BYTES))
        data = self.read(answer.size)
        answer.check(data)
        return data, answer.refused

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()


def served(address):
    with client(address) as well:
        return well.call("echo", b"well", HANG) == b"well"


def test_bytes_come_back_and_refusals_and_faults_are_told_apart(caplog):
    with server() as opened, client(opened.at) as calls:
        for size in (0, 1, 1000, LIMIT):
            payload = secrets.token_bytes(size)
            assert calls.call("echo", payload, HANG) == payload
        with pytest.raises(Refused, match="^not for a worker$"):
            calls.call("no", b"", HANG)
        with pytest.raises(Refused, match="IndexError.*see its log"):
            calls.call("broken", b"", HANG)
        with pytest.raises(Refused, match="no method ask; use one version on both sides"):
            calls.call("ask", b"", HANG)
        with pytest.raises(Refused, match=rf"{LIMIT + 1} bytes is above the limit of {LIMIT}"):
            calls.call("echo", bytes(LIMIT + 1), HANG)
        assert calls.call("echo", b"still", HANG) == b"still"
        assert opened.peers == 1
    assert caplog.text.count("a call of a worker has failed") == 1


def test_many_threads_call_through_one_client():
    with server() as opened, client(opened.at) as calls, ThreadPoolExecutor(16) as pool:
        payloads = [b"%d" % i for i in range(300)]
        assert list(pool.map(lambda p: calls.call("echo", p, HANG), payloads)) == payloads
        assert opened.peers <= 16
        calls.close()
        settle(lambda: opened.peers, 0)


def test_nobody_answers(caplog):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with client(f"127.0.0.1:{port}") as calls:
            with pytest.raises(Unreachable, match=rf"^127.0.0.1:{port}: no answer in time"):
                calls.call("echo", b"", 0.3)
    with client(f"127.0.0.1:{port}") as calls, pytest.raises(Unreachable, match="refused"):
        calls.call("echo", b"", HANG)
    with pytest.raises(Unreachable, match="closed the connection"):
        calls.call("echo", b"", HANG)


def test_a_late_answer_is_not_that_of_the_next_call():
    with server() as opened, client(opened.at) as calls:
        assert calls.call("echo", b"0", HANG) == b"0"
        with pytest.raises(Unreachable, match="in time"):
            calls.call("slow", b"1", 0.1)
        GOES_ON.set()
        assert calls.call("echo", b"2", HANG) == b"2"
        assert calls.call("slow", b"3", HANG) == b"3"


def test_a_client_finds_a_server_that_was_closed_and_opened_again():
    with server() as opened, client(opened.at) as calls:
        assert calls.call("echo", b"1", HANG) == b"1"
        opened.close()
        with pytest.raises(Unreachable):
            calls.call("echo", b"2", HANG)
        with server(opened.at):

            def answered():
                with contextlib.suppress(Unreachable):
                    return calls.call("echo", b"3", HANG) == b"3"

            until(answered)


def test_an_address_that_is_taken_or_foreign_is_an_error():
    with server() as opened:
        for address in (opened.at, "198.51.100.7:0", "127.0.0.1:port", "no.such.host.invalid:1"):
            with pytest.raises(
                ValueError, match=f"cannot listen on {address} .*port 0|HOST:PORT, got '{address}'"
            ):
                WireServer(address, TOKEN, {})


# -- attacks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [b"", b"another token", TOKEN + b" "])
def test_another_token_is_refused_and_logged_once(token, caplog):
    with server() as opened:
        for _ in range(3):
            with client(opened.at, token) as calls:
                with pytest.raises(Refused, match="token differs; set DISTFLOW_TOKEN"):
                    calls.call("echo", b"", HANG)
        assert opened.peers == 0
        assert caplog.text.count("is refused") == 1 and "a call of 127.0.0.1 to" in caplog.text
        assert served(opened.at)


def test_a_client_believes_no_server_without_the_token(monkeypatch):
    """It admits everybody, and answers: neither its proof nor its answers are genuine."""
    with server() as opened, monkeypatch.context() as patch:

        class Liar(Reception):
            def admit(self, proof):
                return bytes(32), super().admit(proof)[1]

        patch.setattr(wire, "Reception", Liar)
        with client(opened.at) as calls, pytest.raises(Refused, match="has not proved"):
            calls.call("echo", b"", HANG)
    lane, session = begun()
    session.begin(lane.head("echo", b"x"))
    good = session.answer_head(b"x")
    lane.answer(good).check(b"x")
    with pytest.raises(Stranger):
        lane.answer(good).check(b"y")
    for head in (b"", good[:-1], *flipped(good)):
        with pytest.raises(Stranger):
            lane.answer(head)
    session.begin(lane.head("echo", b"x"))
    with pytest.raises(Stranger):  # the answer to the frame before
        lane.answer(good)


def test_an_answer_that_is_damaged_on_its_way_is_none(monkeypatch):
    """Also one that claims to be refused by the server: nobody without the token can end a
    worker."""
    run = WireServer._run
    with server() as opened:
        for change in (
            lambda head, answer: (head, answer[:-1] + b"?"),
            lambda head, answer: (b"\1" + head[1:], answer),
            lambda head, answer: (b"\0" * len(head), answer),
            lambda head, answer: (head[:4], b""),
        ):
            with monkeypatch.context() as patch, client(opened.at) as calls:
                patch.setattr(WireServer, "_run", lambda *args, c=change: c(*run(*args)))
                with pytest.raises(Unreachable, match="signed|in time"):
                    calls.call("echo", b"a well known answer", 0.5)


def test_a_replayed_hello_begins_nothing(caplog):
    with server() as opened:
        with Raw(opened) as first:
            opening = Opening(KEY, "by hand")
            lane, proof = first.begin(opening)
            with Raw(opened) as again:
                again.send(opening.hello)
                again.read(1 + CHALLENGE.size)  # another one
                again.send(proof)
                assert "token differs" in again.told()
            head = lane.head("echo", b"x")
            assert first.answered(lane, head, b"x") == (b"x", False)
            with Raw(opened) as again:  # a frame without a session, and one of another session
                again.send(head, b"x")
                assert "another protocol" in again.told()
            with Raw(opened) as again:
                again.begin()
                again.send(head, b"x")
                assert again.is_ended()
        assert caplog.text.count("not signed") == 1
        assert served(opened.at)


def test_a_replayed_or_reordered_frame_is_refused_and_logged_once(caplog):
    def sent(*numbers):
        """Whether frames of these numbers are answered."""
        with Raw(opened) as hand:
            lane, _ = hand.begin()
            heads = [lane.head("echo", b"x") for _ in range(3)]
            hand.send(*(heads[number - 1] + b"x" for number in numbers))
            count = 0
            while len(hand.read(ANSWER_HEAD_BYTES + 1)) == ANSWER_HEAD_BYTES + 1:
                count += 1
                if count == len(numbers):
                    return count
            return count

    with server() as opened:
        assert sent(1, 2, 3) == 3
        assert sent(1, 1) == sent(1, 3) == sent(1, 1, 2) == 1
        assert sent(2) == sent(3, 1) == 0
        assert caplog.text.count("out of order") == 1
        with Raw(opened) as hand:
            lane, _ = hand.begin()
            hand.send(lane.head("echo", b"x"), b"y")
            assert hand.is_ended()
        assert caplog.text.count("not those that it signed") == 1
        assert served(opened.at)


def test_a_frame_of_a_quintillion_bytes_takes_no_memory(caplog):
    with server() as opened:
        assert served(opened.at)
        before = resident_bytes()
        for _ in range(2):
            with Raw(opened) as hand:
                lane, _ = hand.begin()
                signed = struct.pack(">Q32sQ32s", 1, b"echo", 1 << 60, bytes(32))
                lane.head("echo", b"")
                mac = hmac.digest(lane._key, b"frame" + signed, hashlib.sha256)
                text = f"a frame of {1 << 60} bytes is above the limit of {LIMIT}".encode()
                assert hand.answered(lane, signed + mac) == (text, True)
                assert hand.is_ended()
            with Raw(opened) as hand:  # without a signature, and with as much as is taken
                hand.begin()
                hand.send(signed + bytes(32))
                for _ in range(500):
                    hand.send(bytes(1 << 15))
                assert hand.is_ended()
        assert resident_bytes() - before < 8 << 20
        assert served(opened.at)
    assert caplog.text.count("above the limit") == 1


def test_garbage_at_any_byte_is_refused_and_the_server_serves_on(caplog):
    with server() as opened:
        lane, _ = begun()
        for damaged in flipped(lane.head("echo", b"x")):
            with Raw(opened) as hand:
                hand.begin()
                hand.send(damaged, b"x")
                assert hand.is_ended()
        for damaged in flipped(bytes(MAC_BYTES)):
            with Raw(opened) as hand:
                opening = Opening(KEY, "by hand")
                hand.send(opening.hello)
                proof = opening.prove(hand.read(1 + CHALLENGE.size)[1:])
                mask = int.from_bytes(damaged) ^ int.from_bytes(proof)
                hand.send(mask.to_bytes(MAC_BYTES))
                assert "token differs" in hand.told()
        for damaged in flipped(MAGIC):
            with Raw(opened) as hand:
                hand.send(damaged)
                assert "another protocol" in hand.told()
        for begin in (b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", MAGIC):
            for _ in range(5):
                with Raw(opened) as hand:
                    hand.send(begin, secrets.token_bytes(200))
        assert served(opened.at)
        settle(lambda: opened.peers, 0)
    assert caplog.text.count("is refused") <= 5


def flipped(data):
    """The bytes with each of them damaged in turn."""
    for at in range(len(data)):
        yield data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]


def test_connections_that_say_nothing_delay_nobody():
    with server() as opened, contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(Raw(opened))
        for _ in range(20):  # genuine heads, of frames that do not come
            hand = stack.enter_context(Raw(opened))
            hand.send(hand.begin()[0].head("echo", b"x"))
        assert served(opened.at)


@pytest.mark.parametrize("payload", [b"", b"x", bytes(70_000)])
def test_frames_that_come_at_once_are_answered_one_after_the_other(payload):
    """However its bytes are grouped on arrival, no frame is left in a buffer."""
    with server() as opened, Raw(opened) as hand:
        opening = Opening(KEY, "by hand")
        hand.send(opening.hello)
        proof = opening.prove(hand.read(1 + CHALLENGE.size)[1:])
        lane = Lane(_own(KEY, opening.hello + opening._said[len(opening.hello) :]), LIMIT)
        hand.send(proof, *(lane.head("echo", payload) + payload for _ in range(3)))
        opening.lane(hand.read(1 + MAC_BYTES)[1:])
        for number in range(1, 4):
            lane._number = number
            head = lane.answer(hand.read(ANSWER_HEAD_BYTES))
            assert hand.read(head.size) == payload


def test_one_that_sends_without_end_has_its_turns_like_others():
    with server() as opened, Raw(opened) as hand, client(opened.at) as calls:
        calls.call("echo", b"x", HANG)
        lane, _ = hand.begin()
        frames = b"".join(lane.head("echo", b"x") + b"x" for _ in range(3000))
        sender = threading.Thread(target=hand.send, args=(frames,))
        sender.start()  # its answers are not read
        for _ in range(20):
            assert calls.call("echo", b"y", HANG) == b"y"
        lane._number = 1
        for _ in range(3000):
            lane.answer(hand.read(ANSWER_HEAD_BYTES))
            assert hand.read(1) == b"x"
            lane._number += 1
        sender.join()


def test_strangers_are_bounded_and_the_oldest_ends_first():
    with server() as opened, contextlib.ExitStack() as stack:
        hands = [stack.enter_context(Raw(opened)) for _ in range(MOST_STRANGERS + 10)]
        assert all(hand.is_ended() for hand in hands[:10])
        assert served(opened.at)
        lane, _ = hands[-1].begin()
        assert hands[-1].answered(lane, lane.head("echo", b"x"), b"x") == (b"x", False)


def test_a_stranger_has_few_seconds(monkeypatch):
    """Whether it says nothing, or a byte now and then."""
    monkeypatch.setattr(wire, "OPENING_SECONDS", 0.5)
    with server() as opened, Raw(opened) as silent, Raw(opened) as slow_one:
        for at in range(40):
            slow_one.send(Opening(KEY, "by hand").hello[at : at + 1])
            time.sleep(0.02)
        assert slow_one.is_ended() and silent.is_ended()
        monkeypatch.setattr(wire, "OPENING_SECONDS", HANG)
        assert served(opened.at)


def test_no_fault_ends_the_addresses_thread(monkeypatch):
    with server() as opened:
        accept, register = opened._listener.accept, opened._selector.register

        class Listener:
            def accept(self):
                return accept()[0], None

        with monkeypatch.context() as patch:  # as macOS does for a connection that was reset
            patch.setattr(opened, "_listener", Listener())
            assert served(opened.at)

        def full(*_):
            raise OSError(errno.ENOSPC, "no space")

        with monkeypatch.context() as patch:
            patch.setattr(opened._selector, "register", full)
            with client(opened.at) as calls, pytest.raises(Unreachable):
                calls.call("echo", b"x", HANG)
        assert opened._selector.register == register
        with client(opened.at) as calls, pytest.raises(Refused, match="SystemExit: 3; see its log"):
            calls.call("exit", b"", HANG)
        with client(opened.at) as calls, pytest.raises(Refused, match="TypeError"):
            calls.call("no bytes", b"", HANG)
        assert served(opened.at)
        settle(lambda: opened.peers, 0)


def test_without_a_free_file_the_server_waits_and_serves_its_clients(monkeypatch, caplog):
    with server() as opened, client(opened.at) as calls:
        calls.call("echo", b"x", HANG)
        accept, look, done = opened._listener.accept, opened._look, []

        class Listener:
            def accept(self):
                done.append("try")
                if done.count("try") <= 3:
                    raise OSError(errno.EMFILE, "Too many open files")
                return accept()

            def fileno(self):
                return opened_listener.fileno()

        opened_listener = opened._listener
        monkeypatch.setattr(opened, "_listener", Listener())
        monkeypatch.setattr(opened, "_look", lambda now: done.append("look") or look(now))
        with Raw(opened):
            for _ in range(50):
                assert calls.call("echo", b"x", HANG) == b"x"
        with client(opened.at) as others:
            assert others.call("echo", b"x", HANG) == b"x"
        tries = [place for place, what in enumerate(done) if what == "try"]
        assert all(b - a > 1 for a, b in zip(tries[:3], tries[1:4], strict=True))
        assert caplog.text.count("no connection can be taken (Too many open files)") == 1


def test_clients_that_left_while_their_calls_waited_leave_nothing():
    with server() as opened:
        hands = [Raw(opened) for _ in range(10)]
        for hand in hands:
            payload = bytes(LIMIT)
            hand.send(hand.begin()[0].head("slow", payload), payload)
            hand._socket.close()
        settle(lambda: opened.peers, 0)
        GOES_ON.set()
        assert served(opened.at)


def test_a_closed_client_makes_no_call(monkeypatch):
    """Not one that was connecting either."""
    made, connect = [], client_module._connect
    methods = {"echo": lambda name, payload: made.append(payload) or b""}
    with contextlib.closing(WireServer("127.0.0.1:0", TOKEN, methods)) as opened:
        with client(f"127.0.0.1:{opened.port}") as calls:

            def slowly(*address):
                connection = connect(*address)
                calls.close()
                return connection

            monkeypatch.setattr(client_module, "_connect", slowly)
            with pytest.raises(Unreachable, match="closed the connection"):
                calls.call("echo", b"x", HANG)
    assert not made and not calls._busy


def test_a_client_can_be_closed_while_it_shakes_hands(tmp_path):
    cert, _ = certificate(tmp_path / "one")
    tls = tls_of("", "", cert)
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        with client(f"127.0.0.1:{silent.getsockname()[1]}", tls=tls) as calls:
            run = pool.submit(calls.call, "echo", b"x", HANG)
            server_side, _ = silent.accept()
            server_side.recv(1)
            calls.close()
            with pytest.raises(Unreachable, match="closed the connection"):
                run.result()


def test_all_addresses_of_a_name_share_the_seconds(monkeypatch):
    """By a test clock; each attempted connection takes as long as it may."""
    now, tried = [0.0], []

    class Deaf(socket.socket):
        def connect(self, address):
            tried.append(address)
            now[0] += self.gettimeout()
            raise TimeoutError

    def found(*_, **__):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("198.51.100.7", 9))] * 4

    monkeypatch.setattr(socket, "getaddrinfo", found)
    monkeypatch.setattr(socket, "socket", Deaf)
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(client_module, "time", clock)
    with client("a.name:9") as calls, pytest.raises(Unreachable, match="no answer in time"):
        calls.call("echo", b"x", 0.4)
    assert len(tried) == 4 and now[0] == pytest.approx(0.4)


@pytest.mark.parametrize("address", ["nonsense", "host:", "host:port", "host:99999", ":7"])
def test_an_address_that_is_none_is_an_error(address):
    with pytest.raises(ValueError, match="must be HOST:PORT, got"):
        WireClient(address, TOKEN, "a worker")


def test_odd_names_of_hosts_and_workers():
    with client("a..b:7") as calls, pytest.raises(Unreachable, match="no name of a host"):
        calls.call("echo", b"x", HANG)
    with server() as opened, client(opened.at, name="\ud800" + "n" * 100) as calls:
        assert calls.call("echo", b"x", HANG) == b"x"


def test_anywhere_is_both_families():
    with server("[::]:0") as opened:
        for host in ("127.0.0.1", "[::1]"):
            with client(f"{host}:{opened.port}") as calls:
                assert calls.call("echo", b"x", HANG) == b"x"


# -- sessions --------------------------------------------------------------------------------------


def begun(token=TOKEN):
    """Both sides of a session."""
    opening, reception = Opening(derive_key("wire", token), "one"), Reception(KEY, LIMIT)
    proof, session = reception.admit(opening.prove(reception.challenge(opening.hello)))
    return opening.lane(proof), session


def test_a_session_ends_when_idle_and_its_client_begins_anew(monkeypatch):
    def soon(name, payload):  # before the server begins to wait for the next frame
        monkeypatch.setattr(wire, "IDLE_SECONDS", 0.1)
        return payload

    monkeypatch.setitem(METHODS, "soon", soon)
    with server() as opened, client(opened.at) as calls:
        assert calls.call("soon", b"1", HANG) == b"1"
        settle(lambda: opened.peers, 0)
        monkeypatch.setattr(wire, "IDLE_SECONDS", HANG)
        assert calls.call("echo", b"2", HANG) == b"2"


def test_sessions_are_bounded(monkeypatch):
    monkeypatch.setattr(wire, "MOST_SESSIONS", 5)
    with server() as opened, contextlib.ExitStack() as stack:
        hands = [stack.enter_context(Raw(opened)) for _ in range(5)]
        lanes = [hand.begin()[0] for hand in hands]

        def is_served(at):
            hands[at].send(lanes[at].head("echo", b"x"), b"x")
            return len(hands[at].read(ANSWER_HEAD_BYTES + 1)) > 0

        assert is_served(0)
        stack.enter_context(Raw(opened)).begin()
        assert opened.peers == 5
        assert is_served(0)
        assert not is_served(1)  # idle longest
        assert is_served(2)


def test_proofs_of_one_connection_are_none_at_another():
    opening, first, second = Opening(KEY, "one"), Reception(KEY, LIMIT), Reception(KEY, LIMIT)
    proof = opening.prove(first.challenge(opening.hello))
    second.challenge(opening.hello)
    with pytest.raises(Stranger, match="token differs"):
        second.admit(proof)
    first.admit(proof)
    assert len({begun()[0]._key for _ in range(3)}) == 3
    said = bytearray(second.challenge(opening.hello))
    said[-1] ^= 1  # of the limit: all that was said is signed
    with pytest.raises(Stranger, match="token differs"):
        second.admit(opening.prove(bytes(said)))


def certificate(folder, **names):
    """Paths of a certificate and its key."""
    folder.mkdir()
    cert, key = folder / "cert.pem", folder / "key.pem"
    programs.certificate(cert, key, **names)
    return cert, key


def tls_of(*paths):
    """The environment that names these files."""
    names = ("DISTFLOW_TLS_CERT", "DISTFLOW_TLS_KEY", "DISTFLOW_TLS_CA")
    return dict(zip(names, map(str, paths), strict=True))


def test_with_certificates_a_call_is_encrypted(tmp_path, caplog):
    cert, key = certificate(tmp_path / "one")
    tls = tls_of(cert, key, cert)
    with server(tls=tls) as opened:
        with client(opened.at, tls=tls) as calls:
            for size in (0, 10, LIMIT, 10):
                payload = secrets.token_bytes(size)
                assert calls.call("echo", payload, HANG) == payload
            assert opened.peers == 1
        with client(opened.at) as calls, pytest.raises(Unreachable, match="TLS|ended|reset"):
            calls.call("echo", b"secret", HANG)
        until(lambda: "not encrypted by TLS" in caplog.text)
        with client(opened.at, b"another token", tls=tls) as calls, pytest.raises(Refused):
            calls.call("echo", b"secret", HANG)
        with Raw(opened):  # says nothing
            with client(opened.at, tls=tls) as calls:
                assert calls.call("echo", b"well", HANG) == b"well"
    with server() as plain, client(plain.at, tls=tls) as calls:
        with pytest.raises(Unreachable):
            calls.call("echo", b"secret", HANG)
    assert opened.peers == 0


def test_a_certificate_has_to_be_the_addresses(tmp_path):
    cert, key = certificate(tmp_path / "one")
    other, _ = certificate(tmp_path / "two")
    elsewhere = certificate(tmp_path / "three", names="DNS:elsewhere,IP:198.51.100.7")
    with server(tls=tls_of(cert, key, cert)) as opened:
        with client(opened.at, tls=tls_of("", "", other)) as calls:
            with pytest.raises(Unreachable, match="certificate verify failed"):
                calls.call("echo", b"secret", HANG)
    with server(tls=tls_of(*elsewhere, elsewhere[0])) as opened:
        with client(opened.at, tls=tls_of("", "", elsewhere[0])) as calls:
            with pytest.raises(Unreachable, match="IP address mismatch"):
                calls.call("echo", b"secret", HANG)


def test_files_of_tls_that_do_not_fit(tmp_path):
    cert, key = certificate(tmp_path / "one")
    _, other = certificate(tmp_path / "two")
    empty = tmp_path / "empty.pem"
    empty.write_text("-----BEGIN CERTIFICATE-----\n?\n-----END CERTIFICATE-----\n")
    for given, words in (
        ((cert, "", cert), "DISTFLOW_TLS_CERT and DISTFLOW_TLS_KEY belong together"),
        ((cert, key, ""), "DISTFLOW_TLS_CA is not: name the file"),
        (("", "", tmp_path / "gone"), "DISTFLOW_TLS_CA=.*gone does not exist"),
        ((cert, other, cert), "DISTFLOW_TLS_KEY=.*two/key.pem is not the key of .*one/cert.pem"),
        ((empty, key, cert), "DISTFLOW_TLS_KEY=.* is not the key of DISTFLOW_TLS_CERT=.*empty"),
        (("", "", empty), "DISTFLOW_TLS_CA=.*empty.pem has no certificate that can be read"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            read_wire_tls(tls_of(*given))
    assert read_wire_tls({}).client is None


def test_numbers_of_frames_are_those_of_their_session():
    lane, session = begun()
    for _ in range(5):
        frame = session.begin(lane.head("m", b"x"))
        assert (frame.method, frame.size) == ("m", 1)
    late = lane.head("m", b"x")
    session.begin(late)
    for _ in range(2):
        with pytest.raises(Stranger, match="out of order"):
            session.begin(late)
