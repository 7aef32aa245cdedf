"""Programs that take all of something, or will not end, and how each of them may end."""

import dataclasses

from distflow_jax.sandbox.sandbox_records import MIB, SandboxLimits

LIMITS = SandboxLimits(
    seconds=1.0, cpu_seconds=10.0, memory=256 * MIB, processes=24, output=1 << 16, disk=16 * MIB
)


@dataclasses.dataclass(frozen=True)
class Greedy:
    code: str
    causes: tuple[str, ...]
    exit_code: int | None = None


BY_FORCE = ("deadline", "cpu")
# as an ordinary user at level kernel, programs of one time share the limit of processes
ALONE = ("forks without end", "forks and forgets", "starts threads without end")
PROGRAMS = {
    "forks without end": Greedy(
        "while True:\n try: os.fork()\n except OSError: pass", (*BY_FORCE, "memory")
    ),
    "forks and forgets": Greedy(
        "while True:\n try:\n  if os.fork(): os._exit(0)\n except OSError: pass",
        (*BY_FORCE, "ended"),
    ),
    "starts threads without end": Greedy(
        "while True:\n try: threading.Thread(target=time.sleep, args=(99,)).start()\n"
        " except (RuntimeError, MemoryError): pass",
        BY_FORCE,
    ),
    "takes all memory": Greedy(
        "kept = []\nwhile True: kept.append(bytearray(1 << 20))", ("ended", "memory", *BY_FORCE)
    ),
    "takes all memory in children": Greedy(
        "for _ in range(8):\n if not os.fork():\n  kept = bytearray(100 << 20); time.sleep(99)\n"
        "time.sleep(99)",
        ("memory",),
    ),
    "takes all memory as address space": Greedy("mmap.mmap(-1, 1 << 40)", ("ended",), 1),
    "writes a large file": Greedy(
        "with open('f', 'wb') as file:\n while True:\n"
        "  try: file.write(bytes(1 << 20)); file.flush()\n  except OSError: time.sleep(0.01)",
        ("disk",),
    ),
    "writes files without end": Greedy(
        "for i in range(10**9):\n try:\n  with open(str(i), 'wb') as f: f.write(bytes(1 << 18))\n"
        " except OSError: time.sleep(0.01)",
        ("disk",),
    ),
    "writes files without a name": Greedy(
        "kept = []\nfor i in range(200):\n f = open('f', 'wb', buffering=0); os.unlink('f')\n"
        " kept.append(f)\n try: f.write(bytes(1 << 20))\n except OSError: break\ntime.sleep(99)",
        ("disk",),
    ),
    "makes files without end": Greedy(
        "for i in range(10**9):\n try: open(str(i), 'wb').close()\n"
        " except OSError: time.sleep(0.01)",
        ("disk", "deadline"),
    ),
    "makes folders in folders": Greedy(
        "for i in range(99):\n os.mkdir('d' * 200); os.chdir('d' * 200)",
        ("ended", "disk", "deadline"),
    ),
    "closes its folders": Greedy(
        "os.makedirs('a/b'); os.mkdir('a/b/c', 0); os.mkdir('d', 0)", ("ended", "disk")
    ),
    "writes 10 GB": Greedy("while True: os.write(1, b'x' * 65536)", ("output",)),
    "writes 10 GB of errors": Greedy("while True: os.write(2, b'x' * 65536)", ("output",)),
    "calls itself without end": Greedy(
        "sys.setrecursionlimit(10**9)\nf = lambda: list(map(lambda _: f(), [0]))\nf()",
        ("signal", "ended", "memory", *BY_FORCE),
    ),
    "leaves a process": Greedy(
        "if not os.fork():\n os.setsid()\n if not os.fork():\n  os.closerange(0, 256)\n"
        "  time.sleep(999)\n os._exit(0)\nos.wait()",
        ("ended",),
        0,
    ),
    "leaves a process and hangs": Greedy(
        "if not os.fork():\n os.setsid()\n if not os.fork(): time.sleep(999)\n os._exit(0)\n"
        "os.wait(); time.sleep(999)",
        ("deadline",),
        -9,
    ),
    "ignores all signals": Greedy(
        "for n in range(1, 32):\n try: signal.signal(n, signal.SIG_IGN)\n except OSError: pass\n"
        "while True: time.sleep(9)",
        ("deadline",),
        -9,
    ),
    "blocks all signals": Greedy(
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(999)", ("deadline",), -9
    ),
    "stops itself": Greedy("os.kill(os.getpid(), signal.SIGSTOP)", ("deadline",), -9),
    "kills its group": Greedy("os.kill(0, signal.SIGKILL)", ("signal",), -9),
    "aborts": Greedy("os.abort()", ("signal",), -6),
    "reads no input": Greedy("time.sleep(999)", ("deadline",), -9),
    "computes without end": Greedy("9 ** 9 ** 9", BY_FORCE),
    "closes its output": Greedy("os.close(1); os.close(2); time.sleep(999)", ("deadline",), -9),
}
_IMPORTS = "import mmap, os, signal, sys, threading, time\n"


def source(name: str) -> bytes:
    """A program's main.py."""
    return (_IMPORTS + PROGRAMS[name].code).encode()
