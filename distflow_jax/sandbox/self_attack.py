"""The attack of a sandbox on itself: a program that tries to leave, and what stopped each attempt.

The attempts are those that a level has to stop everywhere; tests/sandbox/ makes many more.
"""

import json
import os
import pathlib
import tempfile
from collections.abc import Callable

from distflow_jax.sandbox.sandbox_records import (
    SandboxError,
    SandboxLimits,
    SandboxOutcome,
    SandboxProgram,
)
from distflow_jax.sandbox.system_calls import NUMBERS

# {attempt: its code}; {run} is the number of the run's process, {canary} a file that all may read
ATTEMPTS = {
    "read a user's file": "open({canary!r}).read()",
    "write to this file": "open({canary!r}, 'a')",
    "link to this file": "os.link({canary!r}, 'link')",
    "change the mode of this file": "os.chmod({canary!r}, 0o600)",
    "list the temporary folder": "os.listdir({folder!r})",
    "read the run's environment": "open('/proc/{run}/environ').read()",
    "read the parent process's memory": "open(f'/proc/{{os.getppid()}}/mem', 'rb')",
    "signal the run's process": "os.kill({run}, 0)",
    "trace the run's process": "call({ptrace}, 16, {run}, 0, 0)",
    "open a TCP socket": "socket.socket()",
    "open a Unix socket": "socket.socket(socket.AF_UNIX)",
    "open a datagram socket pair": "socket.socketpair(type=socket.SOCK_DGRAM)",
    "create namespaces": "call({unshare}, 0x10020000)",
    "set up io_uring": "call({io_uring_setup}, 1, 0)",
    "become root": "os.setuid(0) if os.getuid() else call({unshare}, 0x20000)",
    "exceed the memory limit": "bytearray({memory})",
    "exceed the process limit": "fork_all()",
}
_REASONS = {
    "": "NOT STOPPED",
    "EACCES": "Landlock",
    "EPERM": "system call filter, or permissions",
    "ENOSYS": "system call filter",
    **dict.fromkeys(("ENOENT", "ESRCH", "ENOTDIR"), "not visible"),
    "EROFS": "read-only",
    "EXDEV": "different file system",
    "EINVAL": "no such user in the namespace",
    "EAGAIN": "process limit",
    "MemoryError": "memory limit",
}
_PROGRAM = """
import ctypes, errno, json, os, signal, socket
libc = ctypes.CDLL(None, use_errno=True)

def call(*arguments):
    if libc.syscall(*map(ctypes.c_long, arguments)) < 0:
        raise OSError(ctypes.get_errno(), "")

def fork_all():
    started = []
    try:
        while len(started) < {processes}:
            child = os.fork()
            if not child:
                signal.pause()
            started.append(child)
    finally:
        for child in started:
            os.kill(child, signal.SIGKILL)

found = {{}}
for name, code in json.load(open("attempts.json")).items():
    try:
        exec(code)
        found[name] = ""
    except OSError as error:
        found[name] = errno.errorcode.get(error.errno, str(error.errno))
    except MemoryError:
        found[name] = "MemoryError"
print(json.dumps(found))
"""


def attack(
    run: Callable[[SandboxProgram], SandboxOutcome], limits: SandboxLimits, scratch: str
) -> dict[str, str]:
    """{attempt: the error that stopped it, "" if nothing did}. Raises SandboxError.

    scratch: folder for a file that the program must not reach; "": the system's.
    """
    with tempfile.TemporaryDirectory(prefix="distflow-canary-", dir=scratch or None) as folder:
        os.chmod(folder, 0o755)
        canary = pathlib.Path(folder, "canary")
        canary.write_text("a file of the user")
        canary.chmod(0o644)
        told = {
            "canary": str(canary),
            "folder": os.path.dirname(folder),
            "run": os.getpid(),
            "memory": 2 * limits.memory,
            **NUMBERS,
        }
        attempts = {name: code.format(**told) for name, code in ATTEMPTS.items()}
        program = _PROGRAM.format(processes=limits.processes + 8)
        files = {"main.py": program.encode(), "attempts.json": json.dumps(attempts).encode()}
        outcome = run(SandboxProgram(("python3", "main.py"), files, b"", limits))
    if not outcome.succeeded:
        shown = outcome.stderr.decode(errors="replace").strip()[-300:]
        raise SandboxError(f"a test program failed: {outcome.cause} ({outcome.exit_code}): {shown}")
    return json.loads(outcome.stdout)


def table(found: dict[str, str]) -> str:
    """Attempts and what stopped each, a line each."""
    width = max(map(len, found))
    return "\n".join(
        f"  {name:{width}}  {_REASONS.get(error, 'refused')} {error and f'({error})'}".rstrip()
        for name, error in found.items()
    )
