"""Other forms of messages than a list of role and content, pairs without a prompt, and variables of
the chat template.

The prompt of such a pair ends where its conversations differ, and at the latest before the last
message of the shorter one. The answer of each is the assistant's turn that follows. Turns after it
are left out: they belong to conversations that went apart with the answers.
"""

import json
import re
from typing import Any

from distflow_jax.data.example import Message
from distflow_jax.data.row_checks import bad_value, checked_prompt
from distflow_jax.parsing.json_text import DECODER, json_problem
from distflow_jax.parsing.one_line import shown

MESSAGE_COLUMNS = ("prompt", "messages", "conversations", "chosen", "rejected", "completion")
VARIABLES = ("tools", "chat_template_kwargs")
# ShareGPT's `from` and those after its example -> role
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"} | {
    **{"function_call": "assistant", "function_response": "tool", "observation": "tool"},
    **{role: role for role in ("system", "user", "assistant", "tool")},
}
_OWN_KEYS = ("reasoning_content", "thinking", "reasoning", "tool_calls")
_KEYS = r"""(?=.*['"](role|from)\\*['"]\s*:)(?=.*['"](content|value)\\*['"]\s*:)"""
_MESSAGES = re.compile(rf"\s*(array\()?[\[(]?\s*\{{\s*{_KEYS}", re.DOTALL)
_QUOTED = re.compile(rf"""{_KEYS}\s*(\[\s*|b)?(['"])\s*[\[{{].*[\]}}]\s*\4\s*\]?\s*""", re.DOTALL)


def read_messages(value: Any, place: str, column: str) -> Any:
    """`value` as {"role", "content"} each, if it holds messages, ShareGPT's, or JSON text of them.

    Other values stay. Raises ValueError for other text of messages, and for unknown roles.
    """
    if isinstance(value, str) and _QUOTED.fullmatch(value):
        problem = "text of messages within quotes: write a list, or JSON of it"
        raise bad_value(place, column, problem)
    if isinstance(value, str) and _MESSAGES.match(value):
        value = _parsed_messages(value, place, column)
    if not isinstance(value, list):
        return value
    return [_message(message, f"message {i}", place, column) for i, message in enumerate(value)]


def _parsed_messages(text: str, place: str, column: str) -> Any:
    """The messages in JSON text; the text itself if it is another. Raises ValueError."""
    try:
        found = DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        if _goes_on(text, error):
            return text
        problem = f"text of messages: {json_problem(error)}; write a list, or JSON"
        raise bad_value(place, column, problem) from None
    messages = found if isinstance(found, list) else [found]
    if _are_messages(messages):
        return messages
    if isinstance(found, dict):
        for key in [key for key, inner in found.items() if _are_messages(inner)]:
            problem = f"JSON text of an object with messages in {key!r}: write these alone"
            raise bad_value(place, column, problem)
    return text


def _are_messages(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(m, dict) and bool({"role", "from"} & m.keys()) for m in value)


def _goes_on(text: str, error: Exception) -> bool:
    """Whether a text of messages, which is no JSON, goes on with another text."""
    if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
        return bool(text[error.pos :].strip(" \t\r\n,"))
    end = text.rfind("}" if text.lstrip()[0] == "{" else "]") + 1
    return bool(end and re.search(r"\w", text[end:].replace("dtype=object", "")))


def _message(message: Any, which: str, place: str, column: str) -> Any:
    if not isinstance(message, dict):
        return message
    role = message.get("role")
    if role is None and "value" in message:
        if (name := str(message.get("from")).lower()) not in _ROLES:
            raise bad_value(place, column, f"{which} is from {name!r}, not {', '.join(_ROLES)}")
        others = {key: x for key, x in message.items() if key not in ("from", "value", "role")}
        return {"role": _ROLES[name], "content": message["value"], **others}
    if role in ("human", "gpt", "chatgpt"):
        problem = f"{which} has ShareGPT's role {role!r} without from and value: write"
        raise bad_value(place, column, f"{problem} {_ROLES[role]!r}")
    return message


def answer_of(message: Message) -> str | list[Message]:
    """An assistant's message as an answer: its text, or itself if it has a thought or calls."""
    return [message] if any(message.get(key) for key in _OWN_KEYS) else message["content"]


def last_turn(prompt: Any, answer: Any, place: str, column: str) -> tuple[Any, Any]:
    """(prompt, answer) of one message; those before it, if they do not repeat the prompt, belong to
    the prompt. Raises ValueError for an answer that does not end with the assistant."""
    if not isinstance(answer, list):
        return prompt, answer
    *before, last = answer
    if last["role"] != "assistant" or (before and isinstance(prompt, str)):
        problem = "must be messages that end with the assistant's, and one where the prompt is text"
        raise bad_value(place, column, problem)
    return ([*prompt, *before] if before and before != prompt else prompt), answer_of(last)


def template_variables(row: dict[str, Any], place: str) -> dict[str, Any]:
    """Variables of the chat template in a row, whose JSON text is parsed there. ValueError."""
    found: dict[str, Any] = {}
    for column, kind in zip(VARIABLES, (list, dict), strict=True):
        if row.get(column) in (None, "", [], {}):
            continue
        try:
            if not (value := _parsed(row[column])):  # "null", "[]"
                continue
            value = [_parsed(tool) for tool in value] if isinstance(value, list) else value
        except (ValueError, RecursionError) as error:
            raise bad_value(place, column, json_problem(error)) from None
        if not isinstance(value, kind) or not all(isinstance(x, dict | str) for x in value):
            problem = f"expected {'JSON schemas' if kind is list else 'an object'}, or JSON of it"
            raise bad_value(place, column, f"{problem}, got {shown(value)}")
        row[column] = value
        found |= {column: value} if kind is list else without_nulls(value)
    return found


def _parsed(value: Any) -> Any:
    return DECODER.decode(value) if isinstance(value, str) else value


def without_nulls(value: Any) -> Any:
    """A value without the keys of its dicts that are null: a table gives each dict those of all."""
    if isinstance(value, dict):
        return {key: without_nulls(x) for key, x in value.items() if x is not None}
    return [without_nulls(x) for x in value] if isinstance(value, list) else value


_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_HH_ROLES = {"Human": "user", "Assistant": "assistant"}


def split_pair(
    chosen: Any, rejected: Any, place: str
) -> tuple[list[Message], str | list[Message], str | list[Message]]:
    """(prompt, chosen answer, rejected answer) of two conversations.

    Args:
      chosen, rejected: lists of messages as TRL's, or text in HH-RLHF's form, in which each turn
        begins with "\\n\\nHuman:" or "\\n\\nAssistant:".
      place: file and row number, the start of every error message.

    Raises:
      ValueError: text without turns, no common beginning, or a difference outside the answers.
    """
    conversations = {
        column: _conversation(value, place, column)
        for column, value in (("chosen", chosen), ("rejected", rejected))
    }
    first, second = (list(map(_pair, turns)) for turns in conversations.values())
    most = min(len(first), len(second)) - 1
    common = next((i for i in range(most) if first[i] != second[i]), most)
    if not common:
        raise ValueError(
            f"{place}: 'chosen' and 'rejected' have no common beginning, which would be the "
            "prompt; give the prompt a column of its own"
        )
    for column, turns in conversations.items():
        if turns[common]["role"] != "assistant":
            raise bad_value(
                place,
                column,
                f"differs from the other in message {common} of {turns[common]['role']!r}; a "
                "pair differs in an answer of the assistant: leave the row out, or give the "
                "prompt a column of its own",
            )
    answers = (answer_of(turns[common]) for turns in conversations.values())
    return conversations["chosen"][:common], *answers


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages that begins before the answer."""
    return (
        isinstance(value, list)
        and len(value) > 1
        and isinstance(value[0], dict)
        and value[0].get("role") != "assistant"
    )


def _conversation(value: Any, place: str, column: str) -> list[Message]:
    value = checked_prompt(value, place, column)
    if isinstance(value, list):
        return value
    marks = list(_TURN.finditer(value))
    if not marks or marks[0].start():
        raise bad_value(
            place,
            column,
            "text without a prompt; give the prompt a column of its own, or turns that begin "
            r"with '\n\nHuman:' and '\n\nAssistant:'",
        )
    ends = [*(mark.start() for mark in marks[1:]), len(value)]
    return [
        {"role": _HH_ROLES[mark[1]], "content": value[mark.end() : end].strip()}
        for mark, end in zip(marks, ends, strict=True)
    ]


def _pair(message: Message) -> tuple[str, str]:
    # tables give every message the keys of all of them
    return message["role"], message.get("content")
