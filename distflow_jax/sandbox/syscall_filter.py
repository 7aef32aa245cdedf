"""The seccomp filter of a program: system calls that leave the sandbox, or that Landlock misses.

Everything is allowed but what stands here, and calls that are newer than the table. Classic BPF:
Documentation/userspace-api/seccomp_filter.rst and include/uapi/linux/{seccomp,bpf_common}.h.
"""

import ctypes
import errno
import struct
from collections.abc import Sequence

from distflow_jax.sandbox.system_calls import (
    AUDIT_ARCH,
    LAST_NUMBER,
    NAMES,
    NUMBERS,
    PR_SET_DUMPABLE,
    call,
)

NEW_NAMESPACES = 0x7E020080  # flags CLONE_NEW*
# TCGETS, TCGETS2, TIOCGPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: all others change
# attributes of files that are open for reading, or are for devices
HARMLESS_IOCTLS = (0x5401, 0x802C542A, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY: signals to others, news of files outside
REFUSED_FCNTLS = (8, 10, 15, 1024, 1026)
O_TRUNC, O_ACCMODE = 0o1000, 0o3
AF_UNIX, SOCK_STREAM, SOCK_TYPES = 1, 1, 0xF  # the other bits of a type are flags

_LOAD, _EQUAL, _ABOVE, _AND, _RETURN = 0x20, 0x15, 0x25, 0x54, 0x06
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x50000, 0x7FFF0000
_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def _answer(verdict: int) -> _Instruction:
    return (_RETURN, 0, 0, verdict)


def _refuse(code: int = errno.EPERM) -> _Instruction:
    return _answer(_ERRNO | code)


def _only(
    index: int, values: Sequence[int], mask: int = 0xFFFFFFFF, code: int = errno.EPERM
) -> list[_Instruction]:
    """Refuses a call unless an argument, masked, is one of these values.

    Of an argument the low half is read, which is all that the kernel reads of an int.
    """
    tests = [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    masked = [(_LOAD, 0, 0, 16 + 8 * index), (_AND, 0, 0, mask)]
    return [*masked, *tests, _refuse(code), _answer(_ALLOW)]


def _none_of(index: int, values: Sequence[int], mask: int = 0xFFFFFFFF) -> list[_Instruction]:
    """Refuses a call if an argument, masked, is one of these values."""
    *tests, refuse, allow = _only(index, values, mask)
    return [*tests, allow, refuse]


def make_filter(landlock: int, *, alone: bool, process: int) -> bytes:
    """The instructions, for a Landlock of this ABI.

    alone: whether the program's user owns no file outside of the scratch folder, and may signal no
      process outside.
    process: number of the program's process, the only one that it may signal if Landlock cannot
      tell others apart.
    """
    rules = {
        "clone": _only(0, [0], NEW_NAMESPACES),
        # in place of the first one's answer if it allows the call, the second one
        "socketpair": _only(0, [AF_UNIX])[:-1] + _only(1, [SOCK_STREAM], SOCK_TYPES),
        "prlimit64": _only(0, [0]),
        "sched_setaffinity": _only(0, [0]),
        "ioctl": _only(1, HARMLESS_IOCTLS, code=errno.ENOTTY),
        "fcntl": _none_of(1, REFUSED_FCNTLS),
        "prctl": _none_of(0, [PR_SET_DUMPABLE]),  # hides descriptors from the count of the disk
    }
    refused = list(NAMES["refused"])
    if not alone:
        refused += NAMES["of_owners"]
    if landlock < 3:
        refused += NAMES["truncates"]
        to_read = [O_TRUNC], O_TRUNC | O_ACCMODE
        rules |= {"open": _none_of(1, *to_read), "openat": _none_of(2, *to_read)}
    if landlock < 6 and not alone:
        refused += NAMES["signals"]
        rules |= {"kill": _only(0, [0, process]), "tgkill": _only(0, [process])}
    rules |= {name: [_refuse()] for name in refused if name not in rules}
    rules |= {name: [_refuse(errno.ENOSYS)] for name in NAMES["absent"]}
    found = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, AUDIT_ARCH),
        _answer(_KILL),  # 32-bit calls have other numbers
        (_LOAD, 0, 0, 0),
        (_ABOVE, 0, 1, LAST_NUMBER),  # x32's are above as well
        _refuse(errno.ENOSYS),
    ]
    for name, rule in rules.items():
        if name in NUMBERS:
            found += [(_EQUAL, 0, len(rule), NUMBERS[name]), *rule]
    return b"".join(struct.pack("=HBBI", *one) for one in [*found, _answer(_ALLOW)])


def install(instructions: bytes) -> None:
    """Puts the filter on this process and on all that it starts; needs no_new_privs."""
    kept = ctypes.create_string_buffer(instructions, len(instructions))
    count = len(instructions) // 8
    call("seccomp", 1, 0, struct.pack("HP", count, ctypes.addressof(kept)))  # a struct sock_fprog
