"""Control groups: the memory and the number of all processes of a program together.

Both versions: Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst of Linux. Version 2
needs a group whose processes are in groups below it: where this process stands, or one above.
"""

import contextlib
import dataclasses
import os
import pathlib
import time

from distflow_jax.sandbox.sandbox_records import SandboxLimits

_ROOT = pathlib.Path("/sys/fs/cgroup")
_NEEDED = {"memory", "pids"}
_OWN_PROCESSES = 2  # of the sandbox in a program's group
_LIMITS_OF_VERSION_1 = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")


def find(root: pathlib.Path = _ROOT) -> tuple[str, ...]:
    """Folders of groups in which this process may make others; raises OSError without one.

    One for version 2, of memory and of pids for version 1.
    """
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        rows = [row.rstrip("\n").split(":", 2) for row in file]
    own = {name: path.lstrip("/") for _, names, path in rows for name in names.split(",")}
    if own.keys() >= _NEEDED:
        found = [root / name / own[name] for name in sorted(_NEEDED)]
        if all(os.access(folder, os.W_OK) for folder in found):
            return tuple(map(str, found))
    for folder in (root / own.get("", ""), (root / own.get("", "")).parent):
        if folder.is_relative_to(root) and os.access(folder, os.W_OK):
            if _NEEDED <= set((folder / "cgroup.subtree_control").read_text().split()):
                return (str(folder),)
    raise OSError("cannot create a cgroup with the memory and pids controllers")


def clear(parents: tuple[str, ...], zygote: int) -> None:
    """Removes groups that a zygote, and those that have ended without doing so, have left."""
    for parent in parents:
        for folder in pathlib.Path(parent).glob("distflow-*-*"):
            process = folder.name.split("-")[1]
            if process == str(zygote) or not os.path.exists(f"/proc/{process}"):
                _remove(folder)


def _remove(folder: pathlib.Path) -> bool:
    """Removes a group, unless something runs in it; whether none is left."""
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


@dataclasses.dataclass(frozen=True)
class Cgroup:
    """The group of one program: a folder, or two of version 1."""

    folders: tuple[pathlib.Path, ...]

    @classmethod
    def make(cls, parents: tuple[str, ...], slot: int, limits: SandboxLimits) -> "Cgroup":
        """Makes the group of a slot. Raises OSError."""
        name = f"distflow-{os.getppid()}-{slot}"  # the parent is the zygote
        group = cls(tuple(pathlib.Path(parent) / name for parent in parents))
        for folder in group.folders:
            _remove(folder)  # of a keeper that was killed, with its counts
            folder.mkdir()
        memory, pids = group.folders[0], group.folders[-1]
        if len(parents) > 1:
            sizes = dict.fromkeys(_LIMITS_OF_VERSION_1, limits.memory)
        else:
            sizes = {"memory.max": limits.memory, "memory.swap.max": 0}
        for name, size in sizes.items():
            if (memory / name).exists():  # the second only with swap
                (memory / name).write_text(str(size))
        (pids / "pids.max").write_text(str(limits.processes + _OWN_PROCESSES))
        return group

    def join(self) -> None:
        """Moves this process, and all that it starts, into the group."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text("0")

    def kills(self) -> int:
        """Processes that the kernel has killed for the group's memory."""
        name = "memory.oom_control" if len(self.folders) > 1 else "memory.events"
        rows = (row.split() for row in (self.folders[0] / name).read_text().splitlines())
        return sum(int(row[1]) for row in rows if row[0] == "oom_kill")

    def peak(self) -> int:
        """The most bytes that the group had, files in memory included; 0 if nothing counts them."""
        names = ("memory.max_usage_in_bytes", "memory.peak")
        found = [self.folders[0] / name for name in names]
        return next((int(path.read_text()) for path in found if path.exists()), 0)

    def remove(self) -> None:
        """Removes the group, all of whose processes have ended."""
        for _ in range(100):
            if all([_remove(folder) for folder in self.folders]):
                break
            time.sleep(0.002)  # the kernel is not done with the last process
