"""The sandbox of a process: programs of strangers, under the strongest confinement that works here.

Levels, the strongest last: `kernel` needs neither root nor a package, `namespaces` hides the files
and processes of the machine, `cgroup` bounds the memory of all processes of a program together.
docs/sandbox.md says what each stops. At its start the sandbox attacks itself at each level.
"""

import dataclasses
import logging
import os

from distflow_jax.config.sandbox_config import LEVELS, SandboxConfig
from distflow_jax.parsing.paths import checked_path
from distflow_jax.sandbox.keeper_messages import read_outcome
from distflow_jax.sandbox.remote_provider import RemoteProvider
from distflow_jax.sandbox.sandbox_records import (
    MIB,
    SandboxError,
    SandboxLimits,
    SandboxOutcome,
    SandboxProgram,
)
from distflow_jax.sandbox.sandbox_session import SandboxSession
from distflow_jax.sandbox.self_attack import attack, table
from distflow_jax.sandbox.system_calls import unsupported
from distflow_jax.sandbox.zygote_process import ZygoteProcess

log = logging.getLogger("distflow_jax")


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
        self._provider: RemoteProvider | None = None
        self.level = ""
        self.attempts: dict[str, str] = {}
        self.limits = _limits(settings)

    def __enter__(self):
        self._settings = _with_folders(self._settings)
        if self._settings.level == "remote":
            self._provider = RemoteProvider.of(self._settings.url, self._settings.token_file)
            self.level = "remote"
        else:
            self._choose_level()
        return self

    def __exit__(self, *_):
        self.close()

    def run(self, program: SandboxProgram) -> SandboxOutcome:
        """Runs a program to its end. Raises SandboxError."""
        if self._provider:
            return self._provider.run(program)
        return read_outcome(self._zygote.begin(program, []))

    def open(self, program: SandboxProgram) -> SandboxSession:
        """Starts a program that reads and writes frames. Raises SandboxError.

        Raises ValueError for a provider of somebody else, which runs programs to their end only.
        """
        if self._provider:
            raise ValueError("sandbox.level=remote does not support sessions; use another level")
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        try:
            control = self._zygote.begin(program, [theirs_in, theirs_out])
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
        if self._zygote:
            self._zygote.close()
        self._zygote = None

    def _choose_level(self) -> None:
        """Takes the strongest level that works, or the one that is set."""
        settings, lacks = self._settings, []
        wanted = reversed(LEVELS[LEVELS.index(settings.minimum) :])
        for level in wanted if settings.level == "auto" else [settings.level]:
            try:
                self.attempts, self.level = self._try(level), level
                return
            except SandboxError as error:
                lacks.append(f"{level}: {error}")
                self.close()
        raise ValueError(
            f"sandbox.minimum={settings.minimum}: no such sandbox works on this machine "
            f"({'; '.join(lacks)}); use another machine, or set sandbox.level=remote"
        )

    def _try(self, level: str) -> dict[str, str]:
        """Starts a level and attacks it. Raises SandboxError with what it lacks."""
        if why := unsupported():
            raise SandboxError(why)
        packages = self._settings.packages and os.path.abspath(self._settings.packages)
        self._zygote = ZygoteProcess(level, self._settings.scratch, packages)
        found = attack(self.run, self.limits, self._settings.scratch)
        log.info("sandbox: level %s; what stopped each escape attempt:\n%s", level, table(found))
        if through := [name for name, error in found.items() if not error]:
            raise SandboxError(f"does not stop: {', '.join(through)}")
        return found


def _with_folders(settings: SandboxConfig) -> SandboxConfig:
    named = {name: getattr(settings, name) for name in ("scratch", "packages")}
    found = {n: str(checked_path("folder", f"sandbox.{n}", f)) for n, f in named.items() if f}
    return dataclasses.replace(settings, **found)


def _limits(settings: SandboxConfig) -> SandboxLimits:
    return SandboxLimits(
        seconds=settings.seconds,
        cpu_seconds=settings.cpu_seconds,
        memory=settings.memory_mib * MIB,
        processes=settings.processes,
        output=settings.output_kib << 10,
        disk=settings.disk_mib * MIB,
    )
