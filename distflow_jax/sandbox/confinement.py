"""The steps by which a fresh process gives up all that it could reach, before a program has it."""

import dataclasses
import os
import resource
import signal
import sys
from collections.abc import Mapping

from distflow_jax.sandbox import landlock, namespaces, syscall_filter
from distflow_jax.sandbox.sandbox_records import SandboxLimits, SandboxProgram
from distflow_jax.sandbox.system_calls import (
    PR_SET_KEEPCAPS,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    call,
    drop_capabilities,
)

PATHS = ("/usr/local/bin", "/usr/bin", "/bin")
OPEN_FILES = 256
CAP_DAC_READ_SEARCH = 1 << 2
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full")
_SETTINGS = ("/etc/ld.so.cache", "/etc/ld.so.preload", "/etc/localtime", "/etc/alternatives")


@dataclasses.dataclass(frozen=True)
class Confinement:
    """How the programs of one zygote are confined.

    landlock: the kernel's ABI.
    has_namespaces: whether a program has namespaces of its own.
    scratch: folder with the programs' scratch folders.
    packages: a folder of Python packages that programs may import; "": none.
    first_uid: the first user number for programs, one for each at a time; 0: this process's user.
    groups: folders of control groups in which each program gets one; (): it gets none.
    kept: capabilities of programs. As root CAP_DAC_READ_SEARCH where the interpreter is in a folder
      that only root can enter; what is read is then a matter of Landlock alone.
    """

    landlock: int
    has_namespaces: bool
    scratch: str
    packages: str
    first_uid: int
    groups: tuple[str, ...]
    kept: int

    @property
    def root(self) -> str:
        """The folder that programs with namespaces have as their root."""
        return f"{self.scratch}/root"

    def readable(self) -> dict[str, int]:
        """{path: rights} of the files that an interpreter and programs of the system need."""
        prefix = sys.base_prefix
        run = ["/usr", "/bin", "/lib", "/lib32", "/lib64", f"{prefix}/bin", f"{prefix}/lib"]
        run += [self.packages] * bool(self.packages)
        read = landlock.READ
        return (
            dict.fromkeys(run, landlock.RUN)
            | dict.fromkeys(_SETTINGS, read)
            | dict.fromkeys(("/dev/urandom", "/dev/random"), read)
            | dict.fromkeys(_DEVICES, read | landlock.WRITE_FILE)
        )


def environment(scratch: str) -> dict[str, str]:
    """All variables that a program has."""
    return {
        "PATH": ":".join(dict.fromkeys((f"{sys.base_prefix}/bin", *PATHS))),
        "HOME": scratch,
        "TMPDIR": scratch,
        "LANG": "C.UTF-8",
        "MALLOC_ARENA_MAX": "2",  # each has 64 MiB of address space
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def unused_uid() -> int:
    """A user number from which on 1,024 are nobody's; 0 if this process may not choose its user."""
    if os.geteuid() != 0:
        return 0
    with open("/proc/self/uid_map", encoding="ascii") as ranges:
        inside, _, count = max((tuple(map(int, row.split())) for row in ranges), key=lambda r: r[2])
    if count < 1 << 16:
        return 0
    room = min(count, 1 << 31) // 2  # users of accounts and services are in the lower half
    return inside + room + int.from_bytes(os.urandom(4), "little") % (room - 1024)


def can_enter(path: str) -> bool:
    """Whether every user can enter a folder and those above it."""
    while os.stat(path).st_mode & 1:
        if path == "/":
            return True
        path = os.path.dirname(path)
    return False


def confine(
    plan: Confinement,
    program: SandboxProgram,
    scratch: str,
    *,
    uid: int,
    others: int,
    proc: int | None,
) -> None:
    """Confines this process for good, and writes the program's files as its user.

    uid: the program's user; 0 for the present one, which has `others` processes and threads.
    proc: a descriptor of /proc if the program has namespaces.
    Raises OSError if a step fails.
    """
    limits = program.limits
    _limit(limits)
    if uid:
        call("prctl", PR_SET_KEEPCAPS, int(bool(plan.kept)), 0, 0, 0)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    elif proc is not None:
        namespaces.own_user(proc)
    # after the user namespace: its own count would bound that of the namespace above, too
    resource.setrlimit(resource.RLIMIT_NPROC, (limits.processes + others,) * 2)
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    drop_capabilities(plan.kept)
    os.chdir(scratch)
    _write(program.files)
    if plan.landlock:
        landlock.restrict(plan.landlock, plan.readable(), scratch)
    alone = bool(uid) or plan.has_namespaces
    syscall_filter.install(
        syscall_filter.make_filter(
            plan.landlock, owns_outside=not alone, sees_others=not alone, process=os.getpid()
        )
    )


def _limit(limits: SandboxLimits) -> None:
    seconds = int(limits.cpu_seconds) + 1
    for kind, most in {
        resource.RLIMIT_AS: limits.memory,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: limits.disk,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 1,  # 0 would still start a handler of core files; core(5)
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }.items():
        resource.setrlimit(kind, (most, most))


def _write(files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        if folder := os.path.dirname(name):
            os.makedirs(folder, exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)
