"""The keeper of one program: a process that starts it, feeds it, watches its limits and ends it.

It is forked from the zygote and ends with its answer. The program is a child of it; in namespaces
it is a child of their init, which ends with it, and all other processes with init.
"""

import contextlib
import marshal
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from distflow_jax.sandbox import descendants, namespaces
from distflow_jax.sandbox.byte_frames import Frames, FramesEnded
from distflow_jax.sandbox.cgroups import Cgroup
from distflow_jax.sandbox.confinement import Confinement
from distflow_jax.sandbox.program_start import Start, enter
from distflow_jax.sandbox.sandbox_records import SandboxLimits, SandboxOutcome, SandboxProgram
from distflow_jax.sandbox.scratch_folder import count_bytes, remove_folder
from distflow_jax.sandbox.system_calls import PR_SET_CHILD_SUBREAPER, call, prctl

CHECK_SECONDS = 0.05  # between two looks at memory, CPU and disk
_CHECK_SHARE = 20  # a look that takes long comes at most in one of so many seconds
_CHUNK = 1 << 16


def keep(
    plan: Confinement, slot: int, control: socket.socket, ends: Sequence[int]
) -> Callable[[], None]:
    """Returns in the program's process alone, with what it has to run then; else never.

    slot: a number that no other running program has.
    control: brings the program, and takes its outcome.
    ends: of pipes that the program has as descriptors 3 and 4.
    """
    caller = Frames(control.fileno(), control.fileno())
    try:
        told = marshal.loads(caller.receive())
    except FramesEnded:
        os._exit(0)
    program = SandboxProgram(**told | {"limits": SandboxLimits(**told["limits"])})
    folder, uid = f"{plan.scratch}/{slot}", plan.first_uid and plan.first_uid + slot
    try:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        if plan.root:
            call("unshare", namespaces.CLONE_NEWPID)  # of children, of which the first is init
        else:
            os.mkdir(folder, 0o700)
            if uid:
                os.chown(folder, uid, uid)
        group = Cgroup.make(plan.groups, slot, program.limits) if plan.groups else None
        start = Start(plan, program, folder, uid, group)
        (stdin, to_stdin), *reads = (os.pipe() for _ in range(4))  # of output, errors, the report
        child = os.fork()
    except OSError as error:
        _answer(caller, {"error": str(error)})
    theirs = [stdin, *(end for _, end in reads)]
    if not child:
        control.detach()  # its number will be a descriptor of the program
        return enter(start, [*theirs[:3], *ends], theirs[3])
    for end in (*theirs, *ends):
        os.close(end)
    watch = _Watch(start, child, to_stdin, [end for end, _ in reads])
    watch.follow(control)
    _answer(caller, watch.end())


class _Watch:
    """A running program, and what it has used and written so far."""

    def __init__(self, start: Start, child: int, stdin: int, reads: list[int]):
        self._start, self._limits, self._child = start, start.program.limits, child
        self._stdin, self._input = stdin, memoryview(start.program.stdin)
        self._begun = time.monotonic()
        *streams, self._report = reads
        self._streams = {end: bytearray() for end in streams}
        self._cause, self._is_cut, self._memory, self._cpu = "", False, 0, 0.0
        self._spent: dict[tuple[int, int], float] = {}  # CPU seconds of each process of its own

    def follow(self, control: socket.socket) -> None:
        """Feeds and reads the program until it ends, or has to."""
        exited = os.pidfd_open(self._child)
        poll = select.poll()
        for end in (exited, control.fileno(), *self._streams):
            poll.register(end, select.POLLIN)
        for end in (self._stdin, *self._streams):
            os.set_blocking(end, False)
        poll.register(self._stdin, select.POLLOUT)
        deadline, check = self._begun + self._limits.seconds, self._begun + CHECK_SECONDS
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
                if end == self._stdin:
                    self._feed(poll)
                elif end in self._streams:
                    if not self._read(end):
                        poll.unregister(end)
                else:
                    self._cause = self._cause or ("ended" if end == exited else "closed")

    def end(self) -> dict[str, Any]:
        """Ends all processes, and gives the fields of the outcome, or an "error"."""
        code, failure = self._stop()
        for end in self._streams:
            while self._read(end):
                pass
        used, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - self._begun
        # those that end with their namespace are in no sum of the kernel
        cpu = max(self._cpu, used.ru_utime + used.ru_stime)
        memory = max(self._memory, used.ru_maxrss << 10)
        if self._cause == "ended" and code < 0:
            by_kernel = code in (-signal.SIGKILL, -signal.SIGXCPU)
            self._cause = "cpu" if by_kernel and cpu >= self._limits.cpu_seconds else "signal"
        if group := self._start.group:
            memory = group.peak() or memory
            if group.kills() and self._cause in ("signal", "ended"):
                self._cause = "memory"
            group.remove()
        failure = self._clear(code) or failure
        if failure and self._cause != "memory":  # the kernel may have ended init instead
            return {"error": failure}
        texts = (bytes(text[: self._limits.output]) for text in self._streams.values())
        outcome = SandboxOutcome(self._cause, code, *texts, self._is_cut, seconds, cpu, memory)
        return vars(outcome)

    def _stop(self) -> tuple[int, str]:
        """Ends all processes; the program's exit code, and a failure of the sandbox, if any."""
        if self._start.plan.root:
            os.kill(self._child, signal.SIGKILL)
        else:
            descendants.kill_all()
        _, status = os.waitpid(self._child, 0)
        descendants.end_all()
        report = os.read(self._report, _CHUNK)
        told = marshal.loads(report) if report else {}
        if self._start.plan.root:  # the child was init
            status = told.get("status", signal.SIGKILL)
            if not told and self._cause == "ended":
                told["error"] = "the init process of a program exited"
        return os.waitstatus_to_exitcode(status), told.get("error", "")

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
            self._is_cut, self._cause = True, self._cause or "output"
            return False
        return bool(chunk)

    def _beyond(self) -> str:
        """The limit that the program's processes are beyond, "" if there is none."""
        if not self._start.plan.root:  # there init does
            descendants.reap(self._child)
        processes, group = descendants.descendants(), self._start.group
        used = {one: descendants.usage(one) for one in processes}
        memory = sum(one.memory for one in used.values())
        self._memory = max(self._memory, memory)
        self._spent |= {(number, one.begun): one.own for number, one in used.items()}
        reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
        told = sum(one.own + one.waited for one in used.values())
        told += reaped.ru_utime + reaped.ru_stime
        # a process that ignores the ends of its children is told of no time of theirs
        self._cpu = max(self._cpu, told, sum(self._spent.values()))
        if memory > self._limits.memory or (group and group.kills()):
            return "memory"
        if self._cpu > self._limits.cpu_seconds:
            return "cpu"
        return "disk" if self._is_full(processes) else ""

    def _is_full(self, processes: Sequence[int]) -> bool:
        if self._start.plan.root:
            try:
                return not os.statvfs(f"/proc/{self._child}/root{namespaces.SCRATCH}").f_bavail
            except OSError:  # it is about to end, or to begin
                return False
        deleted = descendants.deleted_bytes(processes, os.stat(self._start.folder).st_dev)
        most, deadline = self._limits.disk - deleted, self._begun + self._limits.seconds
        return count_bytes(self._start.folder, most, deadline) > most

    def _clear(self, code: int) -> str:
        """Removes the scratch folder; says whether its disk, not the program, was at its end."""
        if self._start.plan.root:
            return ""
        space = os.statvfs(self._start.folder)
        remove_folder(self._start.folder)
        where = os.path.dirname(self._start.plan.scratch)
        return f"the disk of {where} is full" if code and not space.f_bavail else ""


def _answer(caller: Frames, message: dict[str, Any]) -> None:
    """Sends the answer, and ends this process."""
    with contextlib.suppress(FramesEnded):
        caller.send(marshal.dumps(message))
    os._exit(0)
