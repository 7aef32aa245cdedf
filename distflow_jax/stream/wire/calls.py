"""Definitions of calls that client and server share."""

from collections.abc import Callable
from concurrent.futures import Future

LIMIT_BYTES = 64 << 20  # of an answer, and by default of a frame
TEXT_BYTES = 4096  # of a refusal
# before what a server says to a caller without a session
WELCOME, TURNED_AWAY = b"\1", b"\0"

Bytes = bytes | bytearray  # large ones come as they were received
# (name of the caller, bytes) -> bytes, or what has them once there is something to say
Method = Callable[[str, Bytes], bytes | Future[bytes]]


class Refused(Exception):
    """A call refused by the other side, with its text."""


class Unreachable(Exception):
    """A call without an answer; the text has address and reason."""


def too_large(size: int, limit: int) -> str:
    """A sentence on a frame that a server does not take."""
    return f"a frame of {size} bytes is above the limit of {limit}"
