"""The start of a program: the child's side of its keeper, up to the program itself."""

import dataclasses
import fcntl
import functools
import marshal
import os
import signal
import sys
from collections.abc import Callable, Sequence

from distflow_jax.sandbox import namespaces, warm_python
from distflow_jax.sandbox.cgroups import Cgroup
from distflow_jax.sandbox.confinement import Confinement, confine, environment
from distflow_jax.sandbox.sandbox_records import SandboxProgram
from distflow_jax.sandbox.system_calls import WAIT_ALL, call

_FIRST_FREE = 10  # descriptors of this process, above all that a program has
_LAST = 0xFFFFFFFF


@dataclasses.dataclass(frozen=True)
class Start:
    """A program, and what it starts with.

    scratch: its folder; in namespaces it has another one, in memory.
    uid: its user; 0: that of this process, which has `others` processes and threads.
    group: its control group, if it has one.
    path: folders of the interpreter's own modules.
    """

    plan: Confinement
    program: SandboxProgram
    scratch: str
    uid: int
    others: int
    group: Cgroup | None
    path: Sequence[str]


def enter(start: Start, ends: Sequence[int], report: int) -> Callable[[], None]:
    """Confines this process; gives what it has to run then, with nothing of ours around it.

    ends: what the program has as descriptors 0, 1, 2, and 3 and 4 in a session.
    report: takes a dict with an "error" if a step fails, or with the "status" from init.
    """
    report, *given = (
        fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE) for end in (report, *ends)
    )
    plan, program, scratch, proc = start.plan, start.program, start.scratch, None
    try:
        if start.group:
            start.group.join()
        if plan.has_namespaces:
            proc = namespaces.enter_root(plan.root, program.limits.disk, start.uid)
            scratch = namespaces.SCRATCH
            if child := os.fork():
                _be_init(child, report)
        os.setsid()
        confine(plan, program, scratch, uid=start.uid, others=start.others, proc=proc)
    except (OSError, ValueError, MemoryError) as error:
        os.write(report, marshal.dumps({"error": str(error) or type(error).__name__}))
        os._exit(1)
    for number, end in enumerate(given):
        os.dup2(end, number)
    call("close_range", len(given), _LAST, 0)
    name, *arguments = program.argv
    is_python = name in ("python", "python3")
    if is_python and arguments and not arguments[0].startswith("-"):
        path = [*start.path, *([plan.packages] if plan.packages else [])]
        return functools.partial(warm_python.run, program.argv, environment(scratch), path)
    argv = [sys._base_executable if is_python else name, *arguments]
    return functools.partial(_execute, argv, environment(scratch))


def _be_init(child: int, report: int) -> None:
    """Waits for the program, and for what has lost its parent; never returns."""
    call("close_range", 0, report - 1, 0)  # the program's pipes end with the program
    call("close_range", report + 1, _LAST, 0)
    ended, status = 0, 0
    while ended != child:
        ended, status = os.waitpid(-1, WAIT_ALL)
    os.write(report, marshal.dumps({"status": status}))
    os._exit(0)


def _execute(argv: Sequence[str], variables: dict[str, str]) -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, variables)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127)
