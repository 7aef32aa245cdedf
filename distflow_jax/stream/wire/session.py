"""Sessions of the wire: both sides prove the run's token, then number and sign every frame.

  client     MAGIC, a nonce, its name
  server     a nonce, the most bytes that it takes in a frame
  client     an HMAC of all these under the run's key
  server     an HMAC of the same, with another label

A session is that of one connection, and ends with it. Its key follows from the run's key and what
both sides have said. A frame has a number one above that of the frame before, its method, its size,
the SHA-256 of its bytes, and an HMAC of these. An answer is signed with the number of its frame.
What is sent again, or out of order, has the wrong number; what is sent again on another connection
has the wrong nonce.

All messages but the bytes of frames have fixed sizes. Pure functions of bytes, which wire_client.py
and server.py send.
"""

import hashlib
import secrets
import struct
from typing import NamedTuple

from distflow_jax.parsing.one_line import one_line
from distflow_jax.parsing.token_proof import MAC_BYTES, is_signed, sign
from distflow_jax.stream.wire.calls import Bytes

MAGIC = b"distflow wire 2\n"
NONCE_BYTES, NAME_BYTES, METHOD_BYTES = 16, 80, 32
HELLO = struct.Struct(f">{len(MAGIC)}s{NONCE_BYTES}s{NAME_BYTES}s")
CHALLENGE = struct.Struct(f">{NONCE_BYTES}sQ")
_FRAME = struct.Struct(f">Q{METHOD_BYTES}sQ32s")  # number, method, size, SHA-256
_ANSWER = struct.Struct(">?Q32s")  # whether it is a refusal, size, SHA-256
_NUMBER = struct.Struct(">Q")
FRAME_HEAD_BYTES = _FRAME.size + MAC_BYTES
ANSWER_HEAD_BYTES = _ANSWER.size + MAC_BYTES


class Stranger(Exception):
    """The peer failed authentication or violated the protocol; the text says why."""


class Head(NamedTuple):
    """The head of an authentic, new frame or answer."""

    method: str  # of an answer: ""
    size: int
    digest: bytes
    refused: bool = False

    def check(self, payload: Bytes) -> None:
        """Stranger if these are not the frame's bytes."""
        if len(payload) != self.size or hashlib.sha256(payload).digest() != self.digest:
            raise Stranger("the bytes of its frame are not those that it signed")


class Reception:
    """The server's side of the handshake.

    Args:
      key: derived from the run's token.
      limit: maximum bytes of a frame.
    """

    def __init__(self, key: bytes, limit: int):
        self._key, self._limit, self._said, self._name = key, limit, b"", ""

    def challenge(self, hello: bytes) -> bytes:
        """The answer to a hello."""
        if not hello.startswith(MAGIC):
            raise Stranger("it speaks another protocol, or another version of distflow_jax")
        _, _, name = HELLO.unpack(hello)
        self._name = one_line(name.rstrip(b"\0").decode(errors="replace"))
        challenge = CHALLENGE.pack(secrets.token_bytes(NONCE_BYTES), self._limit)
        self._said = hello + challenge
        return challenge

    def admit(self, proof: bytes) -> tuple[bytes, "Session"]:
        """(the server's own proof, its side of the session) for a caller that has the token."""
        if not is_signed(self._key, proof, b"client", self._said):
            raise Stranger("the token differs; set DISTFLOW_TOKEN alike on both sides")
        return sign(self._key, b"server", self._said), Session(
            _own(self._key, self._said), self._name
        )


class Session:
    """The server's side of a session: one frame at a time.

    Attributes:
      name: of the client.
    """

    def __init__(self, key: bytes, name: str):
        self.name, self._key, self._number = name, key, 0

    def begin(self, head: bytes) -> Head:
        """The frame of this head, whose number is used from now on."""
        signed, mac = head[: _FRAME.size], head[_FRAME.size :]
        if not is_signed(self._key, mac, b"frame", signed):
            raise Stranger("its frame is not signed by the run's token")
        number, method, size, digest = _FRAME.unpack(signed)
        if number != self._number + 1:
            raise Stranger("its frame is repeated or out of order")
        self._number = number
        return Head(method.rstrip(b"\0").decode(errors="replace"), size, digest)

    def answer_head(self, payload: bytes, *, refused: bool = False) -> bytes:
        """The head of the answer to the frame that has begun last."""
        signed = _ANSWER.pack(refused, len(payload), hashlib.sha256(payload).digest())
        return signed + sign(self._key, b"answer", _NUMBER.pack(self._number), signed)


class Opening:
    """The client's side of the handshake.

    Args:
      key: derived from the run's token.
      name: of the client, for the server's log.
    """

    def __init__(self, key: bytes, name: str):
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.hello = HELLO.pack(MAGIC, nonce, name.encode(errors="replace")[:NAME_BYTES])
        self._key, self._said = key, b""

    def prove(self, challenge: bytes) -> bytes:
        """The second message."""
        self._said = self.hello + challenge
        return sign(self._key, b"client", self._said)

    def lane(self, proof: bytes) -> "Lane":
        """The session, if the server has proved the token too."""
        if not is_signed(self._key, proof, b"server", self._said):
            raise Stranger("it has not proved the run's token")
        _, limit = CHALLENGE.unpack(self._said[HELLO.size :])
        return Lane(_own(self._key, self._said), limit)


class Lane:
    """The client's side of a session: one frame at a time.

    Attributes:
      limit: maximum bytes of a frame.
    """

    def __init__(self, key: bytes, limit: int):
        self.limit, self._key, self._number = limit, key, 0

    def head(self, method: str, payload: bytes) -> bytes:
        """The head of the next frame."""
        self._number += 1
        digest = hashlib.sha256(payload).digest()
        signed = _FRAME.pack(self._number, method.encode(), len(payload), digest)
        return signed + sign(self._key, b"frame", signed)

    def answer(self, head: bytes) -> Head:
        """The answer to the last frame. Stranger if it is not the server's."""
        signed, mac = head[: _ANSWER.size], head[_ANSWER.size :]
        if not is_signed(self._key, mac, b"answer", _NUMBER.pack(self._number), signed):
            raise Stranger("its answer is not signed by the run's token")
        refused, size, digest = _ANSWER.unpack(signed)
        return Head("", size, digest, refused)


def _own(key: bytes, said: bytes) -> bytes:
    """The key of one session."""
    return sign(key, b"session", said)
