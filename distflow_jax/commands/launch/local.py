"""Starts N JAX processes of one job on this machine and merges their logs.

distflow launch local --processes=2 --devices_per_process=4 -- \\
    train --config=grpo_smollm2 --workdir=runs/both

Each line of output begins with its process, as in "[p0] ...". When one process fails, all others
get SIGTERM; SIGINT and SIGTERM are passed on to all. After the grace time processes are killed; a
second signal kills at once. The exit code is that of the first process that failed; 75 means that
a checkpoint was saved, and the same command resumes the run.
"""

import argparse
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time

from distflow_jax.commands.launch import hosts

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
POLL_SECONDS = 0.05
STOPPED_WITH_CHECKPOINT = 75  # EX_TEMPFAIL
# short after a crash: without all processes no checkpoint can be written
CRASH_GRACE_SECONDS = 5.0


def make_parser(program: str = "distflow launch local") -> argparse.ArgumentParser:
    """The parser of the flags before `--`, and of the command after it."""
    parser = hosts.parser(__doc__, program)
    parser.add_argument("--processes", type=int, default=2, help="number of processes (default 2)")
    parser.add_argument(
        "--devices_per_process",
        type=int,
        default=1,
        help="CPU devices of each process (default 1)",
    )
    parser.add_argument(
        "--grace_seconds",
        type=float,
        default=60.0,
        help="time to write a checkpoint between SIGTERM and SIGKILL (default 60)",
    )
    hosts.add_command(parser)
    return parser


def parse_arguments(
    arguments: list[str], program: str = "distflow launch local"
) -> argparse.Namespace:
    """Parses and checks the flags before `--`, and the command with its flags after it."""
    parser = make_parser(program)
    options = parser.parse_args(arguments)
    if options.processes < 1 or options.devices_per_process < 1:
        parser.error("--processes and --devices_per_process must be at least 1")
    options.command = hosts.python_command(options)
    return options


def free_port() -> int:
    """A free TCP port of the loopback interface."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def child_environment(
    index: int, processes: int, devices: int, port: int, token: str
) -> dict[str, str]:
    """This process's environment with the job's variables and the number of CPU devices."""
    environment = dict(os.environ)
    flags = environment.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if not flag.startswith(DEVICE_COUNT_FLAG)]
    environment["XLA_FLAGS"] = " ".join([*flags, f"{DEVICE_COUNT_FLAG}={devices}"])
    # every process would claim the machine's accelerators; CPU devices are per process
    environment.setdefault("JAX_PLATFORMS", "cpu")
    environment["DISTFLOW_COORDINATOR"] = f"127.0.0.1:{port}"
    environment["DISTFLOW_NUM_PROCESSES"] = str(processes)
    environment["DISTFLOW_PROCESS_ID"] = str(index)
    environment["DISTFLOW_JOB_TOKEN"] = token
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def forward_lines(
    process: subprocess.Popen, index: int, lock: threading.Lock, signals: queue.SimpleQueue
) -> None:
    """Copies one process's output to stdout, line by line, after the process's number.

    If stdout is closed (`| head`), requests a stop and goes on reading, since a process blocks when
    its output is not read.
    """
    for line in process.stdout or ():
        with lock:
            try:
                sys.stdout.write(f"[p{index}] {line.rstrip(chr(10))}\n")
                sys.stdout.flush()
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                signals.put(signal.SIGTERM)


def exit_code(returncode: int) -> int:
    """A return code as shells report it: 128 + n for a process that signal n ended."""
    return returncode if returncode >= 0 else 128 - returncode


def send(process: subprocess.Popen, number: int, *, group: bool = False) -> None:
    """Sends a signal to a child process, or to all that remain of its process group."""
    try:
        if group:
            os.killpg(process.pid, number)
        elif process.poll() is None:
            process.send_signal(number)
    except ProcessLookupError:
        pass  # ended in between


def wait_for_all(
    processes: list[subprocess.Popen], signals: queue.SimpleQueue, grace_seconds: float
) -> int:
    """Waits for all processes; returns 0, or the exit code of the first that failed.

    `signals` has the numbers of received signals; a second one kills without waiting.
    """
    first_failure = 0
    kill_time = None  # set when the processes got a signal to stop
    while True:
        running = [process for process in processes if process.poll() is None]
        failed = [process for process in processes if process.poll()]
        if failed and not first_failure:
            first_failure = exit_code(failed[0].returncode)
        if not running:
            return first_failure
        stop = signals.get() if not signals.empty() else None
        if kill_time is None and (stop or first_failure):
            crashed = stop is None and first_failure != STOPPED_WITH_CHECKPOINT
            grace = min(grace_seconds, CRASH_GRACE_SECONDS) if crashed else grace_seconds
            kill_time = time.monotonic() + grace
            for process in running:
                send(process, stop or signal.SIGTERM)
        elif stop:
            kill_time = 0.0
        if kill_time is not None and time.monotonic() >= kill_time:
            for process in running:
                send(process, signal.SIGKILL, group=True)
        time.sleep(POLL_SECONDS)


def main(arguments: list[str], program: str = "distflow launch local") -> int:
    """Starts the processes and returns the exit code."""
    options = parse_arguments(arguments, program)
    signals: queue.SimpleQueue = queue.SimpleQueue()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: signals.put(number))
    port, token = free_port(), secrets.token_hex(16)
    lock = threading.Lock()
    processes: list[subprocess.Popen] = []
    readers = []
    try:
        for index in range(options.processes):
            process = subprocess.Popen(
                [sys.executable, *options.command],
                env=child_environment(
                    index, options.processes, options.devices_per_process, port, token
                ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                # its own group: Ctrl-C reaches it only through this process, which can kill it all
                start_new_session=True,
            )
            processes.append(process)
            reader = threading.Thread(
                target=forward_lines, args=(process, index, lock, signals), daemon=True
            )
            reader.start()
            readers.append(reader)
        return wait_for_all(processes, signals, options.grace_seconds)
    finally:
        for process in processes:
            send(process, signal.SIGKILL, group=True)  # with its reward workers
            process.wait()
        for reader in readers:
            reader.join(timeout=5)


def run(arguments: list[str] | None = None, program: str = "distflow launch local") -> None:
    """Ends the process with the launcher's exit code; `arguments` of None are the process's."""
    hosts.run_main(main, arguments, program)
