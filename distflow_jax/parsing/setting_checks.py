"""Ranges, choices and combinations of settings, told by the key, the value and what fits."""

from collections.abc import Collection, Mapping
from typing import Any


def check_least(section: str, config: Any, least: float, *names: str) -> None:
    """Raises ValueError for the first of these settings that is below `least`."""
    for name in names:
        if not (value := getattr(config, name)) >= least:
            must = f"be at least {least:g}" if least else "not be negative"
            raise ValueError(f"{section}.{name} must {must}, got {value}")


def check_positive(section: str, config: Any, *names: str) -> None:
    """Raises ValueError for the first of these settings that is not above 0."""
    for name in names:
        if not (value := getattr(config, name)) > 0:
            raise ValueError(f"{section}.{name} must be positive, got {value}")


def check_one_of(key: str, value: str, choices: Collection[str]) -> None:
    """Raises ValueError for a value that is none of the choices."""
    if value not in choices:
        known = ", ".join(choice or '""' for choice in choices)
        raise ValueError(f"{key} must be one of {known}, got {value!r}")


def refuse(rows: Mapping[str, str], holds: Mapping[str, object], **values: Any) -> None:
    """Raises ValueError for the first of these combinations that holds.

    `rows`: {words that hold together: the message, a template of `values`}. `holds`: {word: whether
    it does}; "!word" in a row: it does not.

    >>> refuse({"cats !house": "{count} cats need a house"}, {"cats": 1, "house": 0}, count=2)
    Traceback (most recent call last):
    ValueError: 2 cats need a house
    """
    for words, message in rows.items():
        if all(bool(holds[word.lstrip("!")]) != word.startswith("!") for word in words.split()):
            raise ValueError(message.format(**values))
