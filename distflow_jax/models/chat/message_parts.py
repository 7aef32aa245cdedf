"""Messages in the form that a chat template reads: text, or lists of parts.

Templates of models that see images may read lists of parts alone, and leave out a content that is
text without an error.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from distflow_jax.models.chat.render import render

_PROBE = "probe"
_READS_TYPES = ("['type']", '["type"]', ".type")


def in_parts(template: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with their texts as lists of one part where the template reads only lists."""
    if not any(text in template for text in _READS_TYPES) or not _reads_only_parts(template):
        return [dict(message) for message in messages]
    return [
        {**message, "content": _parts(message["content"])}
        if isinstance(message["content"], str)
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
