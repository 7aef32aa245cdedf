"""Namespaces: a program sees no process, mount, network or IPC but its own.

The zygote has one namespace of mounts, network and IPC, and a root folder in memory with read-only
views of what programs need. Each program adds namespaces of processes and mounts, and a scratch
folder in memory. An ordinary user becomes root of a user namespace for that; a program then has a
user namespace of its own, without capabilities, in which the kernel counts its processes alone.
"""

import os
import struct
from collections.abc import Iterable

from distflow_jax.sandbox.system_calls import call

SCRATCH = "/scratch"
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_NOSUID, _NODEV, _BIND, _REC, _PRIVATE, _DETACH = 2, 4, 4096, 16384, 1 << 18, 2
_READ_ONLY, _ATTR_NOSUID, _RECURSIVE, _HERE = 1, 2, 0x8000, -100


def make_root(root: str, paths: Iterable[str]) -> None:
    """Enters the zygote's namespaces and makes the folder `root` with views of `paths`."""
    os.mkdir(root)
    flags = CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    if os.geteuid():
        enter_user(flags, os.open("/proc", os.O_PATH))
    else:
        call("unshare", flags)
    _mount("none", "/", "", _REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    os.mkdir(root + SCRATCH)
    for path in paths:
        _show(path, root + path)
    _set_read_only(root, recursive=False)


def _show(path: str, view: str) -> None:
    if not os.path.lexists(path) or os.path.lexists(view):
        return
    os.makedirs(os.path.dirname(view), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), view)
        return
    if os.path.isdir(path):
        os.mkdir(view)
    else:
        os.close(os.open(view, os.O_CREAT))
    _mount(path, view, "", _BIND | _REC)
    _set_read_only(view, recursive=True)


def enter_root(root: str, disk: int, uid: int) -> int:
    """Leaves all mounts but those of `root`, with a scratch folder of `disk` bytes for a user.

    Returns a descriptor of /proc, for `enter_user`.
    """
    call("unshare", CLONE_NEWNS)
    proc = os.open("/proc", os.O_PATH)
    owner = f",uid={uid},gid={uid}" if uid else ""
    settings = f"size={disk},nr_inodes={max(64, disk >> 12)},mode=700{owner}"
    _mount("tmpfs", root + SCRATCH, "tmpfs", _NOSUID | _NODEV, settings)
    os.chdir(root)
    call("pivot_root", b".", b".")
    drop(".")
    os.chdir("/")
    return proc


def drop(root: str) -> None:
    """Takes a mount away; of the zygote's root an empty folder is left."""
    call("umount2", root.encode(), _DETACH)


def enter_user(flags: int, proc: int) -> None:
    """Enters a user namespace in which this user has the same number, and no other exists.

    flags: of other namespaces to enter with it. proc: a descriptor of /proc, which is closed.
    """
    uid, gid = os.geteuid(), os.getegid()
    call("unshare", CLONE_NEWUSER | flags)
    ids = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
    for name, text in ids.items():
        file = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        os.write(file, text.encode())
        os.close(file)
    os.close(proc)


def _mount(source: str, target: str, kind: str, flags: int, settings: str = "") -> None:
    texts = (source.encode(), target.encode(), kind.encode() or None)
    call("mount", *texts, flags, settings.encode() or None)


def _set_read_only(path: str, *, recursive: bool) -> None:
    attributes = struct.pack("=QQQQ", _READ_ONLY | _ATTR_NOSUID, 0, 0, 0)
    call("mount_setattr", _HERE, path.encode(), _RECURSIVE * recursive, attributes, len(attributes))
