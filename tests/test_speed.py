"""No verdict of a test depends on the machine's speed, as far as the code of tests shows that.

A test may say that something took at least so many seconds, and never that it took at most so many:
support/waiting.py waits for events, and ends what hangs. CONTRIBUTING.md has the rule.
"""

import ast

from support.paths import TESTS
from support.waiting import HANG

CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}
CLOCKS |= {f"{name}_ns" for name in CLOCKS}
WAITS = {"wait", "result", "join", "exception", "settimeout", "acquire", "get", "communicate"}
# {file: (its number of places, why these decide nothing)}
EXCEPTIONS = {
    "checkpoint/test_additions.py": (1, "what must not come has some time to come"),
    "stream/test_worker_buffers.py": (1, "ends what hangs"),
    "observe/test_spans.py": (1, "the order of readings of two clocks"),
    "cluster/test_host_exchange.py": (1, "looks whether a connection is closed by now"),
    "rollout/test_soak.py": (1, "goes on for so long"),
    "runs/test_foreign_engines.py": (2, "looks again and again"),
    "serving/test_server.py": (1, "a deadline that passes, since the sampler stands still"),
    "support/chaos.py": (1, "ends what hangs"),
    "support/completions_server.py": (3, "looks again and again"),
    "support/waiting.py": (1, "ends what hangs"),
}


def reads_clock(node, names):
    """Whether an expression reads a clock, or one of `names`."""
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and one.attr in CLOCKS:
            if isinstance(one.value, ast.Name) and one.value.id == "time":
                return True
        if isinstance(one, ast.Name) and one.id in names:
            return True
    return False


def assigned(target, value):
    """Each name of an assignment, and what it gets."""
    tuples = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
    if tuples and len(target.elts) == len(value.elts):
        for one, its in zip(target.elts, value.elts, strict=True):
            yield from assigned(one, its)
    else:
        yield from ((one.id, value) for one in ast.walk(target) if isinstance(one, ast.Name))


def times(function):
    """Names that get a clock's reading in a function, or what is computed from one."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            pairs = (pair for target in node.targets for pair in assigned(target, node.value))
            names |= {name for name, value in pairs if reads_clock(value, names)}
    return names


def bounds_a_time(test, names):
    """Whether a condition says that a time is at most something."""
    for node in ast.walk(test):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for op, left, right in zip(node.ops, sides, sides[1:], strict=False):
                if isinstance(op, ast.Lt | ast.LtE) and reads_clock(left, names):
                    return True
                if isinstance(op, ast.Gt | ast.GtE) and reads_clock(right, names):
                    return True
    return False


def waits_for_seconds(call):
    """Whether a call waits for a number of seconds that is less than what hangs is given."""
    given = [word.value for word in call.keywords if word.arg == "timeout"]
    if isinstance(call.func, ast.Attribute) and call.func.attr in WAITS and len(call.args) == 1:
        given += call.args
    numbers = [one.value for one in given if isinstance(one, ast.Constant)]
    return any(type(number) in (int, float) and 0 < number < HANG for number in numbers)


def places(text):
    """Lines of a file that bound a time or wait for seconds."""
    lines = set()
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            names = times(function)
            for node in ast.walk(function):
                bounds = isinstance(node, ast.Assert | ast.While) and bounds_a_time(
                    node.test, names
                )
                if bounds or isinstance(node, ast.Call) and waits_for_seconds(node):
                    lines.add(node.lineno)
    return sorted(lines)


def test_no_test_bounds_a_time_or_waits_for_seconds():
    found = {str(path.relative_to(TESTS)): places(path.read_text()) for path in TESTS.rglob("*.py")}
    found = {name: lines for name, lines in found.items() if lines}
    allowed = {name: count for name, (count, _) in EXCEPTIONS.items()}
    wrong = {name: lines for name, lines in found.items() if len(lines) != allowed.get(name)}
    assert not wrong, "wait for an event, or count something else than seconds"
    assert found.keys() == allowed.keys(), "the list may shrink"


def test_what_is_found():
    text = """
def test(process, path):
    began = time.monotonic()
    process.wait(60)
    path, end = path.parent, time.monotonic() + 20
    while time.monotonic() < end and not path.exists():
        pass
    elapsed = time.perf_counter() - began
    assert elapsed < 5
    assert 1.0 <= elapsed < 5
    assert elapsed >= 1 and path.size < 7
    subprocess.run(["a"], timeout=HANG)
    subprocess.run(["a"], timeout=120)
"""
    assert places(text) == [4, 6, 9, 10, 13]
