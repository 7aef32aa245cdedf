"""Messages in other forms than a list of role and content, and what stands beside them.

JSON text of messages, ShareGPT's `from` and `value`, answers of several messages, and the columns
`tools` and `chat_template_kwargs`, which are variables of the chat template.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from distflow_jax.data.example import Message
from distflow_jax.data.row_checks import bad_value
from distflow_jax.parsing.one_line import shown

MESSAGE_COLUMNS = ("prompt", "messages", "conversations", "chosen", "rejected", "completion")
VARIABLES = ("tools", "chat_template_kwargs")
# whose turn a message is by its `from`, in ShareGPT's data and those after its example
_FROM = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function_response", "function", "observation"), "tool"),
}
_OTHERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}  # roles of no template
_OWN_KEYS = ("reasoning_content", "thinking", "reasoning", "tool_calls")
_BEGINS = re.compile(r"""\s*(?:array\()?[\[(]?\s*\{\s*['"]\w+['"]\s*:""")
_PROSE = re.compile(r"[\])}](?!, *dtype=\w+\)\s*\Z)[^\])}]*[^\s\])}][^\])}]*\Z")  # behind a value
_KEYS = [re.compile(rf"""['"](?:{names})['"]\s*:""") for names in ("role|from", "content|value")]


def read_messages(value: Any, place: str, column: str) -> Any:
    """`value` with its messages as {"role", "content"}, if it holds messages, or JSON text of them.

    Other text and other values stay. Raises ValueError for a repr of messages, and for a `from`
    that is not ShareGPT's.
    """
    if isinstance(value, str):
        if not _BEGINS.match(value) or not all(key.search(value) for key in _KEYS):
            return value
        try:
            value = _parsed(value)
        except (ValueError, RecursionError) as error:
            if "Extra data" in str(error) or _PROSE.search(value):
                return value
            raise bad_value(
                place, column, f"text of messages that is no JSON ({error}): write a list, or JSON"
            ) from None
    if not isinstance(value, list):
        return value
    return [_message(message, i, place, column) for i, message in enumerate(value)]


def _parsed(text: str) -> Any:
    found = json.loads(text)
    return [found] if isinstance(found, dict) and {"role", "content"} <= found.keys() else found


def _message(message: Any, index: int, place: str, column: str) -> Any:
    if not isinstance(message, dict):
        return message
    if message.get("role") is None and "from" in message and "value" in message:
        role = _FROM.get(str(message["from"]).lower())
        if role is None:
            known = ", ".join(_FROM)
            problem = f"message {index} is from {shown(message['from'])}; known: {known}"
            raise bad_value(place, column, problem)
        others = {key: x for key, x in message.items() if key not in ("from", "value", "role")}
        return {"role": role, "content": message["value"], **others}
    if (role := message.get("role")) in _OTHERS:
        raise bad_value(
            place,
            column,
            f"message {index} has ShareGPT's role {role!r} without its 'from' and 'value': write "
            f"{_OTHERS[role]!r}",
        )
    return message


def answer_of(message: Message) -> str | list[Message]:
    """An assistant's message as an answer: its text, or itself where that is not all of it."""
    return [message] if any(message.get(key) for key in _OWN_KEYS) else message["content"]


def last_turn(prompt: Any, answer: Any, place: str, column: str) -> tuple[Any, Any]:
    """(prompt, answer) of one message: messages before the last of an answer belong to the prompt.

    An answer may repeat the prompt. Raises ValueError for one that does not end with the assistant.
    """
    if not isinstance(answer, list):
        return prompt, answer
    *before, last = answer
    if last["role"] != "assistant":
        raise bad_value(place, column, f"ends with a message of {last['role']!r}, not 'assistant'")
    if before and isinstance(prompt, str):
        raise bad_value(place, column, "has several messages, and the prompt is text: write both")
    return (prompt if before == prompt else [*prompt, *before] if before else prompt), (
        answer_of(last)
    )


def template_variables(row: dict[str, Any], place: str) -> dict[str, Any]:
    """Variables of the chat template in a row, whose JSON text is parsed there. ValueError."""
    found: dict[str, Any] = {}
    for column, kind in zip(VARIABLES, (list, dict), strict=True):
        if row.get(column) in (None, "", [], {}):
            continue
        value = row[column] = _json(row[column], place, column)
        if kind is list and isinstance(value, list):
            value = row[column] = [_json(tool, place, column) for tool in value]
        if not isinstance(value, kind) or not all(isinstance(x, dict | str) for x in value):
            what = "a list of JSON schemas" if kind is list else "an object"
            raise bad_value(
                place, column, f"expected {what}, or JSON text of it, got {shown(value)}"
            )
        found |= {column: value} if kind is list else without_nulls(value)
    return found


def _json(value: Any, place: str, column: str) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise bad_value(place, column, f"not valid JSON ({error}): {shown(value)}") from None


def without_nulls(value: Any) -> Any:
    """A value without the keys of its dicts that are null: a table gives each dict those of all."""
    if isinstance(value, dict):
        return {key: without_nulls(x) for key, x in value.items() if x is not None}
    return [without_nulls(x) for x in value] if isinstance(value, list) else value


def cleaned(row: Any, columns: Iterable[str]) -> Any:
    """A table's row with such columns without_nulls."""
    return {**row, **{column: without_nulls(row[column]) for column in columns if column in row}}
