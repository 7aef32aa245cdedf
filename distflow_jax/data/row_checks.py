"""Checks of a row's values; every error names file, row and column."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from distflow_jax.data.example import Message
from distflow_jax.did_you_mean import nearest
from distflow_jax.parsing.one_line import one_line, shown

_MOST_SHOWN = 12  # columns that a message lists


def checked_text(value: Any, place: str, column: str) -> str:
    """`value`, if it is text with at least one character. Raises ValueError."""
    if not isinstance(value, str) or not value:
        raise bad_value(place, column, f"expected text, got {shown(value)}")
    _check_characters(value, place, column)
    return value


def checked_prompt(
    value: Any, place: str, column: str, *, parts: bool = False
) -> str | list[Message]:
    """`value`, if it is text or a list of messages with role and content. Raises ValueError.

    With `parts` a content may be a list of parts {"type": "text" | "image"} too.
    """
    if isinstance(value, str):
        return checked_text(value, place, column)
    if not isinstance(value, list):
        raise bad_value(place, column, f"expected text or a list of messages, got {shown(value)}")
    if not value:
        raise bad_value(place, column, "an empty list of messages")
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise bad_value(place, column, f"message {i} is {shown(message)}, not an object")
        texts = {key: message.get(key) for key in ("role", "content")}
        if texts["content"] is None and message.get("tool_calls"):
            texts["content"] = ""
        if parts and isinstance(message.get("content"), list):
            texts["content"] = "".join(part.get("text", "") for part in message["content"])
        for key, text in texts.items():
            if not isinstance(text, str) or (key == "role" and not text):
                raise bad_value(
                    place, column, f"message {i} needs text in {key!r}, got {shown(message)}"
                )
            _check_characters(text, place, column)
    return value


def _check_characters(text: str, place: str, column: str) -> None:
    """Raises ValueError for half of a character: JSON can hold one, and no tokenizer reads it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise bad_value(
            place,
            column,
            f"half of a character (the lone surrogate {half!r}) at character {error.start + 1}: "
            "write the whole character, or leave it out",
        ) from None


def bad_value(place: str, column: str, problem: str) -> ValueError:
    """The error for one value of a row."""
    return ValueError(f"{place}, column {column!r}: {one_line(problem)}")


def column_hint(wanted: Sequence[str], found: Iterable[str], key: str) -> str:
    """End of a message about absent columns: those found, and a choice that would read one.

    `key` is the config key of the choice.

    >>> column_hint(["question"], ["qestion", "answer"], "data.columns")
    "found 'qestion', 'answer'; data.columns={'question': 'qestion'} reads 'qestion' as 'question'"
    """
    found = list(found)
    for column in wanted:
        for near in nearest(column, found):
            choice = f"{key}={{{column!r}: {near!r}}} reads {near!r} as {column!r}"
            return f"found {listed(found)}; {choice}"
    return f"found {listed(found)}; name a column, as in {key}={{{wanted[0]!r}: 'COLUMN'}}"


def listed(columns: Collection[str]) -> str:
    """The first columns of a row, as messages list them."""
    names = ", ".join(map(shown, list(columns)[:_MOST_SHOWN])) or "no columns"
    return names + (f" and {len(columns) - _MOST_SHOWN} more" if len(columns) > _MOST_SHOWN else "")
