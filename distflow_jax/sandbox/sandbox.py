"""The sandbox of a process: programs of strangers, under the strongest confinement that works here.

Levels, the strongest last: `kernel` needs neither root nor a package, `namespaces` hides the files
and processes of the machine, `cgroup` bounds the memory of all processes of a program together.
docs/sandbox.md says what each stops. At its start the sandbox attacks itself at each level.
"""

import contextlib
import dataclasses
import json
import logging
import marshal
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import threading

from distflow_jax.config.sandbox_config import LEVELS, SandboxConfig
from distflow_jax.sandbox.keeper_messages import read_outcome, write_message
from distflow_jax.sandbox.sandbox_records import (
    MIB,
    SandboxError,
    SandboxLimits,
    SandboxOutcome,
    SandboxProgram,
)
from distflow_jax.sandbox.sandbox_session import SandboxSession
from distflow_jax.sandbox.system_calls import unsupported

GRACE_SECONDS = 30.0  # beyond a program's deadline, for its keeper; and for a zygote's start
_START = (
    "import sys; sys.path.insert(0, sys.argv[1])\n"
    "from distflow_jax.sandbox.zygote import main; main(*sys.argv[2:])"
)
_log = logging.getLogger(__name__)


class Sandbox:
    """Runs programs. Several threads may use it, each for as many programs as it likes.

    `with Sandbox(config.sandbox) as sandbox: outcome = sandbox.run(program)`. Raises ValueError at
    its start if the machine allows no level from `sandbox.minimum` on.
    """

    def __init__(self, settings: SandboxConfig):
        self._settings = settings
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._zygote: socket.socket | None = None
        self.level = ""
        self.limits = SandboxLimits(
            seconds=settings.seconds,
            cpu_seconds=settings.cpu_seconds,
            memory=settings.memory_mib * MIB,
            processes=settings.processes,
            output=settings.output_kib << 10,
            disk=settings.disk_mib * MIB,
        )

    def __enter__(self):
        self._choose_level()
        return self

    def __exit__(self, *_):
        self.close()

    def run(self, program: SandboxProgram) -> SandboxOutcome:
        """Runs a program to its end. Raises SandboxError."""
        return read_outcome(self._begin(program, []))

    def open(self, program: SandboxProgram) -> SandboxSession:
        """Starts a program that reads and writes frames. Raises SandboxError."""
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        try:
            control = self._begin(program, [theirs_in, theirs_out])
        except SandboxError:
            os.close(ours_in)
            os.close(ours_out)
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        return SandboxSession(control, ours_out, ours_in)

    def close(self) -> None:
        """Ends the zygote, and all programs that still run."""
        with self._lock:
            if self._zygote:
                self._zygote.close()
            if self._process:
                self._process.wait()
            self._zygote = self._process = None

    def _begin(self, program: SandboxProgram, ends: list[int]) -> socket.socket:
        """Hands a program to a new keeper; a connection to that."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                with self._lock:
                    if self._process is None or self._process.poll() is not None:
                        self._start(self.level)
                    descriptors = [theirs.fileno(), *ends]
                    socket.send_fds(self._zygote, [b"program"], descriptors)
                theirs.close()
                ours.settimeout(program.limits.seconds + GRACE_SECONDS)
                write_message(ours, dataclasses.asdict(program))
            except OSError as error:
                ours.close()
                raise SandboxError(f"the sandbox's process has ended: {error}") from None
        return ours

    def _choose_level(self) -> None:
        if why := unsupported():
            raise ValueError(f"{why}: a sandbox is impossible here")
        self.level = "kernel"
        self._start(self.level)

    def _start(self, level: str) -> None:
        """Starts a zygote. Raises SandboxError with what the level lacks here."""
        folder = tempfile.mkdtemp(prefix="distflow-sandbox-", dir=self._settings.scratch or None)
        os.chmod(folder, 0o711)  # a program's user enters its own folder there
        settings = {
            "has_namespaces": level != "kernel",
            "scratch": folder,
            "packages": self._settings.packages,
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = pathlib.Path(__file__).parents[2]
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", "-c", _START),
                    *(str(root), str(theirs.fileno()), json.dumps(settings)),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the run alone
                cwd="/",
                env={"LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "2"},
            )
        ours.settimeout(GRACE_SECONDS)
        answer = ours.recv(1 << 16)
        told = marshal.loads(answer) if answer else {"error": "its process has ended"}
        if "error" in told:
            ours.close()
            self._process.wait()
            shutil.rmtree(folder, ignore_errors=True)
            raise SandboxError(told["error"])
        ours.settimeout(None)
        self._zygote = ours
