"""The start of a program: the child's side of its keeper, up to the program itself.

By these steps a fresh process gives up all that it could reach, before a program has it.
"""

import atexit
import builtins
import dataclasses
import fcntl
import functools
import marshal
import os
import resource
import signal
import sys
import threading
import types
from _sitebuiltins import Quitter
from collections.abc import Callable, Sequence

from distflow_jax.sandbox import byte_frames, landlock, namespaces, syscall_filter
from distflow_jax.sandbox.cgroups import Cgroup
from distflow_jax.sandbox.confinement import Confinement
from distflow_jax.sandbox.sandbox_records import SandboxProgram
from distflow_jax.sandbox.system_calls import (
    PR_SET_KEEPCAPS,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    WAIT_ALL,
    call,
    drop_capabilities,
    prctl,
)

OPEN_FILES = 256
_FIRST_FREE = 10  # descriptors of this process, above all that a program has
_LAST = 0xFFFFFFFF


@dataclasses.dataclass(frozen=True)
class Start:
    """A program, and what it starts with.

    folder: its scratch folder; in namespaces it has another one, in memory.
    uid: its user; 0: that of this process.
    group: its control group, if it has one.
    """

    plan: Confinement
    program: SandboxProgram
    folder: str
    uid: int
    group: Cgroup | None


def enter(start: Start, ends: Sequence[int], report: int) -> Callable[[], None]:
    """Confines this process; gives what it has to run then, with nothing of ours around it.

    ends: what the program has as descriptors 0, 1, 2, and 3 and 4 in a session.
    report: takes a dict with an "error" if a step fails, or with the "status" from init.
    """
    report, *given = (
        fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE) for end in (report, *ends)
    )
    plan, program, scratch, proc = start.plan, start.program, start.folder, None
    try:
        if start.group:
            start.group.join()
        if plan.root:
            proc = namespaces.enter_root(plan.root, program.limits.disk, start.uid)
            scratch = namespaces.SCRATCH
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a signal reaches init by a handler only
            if child := os.fork():
                _be_init(child, report)
            signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        _confine(start, scratch, proc)
    except (OSError, ValueError, MemoryError) as error:
        os.write(report, marshal.dumps({"error": str(error) or type(error).__name__}))
        os._exit(1)
    for number, end in enumerate(given):
        os.dup2(end, number)
    call("close_range", len(given), _LAST, 0)
    name, *arguments = program.argv
    is_python = name in ("python", "python3")
    if is_python and arguments and not arguments[0].startswith("-"):
        kept = byte_frames.__name__ if len(given) > 3 else ""
        return functools.partial(_run_python, program.argv, _variables(scratch), plan.path, kept)
    argv = [sys._base_executable if is_python else name, *arguments]
    return functools.partial(_execute, argv, _variables(scratch))


def _be_init(child: int, report: int) -> None:
    """Waits for the program, and for what has lost its parent; never returns."""
    call("close_range", 0, report - 1, 0)  # the program's pipes end with the program
    call("close_range", report + 1, _LAST, 0)
    ended, status = 0, 0
    while ended != child:
        ended, status = os.waitpid(-1, WAIT_ALL)
    os.write(report, marshal.dumps({"status": status}))
    os._exit(0)


def _confine(start: Start, scratch: str, proc: int | None) -> None:
    """Confines this process for good, and writes the program's files as its user.

    proc: a descriptor of /proc if the program has namespaces. Raises OSError if a step fails.
    """
    plan, limits, uid = start.plan, start.program.limits, start.uid
    for kind, most in {
        resource.RLIMIT_AS: limits.memory,
        resource.RLIMIT_CPU: int(limits.cpu_seconds) + 1,
        resource.RLIMIT_FSIZE: limits.disk,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 1,  # 0 would still start a handler of core files; core(5)
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }.items():
        resource.setrlimit(kind, (most, most))
    if uid:
        prctl(PR_SET_KEEPCAPS, int(bool(plan.kept)))
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    elif proc is not None:
        namespaces.enter_user(0, proc)
    # after the user namespace: its own count would bound that of the namespace above, too
    resource.setrlimit(resource.RLIMIT_NPROC, (limits.processes + plan.others,) * 2)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    drop_capabilities(plan.kept)
    os.chdir(scratch)
    for name, content in start.program.files.items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)
    if plan.landlock:
        landlock.restrict(plan.landlock, plan.readable(), scratch)
    alone = bool(uid or plan.root)
    rules = syscall_filter.make_filter(plan.landlock, alone=alone, process=os.getpid())
    syscall_filter.install(rules)


def _variables(scratch: str) -> dict[str, str]:
    """All variables of the environment that a program has."""
    return {
        "PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": scratch,
        "TMPDIR": scratch,
        "LANG": "C.UTF-8",
        "MALLOC_ARENA_MAX": "2",  # each has 64 MiB of address space
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _execute(argv: Sequence[str], variables: dict[str, str]) -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, variables)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _run_python(
    argv: Sequence[str], variables: dict[str, str], path: Sequence[str], kept: str
) -> None:
    """Runs `argv[1]` in this interpreter, with no start and no import to wait for; never returns.

    path: folders of modules; that of the program comes first. kept: our module that it may import.
    """
    for name in [name for name in sys.modules if name.split(".")[0] == "distflow_jax"]:
        if name != kept:
            del sys.modules[name]
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = list(argv[1:])
    sys.path[:] = [os.path.dirname(os.path.abspath(argv[1])), *path]
    sys.executable, sys.dont_write_bytecode = sys._base_executable, True
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = open(
        2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
    )
    for name in ("exit", "quit"):  # programs expect them, and the zygote runs without site
        setattr(builtins, name, Quitter(name, "Ctrl-D"))
    module = types.ModuleType("__main__")
    module.__file__, module.__builtins__ = argv[1], builtins
    sys.modules["__main__"] = module
    try:
        with open(argv[1], "rb") as file:
            source = file.read()
        exec(compile(source, argv[1], "exec", dont_inherit=True), vars(module))
    finally:
        _end_python(sys.exception())


def _end_python(error: BaseException | None) -> None:
    """Ends the process as the interpreter does at the end of a program, without taking it down."""
    code: object = 0
    if isinstance(error, SystemExit):
        code = 0 if error.code is None else error.code
    elif error is not None:
        trace = error.__traceback__.tb_next  # without our own frame
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(code & 0xFF)
