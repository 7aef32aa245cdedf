"""The forms in which models write calls of tools, and how they read the results.

hermes: Hermes, Qwen2.5, Qwen3
    <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
qwen3_coder: Qwen3-Coder, Qwen3.5
    <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
llama3_json: Llama 3.1 to 3.3; <|python_tag|> may stand before it
    {"name": "f", "parameters": {"x": 1}}
tags: models without a form of their own; without a name, the first tool
    <tool name="f">1</tool>

The names are those of vLLM's parsers. A text is read in time linear in its length.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.parsing.one_line import shown


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    `name` "" stands for the first tool. `arguments` by name, or the text of the only one.
    `problem`: why it is none, in words for the model; "" where it is one.
    """

    name: str = ""
    arguments: Mapping[str, Any] | str = ""
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class ToolForm:
    """A form of calls.

    `read`: the calls in a text. `role`: whose turn a result is in the chat template. `wrapped`: a
    result where no template writes one, or a turn of another role has it.
    """

    read: Callable[[str], list[ToolCall]]
    role: str = "tool"
    wrapped: str = "<tool_response>\n{}\n</tool_response>"


_START, _END = "<tool_call>", "</tool_call>"


def _up_to(end: str, whole: str) -> str:
    """A pattern of the text up to a tag, or of all that is left; a tag in a `whole` is none."""
    return rf"((?:{whole}|[^<\"]++|(?!{end})[<\"])*+)(?:{end}|\Z)"


_VALUE = r"<parameter=[^<>\n]+>(?:[^<]|<(?!/?parameter))*+</parameter>"
_BLOCK = re.compile(_START + _up_to(_END, _VALUE))
_FUNCTION = re.compile(r"<function=([^<>\n]+)>" + _up_to("</function>", _VALUE))
_JSON = re.compile(_up_to(_END, r'"(?:[^"\\]|\\.)*+"'), re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=([^<>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL
)
_OBJECT = re.compile(r"[\s;,]*(\{)")
_NAMED = re.compile(r'\{[^{}]*"name"')
_NAME = r"""\s+name\s*=\s*(?:"([^"<>]*)"|'([^'<>]*)'|([^\s"'<>]+))"""
_OPENING, _CLOSING = re.compile(rf"<tool(?:{_NAME})?\s*>"), "</tool>"


def _json_call(value: Any) -> ToolCall:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        wanted = 'a call must have the form {"name": "...", "arguments": {...}}'
        return ToolCall(problem=f"{wanted}, got {shown(value)}")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str) and arguments.lstrip().startswith("{"):  # JSON in JSON
        arguments = _read_json(arguments, dict)
    if isinstance(arguments, ToolCall):
        return arguments
    if not isinstance(arguments, dict | str):
        return ToolCall(name, problem=f"the arguments of {name} must be an object, {{...}}")
    return ToolCall(name, arguments)


def _read_json(text: str, read: Callable[[Any], Any]) -> Any:
    """read(the value of a text of JSON); a ToolCall with the problem of one that is none."""
    try:
        return read(json.loads(text))
    except (ValueError, RecursionError) as error:
        return ToolCall(problem=f"the call is not valid JSON: {error}")


def _hermes(text: str) -> list[ToolCall]:
    calls, at, in_strings = [], 0, True
    while (start := text.find(_START, at)) >= 0:
        start += len(_START)
        at = end if (end := text.find(_END, start)) >= 0 else len(text)
        if in_strings and not _is_json(text[start:at]):
            whole = _JSON.match(text, start)
            # not tried again behind a text that is none: the time would be quadratic
            if in_strings := _is_json(whole[1]):
                at = whole.end(1)
        calls.append(_read_json(text[start:at], _json_call))
    return calls


def _is_json(text: str) -> bool:
    return not isinstance(_read_json(text, lambda value: value), ToolCall)


def _llama(text: str) -> list[ToolCall]:
    """Objects one after the other; an answer that is another kind of JSON is no call."""
    text, calls, at = text.strip().removeprefix("<|python_tag|>").strip(), [], 0
    while found := _OBJECT.match(text, at):
        try:
            value, at = json.JSONDecoder().raw_decode(text, found.start(1))
        except (ValueError, RecursionError) as error:
            if not _NAMED.match(text, found.start(1)):
                return calls
            return [*calls, ToolCall(problem=f"the call is not valid JSON: {error}")]
        if "name" not in value:
            return calls
        calls.append(_json_call(value))
    return calls


def _qwen(text: str) -> list[ToolCall]:
    blocks = [block[1] for block in _BLOCK.finditer(text)]
    if not blocks and "<function=" in text:  # small models forget the outer tags
        blocks = [text]
    calls = []
    for block in blocks:
        found = [
            ToolCall(
                name.strip(), {key.strip(): value for key, value in _PARAMETER.findall(inside)}
            )
            for name, inside in _FUNCTION.findall(block)
        ]
        calls += found or [ToolCall(problem="a call needs <function=NAME>...</function>")]
    return calls


def _tags(text: str) -> list[ToolCall]:
    """A call goes from the last opening tag before a closing one to that."""
    calls, at = [], 0
    while (end := text.find(_CLOSING, at)) >= 0:
        openings = list(_OPENING.finditer(text, at, end))
        for last in openings[-1:]:
            name = last[1] or last[2] or last[3] or ""
            calls.append(ToolCall(name.strip(), text[last.end() : end]))
        at = end + len(_CLOSING)
    return calls


FORMS = {
    "hermes": ToolForm(_hermes),
    "qwen3_coder": ToolForm(_qwen),
    "llama3_json": ToolForm(_llama, wrapped="{}"),
    "tags": ToolForm(_tags, role="user", wrapped="<result>{}</result>"),
}
_PROBE = ToolCall("zqtoolqz", {"zqkeyqz": "zqvalueqz"})


@functools.lru_cache(maxsize=16)
def form_of(tokenizer: Tokenizer) -> str:
    """The form in which the chat template writes a call; "tags" for one that writes none of these.

    It is found by having the template write one.
    """
    function = {"name": _PROBE.name, "arguments": _PROBE.arguments}
    call = {"type": "function", "function": function}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        ids = tokenizer.encode_answer([{"role": "user", "content": "."}], [answer])
    except ValueError:  # no template, or one that leaves calls out
        return "tags"
    text = tokenizer.decode(ids)
    return next((name for name, form in FORMS.items() if form.read(text) == [_PROBE]), "tags")
