"""A running program: its caller's handle, which waits for its outcome and exchanges frames."""

import contextlib
import marshal
import os
import pathlib
import socket
from collections.abc import Sequence

from distflow_jax.sandbox import byte_frames
from distflow_jax.sandbox.byte_frames import Frames, FramesEnded
from distflow_jax.sandbox.sandbox_records import SandboxError, SandboxOutcome, SandboxProgram

GRACE_SECONDS = 30.0  # for a keeper after its program's deadline
# beside a program that imports byte_frames; a package of that name among its others is not taken
FRAMES_FILES = {
    "distflow_jax/__init__.py": b"",
    "distflow_jax/sandbox/__init__.py": b"",
    "distflow_jax/sandbox/byte_frames.py": pathlib.Path(byte_frames.__file__).read_bytes(),
}


class SandboxSession(Frames):
    """A program under its keeper; one thread at a time, but for `end`.

    One that `Sandbox.open` has started reads frames at descriptor 3 and writes frames to descriptor
    4. Its limits count from its start to its end.
    """

    def __init__(self, control: socket.socket, ends: Sequence[int], program: SandboxProgram):
        """Hands the program to its keeper at `control`; `ends`: of frames from it and to it."""
        super().__init__(*ends or (-1, -1))
        self._control, self._ends = control, list(ends)
        self._keeper = Frames(control.fileno(), control.fileno())
        self._seconds = program.limits.seconds + GRACE_SECONDS
        self._outcome: SandboxOutcome | None = None
        told = vars(program) | {"files": dict(program.files), "limits": vars(program.limits)}
        with contextlib.suppress(FramesEnded, TimeoutError):  # then there is no outcome, either
            self._keeper.send(marshal.dumps(told), self._seconds)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._control.fileno() >= 0:
            self.close()

    def end(self) -> None:
        """Ends the program, if it has not ended. Of any thread; frames end for the one that waits
        for them."""
        with contextlib.suppress(OSError):  # the keeper has gone
            self._control.shutdown(socket.SHUT_WR)

    def close(self) -> SandboxOutcome:
        """Ends the program, if it has not ended, and gives its outcome. Raises SandboxError."""
        self.end()
        return self.wait()

    def wait(self) -> SandboxOutcome:
        """Waits for the end of the program, and gives its outcome. Raises SandboxError."""
        if self._outcome is None:
            try:
                told = marshal.loads(self._keeper.receive(seconds=self._seconds))
            except (FramesEnded, TimeoutError) as error:
                raise SandboxError(f"the keeper of a program exited: {error}") from None
            finally:  # not before: a program that meets the end of its pipe would end by itself
                self._control.close()
                while self._ends:
                    os.close(self._ends.pop())
            if "error" in told:
                raise SandboxError(told["error"])
            self._outcome = SandboxOutcome(**told)
        return self._outcome
