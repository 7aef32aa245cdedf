"""Time of a trivial program at each level of the sandbox, and of deadlines under load.

python benchmarks/sandbox.py
python benchmarks/sandbox.py --programs=20    # a quick look

Prints for each level the median and the 90th percentile in milliseconds of a Python program that
adds two numbers, one program at a time, from the call to its outcome. Then the seconds by which
programs that hang outlast their deadline, four at a time, while every core also has two processes
that compute. The goals are for a quiet machine with two cores: 20 ms at `kernel`, 40 ms at
`namespaces`, and 0.2 s for the worst deadline. With --check the exit code is 1 if one is missed.
"""

import argparse
import concurrent.futures
import os
import statistics
import subprocess
import sys
import time

from distflow_jax.config.sandbox_config import LEVELS, SandboxConfig
from distflow_jax.sandbox.sandbox import Sandbox
from distflow_jax.sandbox.sandbox_records import SandboxLimits, SandboxProgram

GOALS = {"kernel": 0.020, "namespaces": 0.040}  # seconds in the median
DEADLINE, LATEST = 0.5, 0.2  # seconds: of a program that hangs, and by which it may be late
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
    for _ in range(5):
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


def main() -> int:
    """Measures all levels of this machine."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=int, default=200, help="programs of each measurement")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    options = parser.parse_args()
    missed = 0
    for level in LEVELS:
        try:
            with Sandbox(SandboxConfig(level=level)) as sandbox:
                took = latency(sandbox, options.programs)
                late = lateness(sandbox, max(8, options.programs // 5))
        except ValueError as error:
            print(f"{level:10} {error}")
            continue
        median = statistics.median(took)
        print(
            f"{level:10} median {1e3 * median:.1f} ms, 90 % {1e3 * took[len(took) * 9 // 10]:.1f} "
            f"ms; deadlines late by {late[len(late) // 2]:.3f} s in the median, {late[-1]:.3f} s "
            "at most"
        )
        missed += median > GOALS.get(level, 1.0) or late[-1] > LATEST
    return int(options.check and missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
