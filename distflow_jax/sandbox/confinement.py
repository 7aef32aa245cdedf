"""How the programs of a zygote are confined on this machine: files, users, groups."""

import dataclasses
import os
import sys

from distflow_jax.sandbox import cgroups, landlock, namespaces

_CAP_DAC_READ_SEARCH = 1 << 2
_SETTINGS = ("/etc/ld.so.cache", "/etc/ld.so.preload", "/etc/localtime", "/etc/alternatives")


@dataclasses.dataclass(frozen=True)
class Confinement:
    """How the programs of one zygote are confined.

    landlock: the kernel's ABI.
    root: folder that is the root of programs with namespaces of their own; "": they have none.
    scratch: folder with the programs' scratch folders.
    path: folders of the Python modules that programs may import.
    first_uid: the first user number for programs, one for each at a time; 0: this process's user.
    groups: folders of control groups in which each program gets one; (): it gets none.
    kept: capabilities of programs. As root CAP_DAC_READ_SEARCH where the interpreter is in a folder
      that only root can enter; what is read is then a matter of Landlock alone.
    others: processes and threads of the user, where programs share its limit.
    """

    landlock: int
    root: str
    scratch: str
    path: tuple[str, ...]
    first_uid: int
    groups: tuple[str, ...]
    kept: int
    others: int = 0

    @classmethod
    def prepare(cls, level: str, scratch: str, packages: str) -> "Confinement":
        """The confinement of a level on this machine, whose namespaces this process enters.

        packages: a folder of Python packages for programs; "": none. Raises OSError with what the
        level lacks here.
        """
        groups = cgroups.find() if level == "cgroup" else ()
        cgroups.clear(groups, os.getpid())
        root = "" if level == "kernel" else f"{scratch}/root"
        version = landlock.abi()
        if not version and not root:
            raise OSError("this kernel has no Landlock (Linux 5.13, and lsm=landlock at boot)")
        if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
            raise OSError("/proc is not mounted, or this kernel has no CONFIG_PROC_CHILDREN")
        path = (*sys.path[1:], packages) if packages else tuple(sys.path[1:])  # first: our package
        uid = _unused_uid()
        enters = root or can_enter(os.path.realpath(sys.base_prefix))
        kept = 0 if enters or not uid else _CAP_DAC_READ_SEARCH
        plan = cls(version, root, scratch, path, uid, groups, kept)
        if root:
            namespaces.make_root(root, plan.readable())
        return plan

    def readable(self) -> dict[str, int]:
        """{path: rights} of the files that an interpreter and programs of the system need."""
        prefix, read = sys.base_prefix, landlock.READ
        run = ("/usr", "/bin", "/lib", "/lib32", "/lib64", f"{prefix}/bin", f"{prefix}/lib")
        return (
            dict.fromkeys((*run, *self.path), landlock.RUN)
            | dict.fromkeys((*_SETTINGS, "/dev/urandom", "/dev/random"), read)
            | dict.fromkeys(("/dev/null", "/dev/zero", "/dev/full"), read | landlock.WRITE_FILE)
        )


def _unused_uid() -> int:
    """A user number from which on 1,024 are nobody's; 0 if this process may not choose its user."""
    if os.geteuid() != 0:
        return 0
    with open("/proc/self/uid_map", encoding="ascii") as ranges:
        inside, _, count = max((tuple(map(int, row.split())) for row in ranges), key=lambda r: r[2])
    if count < 1 << 16:
        return 0
    # accounts, services and containers have those below; systemd.io/UIDS-GIDS
    least, most = (0x70000000, 0x7FFD0000) if count > 1 << 31 else (count // 2, count - 2)
    return inside + least + int.from_bytes(os.urandom(4), "little") % (most - least - 1024)


def can_enter(path: str) -> bool:
    """Whether every user can enter a folder and those above it."""
    while os.stat(path).st_mode & 1:
        if path == "/":
            return True
        path = os.path.dirname(path)
    return False
