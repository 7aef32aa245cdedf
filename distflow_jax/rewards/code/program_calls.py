"""Calls of a program's functions over a pipe. Runs inside the sandbox, as a file of its own.

`serve PROGRAM` runs a program and answers requests to it; `check` executes an assertion about a
program in another process, such a server. Messages are JSON in frames of SandboxSession: requests
[operation, arguments, keyword arguments], and answers {"value": ..} or {"raised": name of a type}.

Values cross as plain data, of which the receiver makes objects of its own: nothing that a program
defines, compares or patches is part of the other process. Any other object stays where it is, and a
number stands for it.
"""

import builtins
import importlib
import json
import operator
import os
import sys
import types
from collections.abc import Callable
from typing import Any

_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}
_JSON_INTEGER = 1 << 63
_MESSAGES_IN, _MESSAGES_OUT = 3, 4  # descriptors of a SandboxSession
# they would end a loop of the assertion's as if there were no more items
_ENDS_LOOPS = (StopIteration, StopAsyncIteration, GeneratorExit)


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


def serve(path: str) -> None:
    """Runs the program of a file as a module and answers requests about its names and objects."""
    program = sys.modules["program"] = types.ModuleType("program")
    objects: list[Any] = []

    def number_of(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def named(name: str) -> Any:
        solution = getattr(program, "Solution", None)  # a class, as on LeetCode
        return getattr(program if hasattr(program, name) or not solution else solution(), name)

    with open(path, encoding="utf-8") as file:
        exec(compile(file.read(), path, "exec"), vars(program))
    while True:
        operation, args, kwargs = decode(_receive(), objects.__getitem__)
        try:
            value = (_OPERATIONS | {"name": named})[operation](*args, **kwargs)
            answer = {"value": encode(value, number_of)}
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # calls may follow
            answer = {"raised": type(error).__name__}
        _send(answer)


# -- the assertion's side -------------------------------------------------------------------------


class RemoteObject:
    """An object of the program that is no plain data, by its number. Equal only to itself."""

    def __init__(self, number: int, ask: Callable[..., Any]):
        self._number, self._ask = number, ask

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("attribute", self, name)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", self, key)

    def __iter__(self) -> Any:
        return iter(self._ask("list", self))

    def __len__(self) -> int:
        return self._ask("length", self)

    def __bool__(self) -> bool:
        return self._ask("truth", self)

    def __str__(self) -> str:
        return self._ask("text", self)


def check() -> None:
    """Executes the text of {"text": .., "names": [..], "modules": [..]}, and sends "held".

    Before that it sends requests about names and objects of the program.
    """

    def number_of(value: Any) -> int:
        if not isinstance(value, RemoteObject):
            raise TypeError(f"a program in another process cannot get {value!r}")
        return value._number

    def ask(operation: str, *args: Any, **kwargs: Any) -> Any:
        _send(encode([operation, list(args), kwargs], number_of))
        answer = _receive()
        if "raised" in answer:
            raise _error_of(answer["raised"])
        return decode(answer["value"], lambda number: RemoteObject(number, ask))

    assertion = _receive()
    names = {name: importlib.import_module(name) for name in assertion["modules"]}
    names |= {name: ask("name", name) for name in assertion["names"]}
    exec(compile(assertion["text"], "assertion", "exec"), names)
    _send("held")


def _error_of(name: str) -> Exception:
    kind = getattr(builtins, str(name), None)
    known = isinstance(kind, type) and issubclass(kind, Exception)
    return (kind if known and not issubclass(kind, _ENDS_LOOPS) else RuntimeError)(name)


def _receive() -> Any:
    """The next message. EOFError after the last one."""
    size = int.from_bytes(_read(4), "little")
    return json.loads(_read(size))


def _read(size: int) -> bytes:
    content = b""
    while len(content) < size:
        chunk = os.read(_MESSAGES_IN, size - len(content))
        if not chunk:
            raise EOFError
        content += chunk
    return content


def _send(message: Any) -> None:
    content = json.dumps(message).encode()
    content = len(content).to_bytes(4, "little") + content
    while content:
        content = content[os.write(_MESSAGES_OUT, content) :]


if __name__ == "__main__":
    {"serve": serve, "check": check}[sys.argv[1]](*sys.argv[2:])
