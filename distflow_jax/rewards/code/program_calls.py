"""Calls of a program's functions over a pipe. Runs inside the sandbox, as a file of its own.

`serve` runs the program main.py and answers requests to it; `check` executes an assertion about a
program in another process, such a server. Messages are JSON in frames: requests [operation,
arguments, keyword arguments], and answers {"value": ..} or {"raised": name of a type}.

Values cross as plain data, of which the receiver makes objects of its own: nothing that a program
defines, compares or patches is part of the other process. Any other object stays where it is, and a
number stands for it.
"""

import builtins
import importlib
import json
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

from distflow_jax.sandbox.byte_frames import Frames

_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}
_JSON_INTEGER = 1 << 63
# they would end a loop of the assertion's as if there were no more items
_ENDS_LOOPS = (StopIteration, StopAsyncIteration, GeneratorExit)
_FRAMES = Frames(3, 4)


def encode(value: Any, number_of: Callable[[Any], int]) -> Any:
    """The JSON form of a value; `number_of`: the number of an object that is no plain data."""
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return value if abs(value) < _JSON_INTEGER else {"int": hex(value)}
    if isinstance(value, list):
        return [encode(item, number_of) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(part, number_of) for part in item] for item in value.items()]}
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(item, number_of) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    return {"object": number_of(value)}


def decode(form: Any, object_of: Callable[[int], Any]) -> Any:
    """The value of a JSON form. Raises ValueError or TypeError for what `encode` never makes."""
    if isinstance(form, list):
        return [decode(item, object_of) for item in form]
    if not isinstance(form, dict):
        return form
    ((name, inner),) = form.items()
    if name == "dict":
        return {decode(key, object_of): decode(value, object_of) for key, value in inner}
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(item, object_of) for item in inner)
    if name == "object":
        return object_of(inner)
    makers = {"int": lambda text: int(text, 16), "bytes": bytes.fromhex}
    return complex(*inner) if name == "complex" else makers[name](inner)


# -- the program's side ---------------------------------------------------------------------------

_OPERATIONS = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "attribute": getattr,
    "item": operator.getitem,
    "length": len,
    "list": list,
    "truth": bool,
    "text": str,
}


def serve() -> None:
    """Runs the program as a module and answers requests about its names and objects."""
    program = sys.modules["program"] = types.ModuleType("program")
    objects: list[Any] = []

    def number_of(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def named(name: str) -> Any:
        solution = getattr(program, "Solution", None)  # a class, as on LeetCode
        return getattr(program if hasattr(program, name) or not solution else solution(), name)

    with open("main.py", encoding="utf-8") as file:
        exec(compile(file.read(), "main.py", "exec"), vars(program))
    while True:
        operation, args, kwargs = decode(_receive(), objects.__getitem__)
        try:
            value = (_OPERATIONS | {"name": named})[operation](*args, **kwargs)
            answer = {"value": encode(value, number_of)}
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # calls may follow
            answer = {"raised": type(error).__name__}
        _send(answer)


# -- the assertion's side -------------------------------------------------------------------------


def _ask(operation: str, *args: Any, **kwargs: Any) -> Any:
    """The value of an operation in the program's process. Raises what that raises."""
    _send(encode([operation, list(args), kwargs], _number_of))
    answer = _receive()
    if "raised" in answer:
        raise _error_of(answer["raised"])
    return decode(answer["value"], RemoteObject)


def _asks(operation: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: _ask(operation, self, *args, **kwargs)


class RemoteObject:
    """An object of the program that is no plain data, by its number. Equal only to itself."""

    __call__, __getitem__, __len__ = _asks("call"), _asks("item"), _asks("length")
    __bool__, __str__ = _asks("truth"), _asks("text")

    def __init__(self, number: int):
        self._number = number

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _ask("attribute", self, name)

    def __iter__(self) -> Any:
        return iter(_ask("list", self))


def check() -> None:
    """Executes the text of {"text": .., "names": [..], "modules": [..]}, and sends "held".

    Before that it sends requests about names and objects of the program.
    """
    assertion = _receive()
    names = {name: importlib.import_module(name) for name in assertion["modules"]}
    names |= {name: _ask("name", name) for name in assertion["names"]}
    exec(compile(assertion["text"], "assertion", "exec"), names)
    _send("held")


def _number_of(value: Any) -> int:
    if not isinstance(value, RemoteObject):
        raise TypeError(f"a program in another process cannot get {value!r}")
    return value._number


def _error_of(name: str) -> Exception:
    kind = getattr(builtins, str(name), None)
    known = isinstance(kind, type) and issubclass(kind, Exception)
    return (kind if known and not issubclass(kind, _ENDS_LOOPS) else RuntimeError)(name)


def _receive() -> Any:
    return json.loads(_FRAMES.receive())


def _send(message: Any) -> None:
    _FRAMES.send(json.dumps(message).encode())


if __name__ == "__main__":
    {"serve": serve, "check": check}[sys.argv[1]]()
