"""Starts N JAX processes of one job on this machine and merges their logs.

distflow launch local --processes=2 --devices_per_process=4 -- \\
    train --config=grpo_smollm2 --workdir=runs/both

Each line of output begins with its process, as in "[p0] ...". A process that fails is named, with
host, pid and signal, and all others get SIGTERM; so it is with one that a signal stops for longer
than --stopped_seconds. SIGINT and SIGTERM are passed on to all. After the grace time processes are
killed; a second signal kills at once. The exit code is that of the first process that failed; 75
means that a checkpoint was saved, and the same command resumes the run.
"""

import argparse
import contextlib
import os
import queue
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from distflow_jax.cluster import job
from distflow_jax.commands.launch import hosts
from distflow_jax.commands.launch.worker_group import add_workers, worker_command
from distflow_jax.parsing.addresses import listen
from distflow_jax.parsing.paths import named_path

PROGRAM = "distflow launch local"
DOORS = "task_buffers.json"  # of a run's folder: where the trainers answer
LOOK_SECONDS = 0.2
LEAVE_SECONDS = 10.0  # after the run for workers to end by themselves, and again after SIGTERM
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
POLL_SECONDS = 0.05
STOPPED_WITH_CHECKPOINT = 75  # EX_TEMPFAIL
EXPLAINED = (STOPPED_WITH_CHECKPOINT, 2)  # exit codes whose process has printed the reason
# short after a crash: without all processes no checkpoint can be written
CRASH_GRACE_SECONDS = 5.0


def make_parser(program: str = PROGRAM) -> argparse.ArgumentParser:
    """The parser of the flags before `--`, and of the command after it."""
    parser = hosts.parser(__doc__, program)
    add = parser.add_argument
    add("--processes", type=int, default=2, help="number of processes (default 2)")
    each = "CPU devices of each process (default 1)"
    add("--devices_per_process", type=int, default=1, help=each)
    add(
        "--grace_seconds",
        type=float,
        default=60.0,
        help="time to write a checkpoint between SIGTERM and SIGKILL (default 60)",
    )
    add(
        "--stopped_seconds",
        type=float,
        default=10.0,
        help="end the job if a process stays suspended (SIGSTOP) for longer (default 10)",
    )
    add_workers(parser)
    each = "CPU devices of each worker (default 1)"
    add("--devices_per_worker", type=int, default=1, help=each)
    hosts.add_command(parser)
    return parser


def parse_arguments(arguments: list[str], program: str = PROGRAM) -> argparse.Namespace:
    """Parses and checks the flags before `--`, and the command with its flags after it."""
    parser = make_parser(program)
    options = parser.parse_args(arguments)
    if options.processes < 1 or options.devices_per_process < 1:
        parser.error("--processes and --devices_per_process must be at least 1")
    if options.workers < 0 or options.devices_per_worker < 1:
        parser.error("--workers must not be negative, and --devices_per_worker at least 1")
    options.launched = f"{program} {shlex.join(arguments)}"
    options.command = hosts.python_command(options)
    options.worker = worker_command(options.command) if options.workers else None
    return options


def free_port() -> int:
    """A free TCP port of the loopback interface."""
    with listen("a job", "127.0.0.1", 0) as listener:
        return listener.getsockname()[1]


def child_environment(
    index: int, options: argparse.Namespace, port: int, token: str
) -> dict[str, str]:
    """This process's environment with the job's variables and the number of CPU devices."""
    environment = device_environment(options.devices_per_process)
    environment["DISTFLOW_COORDINATOR"] = f"127.0.0.1:{port}"
    environment["DISTFLOW_NUM_PROCESSES"] = str(options.processes)
    environment["DISTFLOW_PROCESS_ID"] = str(index)
    environment["DISTFLOW_JOB_TOKEN"] = token
    environment[job.GRACE] = f"{options.grace_seconds:g}"
    environment[job.LAUNCHED] = options.launched
    return environment


def device_environment(devices: int) -> dict[str, str]:
    """This process's environment with a number of CPU devices."""
    environment = dict(os.environ)
    flags = environment.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if not flag.startswith(DEVICE_COUNT_FLAG)]
    environment["XLA_FLAGS"] = " ".join([*flags, f"{DEVICE_COUNT_FLAG}={devices}"])
    # every process would claim the machine's accelerators; CPU devices are per process
    environment.setdefault("JAX_PLATFORMS", "cpu")
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def forward_lines(
    process: subprocess.Popen, label: str, lock: threading.Lock, signals: queue.SimpleQueue
) -> None:
    """Copies one process's output to stdout, line by line, after a label such as p0.

    If stdout is closed (`| head`), requests a stop and goes on reading, since a process blocks when
    its output is not read.
    """
    for line in process.stdout or ():
        with lock:
            try:
                sys.stdout.write(f"[{label}] {line.rstrip(chr(10))}\n")
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


def stopped_by(process: subprocess.Popen) -> int:
    """The signal that has stopped a child process; 0 if it is not stopped, or that is unknown."""
    if process.poll() is not None or not hasattr(os, "waitid"):  # macOS has it from Python 3.13 on
        return 0
    try:
        state = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0  # it ended since the poll: Linux knows no child that could still stop
    return state.si_status if state else 0


class Children:
    """The processes of the job, while they run.

    Args:
      processes: in the order of their indices.
      grace_seconds: between a signal to stop and SIGKILL.
      stopped_seconds: for which a process may be stopped.
      say: prints a line.
    """

    def __init__(
        self,
        processes: list[subprocess.Popen],
        grace_seconds: float,
        stopped_seconds: float,
        say: Callable[[str], None],
    ):
        self._processes, self._say = processes, say
        self._grace, self._stopped_seconds = grace_seconds, stopped_seconds
        self._began = time.monotonic()
        self._first_failure = 0
        self._kill_time: float | None = None  # set when the processes got a signal to stop
        self._stopped: dict[int, tuple[int, float]] = {}  # index -> signal, since when

    def wait(self, signals: queue.SimpleQueue) -> int:
        """Waits for all processes; returns 0, or the exit code of the first that failed.

        `signals` has the numbers of received signals; a second one kills without waiting.
        """
        while running := [process for process in self._processes if process.poll() is None]:
            self._note_stops()
            self._note_failures()
            stop = signals.get() if not signals.empty() else None
            if self._kill_time is None and (stop or self._first_failure):
                crashed = stop is None and self._first_failure != STOPPED_WITH_CHECKPOINT
                grace = min(self._grace, CRASH_GRACE_SECONDS) if crashed else self._grace
                self._kill_time = time.monotonic() + grace
                for process in running:
                    send(process, stop or signal.SIGTERM)
            elif stop:
                self._kill_time = 0.0
            if self._kill_time is not None and time.monotonic() >= self._kill_time:
                for process in running:
                    send(process, signal.SIGKILL, group=True)
            time.sleep(POLL_SECONDS)
        self._note_failures()
        return self._first_failure

    def _note_failures(self) -> None:
        """Names the first process that failed, unless all were to end."""
        failed = [index for index, process in enumerate(self._processes) if process.poll()]
        if not failed or self._first_failure:
            return
        # what ends within one look: a kill makes the others abort, never the other way round
        first = min(failed, key=lambda i: _consequence(self._processes[i].returncode))
        code = self._processes[first].returncode
        self._first_failure = exit_code(code)
        if self._kill_time is None and code not in EXPLAINED:
            how = f"died by {_name(-code)}" if code < 0 else f"ended with exit code {code}"
            after = time.monotonic() - self._began
            self._say(f"{self._who(first)} {how}, {after:.1f} s after its start; the others end")

    def _note_stops(self) -> None:
        """Names processes that are stopped, and has the job end if one stays so."""
        now = time.monotonic()
        for index, process in enumerate(self._processes):
            number = stopped_by(process)
            if not number:
                self._stopped.pop(index, None)
            elif index not in self._stopped:
                self._stopped[index] = number, now
                self._say(
                    f"{self._who(index)} is stopped by {_name(number)}; after "
                    f"{self._stopped_seconds:g} s that ends the job (SIGCONT lets it go on)"
                )
            elif now - self._stopped[index][1] > self._stopped_seconds:
                if not self._first_failure and self._kill_time is None:
                    self._first_failure = 128 + number
                    self._say(
                        f"{self._who(index)} was stopped by {_name(number)} for "
                        f"{self._stopped_seconds:g} s; the job ends"
                    )

    def _who(self, index: int) -> str:
        return f"process {index} (host {socket.gethostname()}, pid {self._processes[index].pid})"


def _consequence(returncode: int) -> bool:
    """Whether an end is rather that of a process that lost another one."""
    return returncode > 0 or -returncode in (signal.SIGABRT, signal.SIGTERM)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def main(arguments: list[str], program: str = PROGRAM) -> int:
    """Starts the processes and returns the exit code."""
    options = parse_arguments(arguments, program)
    signals: queue.SimpleQueue = queue.SimpleQueue()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: signals.put(number))
    port, token = free_port(), secrets.token_hex(16)
    lock = threading.Lock()
    processes: list[subprocess.Popen] = []
    readers = []
    workers: LocalWorkers | None = None

    def say(line: str) -> None:
        with lock:
            with contextlib.suppress(BrokenPipeError):  # as in forward_lines
                print(f"launch: {line}", file=sys.stderr, flush=True)

    def start(label: str, command: list[str], environment: dict[str, str]) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # its own group: Ctrl-C reaches it only through this process, which can kill it all
            start_new_session=True,
        )
        reader = threading.Thread(
            target=forward_lines, args=(process, label, lock, signals), daemon=True
        )
        reader.start()
        readers.append(reader)
        return process

    try:
        if options.worker is not None:
            environment = device_environment(options.devices_per_worker)
            workers = LocalWorkers(
                options.worker, options.workers, lambda label, c: start(label, c, environment), say
            )
        for index in range(options.processes):
            environment_of = child_environment(index, options, port, token)
            processes.append(start(f"p{index}", options.command, environment_of))
        children = Children(processes, options.grace_seconds, options.stopped_seconds, say)
        return children.wait(signals)
    finally:
        if workers is not None:
            workers.close(finished=all(process.poll() == 0 for process in processes))
        for process in processes:
            send(process, signal.SIGKILL, group=True)  # with its reward workers
            process.wait()
        for reader in readers:
            reader.join(timeout=5)


class LocalWorkers:
    """Workers that begin as soon as the trainers answer, and end after them.

    One that ends before is named; the run goes on.
    """

    def __init__(
        self,
        command: list[str],
        count: int,
        start: Callable[[str, list[str]], subprocess.Popen],
        say: Callable[[str], None],
    ):
        """`start(label, command)`: starts a process. Create this before the trainers."""
        self._command, self._count, self._start, self._say = command, count, start, say
        self._services = named_path("--workdir", command[-1].partition("=")[2]) / DOORS
        self._before = self._read()
        self._workers: list[subprocess.Popen] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self, *, finished: bool) -> None:
        """Ends the workers; after a run that is `finished` they have a moment to end themselves."""
        self._closing.set()
        self._thread.join()
        if finished:
            self._wait()
        for number in (signal.SIGTERM, signal.SIGKILL):
            for worker in self._workers:
                if worker.poll() is None:
                    worker.send_signal(number)
            self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + LEAVE_SECONDS
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(max(0.0, end - time.monotonic()))

    def _watch(self) -> None:
        while self._read() == self._before and not self._closing.wait(LOOK_SECONDS):
            pass
        if not self._closing.is_set():
            names = [f"w{i}" for i in range(self._count)]
            self._workers += [self._start(name, self._command) for name in names]
        told: set[int] = set()
        while not self._closing.wait(LOOK_SECONDS):
            for index, worker in enumerate(self._workers):
                if worker.poll() and index not in told:
                    told.add(index)
                    self._say(f"worker {index} ended with exit code {worker.returncode}")

    def _read(self) -> str:
        try:
            return self._services.read_text()
        except OSError:
            return ""
