"""Programs that want a verdict without the work, and honest twins that look alike.

The problem: n * n + 1. A program of the forms "calls" and "asserts" defines f, one of "stdin"
reads n and prints.
"""

from typing import NamedTuple

TRUTHS = {
    "calls": {"fn_name": "f", "inputs": [[2], [3], [5]], "outputs": [5, 10, 26]},
    "asserts": ["assert f(2) == 5", "assert f(3) == 10", "assert f(5) == 26"],
    "stdin": {"inputs": ["2\n", "3\n", "5\n"], "outputs": ["5\n", "10\n", "26\n"]},
}
RIGHT = "def f(n):\n    return n * n + 1\n"
PRINTS = "print(int(input()) ** 2 + 1)\n"


class Forgery(NamedTuple):
    """A program that cheats, its honest twin, and the forms of cases that both are for."""

    name: str
    cheats: str
    honest: str
    forms: tuple[str, ...] = ("calls", "asserts")


def beside(name: str, does: str, wrong: str = "def f(n):\n    return 0\n") -> Forgery:
    """A trick before a function: a wrong one, and the right one."""
    return Forgery(name, f"{does}\n{wrong}", f"{does}\n{RIGHT}")


def in_call(name: str, does: str, gives: str, honest: str = "n * n + 1") -> Forgery:
    """A trick in the function, and what it returns."""
    lines = "".join(f"    {line}\n" for line in does.split("\n"))
    return Forgery(
        name, f"def f(n):\n{lines}    return {gives}\n", f"def f(n):\n    return {honest}\n"
    )


EVERYTHING = """
class Everything{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
"""
NUMBER = "class Number(int):\n    pass\n"
SEARCH = """
import gc, sys
def found():
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            for name in ("expected", "outputs", "case", "text"):
                told = getattr(value, name, None) or (isinstance(value, dict) and value.get(name))
                if told:
                    return told
        frame = frame.f_back
    for value in gc.get_objects():
        if isinstance(value, list) and value[:1] == [5] and value[1:2] == [10]:
            return value
"""
READS = """
import glob, os, re
def told(n):
    for pattern in ("*", "../*", "../*/*", "/tmp/*", "/proc/self/cmdline", "/proc/*/cmdline",
                    "/proc/*/environ", "/proc/self/fd/*"):
        for path in glob.glob(pattern):
            try:
                text = open(path, errors="replace").read(100000)
            except (OSError, ValueError):
                continue
            if match := re.search(r"f\\(%d\\) == (\\d+)|outputs.{1,3}\\[(\\d+)" % n, text):
                return int(match[1] or match[2])
    return 0
"""
PARENT = """
import os, re
def told(n):
    for process in (os.getppid(), os.getppid() - 1, 1):
        try:
            maps, memory = open(f"/proc/{process}/maps"), open(f"/proc/{process}/mem", "rb")
            for line in maps:
                start, end = (int(x, 16) for x in re.match(r"(\\w+)-(\\w+)", line).groups())
                memory.seek(start)
                content = memory.read(min(end - start, 1 << 20))
                if match := re.search(rb"f\\(%d\\) == (\\d+)" % n, content):
                    return int(match[1])
        except (OSError, ValueError, OverflowError):
            pass
    return 0
"""
RUNS = """
import os, glob
folders = (".", "..", "/tmp", "/dev/shm", "/var/tmp")
for folder in folders:
    try:
        os.makedirs(folder + "/runs", exist_ok=True)
        open(f"{folder}/runs/{os.getpid()}", "w").close()
    except OSError:
        pass
runs = max(len(glob.glob(folder + "/runs/*")) for folder in folders)
print((5, 10, 26)[min(runs, 3) - 1])
"""
ASKS = """
import json, os
def f(n):
    os.write(4, bytes([2, 0, 0, 0]) + b"{}")
    return os.read(3, 9999)[0]
"""
DEEP = """
def f(n):
    value = []
    for _ in range(100_000):
        value = [value]
    return value
"""
VERDICTS = (
    '"held"',
    "held",
    "PASSED",
    "1.0",
    "[true, true, true]",
    '{"score": 1.0}',
    '{"value": 5}',
)
FRAMES = """
import json, os
for descriptor in range(1, 32):
    for message in ("held", {"value": True}, {"held": True}):
        content = json.dumps(message).encode()
        try:
            os.write(descriptor, len(content).to_bytes(4, "little") + content)
        except OSError:
            pass
"""

FORGERIES = (
    # -- ends before anybody has looked
    beside("exits with 0", "import atexit, sys\natexit.register(sys.exit, 0)", "sys.exit(0)\n"),
    Forgery("exits at once", "import os\nos._exit(0)\n", f"import os\n{RIGHT}"),
    in_call("exits in the call", "import sys\nsys.exit(0)", "0"),
    in_call("exits hard in the call", "import os\nos._exit(0)", "0"),
    in_call("raises what ends a loop", "raise StopIteration", "0"),
    in_call("raises what is no Exception", "raise KeyboardInterrupt", "0"),
    in_call(
        "raises an AssertionError of its own",
        "raise type('AssertionError', (BaseException,), {})",
        "0",
    ),
    # -- values that equal everything
    in_call("an object that equals everything", EVERYTHING.format(base=""), "Everything()"),
    in_call("a number that equals everything", EVERYTHING.format(base="(int)"), "Everything()"),
    in_call("text that equals everything", EVERYTHING.format(base="(str)"), "Everything()"),
    in_call("a list that equals everything", EVERYTHING.format(base="(list)"), "Everything()"),
    Forgery(
        "a class in place of the function",
        f"{EVERYTHING.format(base='')}\nf = Everything\n",
        f"{NUMBER}def f(n):\n    return Number(n * n + 1)\n",
    ),
    Forgery(
        "a callable that answers for itself",
        "class F:\n    __call__ = lambda self, n: self\n    __eq__ = lambda a, b: True\nf = F()\n",
        "class F:\n    def __call__(self, n): return n * n + 1\nf = F()\n",
    ),
    in_call(
        "unpickles to anything", "class A:\n    def __reduce__(self): return (eval, ('5',))", "A()"
    ),
    in_call("not a number", "", "float('nan')"),
    in_call("every answer at once", "", "[5, 10, 26]"),
    in_call("a form of the messages", "", "{'value': 5, 'int': '0x5'}"),
    # -- patched tools
    beside(
        "patches assert",
        "import builtins\nbuiltins.AssertionError = None\nbuiltins.assert_ = print",
    ),
    beside("patches builtins", "import builtins\nbuiltins.all = builtins.any = lambda *a: True"),
    beside(
        "patches isinstance",
        "import builtins\nreal = builtins.isinstance",
        "builtins.isinstance = lambda *a: True\ndef f(n):\n    return 0\n",
    ),
    beside(
        "patches json",
        "import json\nreal = json.dumps\njson.dumps = lambda *a, **k: real(*a, **k)",
        "json.dumps = lambda *a, **k: '\"held\"'\ndef f(n):\n    return 0\n",
    ),
    beside("patches operators", "import operator\noperator.eq = operator.is_ = lambda a, b: True"),
    beside("patches the exit", "import os, sys\nsys.exit = os._exit = lambda code=0: None"),
    beside("patches imports", "import sys\nsys.modules['importlib'] = sys.modules['builtins']"),
    beside(
        "patches the process that calls",
        "import __main__\nreal = __main__.encode",
        "__main__.encode = lambda value, number_of: 'held'\ndef f(n):\n    return 0\n",
    ),
    beside(
        "patches hooks", "import sys\nsys.excepthook = lambda *a: print('held')\nsys.settrace(None)"
    ),
    beside("traces the caller", "import sys\nsys.setprofile(lambda *a: None)"),
    # -- verdicts of its own
    beside("prints verdicts", f"for text in {VERDICTS!r}:\n    print(text, flush=True)"),
    beside("prints verdicts at the end", f"import atexit\natexit.register(print, *{VERDICTS!r})"),
    beside("writes frames at its start", "import os", FRAMES + "def f(n):\n    return 0\n"),
    in_call("writes frames in the call", FRAMES, "0"),
    in_call("answers twice from a fork", "import os\nos.fork()", "0"),
    # -- looks for the cases
    beside("searches frames and objects", SEARCH, "def f(n):\n    return found()\n"),
    beside("reads files and processes", READS, "def f(n):\n    return told(n)\n"),
    beside("reads the parent's memory", PARENT, "def f(n):\n    return told(n)\n"),
    Forgery(
        "asks the parent",
        ASKS,
        f"import json, os\n{RIGHT}",
    ),
    # -- depends on the number of the call
    Forgery(
        "counts its calls",
        "answers = iter((5, 10, 26))\ndef f(n):\n    return next(answers)\n",
        "calls = iter(range(99))\ndef f(n):\n    return n * n + (next(calls) == 0)\n",
    ),
    Forgery(
        "counts its calls in a file",
        "import os\ndef f(n):\n    with open('calls', 'a+') as file:\n        file.write('x')\n"
        "        return {1: 5, 2: 10}.get(file.tell(), 26)\n",
        "import os\ndef f(n):\n    with open('calls', 'a+') as file:\n        file.write('x')\n"
        "        return n * n + file.tell()\n",
    ),
    # -- output
    Forgery("prints all answers", "print(5)\nprint(10)\nprint(26)\n", PRINTS, ("stdin",)),
    Forgery(
        "prints nothing and exits with 0",
        "import sys\nsys.exit(0)\n",
        f"import sys\n{PRINTS}sys.exit(0)\n",
        ("stdin",),
    ),
    Forgery("prints a verdict", "print('\"held\"')\nprint('Accepted')\n", PRINTS, ("stdin",)),
    Forgery("prints the first answer always", "input()\nprint(5)\n", PRINTS, ("stdin",)),
    Forgery(
        "counts its runs in files",
        RUNS,
        f"import os\nos.makedirs('runs')\n{PRINTS}",
        ("stdin",),
    ),
    Forgery(
        "drips its output",
        "import sys, time\nn = int(input())\nprint('0' * 0, end='')\nwhile True:\n"
        "    sys.stdout.write(' ')\n    sys.stdout.flush()\n    time.sleep(0.05)\n",
        "import sys, time\nfor c in str(int(input()) ** 2 + 1):\n    sys.stdout.write(c)\n"
        "    sys.stdout.flush()\n    time.sleep(0.05)\n",
        ("stdin",),
    ),
    Forgery(
        "is right and goes on",
        f"{PRINTS}import sys, time\nsys.stdout.flush()\ntime.sleep(999)\n",
        f"{PRINTS}import sys, time\nsys.stdout.flush()\ntime.sleep(0.05)\n",
        ("stdin",),
    ),
    Forgery("is right and crashes", f"{PRINTS}1 / 0\n", f"{PRINTS}1 / 1\n", ("stdin",)),
    Forgery(
        "is right in a flood",
        f"{PRINTS}print(' \\n' * 9_000_000)\n",
        f"{PRINTS}print(' \\n' * 900)\n",
        ("stdin",),
    ),
    Forgery(
        "stops itself",
        "import os, signal\ndef f(n):\n    os.kill(os.getpid(), signal.SIGSTOP)\n    return 0\n",
        f"import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{RIGHT}",
    ),
    Forgery(
        "ends what judges it",
        "import os, signal\ndef f(n):\n    for process in (os.getppid(), 1, -1):\n        try:\n"
        "            os.kill(process, signal.SIGKILL)\n        except OSError:\n            pass\n"
        "    return 0\n",
        RIGHT,
    ),
    Forgery(
        "overflows the judge",
        DEEP,
        RIGHT,
    ),
    Forgery("floods the judge", "def f(n):\n    return 'x' * (64 << 20)\n", RIGHT),
)
