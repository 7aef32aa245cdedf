"""The check that a chat template has written all of a conversation."""

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from distflow_jax.parsing.one_line import shown

OPEN, CLOSE = "<think>", "</think>"  # around an assistant's thought


def check_contents(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Raises ValueError for a message with a content, or a call of a tool, that is not in `text`,
    the rendered messages.

    Space, the case of letters and escapes may differ, and an assistant's thought may be left out.
    """
    for index, message in enumerate(messages):
        calls = [call.get("function", call) for call in message.get("tool_calls", ())]
        for piece in (*texts(message), *(str(call["name"]) for call in calls if "name" in call)):
            if not is_written(piece, text, message["role"]):
                raise left_out(index, message)


def left_out(index: int, message: Mapping[str, Any]) -> ValueError:
    """The error for a message that is not in the text."""
    return ValueError(
        f"the chat template leaves out a part of message {index}, {shown(message)}: use a role "
        "and keys that it writes, or leave the message out"
    )


def is_written(piece: str, text: str, role: str) -> bool:
    """Whether a content of a role's is in a text, perhaps in another form or without a thought."""
    if piece in text:
        return True
    piece = split_thought(piece)[1] if role == "assistant" else piece
    escaped = json.dumps(piece, ensure_ascii=False)[1:-1], json.dumps(piece)[1:-1]
    found = squeezed(f"{text}\0{html.unescape(text)}")
    return any(squeezed(form) in found for form in (piece, *escaped))


def squeezed(text: str) -> str:
    """A text without space and the case of letters."""
    return "".join(text.casefold().split())


def split_thought(answer: str) -> tuple[str, str]:
    """(thought without its tags, what follows it) of an answer; ("", answer) without a thought."""
    thought, _, final = answer.rpartition(CLOSE)
    return thought.strip().removeprefix(OPEN).strip(), final


def texts(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message's content."""
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [p["text"] for p in content if "text" in p]
