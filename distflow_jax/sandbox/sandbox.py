"""The sandbox of a process: programs of strangers, under the strongest confinement that works here.

Levels, the strongest last: `kernel` needs neither root nor a package, `namespaces` hides the files
and processes of the machine, `cgroup` bounds the memory of all processes of a program together.
docs/sandbox.md says what each stops. At its start the sandbox attacks itself at each level.
"""

import logging
import os
import threading
from collections.abc import Callable

from distflow_jax.config.sandbox_config import LEVELS, SandboxConfig
from distflow_jax.parsing.paths import checked_path
from distflow_jax.sandbox.remote_provider import find_provider
from distflow_jax.sandbox.sandbox_records import (
    MIB,
    SandboxError,
    SandboxLimits,
    SandboxOutcome,
    SandboxProgram,
)
from distflow_jax.sandbox.self_attack import attack, table
from distflow_jax.sandbox.system_calls import unsupported
from distflow_jax.sandbox.zygote_process import SandboxSession, ZygoteProcess

log = logging.getLogger("distflow_jax")
_SHARED: dict[SandboxConfig, "Sandbox"] = {}
_OPENING = threading.Lock()


def shared_sandbox(settings: SandboxConfig) -> "Sandbox":
    """This process's sandbox of these settings, which ends with it. Raises ValueError as Sandbox.

    Several threads may call this.
    """
    with _OPENING:
        if settings not in _SHARED:
            _SHARED[settings] = Sandbox(settings).__enter__()
        return _SHARED[settings]


class Sandbox:
    """Runs programs. Several threads may use it, each for as many programs as it likes.

    `with Sandbox(config.sandbox) as sandbox: outcome = sandbox.run(program)`. Raises ValueError at
    its start if the machine allows no level from `sandbox.minimum` on.

    level: the one that was taken. attempts: {attempt of the attack on itself: what stopped it}.
    limits: those of the settings, for programs.
    """

    def __init__(self, settings: SandboxConfig):
        self._settings = settings
        self._zygote: ZygoteProcess | None = None
        self._provider: Callable[[SandboxProgram], SandboxOutcome] | None = None
        self.level = ""
        self.attempts: dict[str, str] = {}
        self.limits = _limits(settings)

    def __enter__(self):
        settings, lacks = self._settings, []
        scratch, packages = _folder("scratch", settings), _folder("packages", settings)
        if settings.level == "remote":
            self._provider = find_provider(settings.url, settings.token_file)
            self.level = "remote"
            return self
        levels = LEVELS[LEVELS.index(settings.minimum) :]
        for level in reversed(levels) if settings.level == "auto" else [settings.level]:
            try:
                self.attempts = self._try(level, scratch, packages)
                self.level = level
                return self
            except SandboxError as error:
                lacks.append(f"{level}: {error}")
                self.close()
        raise ValueError(
            f"sandbox.minimum={settings.minimum}: this machine has no such sandbox "
            f"({'; '.join(lacks)}); run on a machine that has one, or set sandbox.level=remote"
        )

    def __exit__(self, *_):
        self.close()

    def run(self, program: SandboxProgram) -> SandboxOutcome:
        """Runs a program to its end. Raises SandboxError."""
        if self._provider:
            return self._provider(program)
        return self._zygote.begin(program, has_frames=False).wait()

    def open(self, program: SandboxProgram) -> SandboxSession:
        """Starts a program that reads and writes frames. Raises SandboxError.

        Raises ValueError for a provider of somebody else, which runs programs to their end only.
        """
        if self._provider:
            raise ValueError("sandbox.level=remote does not support sessions; use another level")
        return self._zygote.begin(program, has_frames=True)

    def close(self) -> None:
        """Ends the zygote, and all programs that still run."""
        if self._zygote:
            self._zygote.close()
        self._zygote = None

    def _try(self, level: str, scratch: str, packages: str) -> dict[str, str]:
        """Starts a level and attacks it. Raises SandboxError with what it lacks."""
        if why := unsupported():
            raise SandboxError(why)
        self._zygote = ZygoteProcess(level, scratch, packages)
        found = attack(self.run, self.limits, scratch)
        log.info("sandbox: level %s; what stopped each escape attempt:\n%s", level, table(found))
        if through := [name for name, error in found.items() if not error]:
            raise SandboxError(f"does not stop: {', '.join(through)}")
        return found


def _folder(name: str, settings: SandboxConfig) -> str:
    """The path of a folder that the settings name; "": none."""
    given = getattr(settings, name)
    return given and os.path.abspath(checked_path("folder", f"sandbox.{name}", given))


def _limits(settings: SandboxConfig) -> SandboxLimits:
    return SandboxLimits(
        seconds=settings.seconds,
        cpu_seconds=settings.cpu_seconds,
        memory=settings.memory_mib * MIB,
        processes=settings.processes,
        output=settings.output_kib << 10,
        disk=settings.disk_mib * MIB,
    )
