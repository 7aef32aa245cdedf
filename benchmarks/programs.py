"""Programs of this repository that a benchmark starts beside itself."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).parents[1]
END_SECONDS = 180.0  # for a program to end in order


def finished(command: Sequence[str]) -> list[str]:
    """Lines of output of a command. RuntimeError with the end of what it printed if it fails."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = done.stdout + done.stderr
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{said[-6000:]}")
    return done.stdout.splitlines()


@contextlib.contextmanager
def running(command: Sequence[str], log: pathlib.Path) -> Iterator[subprocess.Popen]:
    """A Python program on CPUs, whose output goes to a file; it ends with the block."""
    # a cache of programs would have precedence over the config's
    known = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**known, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end(process, signal.SIGTERM)


def end(process: subprocess.Popen, number: int) -> None:
    """Ends a program and what it has started by a signal, and waits for it."""
    if process.poll() is None:
        os.killpg(process.pid, number)
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
