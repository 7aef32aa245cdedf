"""The run's handle on its zygote: start, requests, end."""

import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import threading

from distflow_jax.sandbox.sandbox_records import SandboxError, SandboxProgram
from distflow_jax.sandbox.sandbox_session import GRACE_SECONDS, SandboxSession

_START = (
    "import sys; sys.path.insert(0, sys.argv[1])\n"
    "from distflow_jax.sandbox.zygote import main; main(*sys.argv[2:])"
)


class ZygoteProcess:
    """A zygote; one that has ended is started again by the next request. For several threads.

    level: of confinement. scratch: folder for scratch folders, "" for the system's. packages: a
    folder of packages for programs, or "". Raises SandboxError with what the level lacks here.
    """

    def __init__(self, level: str, scratch: str, packages: str):
        self._level, self._scratch, self._packages = level, scratch, packages
        self._lock, self._folders = threading.Lock(), list[str]()
        self._process, self._socket = self._start()

    @property
    def pid(self) -> int:
        """Number of the present process."""
        return self._process.pid

    @property
    def folder(self) -> pathlib.Path:
        """The folder of the programs' scratch folders."""
        return pathlib.Path(self._folders[-1])

    def begin(self, program: SandboxProgram, *, has_frames: bool) -> SandboxSession:
        """Hands a program to a new keeper, with pipes for frames. Raises SandboxError."""
        with self._lock:
            if self._process.poll() is not None:
                self._socket.close()
                self._process, self._socket = self._start()
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
            self._process.wait()
            for folder in self._folders:  # left of one that was killed
                shutil.rmtree(folder, ignore_errors=True)

    def _start(self) -> tuple[subprocess.Popen, socket.socket]:
        folder = tempfile.mkdtemp(prefix="distflow-sandbox-", dir=self._scratch or None)
        self._folders.append(folder)
        os.chmod(folder, 0o711)  # a program's user enters its own folder there
        settings = {"level": self._level, "scratch": folder, "packages": self._packages}
        root = str(pathlib.Path(__file__).parents[2])
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            arguments = [root, str(theirs.fileno()), json.dumps(settings)]
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
        answer = ours.recv(1 << 16)
        if error := json.loads(answer) if answer else "the sandbox process exited":
            ours.close()
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)
            raise SandboxError(error)
        ours.settimeout(None)
        return process, ours
