"""Attempts of a program to leave its sandbox, and the machine around it that they aim at.

An attempt is code that raises where it is stopped. `w` has names of the world: paths, ports and
processes of the user who runs the sandbox. The same code outside has to get through, as root or as
any user, wherever that does no harm: the attempt is a real one.
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap

BY_ANY, BY_ROOT, NOT_RUN = "any", "root", ""  # who gets through outside


@dataclasses.dataclass(frozen=True)
class Attempt:
    code: str
    outside: str = BY_ANY


HELPERS = """
import ctypes, fcntl, gc, json, mmap, os, resource, signal, socket, stat, struct, subprocess, sys
w = json.load(open("world.json"))
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

def call(name, *arguments):
    given = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(w["numbers"][name]), *given)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result

def machine_code(code):
    memory = mmap.mmap(-1, len(code), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return ctypes.CFUNCTYPE(ctypes.c_long)(address)()
"""

MAIN = """
from helpers import *
try:
    exec(open("attempt.py").read())
    print("THROUGH", flush=True)
except BaseException as error:
    print(f"stopped: {type(error).__name__}: {error}", flush=True)
os._exit(0)
"""

FILES = {
    "read a file": Attempt("open(w['secret']).read()"),
    "read a file of the user alone": Attempt("open(w['private']).read()"),
    "list a folder": Attempt("os.listdir(w['home'])"),
    "list the folder of temporary files": Attempt("os.listdir(os.path.dirname(w['home']))"),
    "list the root": Attempt("os.listdir('/')", NOT_RUN),  # in namespaces the root is another
    "read the users of the machine": Attempt("open('/etc/passwd').read()"),
    "read by a symbolic link": Attempt("os.symlink(w['secret'], 'l'); open('l').read()"),
    "read by a hard link": Attempt("os.link(w['secret'], w['beside']); open(w['beside']).read()"),
    "link a file into the scratch folder": Attempt("os.link(w['secret'], 'h')"),
    "read by /proc/self/root": Attempt("open('/proc/self/root' + w['secret']).read()"),
    "read by /proc/self/cwd": Attempt("os.chdir(w['home']); open('/proc/self/cwd/secret').read()"),
    "read by a descriptor of the path": Attempt(
        "fd = os.open(w['secret'], os.O_PATH); open(f'/proc/self/fd/{fd}').read()"
    ),
    "read relative to a folder": Attempt(
        "fd = os.open(w['home'], os.O_PATH); os.close(os.open('secret', os.O_RDONLY, dir_fd=fd))"
    ),
    "read relative to the scratch folder": Attempt(
        "open(os.path.relpath(w['secret'], os.getcwd())).read()"
    ),
    "read by handle": Attempt(
        """
        handle = ctypes.create_string_buffer(struct.pack('Ii', 128, 0), 136)
        mount = ctypes.create_string_buffer(4)
        call('name_to_handle_at', -100, w['secret'].encode(), handle, mount, 0)
        """
    ),
    "read by openat2": Attempt(
        "call('openat2', -100, w['secret'].encode(), struct.pack('QQQ', 0, 0, 0), 24)"
    ),
    "map a file": Attempt(
        "mmap.mmap(os.open(w['secret'], os.O_RDONLY), 0, prot=mmap.PROT_READ)[:1]"
    ),
    "start a program of the user": Attempt("subprocess.run([w['script']], check=True)"),
    "import the user's module": Attempt("sys.path.insert(0, w['home']); import users_module"),
    "watch a folder": Attempt(
        "call('inotify_add_watch', call('inotify_init1', 0), w['home'].encode(), 0x100)"
    ),
    "watch a file by fcntl": Attempt(
        "fcntl.fcntl(os.open('/usr', os.O_RDONLY), fcntl.F_NOTIFY, 1); os.listdir('/')"
        "; signal.signal(signal.SIGIO, signal.SIG_IGN)"
    ),
    "append to a file": Attempt("open(w['secret'], 'a').close()"),
    "write to a file by r+": Attempt("open(w['secret'], 'r+').close()"),
    "create a file": Attempt("open(w['beside'], 'w').close()"),
    "create a file among temporary files": Attempt(
        "p = os.path.dirname(w['home']) + '/distflow-escape'; open(p, 'w').close(); os.unlink(p)"
    ),
    "create a file in memory": Attempt(
        "p = '/dev/shm/distflow-escape'; open(p, 'w').close(); os.unlink(p)"
    ),
    "create a file in the library": Attempt("open(os.__file__ + '.new', 'w')", NOT_RUN),
    "truncate a file": Attempt("os.truncate(w['own'], 0)"),
    "truncate a file by opening it to read": Attempt(
        "os.close(os.open(w['own'], os.O_RDONLY | os.O_TRUNC))"
    ),
    "make a folder": Attempt("os.mkdir(w['beside'])"),
    "move a file into the scratch folder": Attempt("os.rename(w['own'], w['beside'])"),
    "move the scratch folder's file out": Attempt(
        "open('f', 'w').close(); os.rename('f', os.path.join(w['home'], 'out'))"
    ),
    "exchange two files": Attempt(
        "open('f', 'w').close()\nif libc.renameat2(-100, b'f', -100, w['secret'].encode(), 2):"
        " raise OSError(ctypes.get_errno(), '')"
    ),
    "link the scratch folder's file out": Attempt(
        "open('f', 'w').close(); os.link('f', os.path.join(w['home'], 'linked'))"
    ),
    "make a symbolic link": Attempt("os.symlink('/', w['beside'])"),
    "make a pipe": Attempt("os.mkfifo(w['beside'])"),
    "remove a file": Attempt("os.unlink(w['own'])"),
    "remove a folder": Attempt("os.rmdir(w['empty'])"),
    "change a mode": Attempt("os.chmod(w['secret'], 0o644)"),
    "change a mode by fchmodat2": Attempt(
        "call('fchmodat2', -100, w['secret'].encode(), 0o644, 0)", NOT_RUN
    ),
    "change a mode by a descriptor": Attempt(
        "fd = os.open(os.__file__, os.O_RDONLY); os.fchmod(fd, os.fstat(fd).st_mode & 0o7777)",
        BY_ROOT,
    ),
    "change an owner": Attempt("os.chown(w['secret'], os.getuid(), -1)"),
    "change times": Attempt("os.utime(w['secret'])"),
    "change times by a descriptor": Attempt(
        "fd = os.open(os.__file__, os.O_RDONLY); s = os.fstat(fd); "
        "os.utime(fd, ns=(s.st_atime_ns, s.st_mtime_ns))",
        BY_ROOT,
    ),
    "set an extended attribute": Attempt("os.setxattr(w['secret'], 'user.escape', b'1')"),
    "remove an extended attribute": Attempt("os.removexattr(w['marked'], 'user.mark')"),
    "set flags of a file": Attempt(
        """
        fd = os.open(os.__file__, os.O_RDONLY)
        flags = bytearray(8)
        fcntl.ioctl(fd, 0x80086601, flags)
        fcntl.ioctl(fd, 0x40086602, flags)
        """,
        BY_ROOT,
    ),
    "make a device": Attempt("os.mknod('d', stat.S_IFBLK | 0o600, os.makedev(254, 0))", BY_ROOT),
    "run a program from memory": Attempt(
        "fd = os.memfd_create('m'); os.write(fd, open('/bin/true', 'rb').read()); "
        "os.execve(fd, ['true'], {}) if os.fork() == 0 else os.wait()"
    ),
}
PROCESSES = {
    "read the run's environment": Attempt("open(f'/proc/{w[\"run\"]}/environ').read()"),
    "read the run's arguments": Attempt("open(f'/proc/{w[\"run\"]}/cmdline').read()"),
    "read the run's memory": Attempt("open(f'/proc/{w[\"run\"]}/mem', 'rb')"),
    "list the run's descriptors": Attempt("os.listdir(f'/proc/{w[\"run\"]}/fd')"),
    "list all processes": Attempt("os.listdir('/proc')"),
    "read the parent's environment": Attempt("open(f'/proc/{os.getppid()}/environ').read()"),
    "read the parent's memory": Attempt("open(f'/proc/{os.getppid()}/mem', 'rb')"),
    "find a descriptor": Attempt("assert any(is_open(fd) for fd in range(3, 9000))", NOT_RUN),
    "find the run's variables": Attempt("os.environ['DISTFLOW_SECRET']"),
    "find the secret among all objects": Attempt(
        "assert any(w['mark'] + 'secret' in repr(vars(m)) for m in list(sys.modules.values()))",
        NOT_RUN,
    ),
    "find a frame of the sandbox": Attempt(
        "assert sys._getframe(1).f_back.f_back.f_locals['plan']", NOT_RUN
    ),
    "read another process": Attempt(
        """
        to = ctypes.create_string_buffer(8)
        local = struct.pack('QQ', ctypes.addressof(to), 8)
        remote = struct.pack('QQ', w['address'], 8)
        call('process_vm_readv', w['victim'], local, 1, remote, 1, 0)
        """
    ),
    "write to another process": Attempt(
        """
        of = ctypes.create_string_buffer(8)
        local = struct.pack('QQ', ctypes.addressof(of), 1)
        remote = struct.pack('QQ', w['address'], 1)
        call('process_vm_writev', w['victim'], local, 1, remote, 1, 0)
        """
    ),
    "trace a process": Attempt(
        "call('ptrace', 16, w['victim'], 0, 0); os.waitpid(w['victim'], 0x40000000); "
        "call('ptrace', 17, w['victim'], 0, 0)"
    ),
    "trace a process by seizing it": Attempt("call('ptrace', 0x4206, w['victim'], 0, 0)"),
    "be traced": Attempt("call('ptrace', 0, 0, 0, 0)"),
    "take a descriptor": Attempt("call('pidfd_getfd', os.pidfd_open(w['victim']), 0, 0)"),
    "compare processes": Attempt("call('kcmp', os.getpid(), w['victim'], 0, 0, 0)"),
    "advise on another's memory": Attempt(
        "part = struct.pack('QQ', w['address'] & ~4095, 4096)\n"
        "call('process_madvise', os.pidfd_open(w['victim']), part, 1, 20, 0)",
        BY_ROOT,
    ),
    "move another's memory": Attempt("call('move_pages', w['victim'], 0, 0, 0, 0, 0)"),
    "signal a process": Attempt("os.kill(w['victim'], 0)"),
    "signal the run": Attempt("os.kill(w['run'], 0)"),
    "signal all processes": Attempt("os.kill(-1, signal.SIGTERM); os.kill(w['run'], 0)", NOT_RUN),
    "signal the parent": Attempt("os.kill(os.getppid(), signal.SIGINT)", NOT_RUN),
    "signal a group": Attempt("os.killpg(w['victim'], 0)"),
    "signal a thread": Attempt("call('tgkill', w['victim'], w['victim'], 0)"),
    "queue a signal": Attempt(
        "call('rt_sigqueueinfo', w['victim'], 0, struct.pack('iii116x', 0, 0, -1))", BY_ANY
    ),
    "signal by a descriptor": Attempt("signal.pidfd_send_signal(os.pidfd_open(w['victim']), 0)"),
    "direct signals of a pipe": Attempt("fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, w['victim'])"),
    "change a priority": Attempt("os.setpriority(os.PRIO_PROCESS, w['victim'], 19)"),
    "change the user's priority": Attempt("os.setpriority(os.PRIO_USER, 0, 5)", NOT_RUN),
    "change a scheduler": Attempt(
        "os.sched_setscheduler(w['victim'], os.SCHED_BATCH, os.sched_param(0))"
    ),
    "change a processor": Attempt(
        "os.sched_setaffinity(w['victim'], os.sched_getaffinity(w['victim']))"
    ),
    "change a limit": Attempt("resource.prlimit(w['victim'], resource.RLIMIT_CORE, (0, 0))"),
    "change an order of input": Attempt("call('ioprio_set', 1, w['victim'], (2 << 13) | 4)"),
    "profile a process": Attempt(
        "call('perf_event_open', struct.pack('II112x', 1, 112) + bytes(8), w['victim'], -1, -1, 0)",
        BY_ROOT,
    ),
}
NETWORK = {
    "connect over TCP": Attempt("socket.create_connection(('127.0.0.1', w['tcp'])).close()"),
    "connect over IPv6": Attempt("socket.create_connection(('::1', w['tcp6'])).close()"),
    "listen for TCP": Attempt("socket.create_server(('127.0.0.1', 0)).close()"),
    "send over UDP": Attempt(
        "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', w['udp']))"
    ),
    "send over UDP and IPv6": Attempt(
        "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).sendto(b'x', ('::1', w['udp6']))"
    ),
    "connect to a Unix socket": Attempt("socket.socket(socket.AF_UNIX).connect(w['unix'])"),
    "connect to an abstract socket": Attempt(
        "socket.socket(socket.AF_UNIX).connect('\\0' + w['abstract'])"
    ),
    "listen at an abstract socket": Attempt(
        "s = socket.socket(socket.AF_UNIX); s.bind('\\0distflow-escape'); s.listen()"
    ),
    "send to a Unix socket": Attempt(
        "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', w['datagrams'])"
    ),
    "reconnect a pair of datagram sockets": Attempt(
        "a, b = socket.socketpair(type=socket.SOCK_DGRAM); a.connect(w['datagrams']); a.send(b'x')"
    ),
    "reconnect a pair of sequenced sockets": Attempt(
        "a, b = socket.socketpair(type=socket.SOCK_SEQPACKET)"
    ),
    "send from a stream to a path": Attempt(
        "a, b = socket.socketpair()\ncall('connect', a.fileno(), b'', 0)", NOT_RUN
    ),
    "look a name up": Attempt("socket.getaddrinfo('localhost', 80)"),
    "open a netlink socket": Attempt("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)"),
    "open a packet socket": Attempt("socket.socket(socket.AF_PACKET, socket.SOCK_RAW)", BY_ROOT),
    "open a raw socket": Attempt("socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)", BY_ROOT),
    "connect in a shell": Attempt(
        "subprocess.run(['bash', '-c', f'exec 3<>/dev/tcp/127.0.0.1/{w[\"tcp\"]}'], check=True)"
    ),
    "share memory of System V": Attempt(
        "i = call('shmget', 0, 4096, 0o1600); call('shmctl', i, 0, 0)"
    ),
    "share semaphores of System V": Attempt(
        "i = call('semget', 0, 1, 0o1600); call('semctl', i, 0, 0, 0)"
    ),
    "share a queue of System V": Attempt("i = call('msgget', 0, 0o1600); call('msgctl', i, 0, 0)"),
    "open a POSIX queue": Attempt(
        "fd = call('mq_open', b'distflow-escape', 0o102, 0o600, 0); call('mq_unlink',"
        " b'distflow-escape')"
    ),
}
KERNEL = {
    "enter a user namespace": Attempt("call('unshare', 0x10000000)"),
    "enter a mount namespace": Attempt("call('unshare', 0x20000)", BY_ROOT),
    "clone into a user namespace": Attempt(
        "p = call('clone', 0x10000011, 0, 0, 0, 0)\nif p == 0: os._exit(0)\nos.waitpid(p, 0)"
    ),
    "clone by clone3": Attempt(
        "p = call('clone3', struct.pack('QQQQQQQQ', 0, 0, 0, 0, 17, 0, 0, 0), 64)\n"
        "if p == 0: os._exit(0)\nos.waitpid(p, 0)"
    ),
    "enter the run's namespace": Attempt(
        "call('setns', os.open(f'/proc/{w[\"run\"]}/ns/uts', os.O_RDONLY), 0)", BY_ROOT
    ),
    "mount a file system": Attempt(
        "call('mount', b'none', b'.', b'tmpfs', 0, 0); call('umount2', b'.', 2)", BY_ROOT
    ),
    "change the root": Attempt("call('chroot', b'.')", BY_ROOT),
    "set up io_uring": Attempt(
        "call('io_uring_setup', 1, ctypes.create_string_buffer(120))", NOT_RUN
    ),
    "load a BPF program": Attempt("call('bpf', 0, bytes(16), 16)", NOT_RUN),
    "catch page faults": Attempt("call('userfaultfd', 1)"),
    "keep a key": Attempt("call('add_key', b'user', b'distflow', b'x', 1, -3)"),
    "read a keyring": Attempt("call('keyctl', 0, -3, 0)"),
    "change the personality": Attempt("call('personality', 0x0040000)"),
    "become root": Attempt("os.setuid(0)", BY_ROOT),
    "join root's groups": Attempt("os.setgroups([0])", BY_ROOT),
    "take all capabilities": Attempt(
        "call('capset', struct.pack('Ii', 0x20080522, 0), struct.pack('6I', *[1 << 21] * 6))",
        BY_ROOT,
    ),
    "gain rights by a setuid program": Attempt(
        "assert libc.prctl(39, 0, 0, 0, 0) == 0"  # PR_GET_NO_NEW_PRIVS
    ),
    "raise a limit": Attempt(
        "resource.setrlimit(resource.RLIMIT_NPROC, (1 << 20, 1 << 20))", NOT_RUN
    ),
    "write core files": Attempt(
        "resource.setrlimit(resource.RLIMIT_CORE, (1 << 30, 1 << 30))", BY_ROOT
    ),
    "hide from the one that counts": Attempt("assert libc.prctl(4, 0, 0, 0, 0) == 0"),
    "call a 32-bit system call": Attempt(
        # mov eax, 20 (getpid); int 0x80; ret
        r"assert machine_code(b'\xb8\x14\x00\x00\x00\xcd\x80\xc3') > 0",
    ),
    "open a file by 32-bit system calls": Attempt(
        # mov eax, 41 (dup); xor ebx, ebx; int 0x80; ret
        r"assert machine_code(b'\xb8\x29\x00\x00\x00\x31\xdb\xcd\x80\xc3') > 0",
    ),
    "call a system call of x32": Attempt(
        "assert libc.syscall(ctypes.c_long(0x40000000 + 39)) > 0", NOT_RUN
    ),
    "call what is newer than the filter": Attempt(
        "assert libc.syscall(ctypes.c_long(469), -100, b'.', 0, 0, 0) == 0 or "
        "ctypes.get_errno() != 38",
        NOT_RUN,
    ),
    "call all that is refused": Attempt(
        """
        def errno_of(name):
            libc.syscall(ctypes.c_long(w['numbers'][name]), *[ctypes.c_long(-1)] * 6)
            return ctypes.get_errno()
        assert [name for name in w['refused'] if errno_of(name) not in (1, 38)]
        """,
        NOT_RUN,
    ),
}
ATTEMPTS = FILES | PROCESSES | NETWORK | KERNEL
OF_X86 = {"call a 32-bit system call", "open a file by 32-bit system calls"}


def files(name, world):
    """The files of an attempt's program."""
    code = textwrap.dedent(ATTEMPTS[name].code).strip()
    return {
        "main.py": MAIN.encode(),
        "helpers.py": (HELPERS + IS_OPEN).encode(),
        "attempt.py": code.encode(),
        "world.json": world,
    }


IS_OPEN = """
def is_open(fd):
    try:
        os.fstat(fd)
        return True
    except OSError:
        return False
"""
VICTIM = """
import ctypes, sys, time
content = ctypes.create_string_buffer(4096)
print(ctypes.addressof(content), flush=True)
time.sleep(1e6)
"""


@contextlib.contextmanager
def world(home: pathlib.Path, numbers, refused):
    """Makes what attempts aim at; gives its names."""
    mark = f"distflow-{os.getpid()}-"
    contents = {"secret": "0" * 64, "private": "1", "users_module.py": "", "script": "#!/bin/sh\n"}
    for name, content in contents.items():
        (home / name).write_text(content)
        (home / name).chmod({"private": 0o600, "script": 0o755}.get(name, 0o644))
    (home / "marked").write_text("")
    with contextlib.suppress(OSError):  # a file system without them
        os.setxattr(home / "marked", "user.mark", b"1")
    with contextlib.ExitStack() as stack:
        opened = {}
        for name, family, kind, address in [
            ("tcp", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            ("tcp6", socket.AF_INET6, socket.SOCK_STREAM, ("::1", 0)),
            ("udp", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            ("udp6", socket.AF_INET6, socket.SOCK_DGRAM, ("::1", 0)),
            ("unix", socket.AF_UNIX, socket.SOCK_STREAM, str(home / "unix")),
            ("datagrams", socket.AF_UNIX, socket.SOCK_DGRAM, str(home / "datagrams")),
            ("abstract", socket.AF_UNIX, socket.SOCK_STREAM, f"\0{mark}abstract"),
        ]:
            opened[name] = stack.enter_context(socket.socket(family, kind))
            opened[name].bind(address)
            if kind == socket.SOCK_STREAM:
                opened[name].listen(64)
        for name in ("unix", "datagrams"):
            (home / name).chmod(0o777)
        victim = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", VICTIM], stdout=subprocess.PIPE, start_new_session=True
            )
        )
        stack.callback(os.kill, victim.pid, signal.SIGKILL)
        yield {
            "home": str(home),
            **{name: str(home / name) for name in ("secret", "private", "script", "marked")},
            "own": str(home / "own"),
            "beside": str(home / "beside"),
            "empty": str(home / "empty"),
            **{name: opened[name].getsockname()[1] for name in ("tcp", "tcp6", "udp", "udp6")},
            **{name: str(home / name) for name in ("unix", "datagrams")},
            "abstract": f"{mark}abstract",
            "mark": mark,
            "run": os.getpid(),
            "victim": victim.pid,
            "address": int(victim.stdout.readline()),
            "numbers": numbers,
            "refused": refused,
        }


def renew(home: pathlib.Path):
    """Makes again what attempts outside have removed or made."""
    for name in ("beside", "out", "linked"):
        path = home / name
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
    (home / "own").write_text("own")
    (home / "empty").mkdir(exist_ok=True)
