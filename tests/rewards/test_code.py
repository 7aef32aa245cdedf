"""The reward `code`: the program of a response, the forms of cases, and failures of the sandbox."""

import json
import math
import random

import pytest

from distflow_jax.config.data_config import RewardConfig
from distflow_jax.config.sandbox_config import SandboxConfig
from distflow_jax.data.dataset import open_dataset
from distflow_jax.rewards.code import program_calls
from distflow_jax.rewards.code.case_verdicts import Judge, lines_of, same
from distflow_jax.rewards.code.hidden_cases import hidden_cases
from distflow_jax.rewards.code.program_text import program_of
from distflow_jax.rewards.code_reward import code
from distflow_jax.rewards.pool import RewardPool, failures
from distflow_jax.rewards.records import ProgramLimits, RewardRequest
from distflow_jax.sandbox.sandbox import Sandbox
from distflow_jax.sandbox.sandbox_records import SandboxError

SETTINGS = SandboxConfig(seconds=5.0, cpu_seconds=2.0)


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(SETTINGS) as opened:
        yield opened


def passes(sandbox, program, truth):
    """Shares of cases that a program passes."""
    cases = hidden_cases(truth)
    return Judge(sandbox, 20.0).count_passed(program, cases, all_needed=False) / len(cases)


# -- the program of a response --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1"),
        ("```python\nx = 1\n```\nBetter:\n```python\nx = 2\n```", "x = 2"),
        ("```py\nx = 1\n```\nIt prints:\n```text\n1\n```", "x = 1"),
        ("```\nx = 1\n```\nor\n```\nx = 2\n```", "x = 2"),
        ("```python\nx = 1\ny =", "x = 1\ny ="),
        ("x = 1\nprint(x)", "x = 1\nprint(x)"),
        ("<think>```python\nx = 1\n```</think>\n```python\nx = 2\n```", "x = 2"),
        ("<think>```python\nx = 1\n```", ""),
        ("```python title='a.py'\ns = 'a```b'\n```", "s = 'a```b'"),
        ("```python\nx = 1```", "x = 1"),
        ("```python\nx = 1``` \nBetter:\n```python\nx = 2\n```", "x = 2"),
        ("```python\nx = 1```\nIt prints:\n```text\n1```", "x = 1"),
        ("```python\n```", ""),
        ("```python\n\n```\nDone.", ""),
        ("Not yet:\n```python\n```\nNow:\n```python\nx = 1\n```", "x = 1"),
        ("", ""),
    ],
)
def test_the_program_is_the_last_block_of_python(response, program):
    assert program_of(response) == program


def test_a_prompt_may_begin_the_program():
    prompt = "Complete.\n```python\ndef f(n):\n    return"
    response = " n + 1\n```\nTry it:\n```python\nf(1)\n```"
    assert program_of(response, prompt) == "def f(n):\n    return n + 1"
    assert program_of("```python\nf(1)\n```", f"{prompt} n\n```\nAgain:") == "f(1)"


# -- forms of cases -------------------------------------------------------------------------------

SQUARE = "def f(n, k=0):\n    return n * n + k\n"
READS = "a, b = map(int, input().split())\nprint(a * b, '  ')\nprint()\n"


@pytest.mark.parametrize(
    ("program", "truth"),
    [
        (READS, {"inputs": ["2 3\n", "4 5"], "outputs": ["6\n", "20"]}),
        (READS, {"inputs": [["2 3", ""]], "outputs": [["6"]]}),
        (SQUARE, {"fn_name": "f", "inputs": [[2], [3, 1]], "outputs": [4, 10]}),
        (SQUARE, {"fn_name": "f", "inputs": ["2", "3\n1"], "outputs": ["4", "10"]}),
        (SQUARE, {"fn_name": "f", "inputs": [[2], [3, 1]], "outputs": [[4], [10]]}),  # APPS
        (SQUARE, ["assert f(2) == 4", "import math\nassert math.isqrt(f(3, k=1)) == 3"]),
        (SQUARE, {"assert_case": ["for n in range(3):\n    assert f(n) == n**2"]}),
        ("class Solution:\n    def g(self, s):\n        return s[::-1]",
         {"fn_name": "g", "inputs": ['"abc"'], "outputs": ['"cba"']}),
        ("def f(d):\n    return {1: d['a'], 'b': (1.5, None)}",
         {"fn_name": "f", "inputs": [[{"a": 3}]], "outputs": [{"1": 3, "b": [1.5, None]}]}),
    ],
)  # fmt: skip
def test_every_form_of_cases_as_an_object_and_as_text(sandbox, program, truth):
    assert passes(sandbox, program, truth) == passes(sandbox, program, json.dumps(truth)) == 1.0
    assert passes(sandbox, "f = g = print", truth) == 0.0


def test_assertions_about_objects_and_errors_of_the_program(sandbox):
    program = """
class Stack:
    def __init__(self, *items): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
def f(n):
    if n < 0: raise ValueError("negative")
    return {n: {n, (n, str(n).encode())}, None: frozenset({2**100, 1j})}
def g(stack): return stack.push(sum(stack))
"""
    holds = [
        "stack = Stack(1, 2)\nassert list(g(stack)) == [1, 2, 3] and len(stack) == 3",
        "assert f(1) == {1: {1, (1, b'1')}, None: frozenset({2**100, 1j})}",
        "try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False",
        "assert f is f and type(f(0)) is dict",
    ]
    fails = [
        "assert Stack() == Stack()",
        "assert f(2) == f(3)",
        "assert f(lambda: 1)",
        "assert g()",
    ]
    assert passes(sandbox, program, holds) == 1.0
    assert passes(sandbox, program, fails) == 0.0


@pytest.mark.parametrize(
    ("truth", "problem"),
    [
        (None, "the row has no test cases"),
        ("", "the row has no test cases"),
        ([], "has no test cases"),
        ({"inputs": [], "outputs": []}, "the row has no test cases"),
        ({"inputs": ["1"]}, "the row has no test cases"),
        ("42", "has no test cases.* got 42"),
        ("{'inputs': 3}", "not valid JSON at character 2"),
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "2 inputs but 1 outputs"),
        ({"inputs": [1], "outputs": ["1"]}, "must be text or lists of lines, got 1"),
        ({"fn_name": "f(", "inputs": [[1]], "outputs": [1]}, "fn_name must be the name"),
        ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "must be a list of arguments, got 1"),
        ({"fn_name": "f", "inputs": ["1,"], "outputs": ["1"]}, "not valid JSON"),
        (["assert f(1) = 2"], "must be Python code"),
        (["f(1) == 2"], "must assert something"),
        (["assert max(1, 2) == 2"], "must assert something about the program"),
        (["import math\nassert math.pi > 3"], "must assert something about the program"),
        ([3], "must be Python code"),
    ],
)
def test_bad_cases_are_errors_in_one_line(truth, problem):
    with pytest.raises(ValueError, match=problem) as error:
        hidden_cases(truth)
    assert "\n" not in str(error.value)


def test_lines_and_values_are_compared_as_documented():
    assert lines_of("1 \r\n2\t\n\n") == lines_of("1\n2") != lines_of(" 1\n2")
    assert lines_of("\n1") != lines_of("1") and lines_of(" \n\n") == lines_of("") == []
    assert same((1, [2.0 + 1e-12]), [1, [2]]) and not same([2.0 + 1e-6], [2])
    assert same({1: 2, None: 3}, {"1": 2, "null": 3}) and not same({1: 2, "1": 2}, {"1": 2})
    assert not same({1, 2}, [1, 2]) and not same("1", 1) and not same(math.nan, math.nan)


def plain_value(draw, depth=3):
    """A random value of plain data."""
    kinds = [
        lambda: draw.choice([None, True, False]),
        lambda: draw.randint(-(10**30), 10**30),
        lambda: draw.random() * 10.0 ** draw.randint(-300, 300),
        lambda: "".join(chr(draw.randint(1, 0x10FFFF)) for _ in range(3)),
        lambda: draw.randbytes(4),
        lambda: complex(draw.random(), draw.random()),
    ]
    some = range(draw.randint(0, 3))
    if depth:
        kinds += [
            lambda: [plain_value(draw, depth - 1) for _ in some],
            lambda: tuple(plain_value(draw, depth - 1) for _ in some),
            lambda: {plain_value(draw, 0): plain_value(draw, depth - 1) for _ in some},
            lambda: {plain_value(draw, 0) for _ in some},
            lambda: frozenset(plain_value(draw, 0) for _ in some),
        ]
    return draw.choice(kinds)()


def typed(value):
    """A value with the types of all of its parts."""
    if isinstance(value, dict):
        return [(typed(key), typed(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(item) for item in value]
    if isinstance(value, set | frozenset):
        return type(value), {(type(item), item) for item in value}
    return type(value), value


def test_plain_data_crosses_unchanged():
    draw = random.Random(0)
    for _ in range(500):
        value = plain_value(draw)
        form = json.loads(json.dumps(program_calls.encode(value, id)))
        assert typed(program_calls.decode(form, abs)) == typed(value)


@pytest.mark.parametrize("form", ["calls", "stdin", "asserts"])
def test_references_of_the_task_pass_and_shorter_programs_do_not(sandbox, form):
    data = open_dataset(f"task:programs?form={form}&operations=2-4")
    for row in range(4):
        example = data[row]
        assert passes(sandbox, program_of(example.chosen), example.ground_truth) == 1.0
        assert passes(sandbox, program_of(example.rejected), example.ground_truth) < 1.0


def test_the_share_is_an_option_and_limits_are_of_case_and_program(sandbox):
    truth = {"fn_name": "f", "inputs": [[n] for n in range(4)], "outputs": [0, 1, 4, 9]}
    halves = "def f(n):\n    if n > 1:\n        while True: pass\n    return n * n"
    options = {"limits": ProgramLimits(SandboxConfig(cpu_seconds=0.3, seconds=5.0))}
    assert code("", halves, truth, partial=True, **options) == {"score": 0.5, "answer": halves}
    assert code("", halves, truth, **options)["score"] == 0.0
    assert code("", "  ", truth, partial=True, **options) == {"score": 0.0, "answer": ""}
    for parallel in (1, 3):
        judge = Judge(sandbox, 20.0, parallel)
        assert judge.count_passed(SQUARE, hidden_cases(truth), all_needed=True) == 4
    sleeps = "import time\ndef f(n):\n    time.sleep(0.4)\n    return n * n"
    assert 1 <= Judge(sandbox, 1.0).count_passed(sleeps, hidden_cases(truth), all_needed=False) < 4


# -- failures of the sandbox ----------------------------------------------------------------------


class FailingSandbox:
    """A sandbox of which a share of calls fails, before the program begins or after it has run."""

    def __init__(self, sandbox, rate, seed=0):
        self._sandbox, self._rate, self._draw = sandbox, rate, random.Random(seed)
        self.limits, self.failed = sandbox.limits, 0

    def _fail(self):
        if self._draw.random() < self._rate / 2:
            self.failed += 1
            raise SandboxError("the machine has no more processes")

    def run(self, program):
        self._fail()
        outcome = self._sandbox.run(program)
        self._fail()
        return outcome

    def open(self, program):
        self._fail()
        session = self._sandbox.open(program)
        session.close, close = lambda: (close(), self._fail()), session.close
        return session


@pytest.mark.parametrize("form", ["calls", "stdin", "asserts"])
def test_verdicts_do_not_depend_on_failures_of_the_sandbox(sandbox, form):
    data = open_dataset(f"task:programs?form={form}&cases=3")
    failing = FailingSandbox(sandbox, 0.2)
    for row in range(5):
        example = data[row]
        for response in (example.chosen, example.rejected):
            found = [
                Judge(one, 20.0).count_passed(
                    program_of(response), hidden_cases(example.ground_truth), all_needed=False
                )
                for one in (sandbox, failing)
            ]
            assert found[0] == found[1]
    assert failing.failed >= 2


def test_a_sandbox_that_always_fails_gives_no_score(sandbox):
    with pytest.raises(SandboxError, match="no more processes"):
        passes(FailingSandbox(sandbox, 2.0), SQUARE, ["assert f(2) == 4"])


def requests(count):
    data = open_dataset("task:programs?cases=3")
    examples = [data[row] for row in range(count)]
    return [
        RewardRequest("programs", (e.chosen, e.rejected)[i % 2], e.ground_truth)
        for i, e in enumerate(examples)
    ]


def test_a_pool_scores_in_its_workers():
    with RewardPool(RewardConfig(function="code", num_workers=2), SETTINGS) as pool:
        assert [r.score for r in pool.score(requests(12))] == [1.0, 0.0] * 6


def test_what_the_model_did_not_do_is_not_a_0():
    """Rows without cases, and a sandbox that cannot start programs: not scored, and counted."""
    bad = [RewardRequest("programs", "x = 1", {"inputs": [], "outputs": []})]
    with RewardPool(RewardConfig(function="code", num_workers=1), SETTINGS) as pool:
        results = pool.score(bad + requests(3))
    assert [r.score for r in results[1:]] == [1.0, 0.0, 1.0] and math.isnan(results[0].score)
    assert "the row has no test cases" in results[0].error
    assert failures(results)["failed"] == failures(results)["not_scored"] == 1
