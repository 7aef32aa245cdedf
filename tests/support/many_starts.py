"""Many starts of subcommands, one after the other, and what each does to the machine.

    python -m support.many_starts HOW CASES RESULTS

CASES is JSON: [{"name": ..., "arguments": [...]}, ...], arguments those of scripts/train.py, or of
the script of "command". HOW is "exec", a process each as a user starts it, or "fork": this process
imports all that a start needs, and each start is a fork of it that calls what the script calls. No
device has been touched before the fork, and the imports are paid once.

RESULTS gets one JSON line for each: its name, exit code, output, the CPU-seconds of it and its
children (a fork's with those of the imports), and the processes that it left behind.
"""

import ctypes
import gc
import importlib
import json
import os
import pathlib
import resource
import signal
import sys
import tempfile
import time

from distflow_jax.commands import main as commands
from support.paths import ROOT

PR_SET_CHILD_SUBREAPER = 36
CPU_SECONDS = 12  # of one process: a start that trains ends here
MEMORY = 6 << 30  # bytes of one process: one that reads a file without end stops here
WALL_SECONDS = 120.0
LEAVE_SECONDS = 10.0  # for children to end after their parent


def become(command, arguments, outputs):
    """Makes this process one that was started with these arguments."""
    os.setsid()
    for descriptor, file in zip((1, 2), outputs, strict=True):
        os.dup2(file.fileno(), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    sys.argv = [str(ROOT / "scripts" / f"{command}.py"), *arguments]


def children():
    pid = os.getpid()
    return pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def reap(first):
    """(exit status of the child `first`, CPU-seconds, what was left) once all have ended."""
    status, cpu, left, end = None, 0.0, [], time.monotonic() + WALL_SECONDS
    while children():
        pid, ended, usage = os.wait4(-1, os.WNOHANG)
        if pid:
            cpu += usage.ru_utime + usage.ru_stime
            if pid == first:
                status, end = ended, time.monotonic() + LEAVE_SECONDS
            continue
        if time.monotonic() > end:
            for child in children():
                command = pathlib.Path(f"/proc/{child}/cmdline").read_bytes()
                left.append(command.replace(b"\0", b" ").decode(errors="replace")[:200])
                os.kill(int(child), signal.SIGKILL)
            end = time.monotonic() + LEAVE_SECONDS
        time.sleep(0.005)
    return status, cpu, left


def start(how, command, arguments, outputs):
    """In a new process: becomes the start, and leaves by SystemExit or a traceback as it does."""
    become(command, arguments, outputs)
    if how == "exec":
        os.execv(sys.executable, [sys.executable, *sys.argv])
    commands.run_script(command)


def text_of(file):
    file.seek(0)
    return file.read().decode(errors="replace")[-4000:]


def main(how, cases, results):
    # whoever loses its parent becomes a child of this process
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    imports, cases = 0.0, json.loads(pathlib.Path(cases).read_text())
    if how == "fork":
        for command in {case.get("command", "train") for case in cases}:
            importlib.import_module(f"distflow_jax.commands.{command}_command")
        usage = resource.getrusage(resource.RUSAGE_SELF)
        imports = usage.ru_utime + usage.ru_stime
        gc.freeze()
    for case in cases:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if child == 0:
                start(how, case.get("command", "train"), case["arguments"], (out, err))
            status, cpu, left = reap(child)
            line = {
                "name": case["name"],
                "code": os.waitstatus_to_exitcode(status),
                "stdout": text_of(out),
                "stderr": text_of(err),
                "cpu": cpu + imports,
                "left": left,
            }
        with open(results, "a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
