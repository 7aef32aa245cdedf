"""Frames of bytes between two processes: a size of 4 bytes, little-endian, and so many bytes.

A Python program of a session may import this module, and needs no file of it: `Frames(3, 4)`.
"""

import os
import select
import time

FOREVER = 1e6  # seconds
_HEADER, _MOST = 4, (1 << 32) - 1
_CHUNK = 1 << 16


class FramesEnded(Exception):
    """The other process closed its end, or sent no frame."""


class Frames:
    """Frames from a descriptor and to another, or the same one; one thread at a time."""

    def __init__(self, source: int, target: int):
        self._source, self._target = source, target

    def send(self, content: bytes, seconds: float = FOREVER) -> None:
        """Sends a frame. Raises TimeoutError, FramesEnded."""
        left = memoryview(len(content).to_bytes(_HEADER, "little") + content)
        deadline = time.monotonic() + seconds
        while left:
            _wait(self._target, select.POLLOUT, deadline)
            try:
                left = left[os.write(self._target, left[: select.PIPE_BUF]) :]  # has room for that
            except ConnectionError:
                raise FramesEnded("the other process does not read") from None

    def receive(self, most: int = _MOST, seconds: float = FOREVER) -> bytes:
        """The next frame, of at most so many bytes. Raises TimeoutError, FramesEnded.

        After a TimeoutError the rest of the frame is lost.
        """
        deadline = time.monotonic() + seconds
        size = int.from_bytes(self._read(_HEADER, deadline), "little")
        if size > most:
            raise FramesEnded(f"a frame of {size} bytes, {most} are allowed")
        return self._read(size, deadline)

    def ask(self, content: bytes, most: int, seconds: float) -> bytes:
        """Sends a frame, and gives the next one. Raises as `send` and `receive`."""
        deadline = time.monotonic() + seconds
        self.send(content, seconds)
        return self.receive(most, deadline - time.monotonic())

    def _read(self, size: int, deadline: float) -> bytes:
        content = bytearray()
        while len(content) < size:
            _wait(self._source, select.POLLIN, deadline)
            try:
                chunk = os.read(self._source, min(size - len(content), _CHUNK))
            except ConnectionError:
                chunk = b""
            if not chunk:
                raise FramesEnded("the other process sends no more")
            content += chunk
        return bytes(content)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()  # select(2) takes no descriptor above 1023
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError("the other process does not answer in time")
