"""Messages in the form that a chat template reads: without nulls, and in text or lists of parts.

Templates of models that see images may read lists of parts alone, and leave out a content that is
text without an error.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from distflow_jax.models.chat.render import render
from distflow_jax.parsing.one_line import shown

THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")  # of an assistant's message
_PROBE = "probe"
_READS_TYPES = ("['type']", '["type"]', ".type")


def checked(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages without keys that are null, and with a thought under the names of all templates,
    as transformers gives them. Raises ValueError for others."""
    found = []
    for index, given in enumerate(messages):
        message = (
            {k: v for k, v in given.items() if v is not None} if isinstance(given, Mapping) else {}
        )
        if "role" not in message or not {"content", "tool_calls"} & message.keys():
            raise ValueError(
                f"message {index} must be a dict with role and content, got {shown(given)}"
            )
        for thought in [message[key] for key in THOUGHT_KEYS if key in message][:1]:
            message = {"thinking": thought, **message, "reasoning_content": thought}
        found.append(message)
    return found


def in_parts(template: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with their texts as lists of one part where the template reads only lists."""
    if not any(text in template for text in _READS_TYPES) or not _reads_only_parts(template):
        return [dict(message) for message in messages]
    return [
        {**message, "content": _parts(message["content"])}
        if isinstance(message.get("content"), str)
        else dict(message)
        for message in messages
    ]


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


@functools.lru_cache(maxsize=32)
def _reads_only_parts(template: str) -> bool:
    return not _writes(template, _PROBE) and _writes(template, _parts(_PROBE))


def _writes(template: str, content: Any) -> bool:
    """Whether the template writes the text of such a content."""
    message = {"role": "user", "content": content}
    variables = {"messages": [message], "add_generation_prompt": False, "tools": None}
    try:
        return _PROBE in render(template, variables | {"documents": None})
    except ValueError:
        return False
