"""The run's handles on its zygote, and on the programs that run there."""

import contextlib
import marshal
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence

from distflow_jax.sandbox.byte_frames import Frames, FramesEnded
from distflow_jax.sandbox.sandbox_records import SandboxError, SandboxOutcome, SandboxProgram

GRACE_SECONDS = 30.0  # for a zygote's start, and for a keeper after its program's deadline
_START = (
    "import sys; sys.path.insert(0, sys.argv[1])\n"
    "from distflow_jax.sandbox.zygote import main; main(*sys.argv[2:])"
)


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


class ZygoteProcess:
    """A zygote; one that has ended is started again by the next request. For several threads.

    level: of confinement. scratch: folder for scratch folders, "" for the system's. packages: a
    folder of packages for programs, or "". Raises SandboxError with what the level lacks here.

    process: the present one. folders: of scratch folders, the present one last.
    """

    def __init__(self, level: str, scratch: str, packages: str):
        self._level, self._scratch, self._packages = level, scratch, packages
        self._lock, self.folders = threading.Lock(), list[str]()
        self.process, self._socket = self._start()

    def begin(self, program: SandboxProgram, *, has_frames: bool) -> SandboxSession:
        """Hands a program to a new keeper, with pipes for frames. Raises SandboxError."""
        with self._lock:
            if self.process.poll() is not None:
                self._socket.close()
                self.process, self._socket = self._start()
            control, theirs = socket.socketpair()
            given, ends = [theirs.detach()], []
            if has_frames:
                (program_in, to_program), (from_program, program_out) = os.pipe(), os.pipe()
                given, ends = [*given, program_in, program_out], [from_program, to_program]
            with contextlib.suppress(OSError):  # the zygote has just ended, and so has the session
                socket.send_fds(self._socket, [b"program"], given)
            for end in given:
                os.close(end)
        return SandboxSession(control, ends, program)

    def close(self) -> None:
        """Ends the process, and all programs that still run."""
        with self._lock:
            self._socket.close()
            self.process.wait()
            for folder in self.folders:  # left of one that was killed
                shutil.rmtree(folder, ignore_errors=True)

    def _start(self) -> tuple[subprocess.Popen, socket.socket]:
        folder = tempfile.mkdtemp(prefix="distflow-sandbox-", dir=self._scratch or None)
        self.folders.append(folder)
        os.chmod(folder, 0o711)  # a program's user enters its own folder there
        root = str(pathlib.Path(__file__).parents[2])
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            arguments = [root, str(theirs.fileno()), self._level, folder, self._packages]
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the run alone
                cwd="/",
                env={"LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "2"},
            )
        ours.settimeout(GRACE_SECONDS)
        try:
            answer = ours.recv(1 << 16)
        except TimeoutError:
            process.kill()
            answer = f"-the sandbox process did not start within {GRACE_SECONDS:.0f} s".encode()
        if answer != b"+":
            ours.close()
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)
            raise SandboxError(answer[1:].decode() or "the sandbox process exited")
        ours.settimeout(None)
        return process, ours
