"""Time of a trivial program at each level of the sandbox, and of deadlines under load.

python benchmarks/sandbox.py
python benchmarks/sandbox.py --programs=20    # a quick look

Prints for each level the median and the 90th percentile of a Python program that adds two numbers,
one program at a time, from the call to its outcome, and the CPU that the program and its keeper
take, which other jobs of the machine change little. Then the seconds by which programs that hang
outlast their deadline, four at a time, while every core also has two processes that compute.
"""

import argparse
import concurrent.futures
import os
import statistics
import subprocess
import sys
import time

from distflow_jax.config.sandbox_config import LEVELS, SandboxConfig
from distflow_jax.sandbox.descendants import usage
from distflow_jax.sandbox.sandbox import Sandbox
from distflow_jax.sandbox.sandbox_records import SandboxLimits, SandboxProgram

DEADLINE = 0.5  # seconds of a program that hangs
WARM = 5  # programs before those that count
ADDS = b"print(sum(map(int, input().split())))"


def timed(sandbox: Sandbox, program: SandboxProgram) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    outcome = sandbox.run(program)
    seconds = time.perf_counter() - start
    assert outcome.cause == ("deadline" if program.limits.seconds == DEADLINE else "ended"), outcome
    return seconds


def latency(sandbox: Sandbox, count: int) -> list[float]:
    """Seconds of trivial programs, in order of size."""
    program = SandboxProgram(("python3", "main.py"), {"main.py": ADDS}, b"3 4\n")
    for _ in range(WARM):
        timed(sandbox, program)
    return sorted(timed(sandbox, program) for _ in range(count))


def lateness(sandbox: Sandbox, count: int) -> list[float]:
    """Seconds by which programs outlast their deadline under load, in order of size."""
    limits = SandboxLimits(seconds=DEADLINE)
    program = SandboxProgram(("python3", "main.py"), {"main.py": b"while True: pass"}, b"", limits)
    load = [sys.executable, "-c", "while True: pass"]
    computing = [subprocess.Popen(load) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(timed, sandbox, program) for _ in range(count)]
            return sorted(call.result() - DEADLINE for call in calls)
    finally:
        for process in computing:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=int, default=200, help="programs of each measurement")
    options = parser.parse_args()
    for level in LEVELS:
        try:
            with Sandbox(SandboxConfig(level=level)) as sandbox:
                before = usage(sandbox._zygote.process.pid)[1]
                took = latency(sandbox, options.programs)
                cpu = (usage(sandbox._zygote.process.pid)[1] - before) / (len(took) + WARM)
                late = lateness(sandbox, max(8, options.programs // 5))
        except ValueError as error:
            print(f"{level:10} {error}")
            continue
        median = statistics.median(took)
        print(
            f"{level:10} median {1e3 * median:.1f} ms, 90 % {1e3 * took[len(took) * 9 // 10]:.1f} "
            f"ms, CPU {1e3 * cpu:.1f} ms; deadlines late by {late[len(late) // 2]:.3f} s in the "
            f"median, {late[-1]:.3f} s at most"
        )


if __name__ == "__main__":
    main()
