"""Tools as models know them: a function's JSON schema, and its call with a model's arguments."""

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distflow_jax import user_functions
from distflow_jax.config.sandbox_config import SandboxConfig
from distflow_jax.did_you_mean import hint
from distflow_jax.environments.calculator import calculate
from distflow_jax.parsing.one_line import shown

# built-in tools; those in the sandbox are loaded where a run names them
TOOLS: dict[str, Callable[..., Any] | str] = {
    "calculator": calculate,
    "python": "distflow_jax.environments.interpreters:Python",
    "bash": "distflow_jax.environments.interpreters:Bash",
}
_KINDS: dict[Any, tuple[str, type | tuple[type, ...]]] = {
    str: ("string", str),
    int: ("integer", int),
    float: ("number", (int, float)),
    bool: ("boolean", bool),
    list: ("array", list),
    dict: ("object", dict),
}
_TYPES = dict(_KINDS.values())
_NO_TEXT = re.compile(r" at 0x[0-9a-fA-F]+>|^(bytearray\()?b['\"]")  # objects by address; bytes
_ARGUMENT = re.compile(r"^ +(\w+)(?: *\(.*?\))?: *(.*(?:\n {5,}.*)*)", re.MULTILINE)


class Unsuccessful(ValueError):
    """A call that failed, with the answer of the tool, such as a traceback."""


@dataclasses.dataclass(frozen=True)
class Tool:
    """A tool: a function, or a class of which a response has an object that it calls.

    `schema`: as chat templates read it, {"type": "function", "function": {"name", "description",
    "parameters": a JSON schema}}.
    """

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]

    @property
    def has_state(self) -> bool:
        """Whether a call may depend on those before it."""
        return inspect.isclass(self.function)

    @property
    def is_async(self) -> bool:
        """Whether calls are awaited."""
        return inspect.iscoroutinefunction(_called(self.function))

    def make(self, sandbox: SandboxConfig) -> Callable[..., Any]:
        """The function that a response calls. A class gets `sandbox` if it has that parameter."""
        if not self.has_state:
            return self.function
        takes = "sandbox" in inspect.signature(self.function).parameters
        return self.function(sandbox=sandbox) if takes else self.function()

    @property
    def required(self) -> Sequence[str]:
        """The names of arguments that every call gives."""
        return self.schema["function"]["parameters"].get("required", ())

    def bind(self, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
        """The arguments by name, each of its type. ValueError, in words for the model, for wrong
        ones. Text is read as JSON for a parameter of another type."""
        known, required = self.schema["function"]["parameters"]["properties"], self.required
        if isinstance(arguments, str):
            arguments = {next(iter(known)): arguments} if known else {}
        given = {k: v for k, v in arguments.items() if v is not None or k in required}
        for name in given:
            if name not in known:
                raise ValueError(f"{self.name} has no argument {name[:40]!r}; {hint(name, known)}")
        for name in required:
            if name not in given:
                raise ValueError(f"{self.name} needs the argument {name!r}")
        return {
            name: value
            if value is None and known[name].get("nullable")
            else _fitted(name, value, known[name]["type"])
            for name, value in given.items()
        }

    def text_of(self, result: Any) -> str:
        """A result as text. TypeError for one that has none."""
        if not isinstance(result, str) and _NO_TEXT.search(str(result)):
            raise TypeError(f"it returned {user_functions.shown_with_type(result)}, not text")
        return str(result)


def by_name(tools: Mapping[str, str] | Sequence[str] | str) -> dict[str, str]:
    """{name: tool}: tools without a name have their own. ValueError where there is none."""
    if not isinstance(tools, Mapping):
        given = [tools] if isinstance(tools, str) else tools
        tools = {re.split("[:.]", str(where))[-1]: where for where in given}
    if not tools or not all(isinstance(where, str) for where in tools.values()):
        raise ValueError(f"tools must name at least one tool, each as text, got {shown(tools)}")
    return dict(tools)


def load_tool(name: str, where: str) -> Tool:
    """A tool of TOOLS, or "path/file.py:function", under a name.

    Raises ValueError or FileNotFoundError for others; the nearest is named.
    """
    found = user_functions.load_named(
        where, TOOLS, "tool", setting="tool", example="path/to/file.py:function"
    )
    if isinstance(found, str):
        found = user_functions.load_function(found, "tool")
    return Tool(name, found, _schema(name, found))


def _schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a function, from its signature and docstring, as transformers makes it."""
    called = _called(function)
    parameters = list(inspect.signature(called).parameters.values())
    parameters = parameters[1:] if inspect.isclass(function) else parameters
    text, _, after = inspect.cleandoc(called.__doc__ or "").partition("\nArgs:\n")
    about = {name: " ".join(said.split()) for name, said in _ARGUMENT.findall(after)}
    try:
        hints = typing.get_type_hints(called)
    except NameError as error:
        raise ValueError(f"tool {name!r}: the type of a parameter is unknown: {error}") from error
    properties = {}
    for parameter in parameters:
        kind = _kind(hints.get(parameter.name, str))
        if kind is None or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(
                f"tool {name!r}: a model cannot set its parameter {str(parameter)!r}; use "
                "parameters of type str, int, float, bool, list or dict"
            )
        said = about.get(parameter.name)
        properties[parameter.name] = kind | ({"description": said} if said else {})
    required = [p.name for p in parameters if p.default is p.empty]
    schema = {"type": "object", "properties": properties}
    schema |= {"required": required} if required else {}
    text = text.partition("\nReturns:\n")[0].strip()
    return {
        "type": "function",
        "function": {"name": name, "description": text, "parameters": schema},
    }


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    return function.__call__ if inspect.isclass(function) else function


def _kind(hint: Any) -> dict[str, Any] | None:
    """The JSON schema of a type; None without one."""
    nullable = {}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint, *others = [h for h in typing.get_args(hint) if h is not types.NoneType]
        hint, nullable = None if others else hint, {"nullable": True}
    found = _KINDS.get(typing.get_origin(hint) or hint)
    return {"type": found[0]} | nullable if found else None


def _fitted(name: str, value: Any, kind: str) -> Any:
    if isinstance(value, str) and kind != "string":
        try:
            value = json.loads(value.lower() if kind == "boolean" else value)
        except (ValueError, RecursionError):
            pass  # said below
    if not isinstance(value, _TYPES[kind]) or isinstance(value, bool) != (kind == "boolean"):
        raise ValueError(f"the argument {name!r} must be of type {kind}, got {shown(value)}")
    return value
