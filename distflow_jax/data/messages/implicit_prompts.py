"""Preference pairs without a prompt of their own: the common beginning of both is the prompt.

Two forms are read. TRL's pairs have conversations in `chosen` and `rejected`. HH-RLHF's are text
in which each turn begins with "\\n\\nHuman:" or "\\n\\nAssistant:".

The prompt ends where the conversations differ, and at the latest before the last message of the
shorter one. The answer of each is the assistant's turn that follows. Turns after it are left out:
they belong to conversations that went apart with the answers.
"""

import re
from typing import Any

from distflow_jax.data.example import Message
from distflow_jax.data.messages.message_forms import answer_of
from distflow_jax.data.row_checks import bad_value, checked_prompt

_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def split_pair(
    chosen: Any, rejected: Any, place: str
) -> tuple[list[Message], str | list[Message], str | list[Message]]:
    """(prompt, chosen answer, rejected answer) of two conversations.

    Args:
      chosen, rejected: lists of messages, or text in HH-RLHF's form.
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
        {"role": _ROLES[mark[1]], "content": value[mark.end() : end].strip()}
        for mark, end in zip(marks, ends, strict=True)
    ]


def _pair(message: Message) -> tuple[str, str]:
    # tables give every message the keys of all of them
    return message["role"], message.get("content")
