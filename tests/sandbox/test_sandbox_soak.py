"""Programs in their thousands: every outcome as expected, and nothing is left of them.

Nightly: 10,000 random programs at each of two levels, four at a time, each right, wrong, hanging,
crashing, flooding or forking, leave no process, folder or descriptor, and the memory of this
process and of the zygote stays within 2 %.
"""

import concurrent.futures
import os
import pathlib
import random
import sys

import pytest
from support.waiting import until

from distflow_jax.config.sandbox_config import SandboxConfig
from distflow_jax.sandbox import descendants, system_calls
from distflow_jax.sandbox.sandbox import Sandbox
from distflow_jax.sandbox.sandbox_records import SandboxLimits, SandboxProgram

pytestmark = pytest.mark.skipif(bool(system_calls.unsupported()), reason=system_calls.unsupported())
# {kind: (share, code, deadline, what its outcome has)}; code gets a and b by standard input. Those
# that end by themselves have a minute: how long they take is the machine's matter
KINDS = {
    "right": (8, "print(a * b)", 60, {"cause": "ended", "exit_code": 0}),
    "wrong": (4, "print(a * b + 1)", 60, {"cause": "ended", "exit_code": 0}),
    "raises": (2, "print(a * b); 1 / 0", 60, {"cause": "ended", "exit_code": 1}),
    "crashes": (
        2,
        "print(a * b, flush=True); os.abort()",
        60,
        {"cause": "signal", "exit_code": -6},
    ),
    "hangs": (1, "time.sleep(99)", 0.2, {"cause": "deadline", "exit_code": -9}),
    "floods": (1, "while True: os.write(1, b'x' * 9999)", 60, {"cause": "output"}),
    "forks": (
        2,
        "for _ in range(3):\n if not os.fork():\n  os.setsid(); os.fork(); time.sleep(99)\n"
        "print(a * b)",
        60,
        {"cause": "ended", "exit_code": 0},
    ),
    "fills": (1, "open('f', 'wb').write(bytes(1 << 18)); print(a * b)", 60, {"cause": "ended"}),
}


def program(kind, a, b):
    _, code, seconds, _ = KINDS[kind]
    source = f"import os, time\na, b = map(int, input().split())\n{code}\n"
    limits = SandboxLimits(seconds=seconds, cpu_seconds=60, output=1 << 16, disk=1 << 20)
    return SandboxProgram(
        ("python3", "main.py"), {"main.py": source.encode()}, f"{a} {b}\n".encode(), limits
    )


def check(sandbox, seed):
    """Runs the random program of a seed; its kind."""
    rng = random.Random(seed)
    kinds = list(KINDS)
    kind = rng.choices(kinds, [KINDS[name][0] for name in kinds])[0]
    a, b = rng.randrange(1000), rng.randrange(1000)
    outcome = sandbox.run(program(kind, a, b))
    for name, value in KINDS[kind][-1].items():
        assert getattr(outcome, name) == value, (kind, outcome)
    printed = outcome.stdout.strip()
    if kind not in ("hangs", "floods"):
        assert (int(printed) == a * b) == (kind != "wrong"), (kind, outcome)
    return kind


def held(process):
    """Kilobytes in memory, and descriptors, of a process.

    Pages of files are left out: the kernel takes them back as it likes.
    """
    status = pathlib.Path(f"/proc/{process}/status").read_text().split()
    return int(status[status.index("RssAnon:") + 1]), len(os.listdir(f"/proc/{process}/fd"))


def soak(count, level):
    """Runs so many programs, and checks what is left; returns {process: memory at marks}."""
    with Sandbox(SandboxConfig(level=level)) as sandbox:
        processes = (os.getpid(), sandbox._zygote.process.pid)
        folder = pathlib.Path(sandbox._zygote.folders[-1])
        marks = []
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for mark in range(5):
                seeds = range(mark * count // 5, (mark + 1) * count // 5)
                kinds = set(pool.map(lambda seed: check(sandbox, seed), seeds))
                until(lambda: not descendants.children(processes[1]))
                marks.append([held(process) for process in processes])
                left = [path.name for path in folder.iterdir()]
                assert set(left) <= {"root"}, left
                groups = pathlib.Path("/sys/fs/cgroup").glob(f"*/**/distflow-{processes[1]}-*")
                assert not list(groups)
        assert kinds == set(KINDS) or count < 500
    assert not folder.exists()
    assert len({descriptors for one in marks[1:] for _, descriptors in [one[0]]}) == 1
    assert len({descriptors for one in marks[1:] for _, descriptors in [one[1]]}) == 1
    return {role: [one[i][0] for one in marks] for i, role in enumerate(("run", "zygote"))}


def test_a_hundred_programs():
    soak(100, "kernel")


@pytest.mark.slow
@pytest.mark.parametrize("level", ["kernel", "auto"])
def test_ten_thousand_programs(level):
    memory = soak(10_000, level)
    print(memory, file=sys.stderr)
    for sizes in memory.values():
        assert max(sizes[1:]) <= 1.02 * min(sizes[1:]), memory
