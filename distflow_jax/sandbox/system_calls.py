"""Linux system calls that Python has no function for, through libc's syscall(2).

Numbers: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux.
"""

import ctypes
import os
import platform
import struct
import sys

# by what syscall_filter.py does with them; name:x86_64:aarch64, - where an architecture has none
_TABLE = {
    # processes, memory and descriptors of others; mounts, namespaces and the machine; kernel
    # interfaces with a long record of holes; everything that has a network or a name outside
    "refused": """
ptrace:101:117 process_vm_readv:310:270 process_vm_writev:311:271 process_madvise:440:440
process_mrelease:448:448 kcmp:312:272 pidfd_getfd:438:438 migrate_pages:256:238 move_pages:279:239
get_robust_list:274:100 setpriority:141:140 ioprio_set:251:30 sched_setscheduler:144:119
sched_setparam:142:118 sched_setattr:314:274 mount:165:40 umount2:166:39 pivot_root:155:41
chroot:161:51 move_mount:429:429 open_tree:428:428 fsopen:430:430 fsconfig:431:431 fsmount:432:432
fspick:433:433 mount_setattr:442:442 statmount:457:457 listmount:458:458 setns:308:268
unshare:272:97 name_to_handle_at:303:264 open_by_handle_at:304:265 quotactl:179:60
quotactl_fd:443:443 swapon:167:224 swapoff:168:225 reboot:169:142 syslog:103:116 acct:163:89
settimeofday:164:170 clock_settime:227:112 clock_adjtime:305:266 adjtimex:159:171
sethostname:170:161 setdomainname:171:162 iopl:172:- ioperm:173:- vhangup:153:58
kexec_load:246:104 kexec_file_load:320:294 init_module:175:105 finit_module:313:273
delete_module:176:106 personality:135:92 modify_ldt:154:- uselib:134:- ustat:136:- sysfs:139:-
lookup_dcookie:212:18 nfsservctl:180:42 bpf:321:280 perf_event_open:298:241 userfaultfd:323:282
keyctl:250:219 add_key:248:217 request_key:249:218 socket:41:198 connect:42:203 bind:49:200
listen:50:201 accept:43:202 accept4:288:242 inotify_init:253:- inotify_init1:294:26
inotify_add_watch:254:27 fanotify_init:300:262 fanotify_mark:301:263 shmget:29:194 shmat:30:196
shmctl:31:195 semget:64:190 semop:65:193 semctl:66:191 semtimedop:220:192 msgget:68:186
msgsnd:69:189 msgrcv:70:188 msgctl:71:187 mq_open:240:180 mq_unlink:241:181 sync:162:81
syncfs:306:267""",
    # ENOSYS, after which libraries take another way. A file in memory is on no disk, in no process
    "absent": """
clone3:435:435 io_uring_setup:425:425 io_uring_enter:426:426 io_uring_register:427:427
memfd_create:319:279 memfd_secret:447:447""",
    # Landlock covers none of these; they are refused where the program's user owns files outside
    "of_owners": """
chmod:90:- fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 chown:92:- fchown:93:55 lchown:94:-
fchownat:260:54 utime:132:- utimes:235:- futimesat:261:- utimensat:280:88 setxattr:188:5
lsetxattr:189:6 fsetxattr:190:7 removexattr:197:14 lremovexattr:198:15 fremovexattr:199:16""",
    # Landlock before ABI 3 misses them
    "truncates": "truncate:76:45 openat2:437:437",
    # Landlock before ABI 6 misses them
    "signals": """
kill:62:129 tkill:200:130 tgkill:234:131 rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240
pidfd_send_signal:424:424""",
    # refused for some arguments, or only called by the sandbox
    "others": """
open:2:- openat:257:56 clone:56:220 socketpair:53:199 prlimit64:302:261 sched_setaffinity:203:122
ioctl:16:29 fcntl:72:25 prctl:157:167 seccomp:317:277 capset:126:91 close_range:436:436
landlock_create_ruleset:444:444 landlock_add_rule:445:445 landlock_restrict_self:446:446""",
}
_ROWS = {kind: [row.split(":") for row in rows.split()] for kind, rows in _TABLE.items()}
NAMES = {kind: [name for name, *_ in rows] for kind, rows in _ROWS.items()}
LAST_NUMBER = 462  # the newest that the filter knows (mseal, Linux 6.10); none above is let through
MACHINES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}  # column, AUDIT_ARCH

WAIT_ALL = 0x40000000  # __WALL of waitpid: children that clone(2) made as well
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS = 1, 4, 8
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47


def numbers(machine: str) -> dict[str, int]:
    """{name: number} of the calls that an architecture has."""
    column, _ = MACHINES[machine]
    rows = [row for kind in _ROWS.values() for row in kind]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def unsupported() -> str:
    """Why this machine can have no sandbox of ours; "" if it may have one."""
    if sys.platform != "linux":
        return f"the sandbox needs Linux, not {sys.platform}"
    if platform.machine() not in MACHINES:
        return f"the sandbox needs {' or '.join(MACHINES)}, not {platform.machine()}"
    return ""


_HERE = "" if unsupported() else platform.machine()
NUMBERS = numbers(_HERE) if _HERE else {}
AUDIT_ARCH = MACHINES[_HERE][1] if _HERE else 0
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long


def call(name: str, *arguments: int | bytes | None) -> int:
    """A system call; bytes are passed by their address. Raises OSError with its name."""
    given = (ctypes.c_long(one) if isinstance(one, int) else one for one in arguments)
    result = _LIBC.syscall(ctypes.c_long(NUMBERS[name]), *given)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return int(result)


def prctl(option: int, first: int, second: int = 0) -> None:
    """The call prctl, whose last arguments are 0. Raises OSError."""
    call("prctl", option, first, second, 0, 0)


def drop_capabilities(kept: int) -> None:
    """Gives up all capabilities but those of the mask `kept`, which programs started later keep."""
    header = struct.pack("=Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    call("capset", header, struct.pack("=6I", kept, kept, kept, 0, 0, 0))
    if kept:
        prctl(PR_CAP_AMBIENT, 2, kept.bit_length() - 1)
