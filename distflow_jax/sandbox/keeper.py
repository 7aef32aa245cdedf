"""The keeper of one program: a process that starts it, feeds it, watches its limits and ends it.

It is forked from the zygote and ends with its answer. The program is a child of it; in namespaces
it is a child of their init, which ends with it, and all other processes with init.
"""

import dataclasses
import fcntl
import functools
import marshal
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from distflow_jax.sandbox import descendants, namespaces, warm_python
from distflow_jax.sandbox.cgroups import Cgroup
from distflow_jax.sandbox.confinement import Confinement, confine, environment
from distflow_jax.sandbox.keeper_messages import read_message, write_message
from distflow_jax.sandbox.sandbox_records import SandboxLimits, SandboxProgram
from distflow_jax.sandbox.scratch_folder import count_bytes, remove_folder
from distflow_jax.sandbox.system_calls import PR_SET_CHILD_SUBREAPER, call

CHECK_SECONDS = 0.05  # between two looks at memory, CPU and disk
_CHECK_SHARE = 20  # a look that takes long comes at most in one of so many seconds
_CHUNK = 1 << 16
_FIRST_FREE = 10  # descriptors of this process, above all that a program has
_WAIT_ALL = 0x40000000  # __WALL


@dataclasses.dataclass
class _Pipes:
    """Both ends of a program's pipes."""

    stdin: tuple[int, int] = dataclasses.field(default_factory=os.pipe)
    stdout: tuple[int, int] = dataclasses.field(default_factory=os.pipe)
    stderr: tuple[int, int] = dataclasses.field(default_factory=os.pipe)
    report: tuple[int, int] = dataclasses.field(default_factory=os.pipe)  # of the start, of init


def keep(
    plan: Confinement,
    control: socket.socket,
    ends: Sequence[int],
    slot: int,
    others: int,
    path: Sequence[str],
) -> Callable[[], None]:
    """Returns in the program's process alone, with what it has to run then; else never.

    control: brings the program, and takes its outcome.
    ends: of pipes that the program has as descriptors 3 and 4.
    slot: a number that no other running program has.
    others: processes and threads of this user, outside.
    path: folders of the interpreter's own modules.
    """
    told = read_message(control)
    program = SandboxProgram(**told | {"limits": SandboxLimits(**told["limits"])})
    uid = plan.first_uid and plan.first_uid + slot
    scratch = f"{plan.scratch}/{slot}"
    try:
        call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        pipes = _Pipes()
        if plan.has_namespaces:
            namespaces.new_processes()
        else:
            os.mkdir(scratch, 0o700)
            if uid:
                os.chown(scratch, uid, uid)
        group = Cgroup.make(plan.groups, slot, program.limits) if plan.groups else None
    except OSError as error:
        _answer(control, {"error": str(error)})
    started = time.monotonic()
    child = os.fork()
    if not child:
        control.detach()  # its number will be a descriptor of the program
        return _enter(plan, program, pipes, ends, scratch, uid, others, path, group)
    for end in (pipes.stdin[0], pipes.stdout[1], pipes.stderr[1], pipes.report[1], *ends):
        os.close(end)
    watch = _Watch(plan, program, pipes, child, scratch, started, group)
    watch.follow(control)
    _answer(control, watch.end())


def _enter(plan, program, pipes, ends, scratch, uid, others, path, group):
    """The child's side: everything up to the program itself."""
    report = fcntl.fcntl(pipes.report[1], fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
    given = [pipes.stdin[0], pipes.stdout[1], pipes.stderr[1], *ends]
    given = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE) for end in given]
    try:
        if group:
            group.join()
        proc = None
        if plan.has_namespaces:
            root = f"{plan.scratch}/root"
            proc = namespaces.enter_root(root, program.limits.disk, uid)
            scratch = namespaces.SCRATCH
            child = os.fork()
            if child:
                _be_init(child, report)
        os.setsid()
        confine(
            plan, program.limits, program.files, scratch, uid=uid, others=others, proc=proc
        )
    except OSError as error:
        os.write(report, marshal.dumps({"error": str(error)}))
        os._exit(1)
    for number, end in enumerate(given):
        os.dup2(end, number)
    os.closerange(len(given), os.sysconf("SC_OPEN_MAX"))
    variables = environment(scratch)
    python, main = program.argv[0] in ("python", "python3"), program.argv[1:2]
    if python and main and not main[0].startswith("-"):
        path = [*path, plan.packages] if plan.packages else path
        return functools.partial(warm_python.run, program.argv, variables, path)
    argv = (sys._base_executable, *program.argv[1:]) if python else program.argv
    return functools.partial(_execute, argv, variables)


def _be_init(child: int, report: int) -> None:
    """Waits for the program, and for what has lost its parent; never returns."""
    ended, status = 0, 0
    while ended != child:
        ended, status = os.waitpid(-1, _WAIT_ALL)
    os.write(report, marshal.dumps({"status": status}))
    os._exit(0)


def _execute(argv: Sequence[str], variables: dict[str, str]) -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, variables)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127)


class _Watch:
    """A running program, and what it has used and written so far."""

    def __init__(self, plan, program, pipes, child, scratch, started, group):
        self._plan, self._limits, self._child = plan, program.limits, child
        self._scratch, self._started, self._group = scratch, started, group
        self._input = memoryview(program.stdin)
        self._stdin, self._report = pipes.stdin[1], pipes.report[0]
        self._streams = {pipes.stdout[0]: bytearray(), pipes.stderr[0]: bytearray()}
        self._is_cut, self._cause, self._memory = False, "", 0
        self._own_memory = descendants.usage(os.getpid())[0]
        self._device = os.stat(plan.scratch).st_dev

    def follow(self, control: socket.socket) -> None:
        """Feeds and reads the program until it ends, or has to."""
        exited = os.pidfd_open(self._child)
        poll = select.poll()
        for end in (exited, control.fileno(), *self._streams):
            poll.register(end, select.POLLIN)
        for end in (self._stdin, *self._streams):
            os.set_blocking(end, False)
        poll.register(self._stdin, select.POLLOUT)
        deadline = self._started + self._limits.seconds
        check = self._started + CHECK_SECONDS
        while not self._cause:
            now = time.monotonic()
            if now >= deadline:
                self._cause = "deadline"
            elif now >= check:
                self._cause = self._beyond()
                took = time.monotonic() - now
                check = now + max(CHECK_SECONDS, took * _CHECK_SHARE)
            pause = 0 if self._cause else min(deadline, check) - time.monotonic()
            for end, _ in poll.poll(max(0, pause) * 1000):
                if end == exited:
                    self._cause = self._cause or "ended"
                elif end == control.fileno():
                    self._cause = self._cause or "closed"
                elif end == self._stdin:
                    self._feed(poll)
                elif not self._read(end):
                    poll.unregister(end)
        os.close(exited)

    def end(self) -> dict[str, Any]:
        """Ends all processes, and gives the fields of the outcome."""
        status, failure = self._stop()
        for end in self._streams:
            while self._read(end):
                pass
        if self._cause == "output":
            self._is_cut = True
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = used.ru_utime + used.ru_stime
        code = os.waitstatus_to_exitcode(status)
        if self._cause == "ended" and code < 0:
            by_kernel = code in (-signal.SIGKILL, -signal.SIGXCPU)
            self._cause = "cpu" if by_kernel and cpu >= self._limits.cpu_seconds else "signal"
        seconds = time.monotonic() - self._started
        if self._group:
            if self._group.kills() and self._cause in ("signal", "ended"):
                self._cause = "memory"
            self._memory = self._group.peak() or self._memory
            self._group.remove()
        failure = failure or self._clear(code)
        if failure:
            return {"error": failure}
        stdout, stderr = (bytes(text[: self._limits.output]) for text in self._streams.values())
        return {
            "cause": self._cause,
            "exit_code": code,
            "stdout": stdout,
            "stderr": stderr,
            "is_cut": self._is_cut,
            "seconds": seconds,
            "cpu_seconds": cpu,
            "memory": self._memory if self._group else max(self._memory, used.ru_maxrss << 10),
        }

    def _stop(self) -> tuple[int, str]:
        """Ends all processes; the program's wait status, and why it did not start, if so."""
        if self._plan.has_namespaces:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            status = signal.SIGKILL
        else:
            descendants.kill_all()
            _, status = os.waitpid(self._child, 0)
            descendants.end_all()
        report = os.read(self._report, _CHUNK)
        told = marshal.loads(report) if report else {}
        return told.get("status", status), told.get("error", "")

    def _feed(self, poll: select.poll) -> None:
        try:
            self._input = self._input[os.write(self._stdin, self._input[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._input = self._input[:0]
        if not self._input:
            poll.unregister(self._stdin)
            os.close(self._stdin)

    def _read(self, end: int) -> bool:
        """Reads what a stream has; whether there may be more."""
        text = self._streams[end]
        try:
            chunk = os.read(end, _CHUNK)
        except BlockingIOError:
            return False
        text += chunk[: self._limits.output + 1 - len(text)]
        if len(text) > self._limits.output:
            self._is_cut = True
            self._cause = self._cause or "output"
            return False
        return bool(chunk)

    def _beyond(self) -> str:
        """The limit that the program's processes are beyond, "" if there is none."""
        processes = descendants.descendants()
        used = [descendants.usage(one) for one in processes]
        memory = sum(max(0, own - self._own_memory) for own, _ in used)
        self._memory = max(self._memory, memory)
        if memory > self._limits.memory or (self._group and self._group.kills()):
            return "memory"
        if sum(cpu for _, cpu in used) > self._limits.cpu_seconds:
            return "cpu"
        return "disk" if self._is_full(processes) else ""

    def _is_full(self, processes: Sequence[int]) -> bool:
        if self._plan.has_namespaces:
            try:
                return not os.statvfs(f"/proc/{self._child}/root{namespaces.SCRATCH}").f_bavail
            except OSError:  # it is about to end, or to begin
                return False
        deleted = sum(descendants.deleted_bytes(one, self._device) for one in processes)
        return deleted + count_bytes(self._scratch) > self._limits.disk

    def _clear(self, code: int) -> str:
        """Removes the scratch folder; says whether its disk, not the program, was at its end."""
        if self._plan.has_namespaces:
            return ""
        space = os.statvfs(self._scratch)
        remove_folder(self._scratch)
        if code and not space.f_bavail:
            return f"the disk of {self._plan.scratch} is full"
        return ""


def _answer(control: socket.socket, message: dict[str, Any]) -> None:
    """Sends the answer, and ends this process."""
    try:
        write_message(control, message)
    except OSError:  # the one that asked has gone
        pass
    os._exit(0)
