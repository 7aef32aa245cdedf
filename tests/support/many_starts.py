"""Many starts of scripts/train.py from one process that has imported all it needs.

    python -m support.many_starts CASES RESULTS

CASES is JSON: [{"name": ..., "arguments": [...]}, ...], arguments those of scripts/train.py. Each
start is a fork that calls what the script calls, before this process has touched a device, so that
no import is paid twice. RESULTS gets one JSON line for each: its name, exit code, output, the
CPU-seconds of it and its children and those of the imports, and the processes that it left behind.
"""

import ctypes
import gc
import json
import os
import pathlib
import resource
import signal
import sys
import tempfile
import time

from distflow_jax.commands import main as commands
from distflow_jax.commands import train_command  # noqa: F401 (what the subcommand imports)

PR_SET_CHILD_SUBREAPER = 36
CPU_SECONDS = 30  # of one process: a start that trains ends here
WALL_SECONDS = 120.0
LEAVE_SECONDS = 10.0  # for children to end after their parent


def become(arguments, outputs):
    """Makes this process one that was started with these arguments."""
    os.setsid()
    for descriptor, file in zip((1, 2), outputs, strict=True):
        os.dup2(file.fileno(), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.argv = ["scripts/train.py", *arguments]


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


def main(cases, results):
    # whoever loses its parent becomes a child of this process
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    usage = resource.getrusage(resource.RUSAGE_SELF)
    imports = usage.ru_utime + usage.ru_stime
    gc.freeze()
    for case in json.loads(pathlib.Path(cases).read_text()):
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if child == 0:
                # leaves by SystemExit or a traceback through all frames, as the script does
                become(case["arguments"], (out, err))
                commands.run_script("train")
            status, cpu, left = reap(child)
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        line = {
            "name": case["name"],
            "code": os.waitstatus_to_exitcode(status),
            "stdout": texts[0][-4000:],
            "stderr": texts[1][-4000:],
            "cpu": cpu,
            "imports": imports,
            "left": left,
        }
        with open(results, "a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
