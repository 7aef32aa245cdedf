"""The seccomp filter of a program: system calls that leave the sandbox, or that Landlock misses.

Everything is allowed but what stands here, and calls that are newer than the table. Classic BPF:
Documentation/userspace-api/seccomp_filter.rst and include/uapi/linux/{seccomp,bpf_common}.h.
"""

import ctypes
import errno
import struct

from distflow_jax.sandbox.system_calls import AUDIT_ARCH, LAST_NUMBER, NUMBERS, call

# processes, memory and descriptors of others; mounts, namespaces and the machine; kernel interfaces
# with a long record of holes; everything that has a network or a name outside
REFUSED = """
ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp pidfd_getfd
migrate_pages move_pages get_robust_list setpriority ioprio_set sched_setscheduler sched_setparam
sched_setattr mount umount2 pivot_root chroot move_mount open_tree fsopen fsconfig fsmount fspick
mount_setattr statmount listmount setns unshare name_to_handle_at open_by_handle_at quotactl
quotactl_fd swapon swapoff reboot syslog acct settimeofday clock_settime clock_adjtime adjtimex
sethostname setdomainname iopl ioperm vhangup kexec_load kexec_file_load init_module finit_module
delete_module personality modify_ldt uselib ustat sysfs lookup_dcookie nfsservctl bpf
perf_event_open userfaultfd keyctl add_key request_key socket connect bind listen accept accept4
inotify_init inotify_init1 inotify_add_watch fanotify_init fanotify_mark shmget shmat shmctl semget
semop semctl semtimedop msgget msgsnd msgrcv msgctl mq_open mq_unlink sync syncfs
""".split()
# ENOSYS, after which libraries take another way. A file in memory is on no disk and in no process
ABSENT = "clone3 io_uring_setup io_uring_enter io_uring_register memfd_create memfd_secret".split()
# Landlock covers none of these; they are refused where the program's user owns files outside
OF_OWNERS = """
chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat
setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr
""".split()
TRUNCATES = ("truncate", "openat2")  # Landlock before ABI 3 misses them
# Landlock before ABI 6 misses them
SIGNALS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal")

NEW_NAMESPACES = 0x7E020080  # flags CLONE_NEW*
# TCGETS, TCGETS2, TIOCGPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: all others change
# attributes of files that are open for reading, or are for devices
HARMLESS_IOCTLS = (0x5401, 0x802C542A, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY: signals to others, news of files outside
REFUSED_FCNTLS = (8, 10, 15, 1024, 1026)
O_TRUNC, O_ACCMODE = 0o1000, 0o3
AF_UNIX, SOCK_STREAM, SOCK_TYPES = 1, 1, 0xF
PR_SET_DUMPABLE = 4  # hides descriptors from the one that counts what is on disk

_LOAD, _EQUAL, _ABOVE, _SET, _AND, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x54, 0x06
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x50000, 0x7FFF0000
_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def _argument(index: int) -> _Instruction:
    """Loads the low half of an argument, which is all that the kernel reads of an int."""
    return (_LOAD, 0, 0, 16 + 8 * index)


def _refuse(code: int = errno.EPERM) -> _Instruction:
    return (_RETURN, 0, 0, _ERRNO | code)


_allow = (_RETURN, 0, 0, _ALLOW)


def _only(index: int, *values: int, code: int = errno.EPERM) -> list[_Instruction]:
    """Allows a call whose argument has one of these values."""
    count = len(values)
    tests = [(_EQUAL, count - i, 0, value) for i, value in enumerate(values)]
    return [_argument(index), *tests, _refuse(code), _allow]


def _none_of(index: int, *values: int) -> list[_Instruction]:
    """Refuses a call whose argument has one of these values."""
    count = len(values)
    tests = [(_EQUAL, count - i, 0, value) for i, value in enumerate(values)]
    return [_argument(index), *tests, _allow, _refuse()]


def _reading_only(index: int) -> list[_Instruction]:
    """Refuses flags that truncate a file which is opened for reading."""
    masked = (_AND, 0, 0, O_TRUNC | O_ACCMODE)
    return [_argument(index), masked, (_EQUAL, 0, 1, O_TRUNC), _refuse(), _allow]


def make_filter(landlock: int, *, owns_outside: bool, sees_others: bool, process: int) -> bytes:
    """The instructions, for a Landlock of this ABI.

    owns_outside: whether the program's user owns files outside of the scratch folder.
    sees_others: whether processes outside may be signalled by that user.
    process: number of the program's process, the only one that it may signal if Landlock cannot
      tell others apart.
    """
    refused = dict.fromkeys(REFUSED, errno.EPERM) | dict.fromkeys(ABSENT, errno.ENOSYS)
    rules = {
        "clone": [_argument(0), (_SET, 0, 1, NEW_NAMESPACES), _refuse(), _allow],
        "socketpair": [
            _argument(0),
            (_EQUAL, 0, 3, AF_UNIX),
            _argument(1),
            (_AND, 0, 0, SOCK_TYPES),  # the rest are flags
            (_EQUAL, 1, 0, SOCK_STREAM),
            _refuse(),
            _allow,
        ],
        "prlimit64": _only(0, 0),
        "sched_setaffinity": _only(0, 0),
        "ioctl": _only(1, *HARMLESS_IOCTLS, code=errno.ENOTTY),
        "fcntl": _none_of(1, *REFUSED_FCNTLS),
        "prctl": _none_of(0, PR_SET_DUMPABLE),
    }
    if owns_outside:
        refused |= dict.fromkeys(OF_OWNERS, errno.EPERM)
    if landlock < 3:
        refused |= dict.fromkeys(TRUNCATES, errno.EPERM)
        rules |= {"open": _reading_only(1), "openat": _reading_only(2)}
    if landlock < 6 and sees_others:
        refused |= dict.fromkeys(SIGNALS, errno.EPERM)
        rules |= {"kill": _only(0, 0, process), "tgkill": _only(0, process)}
        del refused["kill"], refused["tgkill"]
    return _assembled(refused, rules)


def _assembled(refused: dict[str, int], rules: dict[str, list[_Instruction]]) -> bytes:
    found = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, AUDIT_ARCH),
        (_RETURN, 0, 0, _KILL),  # 32-bit calls have other numbers
        (_LOAD, 0, 0, 0),
        (_ABOVE, 0, 1, LAST_NUMBER),  # x32's are above as well
        _refuse(errno.ENOSYS),
    ]
    for name, rule in rules.items():
        if name in NUMBERS:
            found += [(_EQUAL, 0, len(rule), NUMBERS[name]), *rule]
    for name, code in refused.items():
        if name in NUMBERS:
            found += [(_EQUAL, 0, 1, NUMBERS[name]), _refuse(code)]
    return b"".join(struct.pack("=HBBI", *one) for one in [*found, _allow])


def install(instructions: bytes) -> None:
    """Puts the filter on this process and on all that it starts; needs no_new_privs."""
    kept = ctypes.create_string_buffer(instructions, len(instructions))
    filtered = _Filter(len(instructions) // 8, ctypes.addressof(kept))
    call("seccomp", 1, 0, filtered)  # SECCOMP_SET_MODE_FILTER
