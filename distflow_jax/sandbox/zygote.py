"""The zygote: a small Python process that forks a keeper for each program.

It starts without packages, environment or descriptors of the run, and never gets anything of it:
the memory of a program, a copy of the zygote's, has nothing to find. It ends when the run does.
"""

import contextlib
import dataclasses
import gc
import importlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable

from distflow_jax.sandbox import cgroups, descendants, namespaces
from distflow_jax.sandbox.confinement import Confinement
from distflow_jax.sandbox.keeper import keep
from distflow_jax.sandbox.scratch_folder import remove_folder
from distflow_jax.sandbox.system_calls import PR_SET_CHILD_SUBREAPER, prctl

# of the standard library; those that programs import often, which then takes no time
WARM = (
    "bisect collections copy dataclasses datetime decimal enum fractions functools heapq io "
    "itertools json math operator random re runpy string statistics time traceback typing"
).split()
COUNT_SECONDS = 1.0  # between two counts of the user's processes


def main(descriptor: str, level: str, scratch: str, packages: str) -> None:
    """Serves programs at a socket until its other end closes.

    level, scratch, packages: as of Confinement.prepare. The first message is "+", or "-" and what
    the level lacks here.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # of the thread that started this process
    os.umask(0o022)
    server = socket.socket(fileno=int(descriptor))
    try:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        plan = Confinement.prepare(level, scratch, packages)
    except OSError as error:
        server.send(f"-{error}".encode())
        return
    server.send(b"+")
    for name in WARM:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collections in programs write to no page of these
    start = _Zygote(server, plan).serve()
    del plan, server
    start()


class _Zygote:
    """The loop over requests. A number, a slot, is that of one running keeper."""

    def __init__(self, server: socket.socket, plan: Confinement):
        self._server, self._plan = server, plan
        self._keepers: dict[int, tuple[int, int]] = {}  # {descriptor: (process, slot)}
        self._counted = -COUNT_SECONDS

    def serve(self) -> Callable[[], None]:
        """Answers requests; gives what is to run then: the end, or in a program's process that."""
        while True:
            ready, _, _ = select.select([self._server, *self._keepers], [], [])
            for ended in ready:
                if ended is not self._server:
                    self._reap(ended)
            if self._server in ready:
                message, given, _, _ = socket.recv_fds(self._server, 16, 3)
                if not message:
                    return self._end
                if start := self._begin(given):
                    return start

    def _end(self) -> None:
        for ended in list(self._keepers):  # they have lost their callers, too
            self._reap(ended)
        if self._plan.root:
            namespaces.drop(self._plan.root)
        cgroups.clear(self._plan.groups, os.getpid())
        remove_folder(self._plan.scratch)

    def _begin(self, given: list[int]) -> Callable[[], None] | None:
        """Forks a keeper, which gives the program's process what that has to run."""
        taken = {slot for _, slot in self._keepers.values()}
        slot = min(set(range(len(taken) + 1)) - taken)
        if not (self._plan.first_uid or self._plan.root):  # programs share the limit of their user
            if time.monotonic() >= self._counted + COUNT_SECONDS:
                others = descendants.count_tasks(os.getuid())
                self._plan = dataclasses.replace(self._plan, others=others)
                self._counted = time.monotonic()
        process = -1
        with contextlib.suppress(OSError):  # none is left: the caller's socket ends without answer
            if process := os.fork():
                self._keepers[os.pidfd_open(process)] = process, slot
        if not process:
            self._server.close()
            for descriptor in self._keepers:
                os.close(descriptor)
            return keep(self._plan, slot, socket.socket(fileno=given[0]), given[1:])
        for descriptor in given:
            os.close(descriptor)
        return None

    def _reap(self, descriptor: int) -> None:
        process, slot = self._keepers.pop(descriptor)
        os.close(descriptor)
        if os.waitpid(process, 0)[1]:  # killed from outside: its program is ours now
            kept = {keeper for keeper, _ in self._keepers.values()}
            while strays := set(descendants.children(os.getpid())) - kept:
                for stray in strays:
                    os.kill(stray, signal.SIGKILL)
                    os.waitpid(stray, 0)
            if os.path.exists(f"{self._plan.scratch}/{slot}"):
                remove_folder(f"{self._plan.scratch}/{slot}")
