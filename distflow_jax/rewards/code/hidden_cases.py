"""The hidden cases of a row, from its ground truth.

| ground truth                                          | a case                                |
|-------------------------------------------------------|---------------------------------------|
| {"inputs": [text], "outputs": [text]}                 | standard input, standard output       |
| the same with "fn_name": an input is a list of        | a call of the function, and its value |
| arguments, or lines of JSON; then outputs are JSON    |                                       |
| ["assert f(1) == 2", ..], or {"assert_case": [..]}    | an assertion about the program        |

As an object, or as JSON text of one. The forms of objects are verl's, that with lines of JSON is
LiveCodeBench's.
"""

import ast
import builtins
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from distflow_jax.parsing.checked_fields import is_missing
from distflow_jax.parsing.json_text import parse_json
from distflow_jax.parsing.one_line import shown

_FORMS = (
    'expected {"inputs": [...], "outputs": [...]}, with "fn_name" for calls of a function, or a '
    "list of assertions"
)


class PrintCase(NamedTuple):
    """Text on standard input, and the text that is to be printed."""

    stdin: str
    expected: str


class CallCase(NamedTuple):
    """Arguments of a call, and the values that it may return."""

    function: str
    arguments: list[Any]
    expected: tuple[Any, ...]


class AssertCase(NamedTuple):
    """Statements that hold; names in them that are the program's, and those of Python's modules."""

    text: str
    names: tuple[str, ...]
    modules: tuple[str, ...]


Case = PrintCase | CallCase | AssertCase


def hidden_cases(truth: Any) -> list[Case]:
    """The cases of a ground truth. Raises ValueError for one without any, or of no known form."""
    if is_missing(truth):
        raise ValueError(f"the row has no test cases: {_FORMS}")
    if isinstance(truth, str):
        truth = parse_json(truth, "the cases in the ground truth")
    if isinstance(truth, Mapping) and truth.get("assert_case"):
        truth = truth["assert_case"]
    if isinstance(truth, list) and truth:
        return [_assertion(text) for text in truth]
    if not isinstance(truth, Mapping):
        raise ValueError(f"the ground truth has no test cases: {_FORMS}, got {shown(truth)}")
    inputs, outputs = truth.get("inputs"), truth.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise ValueError(f"the row has no test cases: {_FORMS}, got {shown(truth)}")
    if len(inputs) != len(outputs):
        raise ValueError(
            f"the test cases have {len(inputs)} inputs but {len(outputs)} outputs: give one output "
            "for each input"
        )
    name = truth.get("fn_name")
    pairs = list(zip(inputs, outputs, strict=True))
    if name is None:
        return [PrintCase(_text(given), _text(expected)) for given, expected in pairs]
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"fn_name must be the name of a function, got {shown(name)}")
    calls = [_call(given, expected) for given, expected in pairs]
    # APPS has every output in a list of its own
    wrapped = all(isinstance(value, list) and len(value) == 1 for _, value in calls)
    return [
        CallCase(name, args, (value, value[0]) if wrapped else (value,)) for args, value in calls
    ]


def _text(value: Any) -> str:
    lines = value if isinstance(value, list) else [value]
    if not all(isinstance(line, str) for line in lines):
        raise ValueError(
            f"inputs and outputs without fn_name must be text or lists of lines, got {shown(value)}"
        )
    return "\n".join(lines)


def _call(given: Any, expected: Any) -> tuple[list[Any], Any]:
    """(arguments, value) of a call."""
    if isinstance(given, str):
        lines = given.split("\n")
        arguments = [parse_json(line, "an argument in the cases' inputs") for line in lines]
        if isinstance(expected, str):
            expected = parse_json(expected, "the cases' outputs")
        return arguments, expected
    if not isinstance(given, list):
        raise ValueError(f"an input of fn_name must be a list of arguments, got {shown(given)}")
    return given, expected


def _assertion(text: Any) -> AssertCase:
    """An assertion, if it asserts something of a program.

    Builtin names are Python's, never the program's; so are those of modules before a dot.
    """
    try:
        found = list(ast.walk(ast.parse(text)))
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"an assertion must be Python code, got {shown(text)}: {error}") from error
    names = [node for node in found if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in found if isinstance(node, ast.arg)}
    bound |= {n.name for n in found if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    bound |= {n.asname or n.name.split(".")[0] for n in found if isinstance(n, ast.alias)}
    free = {node.id for node in names} - bound - set(dir(builtins))
    before_dots = {ast.unparse(n.value) for n in found if isinstance(n, ast.Attribute)}
    modules = free & before_dots & sys.stdlib_module_names
    if free == modules or not any(isinstance(node, ast.Assert) for node in found):
        raise ValueError(f"an assertion must assert something about the program, got {shown(text)}")
    return AssertCase(text, tuple(sorted(free - modules)), tuple(sorted(modules)))
