"""The check that a chat template has written all of a conversation."""

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distflow_jax.models.chat import thoughts
from distflow_jax.parsing.one_line import shown


def check_contents(messages: Sequence[Mapping[str, Any]], tools: Any, text: str) -> None:
    """Raises ValueError unless `text`, the rendered messages, has every content, every call of a
    tool and every tool.

    Space, the case of letters and escapes may differ, and an assistant's thought may be left out.
    """
    for index, message in enumerate(messages):
        for piece in texts(message):
            if piece not in text and not is_written(piece, text, message["role"]):
                raise left_out(index, message)
        for name in _names(message.get("tool_calls")):
            if name not in text:
                raise ValueError(
                    f"the chat template leaves out the call of {name!r} in message {index}: use a "
                    "model whose template writes tool_calls, or write the call into the content"
                )
    for name in _names(tools):
        if name not in text:
            raise ValueError(
                f"the chat template does not write the tool {name!r}: leave out 'tools', or use a "
                "model whose template lists them"
            )


def left_out(index: int, message: Mapping[str, Any]) -> ValueError:
    """The error for a message whose content is not in the text."""
    return ValueError(
        f"the chat template leaves out message {index} of {message['role']!r}, "
        f"{shown(message.get('content'))}: use a role that it knows, or leave the message out"
    )


def is_written(piece: str, text: str, role: str = "assistant") -> bool:
    """Whether a text has a content, perhaps in another form; of an assistant's what follows its
    thought."""
    found = squeezed(text)
    return any(squeezed(form) in found for form in _forms(piece, role))


def squeezed(text: str) -> str:
    """A text without space and the case of letters."""
    return "".join(text.casefold().split())


def texts(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message's content."""
    content = message.get("content", "")
    if isinstance(content, str):
        return [content]
    return [p["text"] for p in content if isinstance(p, Mapping) and isinstance(p.get("text"), str)]


def _forms(piece: str, role: str) -> Iterator[str]:
    yield piece
    if role == "assistant":
        piece = thoughts.split(piece)[1]
        yield piece
    yield json.dumps(piece, ensure_ascii=False)[1:-1]
    yield json.dumps(piece)[1:-1]
    yield html.escape(piece)


def _names(tools: Any) -> list[str]:
    """The names of tools, or of calls: {"name": ...} or {"function": {"name": ...}} each."""
    found = [
        tool["function"] if isinstance(tool.get("function"), Mapping) else tool
        for tool in tools or ()
        if isinstance(tool, Mapping)
    ]
    return [one["name"] for one in found if isinstance(one.get("name"), str)]
