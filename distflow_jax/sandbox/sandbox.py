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
from distflow_jax.parsing.http_call import HttpServer
from distflow_jax.parsing.pem_files import read_secret
from distflow_jax.sandbox import self_attack
from distflow_jax.sandbox.keeper_messages import read_outcome, write_message
from distflow_jax.sandbox.sandbox_records import (
    MIB,
    SandboxError,
    SandboxLimits,
    SandboxOutcome,
    SandboxProgram,
)
from distflow_jax.sandbox.remote_provider import RemoteProvider
from distflow_jax.sandbox.sandbox_session import SandboxSession
from distflow_jax.sandbox.system_calls import NUMBERS, unsupported

GRACE_SECONDS = 30.0  # beyond a program's deadline, for its keeper; and for a zygote's start
_START = (
    "import sys; sys.path.insert(0, sys.argv[1])\n"
    "from distflow_jax.sandbox.zygote import main; main(*sys.argv[2:])"
)
log = logging.getLogger("distflow_jax")


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
        self._provider: RemoteProvider | None = None
        if settings.level == "remote":
            key = read_secret("sandbox.token_file", settings.token_file) if settings.token_file else ""
            self._provider = RemoteProvider(HttpServer(settings.url, key))
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
        if self._settings.level == "remote":
            self._try_provider()
        else:
            self._choose_level()
        return self

    def __exit__(self, *_):
        self.close()

    def run(self, program: SandboxProgram) -> SandboxOutcome:
        """Runs a program to its end. Raises SandboxError."""
        return self._provider.run(program) if self._provider else self._run_here(program)

    def _run_here(self, program: SandboxProgram) -> SandboxOutcome:
        return read_outcome(self._begin(program, []))

    def open(self, program: SandboxProgram) -> SandboxSession:
        """Starts a program that reads and writes frames. Raises SandboxError.

        Raises ValueError for a provider of somebody else, which runs programs to their end only.
        """
        if self._provider:
            raise ValueError("sandbox.level=remote runs no program that lives on; use another level")
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

    def _try_provider(self) -> None:
        try:
            self._provider.run(SandboxProgram(("python3", "main.py"), {"main.py": b""}))
        except SandboxError as error:
            raise ValueError(f"sandbox.url: {error}") from None
        self.level = "remote"

    def _choose_level(self) -> None:
        """Takes the strongest level that works, or the one that is set."""
        settings = self._settings
        least = LEVELS.index(settings.minimum)
        wanted = reversed(LEVELS[least:]) if settings.level == "auto" else [settings.level]
        lacks = []
        for level in wanted:
            try:
                self._try(level)
                self.level = level
                return
            except SandboxError as error:
                lacks.append(f"{level}: {error}")
                self.close()
        raise ValueError(
            f"sandbox.minimum={settings.minimum}: this machine has no such sandbox "
            f"({'; '.join(lacks)}); run on a machine that has one, or set sandbox.level=remote"
        )

    def _try(self, level: str) -> None:
        """Starts a level and attacks it. Raises SandboxError with what it lacks."""
        if why := unsupported():
            raise SandboxError(why)
        self._start(level)
        found = self_attack.attack(self._run_here, self.limits, NUMBERS, self._settings.scratch)
        log.info("sandbox: level %s; attempts to leave it:\n%s", level, self_attack.table(found))
        if through := [name for name, error in found.items() if not error]:
            raise SandboxError(f"does not stop: {', '.join(through)}")

    def _start(self, level: str) -> None:
        """Starts a zygote. Raises SandboxError with what the level lacks here."""
        folder = tempfile.mkdtemp(prefix="distflow-sandbox-", dir=self._settings.scratch or None)
        os.chmod(folder, 0o711)  # a program's user enters its own folder there
        settings = {
            "level": level,
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
