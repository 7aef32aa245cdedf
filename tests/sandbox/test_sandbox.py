"""The sandbox's call: outcomes of programs, limits, sessions, failures of its own, and levels.

An outcome is what the program did; what the sandbox could not do is a SandboxError. A run without
the sandbox imports nothing of it, and docs/sandbox.md does what it says.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import io
import math
import os
import pathlib
import signal
import struct
import subprocess
import sys
import tempfile

import pytest
from support.doc_blocks import blocks, commands
from support.paths import ROOT
from support.waiting import until

from distflow_jax.config.sandbox_config import LEVELS, SandboxConfig
from distflow_jax.sandbox import (
    cgroups,
    descendants,
    scratch_folder,
    syscall_filter,
    system_calls,
    zygote_process,
)
from distflow_jax.sandbox.byte_frames import FramesEnded
from distflow_jax.sandbox.sandbox import Sandbox
from distflow_jax.sandbox.sandbox_records import (
    MIB,
    SandboxError,
    SandboxLimits,
    SandboxProgram,
)

pytestmark = pytest.mark.skipif(bool(system_calls.unsupported()), reason=system_calls.unsupported())
LIMITS, SHORT = SandboxLimits(), SandboxLimits(seconds=0.3)


def python(source, stdin=b"", *arguments, limits=LIMITS, **files):
    """A Python program."""
    contents = {"main.py": source.encode(), **files}
    return SandboxProgram(("python3", "main.py", *arguments), contents, stdin, limits)


@pytest.fixture(scope="module", params=LEVELS)
def sandbox(request):
    """A sandbox of each level that this machine has."""
    try:
        with Sandbox(SandboxConfig(level=request.param)) as sandbox:
            yield sandbox
    except ValueError as error:
        assert request.param != "kernel" or "Landlock" in str(error)
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def best():
    """The strongest sandbox of this machine."""
    with Sandbox(SandboxConfig()) as sandbox:
        yield sandbox


def test_output_errors_and_code(sandbox):
    source = "import sys\nprint(input()[::-1])\nprint('oh', file=sys.stderr)\nsys.exit(7)"
    outcome = sandbox.run(python(source, b"abc\n"))
    assert (outcome.cause, outcome.exit_code) == ("ended", 7)
    assert (outcome.stdout, outcome.stderr) == (b"cba\n", b"oh\n")
    assert not outcome.succeeded and not outcome.is_cut
    assert 0 < outcome.cpu_seconds and 0 < outcome.seconds and outcome.memory > MIB


def test_warm_python_is_like_python(sandbox):
    """Arguments, modules, exit functions, threads and tracebacks are as of `python3 main.py`."""
    source = """
import atexit, os, pickle, sys, threading, time
import beside
class Point:
    pass
assert type(pickle.loads(pickle.dumps(Point()))) is Point
assert __name__ == "__main__" and __file__ == "main.py" and sys.argv == ["main.py", "a", "b c"]
assert os.getcwd() == os.environ["HOME"] == sys.path[0] and sys.dont_write_bytecode
assert not [name for name in sys.modules if "distflow" in name]
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.05), print("thread", beside.value))).start()
print("é")
raise ValueError("the end")
"""
    outcome = sandbox.run(python(source, b"", "a", "b c", **{"beside.py": b"value = 5"}))
    assert outcome.stdout.decode().splitlines() == ["é", "thread 5", "at exit"]
    trace = outcome.stderr.decode().splitlines()
    assert trace[0] == "Traceback (most recent call last):"
    assert trace[1].startswith('  File "main.py", line 13') and trace[-1] == "ValueError: the end"
    assert outcome.exit_code == 1


@pytest.mark.parametrize(
    "source, code, errors",
    [
        ("import sys; sys.exit()", 0, b""),
        ("import sys; sys.exit('why')", 1, b"why\n"),
        ("import os; os._exit(300)", 44, b""),
        ("raise SystemExit(True)", 1, b""),
        ("exit(3)", 3, b""),
        ("quit()", 0, b""),
        ("def f(:", 1, None),
    ],
)
def test_exit_codes(best, source, code, errors):
    outcome = best.run(python(source))
    assert outcome.exit_code == code
    assert outcome.stderr == errors if errors is not None else b"SyntaxError" in outcome.stderr


def test_other_programs(sandbox):
    """Any program of the system runs, and Python with flags; one that is absent is no failure."""
    shell = "cat; echo $HOME $PATH >&2; echo made > file; cat file; exit 3"
    outcome = sandbox.run(SandboxProgram(("bash", "-c", shell), {}, b"in "))
    assert (outcome.exit_code, outcome.stdout) == (3, b"in made\n")
    assert len(outcome.stderr.split()) == 2
    outcome = sandbox.run(SandboxProgram(("python3", "-c", "print(6 * 7)")))
    assert (outcome.exit_code, outcome.stdout) == (0, b"42\n"), outcome
    outcome = sandbox.run(SandboxProgram(("no-such-program",)))
    assert (outcome.cause, outcome.exit_code) == ("ended", 127)


def test_environment_is_the_sandbox_s(sandbox, monkeypatch):
    monkeypatch.setenv("SECRET", "of the run")
    outcome = sandbox.run(SandboxProgram(("env",)))
    names = {line.split("=")[0] for line in outcome.stdout.decode().splitlines()}
    assert names == {
        *("PATH", "HOME", "TMPDIR", "LANG", "MALLOC_ARENA_MAX", "PYTHONDONTWRITEBYTECODE")
    }


def test_files_in_folders(sandbox):
    source = "import os, pack.inner; print(sorted(os.listdir('.')), open('a/b/c').read())"
    files = {"pack/__init__.py": b"", "pack/inner.py": b"", "a/b/c": b"deep"}
    assert sandbox.run(python(source, **files)).stdout == b"['a', 'main.py', 'pack'] deep\n"


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../../x", "a//b", "./x", "a\0b"])
def test_paths_of_files_stay_below_the_scratch_folder(name):
    with pytest.raises(ValueError, match="not a path below the scratch folder"):
        SandboxProgram(("true",), {name: b""})


@pytest.mark.parametrize("argv", [(), ("a\0",)])
def test_programs_have_names(argv):
    with pytest.raises(ValueError, match="names no program"):
        SandboxProgram(argv)


def test_scratch_folders_are_new(sandbox):
    source = "import os; print(os.listdir('.')); open('left', 'w').close()"
    assert [sandbox.run(python(source)).stdout for _ in range(2)] == [b"['main.py']\n"] * 2


def test_no_name_hinders_the_removal_of_a_scratch_folder(sandbox):
    """A program's folders have an outcome, whatever their names, and end no other program."""
    names = "import os\nfor i in range(9):\n for top in 'amz': os.makedirs(f'{top}oved-{i}/b/c')\n"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(sandbox.run, python("import time; time.sleep(0.5); print(1)"))
        assert sandbox.run(python(names)).succeeded
        assert other.result().stdout == b"1\n"


def test_output_is_cut_at_the_limit(sandbox):
    limits = dataclasses.replace(LIMITS, output=1000)
    exact = sandbox.run(python("print('x' * 999)", limits=limits))
    assert (exact.cause, len(exact.stdout), exact.is_cut) == ("ended", 1000, False)
    above = sandbox.run(
        python("print('x' * 1000, flush=True)\nimport time; time.sleep(9)", limits=limits)
    )
    assert (above.cause, len(above.stdout), above.is_cut) == ("output", 1000, True)


def test_large_input_and_output_at_once(sandbox):
    content = os.urandom(1 << 21)
    limits = dataclasses.replace(LIMITS, output=1 << 22)
    outcome = sandbox.run(SandboxProgram(("cat",), {}, content, limits))
    assert outcome.stdout == content


def test_input_that_nobody_reads(sandbox):
    assert sandbox.run(python("print(1)", b"x" * (1 << 22))).stdout == b"1\n"


def test_deadline_counts_from_the_start(sandbox):
    outcome = sandbox.run(python("import time\nprint(1, flush=True)\ntime.sleep(99)", limits=SHORT))
    assert (outcome.cause, outcome.stdout, outcome.exit_code) == ("deadline", b"1\n", -9)
    assert outcome.seconds >= SHORT.seconds


def test_cpu_of_all_processes_counts(sandbox):
    limits = dataclasses.replace(LIMITS, seconds=60.0, cpu_seconds=0.4)
    source = "import os\nos.fork(); os.fork()\nwhile True: pass"
    outcome = sandbox.run(python(source, limits=limits))
    assert outcome.cause == "cpu" and outcome.cpu_seconds >= 0.4


def test_cpu_of_children_counts_whose_ends_are_ignored(sandbox):
    source = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(100):
    if not os.fork():
        while time.process_time() < 0.15: pass
        os._exit(0)
    try: os.wait()
    except ChildProcessError: pass
"""
    limits = dataclasses.replace(LIMITS, cpu_seconds=1.0, seconds=60.0)
    outcome = sandbox.run(python(source, limits=limits))
    assert outcome.cause == "cpu" and 1 < outcome.cpu_seconds < 5


def test_orphans_that_have_ended_are_no_processes(sandbox):
    source = """
import os, time
for _ in range(60):
    if not (child := os.fork()):
        os.fork()
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.01)
"""
    limits = dataclasses.replace(LIMITS, processes=24, seconds=60.0)
    assert sandbox.run(python(source, limits=limits)).succeeded


FORKS = """
import mmap, os, time
{before}
for _ in range({count}):
    if not os.fork():
        {within}
        time.sleep({seconds})
        os._exit(0)
for _ in range({count}): os.wait()
"""


def test_pages_of_several_processes_count_once(sandbox):
    """Data before forks are one copy; memory that is shared without a file counts, too."""
    limits = dataclasses.replace(LIMITS, memory=200 * MIB, seconds=60.0)
    kept = {"before": "data = bytearray(b'x' * (80 << 20))", "within": "pass", "seconds": 0.3}
    outcome = sandbox.run(python(FORKS.format(count=3, **kept), limits=limits))
    assert outcome.succeeded and outcome.memory < 200 * MIB
    take = "m = mmap.mmap(-1, 80 << 20); m.write(b'x' * (80 << 20))"
    shared = {"before": "", "within": take, "seconds": 5}
    outcome = sandbox.run(python(FORKS.format(count=4, **shared), limits=limits))
    assert outcome.cause == "memory"


def test_side_by_side(sandbox):
    """Programs of several threads keep apart, and each thread gets its own."""
    source = "import time\nx = input(); time.sleep(0.01); print(x)"
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        runs = [pool.submit(sandbox.run, python(source, b"%d\n" % i)) for i in range(40)]
        assert [int(run.result().stdout) for run in runs] == list(range(40))


ECHO = """
import os, sys
requests, answers = open(3, "rb"), open(4, "wb")
total = 0
while header := requests.read(4):
    content = requests.read(int.from_bytes(header, "little"))
    total += len(content)
    print("read", len(content))
    if content == b"exit":
        sys.exit(9)
    if content == b"hang":
        import time; time.sleep(99)
    answer = b"%d " % total + content
    answers.write(len(answer).to_bytes(4, "little") + answer)
    answers.flush()
"""


def test_session_keeps_its_state(sandbox):
    with sandbox.open(python(ECHO)) as session:
        for content, answer in [(b"ab", b"2 ab"), (b"", b"2 "), (b"x" * 200000, None)]:
            session.send(content, 9)
            assert session.receive(1 << 20, 9) == (answer or b"200002 " + content)
        outcome = session.close()
    assert (outcome.cause, outcome.exit_code) == ("closed", -9)


def test_session_that_ends(sandbox):
    with sandbox.open(python(ECHO)) as session:
        session.send(b"exit", 9)
        with pytest.raises(FramesEnded):
            session.receive(100, 9)
        until(lambda: not descendants.children(session_keeper(sandbox)))
        outcome = session.close()
    assert outcome.exit_code == 9 and outcome.stdout == b"read 4\n"
    assert session.close() is outcome


def session_keeper(sandbox):
    """The only keeper's process, or the zygote if there is none."""
    zygote = sandbox._zygote.process.pid
    return next(iter(descendants.children(zygote)), zygote)


def test_session_has_deadlines(sandbox):
    with sandbox.open(python(ECHO)) as session:
        session.send(b"hang", 9)
        with pytest.raises(TimeoutError):
            session.receive(100, 0.05)
    with sandbox.open(python("import time; time.sleep(99)")) as session:
        with pytest.raises(TimeoutError):
            session.send(b"x" * (1 << 22), 0.05)
    with sandbox.open(python(ECHO, limits=SHORT)) as session:
        with pytest.raises(FramesEnded):
            session.receive(100, 60)
        assert session.close().cause == "deadline"


def test_session_refuses_large_frames(sandbox):
    source = "import os; os.write(4, b'\\xff\\xff\\xff\\x7f')\nimport time; time.sleep(99)"
    with sandbox.open(python(source)) as session, pytest.raises(FramesEnded, match="allowed"):
        session.receive(1 << 20, 9)


def test_programs_end_with_the_run():
    """A run that is killed leaves no process and no folder."""
    code = f"""
import sys, threading
sys.path[:0] = [{str(ROOT)!r}]
from distflow_jax.config.sandbox_config import SandboxConfig
from distflow_jax.sandbox.sandbox import Sandbox
from distflow_jax.sandbox.sandbox_records import SandboxLimits, SandboxProgram
sandbox = Sandbox(SandboxConfig()).__enter__()
zygote = sandbox._zygote
program = SandboxProgram(("sleep", "999"), limits=SandboxLimits(seconds=999))
threading.Thread(target=sandbox.run, args=(program,)).start()
print(zygote.process.pid, zygote.folders[-1], flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        zygote, folder = run.stdout.readline().split()
        until(lambda: descendants.children(int(zygote)))
        run.kill()
    until(lambda: not pathlib.Path(folder).exists())
    until(lambda: not pathlib.Path(f"/proc/{zygote}").exists() or is_zombie(zygote))


def is_zombie(process):
    return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_failures_of_the_sandbox_are_no_outcomes(best):
    """A keeper that is killed fails its call, a zygote the calls under way; later calls succeed."""
    program = python("import time; time.sleep(99)")
    for victim in (lambda zygote: descendants.children(zygote)[0], lambda zygote: zygote):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            zygote = best._zygote.process.pid
            until(lambda zygote=zygote: not descendants.children(zygote))  # of an earlier call
            run = pool.submit(best.run, program)
            keepers = until(lambda zygote=zygote: descendants.children(zygote))
            killed = victim(zygote)
            os.kill(killed, signal.SIGKILL)
            if killed == zygote:
                for keeper in keepers:
                    with contextlib.suppress(ProcessLookupError):  # it ends with its zygote
                        os.kill(keeper, signal.SIGKILL)
                until(lambda zygote=zygote: is_zombie(zygote))
            with pytest.raises(SandboxError, match="the keeper of a program exited"):
                run.result()
        assert best.run(python("print(1)")).stdout == b"1\n"


def test_a_sandbox_process_that_does_not_start_is_named(monkeypatch):
    monkeypatch.setattr(zygote_process, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(zygote_process, "_START", "import time; time.sleep(99)")
    with pytest.raises(SandboxError, match="did not start within 0 s"):
        zygote_process.ZygoteProcess("kernel", "", "")


@pytest.fixture
def folder():
    """A folder that every user may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield pathlib.Path(name)


def test_scratch_disk_without_space(folder):
    """A program that could not be written, or whose disk is full, has no outcome."""
    limits = dataclasses.replace(LIMITS, disk=1 << 20)
    with Sandbox(SandboxConfig()) as sandbox, pytest.raises(SandboxError):
        sandbox.run(python("", limits=limits, large=bytes(2 << 20)))
    if os.geteuid() != 0:
        pytest.skip("only root mounts a small disk")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder])
    if mounted.returncode:
        pytest.skip("this root mounts nothing")
    try:
        settings = SandboxConfig(level="kernel", scratch=str(folder))
        source = "open('f', 'wb', buffering=0).write(bytes(1 << 20))\nraise SystemExit(1)"
        with Sandbox(settings) as sandbox:
            with pytest.raises(SandboxError, match=f"the disk of {folder} is full"):
                sandbox.run(python(source + "\n"))
            assert sandbox.run(python("print(1)")).stdout == b"1\n"
    finally:
        subprocess.run(["umount", folder], check=True)


def test_strongest_level_is_taken(best):
    for level in reversed(LEVELS):
        try:
            with Sandbox(SandboxConfig(level=level)):
                break
        except ValueError:
            continue
    assert best.level == level
    assert len(best.attempts) >= 12 and all(best.attempts.values())


def test_below_the_minimum_a_run_does_not_begin(monkeypatch):
    monkeypatch.setattr(cgroups, "_ROOT", pathlib.Path("/nowhere"))
    monkeypatch.setattr("distflow_jax.sandbox.sandbox.unsupported", lambda: "darwin is not Linux")
    with pytest.raises(ValueError, match="sandbox.minimum=kernel: .*kernel: darwin is not Linux"):
        Sandbox(SandboxConfig()).__enter__()


def test_level_that_lets_something_through_is_not_taken(monkeypatch):
    attempts = {"do nothing": "pass"}
    monkeypatch.setattr("distflow_jax.sandbox.self_attack.ATTEMPTS", attempts)
    with pytest.raises(ValueError, match="kernel: does not stop: do nothing"):
        Sandbox(SandboxConfig()).__enter__()


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"level": "kernal"}, "sandbox.level must be one of"),
        ({"level": "kernel", "minimum": "cgroup"}, "below sandbox.minimum=cgroup"),
        ({"level": "remote"}, "needs sandbox.url"),
        ({"url": "http://a:1"}, "has no effect with sandbox.level='auto'"),
        ({"memory_mib": 1}, "sandbox.memory_mib must be at least 64"),
        ({"seconds": 0.0}, "sandbox.seconds must be positive"),
        ({"scratch": "/nowhere"}, "sandbox.scratch=/nowhere does not exist"),
        ({"packages": "/nowhere"}, "sandbox.packages=/nowhere does not exist"),
    ],
)
def test_settings_are_checked(settings, words):
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        Sandbox(SandboxConfig(**settings)).__enter__()


def test_packages_that_programs_may_import(folder):
    (folder / "wanted.py").write_text("value = 3")
    with Sandbox(SandboxConfig(packages=str(folder))) as sandbox:
        assert sandbox.run(python("import wanted; print(wanted.value)")).stdout == b"3\n"


def test_numbers_of_system_calls_are_the_kernel_s():
    """Golden: the headers that this machine has."""
    headers = {
        "x86_64": ["/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"],
        "aarch64": ["/usr/include/asm-generic/unistd.h"],
    }
    seen = 0
    for machine, paths in headers.items():
        for path in filter(os.path.exists, paths):
            rows = (line.split() for line in pathlib.Path(path).read_text().splitlines())
            found = {
                row[1].removeprefix("__NR_").removeprefix("__NR3264_"): int(row[2])
                for row in rows
                if len(row) >= 3 and row[0] == "#define" and row[2].isdigit()
            }
            ours = system_calls.numbers(machine)
            both = ours.keys() & found.keys()
            assert {name: ours[name] for name in both} == {name: found[name] for name in both}
            seen += len(both)
    if not seen:
        pytest.skip("no headers of Linux")


def test_all_refused_calls_have_numbers():
    known = system_calls.numbers("x86_64")
    named = [name for names in system_calls.NAMES.values() for name in names]
    assert set(named) == known.keys() and len(named) == len(known) >= 139


@pytest.mark.parametrize("landlock", [0, 1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize("alone", [True, False])
def test_filter_verdicts(landlock, alone):
    """The filter, interpreted: what Landlock lacks is refused, at every ABI."""
    rules = syscall_filter.make_filter(landlock, alone=alone, process=77)

    def verdict(name, *arguments):
        return interpret(rules, system_calls.NUMBERS[name], arguments)

    assert verdict("read" if "read" in system_calls.NUMBERS else "close_range") == "allow"
    assert verdict("ptrace") == verdict("connect") == verdict("unshare") == 1
    assert verdict("clone3") == 38
    assert verdict("clone", 17) == "allow" and verdict("clone", 0x10000011) == 1
    assert verdict("socketpair", 1, 1 | 0x80000) == "allow"
    assert verdict("socketpair", 1, 2) == verdict("socketpair", 1, 5) == 1
    assert verdict("socketpair", 2, 1) == 1
    assert verdict("ioctl", 3, 0x5413) == "allow" and verdict("ioctl", 3, 0x40086602) == 25
    assert verdict("prlimit64", 0) == "allow" and verdict("prlimit64", 5) == 1
    assert verdict("fcntl", 3, 2) == "allow" and verdict("fcntl", 3, 8) == 1
    assert verdict("fchmod") == ("allow" if alone else 1)
    truncates = "allow" if landlock >= 3 else 1
    assert verdict("truncate") == verdict("openat", 0, 0, 0o1000) == truncates
    assert verdict("openat", 0, 0, 0o1001) == "allow"  # writing: Landlock's
    signals = "allow" if landlock >= 6 or alone else 1
    assert verdict("kill", 1) == verdict("tgkill", 1) == verdict("tkill", 1) == signals
    assert verdict("kill", 0) == verdict("kill", 77) == verdict("tgkill", 77) == "allow"
    assert interpret(rules, system_calls.LAST_NUMBER + 1, ()) == 38
    assert interpret(rules, 0x40000000 + 39, ()) == 38
    assert interpret(rules, 20, (), arch=0x40000003) == "kill"


def interpret(rules, number, arguments, arch=None):
    """The verdict of a classic BPF program on a call."""
    arch = system_calls.AUDIT_ARCH if arch is None else arch
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=iIQ6q", number, arch, 0, *padded)
    steps = list(struct.iter_unpack("=HBBI", rules))
    value, at = 0, 0
    while True:
        code, yes, no, constant = steps[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("=I", data, constant)
        elif code == 0x54:
            value &= constant
        elif code == 0x06:
            kinds = {0x7FFF0000: "allow", 0x80000000: "kill"}
            return kinds.get(constant, constant & 0xFFFF)
        else:
            holds = {0x15: value == constant, 0x25: value > constant, 0x45: value & constant}
            at += yes if holds[code] else no


def test_folders_of_strangers_are_removed(tmp_path):
    """However deep, wide or closed a folder is, and whatever its links lead to."""
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    folder.mkdir()
    for top in ("a" * 200, "b" * 200):  # the path of the last is longer than any that has a call
        inner = os.open(folder, os.O_RDONLY)
        for depth in range(40):
            os.mkdir(top, dir_fd=inner)
            os.symlink(outside, f"link-{top[0]}-{depth}", dir_fd=inner)
            below = os.open(top, os.O_RDONLY, dir_fd=inner)
            os.close(inner)
            inner = below
        os.close(inner)
    (folder / "closed").mkdir()
    (folder / "closed" / "file").write_text("")
    (folder / "closed").chmod(0)
    count = functools.partial(scratch_folder.count_bytes, str(folder))
    closed = os.geteuid() != 0  # a folder that its owner cannot read
    assert 80 * 4096 <= count(math.inf, math.inf) <= (math.inf if closed else 1000 * 4096)
    assert 4096 < count(4096, math.inf) <= 8192 and count(math.inf, 0) == 0
    scratch_folder.remove_folder(str(folder))
    assert not folder.exists() and (outside / "kept").read_text() == "kept"


def test_groups_of_version_2(tmp_path, monkeypatch):
    """Where this process stands or above, if memory and processes are counted in groups there."""
    own = next(
        row.rstrip("\n").split(":", 2)[2]
        for row in open("/proc/self/cgroup")
        if row.startswith("0::")
    )
    rows = f"0::{own}\n"
    monkeypatch.setattr("builtins.open", opens("/proc/self/cgroup", rows))
    here = tmp_path / own.lstrip("/")
    here.mkdir(parents=True, exist_ok=True)
    (here / "cgroup.subtree_control").write_text("cpu memory pids\n")
    assert cgroups.find(tmp_path) == (str(here),)
    (here / "cgroup.subtree_control").write_text("cpu\n")
    with pytest.raises((OSError, FileNotFoundError)):
        cgroups.find(tmp_path)
    group = cgroups.Cgroup.make((str(tmp_path),), 3, SandboxLimits(processes=5, memory=1000))
    (folder,) = group.folders
    assert (folder / "pids.max").read_text() == "7"


def opens(path, text):
    """An `open` that finds another text at one path."""
    before = open

    def replaced(file, *arguments, **named):
        return io.StringIO(text) if file == path else before(file, *arguments, **named)

    return replaced


def test_a_run_without_the_sandbox_imports_nothing_of_it():
    code = (
        "import sys, distflow_jax.run\n"
        "print([name for name in sys.modules if name.startswith('distflow_jax.sandbox')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_zygote_imports_nothing_of_the_run():
    """Neither packages nor any of our modules but those of the sandbox and their records."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import distflow_jax.sandbox.zygote\n"
        "print([n for n in sys.modules if n.startswith('distflow_jax.') and"
        " not n.startswith('distflow_jax.sandbox')])"
    )
    command = [sys.executable, "-I", "-S", "-c", code, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_page():
    """docs/sandbox.md to the letter."""
    shown = blocks(ROOT / "docs" / "sandbox.md")
    printed = []
    for block in shown:
        if block.language == "python":
            printed.append(check([sys.executable, "-c", block.text]))
        elif block.language in ("", "bash"):
            printed += [check([sys.executable, *line[1:]]) for line in commands(block.text)]
    assert "42" in printed[0] and "read a user's file" in printed[0]


def check(command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
