"""Records of the sandbox: a program and its limits, its outcome, and failures of the sandbox."""

import dataclasses
from collections.abc import Mapping

MIB = 1 << 20


class SandboxError(Exception):
    """A failure of the sandbox itself: it says nothing about the program, which may run again."""


@dataclasses.dataclass(frozen=True)
class SandboxLimits:
    """Resources of a program and of all processes that it starts."""

    seconds: float = 10.0  # from its start, by the clock
    cpu_seconds: float = 10.0  # of all of its processes together
    memory: int = 512 * MIB  # bytes, of each process; at level cgroup of all together
    processes: int = 32  # and threads, at any time
    output: int = MIB  # bytes, of each of the two streams
    disk: int = 64 * MIB  # bytes in the scratch folder


@dataclasses.dataclass(frozen=True)
class SandboxProgram:
    """A program, the files beside it, and its input.

    argv: `("python3", "main.py", ...)` runs in an interpreter that has already started; any other
      program is found on the path /usr/local/bin:/usr/bin:/bin.
    files: {path below the scratch folder: content}. The scratch folder is empty otherwise. It is
      the program's working folder, and the only place that it can write to.
    """

    argv: tuple[str, ...]
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    stdin: bytes = b""
    limits: SandboxLimits = SandboxLimits()

    def __post_init__(self):
        if not self.argv or any("\0" in argument for argument in self.argv):
            raise ValueError(f"{self.argv!r} names no program: it is empty, or has a null byte")
        for name in self.files:
            if name.startswith("/") or "\0" in name or {"", ".", ".."} & set(name.split("/")):
                raise ValueError(f"{name!r} is not a path below the scratch folder")


@dataclasses.dataclass(frozen=True)
class SandboxOutcome:
    """The end of a program.

    cause: "ended" by itself; "signal": by a signal, of its own or of the kernel; or by the sandbox
      for its "deadline", or for "cpu", "memory", "output" or "disk" beyond its limits; "closed":
      the caller closed its session.
    """

    cause: str
    exit_code: int  # as subprocess has it: -N after signal N
    stdout: bytes  # the first bytes, at most as many as the limit
    stderr: bytes
    is_cut: bool  # whether one of the streams had more
    seconds: float
    cpu_seconds: float  # of all processes
    memory: int  # bytes, the most of a process; at level cgroup of all together

    @property
    def succeeded(self) -> bool:
        """Whether the program ended by itself with exit code 0."""
        return self.cause == "ended" and self.exit_code == 0
