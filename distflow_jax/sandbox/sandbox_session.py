"""A program that lives on, and frames of bytes to and from it."""

import contextlib
import os
import select
import socket
import time

from distflow_jax.sandbox.keeper_messages import read_outcome
from distflow_jax.sandbox.sandbox_records import SandboxOutcome

_HEADER = 4  # bytes of a frame's size, little-endian
_CHUNK = 1 << 16


class SessionEnded(Exception):
    """The program closed its end, or sent no frame: `close` says how it ended."""


class SandboxSession:
    """The caller's handle on a running program; one thread at a time.

    The program reads frames at descriptor 3 and writes frames to descriptor 4. A frame is its size
    in 4 bytes, little-endian, and so many bytes. Its limits count from its start to its end.
    """

    def __init__(self, control: socket.socket, to_program: int, from_program: int):
        self._control, self._to, self._from = control, to_program, from_program
        os.set_blocking(to_program, False)
        self._outcome: SandboxOutcome | None = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._control.fileno() >= 0:
            self.close()

    def send(self, content: bytes, seconds: float) -> None:
        """Sends a frame. Raises TimeoutError, SessionEnded."""
        left = memoryview(len(content).to_bytes(_HEADER, "little") + content)
        deadline = time.monotonic() + seconds
        while left:
            self._wait(self._to, select.POLLOUT, deadline)
            try:
                left = left[os.write(self._to, left[:_CHUNK]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise SessionEnded("the program closed its input") from None

    def receive(self, most: int, seconds: float) -> bytes:
        """The next frame, of at most so many bytes. Raises TimeoutError, SessionEnded.

        After a TimeoutError the rest of the frame is lost: close the session.
        """
        deadline = time.monotonic() + seconds
        size = int.from_bytes(self._read(_HEADER, deadline), "little")
        if size > most:
            raise SessionEnded(f"the program sent {size} bytes; at most {most} are allowed")
        return self._read(size, deadline)

    def close(self) -> SandboxOutcome:
        """Ends the program, if it has not ended, and gives its outcome. Raises SandboxError."""
        if self._outcome is None:
            try:
                with contextlib.suppress(OSError):  # the keeper has gone
                    self._control.shutdown(socket.SHUT_WR)
                self._outcome = read_outcome(self._control)
            finally:  # afterwards: a program that meets the end of its pipe would end by itself
                os.close(self._to)
                os.close(self._from)
        return self._outcome

    def _read(self, size: int, deadline: float) -> bytes:
        content = bytearray()
        while len(content) < size:
            self._wait(self._from, select.POLLIN, deadline)
            chunk = os.read(self._from, min(size - len(content), _CHUNK))
            if not chunk:
                raise SessionEnded("the program closed its output")
            content += chunk
        return bytes(content)

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        poll = select.poll()  # select(2) takes no descriptor above 1023
        poll.register(descriptor, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError("the program did not answer in time")
