"""Sessions of the wire: both sides prove the run's token, then number and sign every frame.

  caller     MAGIC, a nonce, its name
  door       a nonce, the time, an HMAC of all these under a secret of its own: it keeps nothing
  caller     its nonce, the door's bytes, an HMAC of them under the run's key, its name
  door       an HMAC of the same, with another label

The session's key follows from the run's key and both nonces. A frame has the session, a number one
above that of the frame before, its size, the SHA-256 of its bytes, and an HMAC of these and of the
method. An answer is signed with the number of its frame. What is sent again, or out of order, has
the wrong number; what is sent again to another door, or later, has the wrong nonce.

A stranger takes no memory: the door keeps only sessions whose caller has proved the token. Pure
functions of bytes and clocks; wire.py sends them.
"""

import hashlib
import secrets
import struct
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from distflow_jax.parsing.one_line import one_line
from distflow_jax.parsing.token_proof import MAC_BYTES, derive_key, is_signed, sign

MAGIC = b"distflow wire 1\n"
NONCE_BYTES, ID_BYTES, NAME_BYTES = 16, 16, 80
FRESH_SECONDS = 10.0  # between a door's challenge and its answer
IDLE_SECONDS = 900.0  # after which a session is forgotten; its caller begins another
MOST_SESSIONS = 4096  # beyond it the one that has been idle longest is forgotten
_CHALLENGE = struct.Struct(f">{NONCE_BYTES}sd{MAC_BYTES}s")  # nonce, time, HMAC
_FRAME = struct.Struct(f">{ID_BYTES}sQQ32s")  # session, number, size, SHA-256
_ANSWER = struct.Struct(">B32s")  # whether it is a refusal, SHA-256
_NUMBER = struct.Struct(">Q")


class Stranger(Exception):
    """A frame that is refused without an answer that is signed; its text says why."""


class NoSession(Stranger):
    """A frame of a session that the door does not have, or no longer."""


class Frame(NamedTuple):
    """The head of a frame that is genuine and new."""

    key: bytes = b""
    name: str = ""
    number: int = 0
    size: int = 0
    digest: bytes = b""

    def check(self, payload: bytes) -> None:
        """Stranger if these are not the frame's bytes."""
        if len(payload) != self.size or hashlib.sha256(payload).digest() != self.digest:
            raise Stranger("the bytes of its frame are not those that it signed")


class _Session:
    def __init__(self, key: bytes, name: str, now: float):
        self.key, self.name, self.last, self.used = key, name, 0, now


class Sessions:
    """A door's side.

    Args:
      token: of the run.
      clock: seconds, of any origin.
    """

    def __init__(self, token: bytes, clock: Callable[[], float] = time.monotonic):
        self._key, self._clock = derive_key("wire", token), clock
        self._own = secrets.token_bytes(MAC_BYTES)
        self._sessions: dict[bytes, _Session] = {}  # the one idle longest first
        self._begun: dict[bytes, float] = {}  # sessions that began lately, and when
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sessions)

    def challenge(self, hello: bytes) -> bytes:
        """The answer to a hello."""
        if not hello.startswith(MAGIC) or len(hello) < len(MAGIC) + NONCE_BYTES:
            raise Stranger("it speaks another protocol, or another version of distflow_jax")
        nonce = secrets.token_bytes(NONCE_BYTES)
        now = self._clock()
        mac = sign(self._own, nonce, struct.pack(">d", now), hello[len(MAGIC) :])
        return _CHALLENGE.pack(nonce, now, mac)

    def admit(self, proof: bytes) -> bytes:
        """Begins a session for a caller that has proved the token; the door's own proof."""
        at = NONCE_BYTES + _CHALLENGE.size
        if len(proof) < at + MAC_BYTES:
            raise Stranger("its proof is damaged")
        nonce, challenge, mac = proof[:NONCE_BYTES], proof[NONCE_BYTES:at], proof[at:][:MAC_BYTES]
        name = proof[at + MAC_BYTES :]
        own_nonce, then, own_mac = _CHALLENGE.unpack(challenge)
        now = self._clock()
        if not is_signed(self._own, own_mac, own_nonce, struct.pack(">d", then), nonce, name):
            raise Stranger("its proof answers no challenge of this process")
        if now - then > FRESH_SECONDS:
            raise Stranger("its proof comes too late")
        if not is_signed(self._key, mac, b"caller", nonce, challenge, name):
            raise Stranger("its token is another one; set DISTFLOW_TOKEN alike on both sides")
        key, session = _session(self._key, nonce, challenge, name)
        with self._lock:
            self._forget(now)
            if session in self._begun:
                raise Stranger("its proof is a repetition")
            self._begun[session] = now
            text = one_line(name[:NAME_BYTES].decode(errors="replace"))
            self._sessions[session] = _Session(key, text, now)
        return sign(self._key, b"door", nonce, challenge, name)

    def begin(self, method: str, head: bytes) -> Frame:
        """The frame of this head, whose number is used from now on."""
        if len(head) != _FRAME.size + MAC_BYTES:
            raise Stranger("its frame is damaged")
        signed, mac = head[: _FRAME.size], head[_FRAME.size :]
        session, number, size, digest = _FRAME.unpack(signed)
        with self._lock:
            known = self._sessions.get(session)
            if known is None:
                raise NoSession("its session has ended")
            if not is_signed(known.key, mac, b"frame", signed, method.encode()):
                raise Stranger("its frame is not signed by the run's token")
            if number != known.last + 1:
                raise Stranger("its frame is repeated or out of order")
            known.last, known.used = number, self._clock()
            self._sessions[session] = self._sessions.pop(session)  # the last one used
        return Frame(known.key, known.name, number, size, digest)

    def end(self, frame: Frame) -> None:
        """Forgets the session of a frame."""
        with self._lock:
            found = [s for s, known in self._sessions.items() if known.key == frame.key]
            for session in found:
                del self._sessions[session]

    def _forget(self, now: float) -> None:
        while self._begun:
            session, then = next(iter(self._begun.items()))
            if now - then <= FRESH_SECONDS:
                break
            del self._begun[session]
        while self._sessions:
            session, known = next(iter(self._sessions.items()))
            if now - known.used <= IDLE_SECONDS and len(self._sessions) < MOST_SESSIONS:
                break
            del self._sessions[session]


class Opening:
    """A caller's side of the proof.

    Args:
      token: of the run.
      name: of the caller, for the logs of the other side.
    """

    def __init__(self, token: bytes, name: str):
        self._key, self._name = derive_key("wire", token), name.encode()[:NAME_BYTES]
        self._nonce, self._challenge = secrets.token_bytes(NONCE_BYTES), b""

    def hello(self) -> bytes:
        """The first message."""
        return MAGIC + self._nonce + self._name

    def prove(self, challenge: bytes) -> bytes:
        """The second message."""
        if len(challenge) != _CHALLENGE.size:
            raise Stranger("it speaks another protocol, or another version of distflow_jax")
        self._challenge = challenge
        mac = sign(self._key, b"caller", self._nonce, challenge, self._name)
        return self._nonce + challenge + mac + self._name

    def lane(self, proof: bytes) -> "Lane":
        """The session, if the door has proved the token too."""
        parts = self._nonce, self._challenge, self._name
        if not is_signed(self._key, proof, b"door", *parts):
            raise Stranger("it has not proved the run's token")
        return Lane(*_session(self._key, *parts))


class Lane:
    """A caller's side of a session: one frame at a time."""

    def __init__(self, key: bytes, session: bytes):
        self._key, self._session, self._number = key, session, 0

    def head(self, method: str, payload: bytes) -> bytes:
        """The head of the next frame."""
        self._number += 1
        digest = hashlib.sha256(payload).digest()
        signed = _FRAME.pack(self._session, self._number, len(payload), digest)
        return signed + sign(self._key, b"frame", signed, method.encode())

    def is_refusal(self, head: bytes, payload: bytes) -> bool:
        """Whether the answer to the last frame refuses it. Stranger if it is not the door's."""
        signed, mac = head[: _ANSWER.size], head[_ANSWER.size :]
        number = _NUMBER.pack(self._number)
        if not is_signed(self._key, mac, b"answer", number, signed):
            raise Stranger("its answer is not signed by the run's token")
        refused, digest = _ANSWER.unpack(signed)
        if hashlib.sha256(payload).digest() != digest:
            raise Stranger("its answer is damaged")
        return bool(refused)


def answer_head(frame: Frame, payload: bytes, *, refused: bool) -> bytes:
    """The head of the answer to a frame."""
    signed = _ANSWER.pack(refused, hashlib.sha256(payload).digest())
    return signed + sign(frame.key, b"answer", _NUMBER.pack(frame.number), signed)


def _session(key: bytes, nonce: bytes, challenge: bytes, name: bytes) -> tuple[bytes, bytes]:
    """(key, number) of a session."""
    own = sign(key, b"session", nonce, challenge, name)
    return own, sign(own, b"number")[:ID_BYTES]
