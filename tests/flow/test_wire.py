"""The wire answers those that have the run's token, each frame once, and nobody else."""

import contextlib
import hashlib
import hmac
import itertools
import secrets
import socket
import struct
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from support.sockets import open_files, resident_bytes, settled, threads

from distflow_jax.flow.workers.wire import _HEAD, Caller, Door, Refused, Unreachable
from distflow_jax.flow.workers.wire_session import (
    FRESH_SECONDS,
    IDLE_SECONDS,
    MAGIC,
    MOST_SESSIONS,
    Lane,
    NoSession,
    Opening,
    Sessions,
    Stranger,
    answer_head,
)
from distflow_jax.flow.workers.wire_tls import read_wire_tls

TOKEN = b"the token of a run, 32 bytes long"
LIMIT = 1 << 20
SERVICE = "/distflow.Wire/"


def no(name, payload):
    raise Refused(f"not for {name}")


def broken(name, payload):
    return payload[1 << 40]


def slow(name, payload):
    time.sleep(0.3)
    return payload


METHODS = {"echo": lambda name, payload: payload, "no": no, "broken": broken, "slow": slow}


@contextlib.contextmanager
def door(address="127.0.0.1:0", **options):
    opened = Door(address, TOKEN, METHODS, limit_bytes=LIMIT, **options)
    opened.at = f"127.0.0.1:{opened.port}"
    try:
        yield opened
    finally:
        opened.close()


@contextlib.contextmanager
def caller(address, token=TOKEN, name="a worker", **options):
    made = Caller(address, token, name, **options)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def raw(address):
    """send(method, head, payload): a frame as it is, whatever it is worth."""
    with grpc.insecure_channel(address, [("grpc.max_send_message_length", -1)]) as channel:

        def send(method, head, payload=b""):
            stub = channel.unary_unary(SERVICE + method)
            answer, call = stub.with_call(payload, timeout=5, metadata=((_HEAD, head),))
            return answer, dict(call.trailing_metadata()).get(_HEAD, b"")

        yield send


def refusal(send, *frame):
    with pytest.raises(grpc.RpcError) as caught:
        send(*frame)
    return caught.value.details()


def session_of(send, token=TOKEN):
    """(the caller's side of a session, the bytes that began it)."""
    opening = Opening(token, "by hand")
    challenge, _ = send("-hello", opening.hello())
    proof = opening.prove(challenge)
    answer, _ = send("-proof", proof)
    return opening.lane(answer), proof


def served(address):
    with caller(address) as well:
        return well.call("echo", b"well", 5) == b"well"


def test_bytes_come_back_and_refusals_and_faults_are_told_apart(caplog):
    with door() as opened, caller(opened.at) as calls:
        for size in (0, 1, 1000, LIMIT):
            payload = secrets.token_bytes(size)
            assert calls.call("echo", payload, 5) == payload
        with pytest.raises(Refused, match="^not for a worker$"):
            calls.call("no", b"", 5)
        with pytest.raises(Refused, match="IndexError.*see its log"):
            calls.call("broken", b"", 5)
        with pytest.raises(Refused, match="no method ask; use one version on both sides"):
            calls.call("ask", b"", 5)
        with pytest.raises(Refused, match=rf"{LIMIT + 1} bytes is above the limit of {LIMIT}"):
            calls.call("echo", bytes(LIMIT + 1), 5)
        assert calls.call("echo", b"still", 5) == b"still"
        assert opened.peers == 1
    assert caplog.text.count("a call of a worker has failed") == 1


def test_many_threads_call_through_one_caller():
    with door() as opened, caller(opened.at) as calls, ThreadPoolExecutor(16) as pool:
        payloads = [b"%d" % i for i in range(300)]
        assert list(pool.map(lambda p: calls.call("echo", p, 10), payloads)) == payloads
        assert opened.peers <= 16
        calls.close()
        assert settled(lambda: opened.peers, 0) == 0


def test_nobody_answers(caplog):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with caller(f"127.0.0.1:{port}") as calls:
            began = time.monotonic()
            with pytest.raises(Unreachable, match=rf"^127.0.0.1:{port}: no answer in time"):
                calls.call("echo", b"", 0.3)
            assert time.monotonic() - began < 3
    with caller(f"127.0.0.1:{port}") as calls, pytest.raises(Unreachable, match="refused"):
        calls.call("echo", b"", 5)
    with pytest.raises(Unreachable, match="closed the connection"):
        calls.call("echo", b"", 5)


def test_a_late_answer_is_not_that_of_the_next_call():
    with door() as opened, caller(opened.at) as calls:
        assert calls.call("echo", b"0", 5) == b"0"
        with pytest.raises(Unreachable, match="in time"):
            calls.call("slow", b"1", 0.1)
        assert calls.call("echo", b"2", 5) == b"2"
        assert calls.call("slow", b"3", 5) == b"3"


def test_a_caller_finds_a_door_that_was_closed_and_opened_again():
    with door() as opened, caller(opened.at) as calls:
        assert calls.call("echo", b"1", 5) == b"1"
        opened.close()
        with pytest.raises(Unreachable):
            calls.call("echo", b"2", 5)
        with door(opened.at):
            assert _until(lambda: calls.call("echo", b"3", 5)) == b"3"


def _until(call, seconds=5.0):
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(Unreachable):
            return call()
        assert time.monotonic() < end
        time.sleep(0.05)


def test_an_address_that_is_taken_or_foreign_is_an_error():
    with door() as opened:
        for address in (opened.at, "198.51.100.7:0", "127.0.0.1:port", "no.such.host.invalid:1"):
            with pytest.raises(ValueError, match=f"cannot listen on {address} .*port 0"):
                Door(address, TOKEN, {})


# -- attacks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [b"", b"another token", TOKEN + b" "])
def test_another_token_is_refused_and_logged_once(token, caplog):
    with door() as opened:
        for _ in range(3):
            with caller(opened.at, token) as calls:
                with pytest.raises(Refused, match="token is another one; set DISTFLOW_TOKEN"):
                    calls.call("echo", b"", 5)
        assert opened.peers == 0
        assert caplog.text.count("is refused") == 1 and "ipv4:127.0.0.1 " in caplog.text
        assert served(opened.at)


def test_a_caller_believes_no_door_without_the_token():
    """It admits everybody, and answers: neither its proof nor its answers are genuine."""
    with door() as opened:

        class Liar(Sessions):
            def admit(self, proof):
                super().admit(proof)
                return bytes(32)

        opened._sessions = Liar(TOKEN)
        with caller(opened.at) as calls, pytest.raises(Refused, match="has not proved"):
            calls.call("echo", b"", 5)
    lane, sessions = _begun()
    frame = sessions.begin("echo", lane.head("echo", b"x"))
    good = answer_head(frame, b"x", refused=False)
    assert not lane.is_refusal(good, b"x")
    for head, answer in ((good, b"y"), (b"", b"x"), (good[:-1], b"x"), *_flipped(good, b"x")):
        with pytest.raises(Stranger):
            lane.is_refusal(head, answer)
    sessions.begin("echo", lane.head("echo", b"x"))
    with pytest.raises(Stranger):  # the answer to the frame before
        lane.is_refusal(good, b"x")


def test_a_replayed_hello_begins_nothing(caplog):
    with door() as opened, raw(opened.at) as send:
        lane, proof = session_of(send)
        assert "a repetition" in refusal(send, "-proof", proof)
        hello = MAGIC + proof[:16] + b"by hand"
        challenge, _ = send("-hello", hello)  # another one each time
        mixed = proof[:16] + challenge + proof[16 + len(challenge) :]
        assert "token is another one" in refusal(send, "-proof", mixed)
        send("echo", lane.head("echo", b"x"), b"x")
        send("-bye", lane.head("-bye", b""))
        assert "a repetition" in refusal(send, "-proof", proof)  # not after its end either
        assert caplog.text.count("a repetition") == 1
        assert served(opened.at)


def test_a_replayed_or_reordered_frame_is_refused_and_logged_once(caplog):
    with door() as opened, raw(opened.at) as send:
        lane, _ = session_of(send)
        first, second, third = (lane.head("echo", b"x") for _ in range(3))
        assert send("echo", first, b"x")[0] == b"x"
        assert "out of order" in refusal(send, "echo", first, b"x")
        assert "out of order" in refusal(send, "echo", third, b"x")
        assert send("echo", second, b"x")[0] == b"x"
        assert "out of order" in refusal(send, "echo", second, b"x")
        assert send("echo", third, b"x")[0] == b"x"
        assert "not signed" in refusal(send, "no", lane.head("echo", b"x"), b"x")
        assert caplog.text.count("out of order") == 1
        other, _ = session_of(send)
        assert "not those that it signed" in refusal(send, "echo", other.head("echo", b"x"), b"y")
        assert served(opened.at)


def test_a_frame_of_a_quintillion_bytes_takes_no_memory(caplog):
    with door() as opened, raw(opened.at) as send:
        assert served(opened.at)
        lane, _ = session_of(send)
        signed = struct.pack(">16sQQ32s", lane._session, 1, 1 << 60, bytes(32))
        mac = hmac.digest(lane._key, b"frame" + signed + b"echo", hashlib.sha256)
        answer, _ = send("echo", signed + mac)
        assert answer == f"a frame of {1 << 60} bytes is above the limit of {LIMIT}".encode()
        with pytest.raises(grpc.RpcError):  # larger than its head says
            send("echo", lane.head("echo", b"x"), bytes(2 * LIMIT))
        _claimed(opened.port)
        before = resident_bytes()
        for _ in range(5):
            _claimed(opened.port)
        assert resident_bytes() - before < 8 << 20
        assert served(opened.at)
    assert caplog.text.count("above the limit") == 1
    assert caplog.text.count("its frame is damaged") == 1  # they came as far as that


def _claimed(port):
    """Messages of 4 GB, the most that gRPC can claim, of which as much comes as is taken."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": SERVICE + "echo",
        ":authority": "x",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    texts = [text.encode() for pair in fields.items() for text in pair]
    block = b"".join(
        bytes([0, len(key)]) + key + bytes([len(value)]) + value
        for key, value in zip(texts[::2], texts[1::2], strict=True)
    )
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(0.2)
        with contextlib.suppress(OSError):
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))
            for stream in range(1, 20, 2):
                connection.sendall(_frame(1, 4, stream, block))
                connection.sendall(_frame(0, 0, stream, b"\0\xff\xff\xff\xff"))
            for stream in range(1, 20, 2):
                for _ in range(64):
                    connection.sendall(_frame(0, 0, stream, bytes(16_000)))


def _frame(kind, flags, stream, body):
    return (
        struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body
    )


def test_garbage_at_any_byte_is_refused_and_the_door_serves_on(caplog):
    with door() as opened, raw(opened.at) as send:
        lane, _ = session_of(send)
        head = lane.head("echo", b"x")
        for damaged in (*_flipped(head, b"x"), (head[:-1], b"x"), (head + b"\0", b"x"), (b"", b"")):
            refusal(send, "echo", *damaged)
        opening = Opening(TOKEN, "by hand")
        challenge, _ = send("-hello", opening.hello())
        proof = opening.prove(challenge)
        for damaged, _ in (*_flipped(proof, b""), (proof[:-1], b""), (proof + b"\0", b"")):
            refusal(send, "-proof", damaged)
        for damaged, _ in _flipped(MAGIC, b""):
            refusal(send, "-hello", damaged + bytes(16))
        assert opened.peers == 1
        assert send("echo", head, b"x")[0] == b"x"  # nothing of it was taken before
        for begin in (b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
            for _ in range(5):
                with socket.create_connection(("127.0.0.1", opened.port)) as connection:
                    connection.sendall(begin + secrets.token_bytes(200))
        assert served(opened.at)
    assert caplog.text.count("is refused") <= 8


def _flipped(head, payload):
    """The head with each of its bytes damaged in turn."""
    for at in range(len(head)):
        yield head[:at] + bytes([head[at] ^ 1 << at % 8]) + head[at + 1 :], payload


def test_connections_that_say_nothing_delay_nobody():
    with door() as opened, contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", opened.port)))
        with raw(opened.at) as send:
            lane, _ = session_of(send)
            channel = stack.enter_context(grpc.insecure_channel(opened.at))
            stub = channel.stream_unary(SERVICE + "echo")
            never = threading.Event()
            for _ in range(20):  # genuine heads, of frames that do not come
                lane, _ = session_of(send)
                waiting = iter(lambda: never.wait(10) or b"", None)
                stub.future(waiting, metadata=((_HEAD, lane.head("echo", b"x")),))
            assert served(opened.at)
            never.set()


def joined(count):
    """Threads, files and resident bytes after workers have joined and left, one after the other."""
    with door() as opened:
        for k in range(count):
            with caller(opened.at, name=f"worker {k}") as calls:
                assert calls.call("echo", b"x", 5) == b"x"
        assert settled(lambda: opened.peers, 0) == 0
    return settled(threads, 1), open_files(), resident_bytes()


def test_two_hundred_joins_and_leaves_leave_nothing():
    joined(5)
    before = settled(threads, 1), open_files()
    after = joined(200)
    assert after[0] <= before[0] and settled(open_files, before[1]) <= before[1]


@pytest.mark.slow
def test_two_thousand_joins_and_leaves_leave_no_memory():
    """Nothing of a worker that has left remains (flow/workers/wire.py)."""
    joined(400)
    before = resident_bytes()
    joined(2000)
    assert resident_bytes() < 1.02 * before


# -- sessions --------------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now = 5.0

    def __call__(self):
        return self.now


def _begun(clock=time.monotonic, sessions=None):
    sessions = Sessions(TOKEN, clock) if sessions is None else sessions
    opening = Opening(TOKEN, "one")
    return opening.lane(
        sessions.admit(opening.prove(sessions.challenge(opening.hello())))
    ), sessions


def test_a_proof_comes_soon_and_sessions_end_when_idle():
    clock = Clock()
    lane, sessions = _begun(clock)
    opening = Opening(TOKEN, "late")
    proof = opening.prove(sessions.challenge(opening.hello()))
    clock.now += FRESH_SECONDS + 1
    with pytest.raises(Stranger, match="too late"):
        sessions.admit(proof)
    clock.now += IDLE_SECONDS - 20
    sessions.begin("m", lane.head("m", b""))
    clock.now += IDLE_SECONDS - 1
    other, _ = _begun(sessions=sessions)
    assert len(sessions) == 2
    clock.now += 2
    _begun(sessions=sessions)
    with pytest.raises(NoSession):
        sessions.begin("m", lane.head("m", b""))
    sessions.begin("m", other.head("m", b""))


def test_sessions_are_bounded():
    sessions = Sessions(TOKEN)
    lanes = [_begun(sessions=sessions)[0] for _ in range(MOST_SESSIONS)]
    sessions.begin("m", lanes[0].head("m", b""))
    for _ in range(10):
        _begun(sessions=sessions)
    assert len(sessions) == MOST_SESSIONS
    sessions.begin("m", lanes[0].head("m", b""))
    with pytest.raises(NoSession):
        sessions.begin("m", lanes[1].head("m", b""))


def test_a_caller_begins_anew_when_its_session_has_ended():
    with door() as opened, caller(opened.at) as calls:
        assert calls.call("echo", b"1", 5) == b"1"
        opened._sessions._sessions.clear()
        assert calls.call("echo", b"2", 5) == b"2"


def test_proofs_of_one_door_are_none_at_another():
    first, second = Sessions(TOKEN), Sessions(TOKEN)
    opening = Opening(TOKEN, "one")
    proof = opening.prove(first.challenge(opening.hello()))
    with pytest.raises(Stranger, match="no challenge of this process"):
        second.admit(proof)
    keys = {_begun(sessions=first)[0]._key for _ in range(3)}
    assert len(keys) == 3
    assert isinstance(_begun(sessions=first)[0], Lane)


def test_with_certificates_a_call_is_encrypted(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-keyout {key} -out {cert} -subj /CN=localhost "
        "-addext subjectAltName=DNS:localhost,IP:127.0.0.1",
        shell=True,
        check=True,
        capture_output=True,
    )
    names = ("DISTFLOW_TLS_CERT", "DISTFLOW_TLS_KEY", "DISTFLOW_TLS_CA")
    tls = read_wire_tls(dict(zip(names, map(str, (cert, key, cert)), strict=True)))
    with door(tls=tls) as opened:
        with caller(opened.at, tls=tls) as calls:
            assert calls.call("echo", b"secret", 5) == b"secret"
        with caller(opened.at) as calls, pytest.raises(Unreachable):
            calls.call("echo", b"secret", 2)
        with caller(opened.at, b"another token", tls=tls) as calls, pytest.raises(Refused):
            calls.call("echo", b"secret", 5)
    for given, words in (
        ((cert, "", cert), "DISTFLOW_TLS_CERT and DISTFLOW_TLS_KEY belong together"),
        ((cert, key, ""), "DISTFLOW_TLS_CA is not: name the file"),
        (("", "", tmp_path / "gone"), "DISTFLOW_TLS_CA=.*gone cannot be read: No such file"),
    ):
        with pytest.raises(ValueError, match=words):
            read_wire_tls(dict(zip(names, map(str, given), strict=True)))
    assert key.read_text() not in repr(tls)
    assert read_wire_tls({}).caller_credentials() is None


def test_numbers_of_frames_are_those_of_their_session():
    lane, sessions = _begun()
    for number in itertools.islice(itertools.count(1), 5):
        assert sessions.begin("m", lane.head("m", b"")).number == number
