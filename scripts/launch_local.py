"""Starts N JAX processes of one job on this machine and merges their logs.

python scripts/launch_local.py --processes=2 --devices_per_process=4 -- \\
    scripts/train.py --config=configs/grpo_smollm2.py --workdir=runs/two

Each line of output is marked with its process, as in "[p0] ...". When one process fails, or on
SIGINT or SIGTERM, all are asked to stop with that signal (SIGTERM after a failure) and killed after
the grace time; a second signal kills at once. The exit code is that of the first process to fail;
75 means: stopped with a checkpoint, start me again.
"""

import argparse
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
POLL_SECONDS = 0.05
STOPPED_WITH_CHECKPOINT = 75  # EX_TEMPFAIL
# Nothing to wait for after a crash: a checkpoint needs all processes.
CRASH_GRACE_SECONDS = 5.0


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Flags before `--`, the program and its flags after it."""
    summary, example, details = __doc__.split("\n\n")
    parser = argparse.ArgumentParser(
        description=summary + "\n\n" + details,
        epilog="example:\n  " + example.replace("\n", "\n  "),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--processes", type=int, default=2, help="number of processes (default 2)")
    parser.add_argument(
        "--devices_per_process",
        type=int,
        default=1,
        help="CPU devices that each process pretends to have (default 1)",
    )
    parser.add_argument(
        "--grace_seconds",
        type=float,
        default=60.0,
        help="time to write a checkpoint between SIGTERM and SIGKILL (default 60)",
    )
    parser.add_argument("command", nargs="+", help="Python script and its arguments, after --")
    options = parser.parse_args(arguments)
    if options.processes < 1 or options.devices_per_process < 1:
        parser.error("--processes and --devices_per_process must be at least 1")
    return options


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def child_environment(index: int, processes: int, devices: int, port: int) -> dict[str, str]:
    """This process's environment, plus the job's variables and the device count on CPU."""
    environment = dict(os.environ)
    flags = environment.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if not flag.startswith(DEVICE_COUNT_FLAG)]
    environment["XLA_FLAGS"] = " ".join([*flags, f"{DEVICE_COUNT_FLAG}={devices}"])
    # Processes on one machine would all claim its accelerators; CPU devices can be had per process.
    environment.setdefault("JAX_PLATFORMS", "cpu")
    environment["DISTFLOW_COORDINATOR"] = f"127.0.0.1:{port}"
    environment["DISTFLOW_NUM_PROCESSES"] = str(processes)
    environment["DISTFLOW_PROCESS_ID"] = str(index)
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def forward_lines(
    process: subprocess.Popen, index: int, lock: threading.Lock, signals: queue.SimpleQueue
) -> None:
    """Copies one process's output to ours, line by line, with its mark in front.

    If nobody reads ours any more (`| head`), asks for a stop, and goes on reading: a process whose
    output nobody takes would block.
    """
    for line in process.stdout:
        with lock:
            try:
                sys.stdout.write(f"[p{index}] {line.rstrip(chr(10))}\n")
                sys.stdout.flush()
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                signals.put(signal.SIGTERM)


def exit_code(returncode: int) -> int:
    """A shell's view of a return code: 128 + n for a process that signal n ended."""
    return returncode if returncode >= 0 else 128 - returncode


def send(process: subprocess.Popen, number: int, *, group: bool = False) -> None:
    """Signals one child, or all that is left of the group it leads."""
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
    """Returns when all have ended: 0, or the exit code of the first that failed.

    `signals` delivers the numbers of signals sent to us; a second one kills without waiting.
    """
    first_failure = 0
    kill_time = None  # set once we have asked them to stop
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


def main(arguments: list[str]) -> int:
    """Starts the processes and returns the exit code."""
    options = parse_arguments(arguments)
    signals: queue.SimpleQueue = queue.SimpleQueue()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: signals.put(number))
    port = free_port()
    lock = threading.Lock()
    processes: list[subprocess.Popen] = []
    readers = []
    try:
        for index in range(options.processes):
            process = subprocess.Popen(
                [sys.executable, *options.command],
                env=child_environment(index, options.processes, options.devices_per_process, port),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                # A group of its own: Ctrl-C reaches it through us, and we can end all of it.
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
            send(process, signal.SIGKILL, group=True)  # reward workers and the like
            process.wait()
        for reader in readers:
            reader.join(timeout=5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
