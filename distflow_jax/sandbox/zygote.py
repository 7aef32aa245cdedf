"""The zygote: a small Python process that forks a keeper for each program.

It starts without packages, environment or descriptors of the run, and never gets anything of it:
the memory of a program, a copy of the zygote's, has nothing to find. It ends when the run does.
"""

import gc
import importlib
import json
import marshal
import os
import select
import signal
import socket
import sys
import time

from distflow_jax.sandbox import cgroups, descendants, landlock, namespaces
from distflow_jax.sandbox.confinement import (
    CAP_DAC_READ_SEARCH,
    Confinement,
    can_enter,
    unused_uid,
)
from distflow_jax.sandbox.keeper import keep
from distflow_jax.sandbox.scratch_folder import remove_folder
from distflow_jax.sandbox.system_calls import PR_SET_CHILD_SUBREAPER, call

# of the standard library; those that programs import often, which then takes no time
WARM = (
    "bisect collections copy dataclasses datetime decimal enum fractions functools heapq io "
    "itertools json math operator random re runpy string statistics time traceback typing"
).split()
COUNT_SECONDS = 1.0  # between two counts of the user's processes


def main(descriptor: str, settings: str) -> None:
    """Serves programs at a socket until its other end closes.

    settings: a JSON object with the fields level, scratch and packages.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # of the thread that started this process
    os.umask(0o022)
    path = sys.path[1:]  # the first is this package's
    server = socket.socket(fileno=int(descriptor))
    try:
        plan = _prepare(**json.loads(settings))
    except OSError as error:
        server.send(marshal.dumps({"error": str(error)}))
        return
    server.send(marshal.dumps({"landlock": plan.landlock}))
    for name in WARM:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collections in programs write to no page of these
    if begun := _Zygote(server, plan).serve():
        start = keep(plan, *begun, path)
        del begun, plan, server
        start()


def _prepare(*, level: str, scratch: str, packages: str) -> Confinement:
    has_namespaces = level != "kernel"
    groups = cgroups.find() if level == "cgroup" else ()
    cgroups.clear(groups, os.getpid())
    call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    version = landlock.abi()
    if not version and not has_namespaces:
        raise OSError("this kernel has no Landlock (needs Linux 5.13, and lsm=landlock at boot)")
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        raise OSError("/proc is not mounted, or this kernel lacks CONFIG_PROC_CHILDREN")
    uid = unused_uid()
    enters = has_namespaces or can_enter(os.path.realpath(sys.base_prefix))
    kept = 0 if enters or not uid else CAP_DAC_READ_SEARCH
    plan = Confinement(version, has_namespaces, scratch, packages, uid, groups, kept)
    if has_namespaces:
        os.mkdir(plan.root)
        namespaces.make_root(plan.root, plan.readable())
    return plan


class _Zygote:
    """The loop over requests. A number, a slot, is that of one running keeper."""

    def __init__(self, server: socket.socket, plan: Confinement):
        self._server, self._plan = server, plan
        self._keepers: dict[int, tuple[int, int]] = {}  # {descriptor: (process, slot)}
        self._others, self._counted = 0, -COUNT_SECONDS

    def serve(self) -> tuple[socket.socket, list[int], int, int] | None:
        """Arguments of `keep` in a keeper; None in the zygote, at the end."""
        while True:
            ready, _, _ = select.select([self._server, *self._keepers], [], [])
            for ended in ready:
                if ended is not self._server:
                    self._reap(ended)
            if self._server in ready:
                message, given, _, _ = socket.recv_fds(self._server, 16, 3)
                if not message:
                    break
                if begun := self._begin(given):
                    return begun
        for ended in list(self._keepers):  # they have lost their callers, too
            self._reap(ended)
        if self._plan.has_namespaces:
            namespaces.drop_root(self._plan.root)
        cgroups.clear(self._plan.groups, os.getpid())
        remove_folder(self._plan.scratch)
        return None

    def _begin(self, given: list[int]) -> tuple[socket.socket, list[int], int, int] | None:
        taken = {slot for _, slot in self._keepers.values()}
        slot = min(set(range(len(taken) + 1)) - taken)
        self._count_others()
        try:
            process = os.fork()
            if not process:
                self._server.close()
                for descriptor in self._keepers:
                    os.close(descriptor)
                return socket.socket(fileno=given[0]), given[1:], slot, self._others
            self._keepers[os.pidfd_open(process)] = process, slot
        except OSError:  # no process left: the caller's socket closes without an answer
            pass
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

    def _count_others(self) -> None:
        """Counts processes and threads of this user, where programs share their limit."""
        if self._plan.first_uid or self._plan.has_namespaces:
            return
        if time.monotonic() >= self._counted + COUNT_SECONDS:
            self._others = descendants.count_tasks(os.getuid())
            self._counted = time.monotonic()
