"""Settings: values with their ranges, choices and needs, and the one validator that reads these.

@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Section, name="checkpoint"):
    every: int = setting(10, at_least(1))
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from distflow_jax.parsing.checked_fields import MOST_INTEGER, Kind
from distflow_jax.parsing.one_line import not_utf8, shown

T = TypeVar("T")

MOST_FLOAT, LEAST_FLOAT = 3.4028235e38, 1.1754944e-38  # of float32, the latter normal
MOST_SECONDS = MOST_INTEGER // 1000  # poll(2) takes milliseconds as an int32


def setting(
    default: T, kind: Kind | None = None, *, needs: Mapping[str, Collection[Any]] | None = None
) -> T:
    """A field of a section with its default and the values that it may have.

    `needs`: {another setting of the section: values of it with which this one has an effect; ():
    any that is not false}.
    """
    told = {"kind": kind, "needs": needs or {}, "default": default}
    given = {"default_factory": default.copy} if isinstance(default, dict) else {"default": default}
    found: T = dataclasses.field(**given, metadata=told)  # type: ignore[call-overload]
    return found


def needed(kind: Kind) -> Any:
    """A field without a default, and the values that it may have."""
    return dataclasses.field(metadata={"kind": kind})


class Section:
    """Base of a section of the config, a frozen dataclass that checks its settings.

    `name` stands before its keys in messages.
    """

    _name = ""

    def __init_subclass__(cls, name: str = ""):
        cls._name = name if not name or name.endswith(" ") else f"{name}."

    def __post_init__(self):
        check_settings(self, self._name)


def check_settings(config: Any, prefix: str) -> None:
    """Raises ValueError for the first setting of a dataclass whose value no device or file can
    take, that is outside its range or choices, or that has no effect. `prefix` begins its name."""
    for field in dataclasses.fields(config):
        key, value = f"{prefix}{field.name}", getattr(config, field.name)
        kind = field.metadata.get("kind")
        if kind and value is not None and not kind.fits(value):
            check_values(value, key, of_user=True)
            raise ValueError(f"{key} must be {kind.words}, got {shown(value)}")
        check_values(value, key)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for other, values in field.metadata.get("needs", {}).items():
            chosen = getattr(config, other)
            if value == field.metadata["default"] or (chosen in values if values else chosen):
                continue
            fix = "raise that" if chosen == 0 else f"set {other}"
            if values or chosen is False:
                fix = f"use {other}={listed(map(repr, values or (True,)))}"
            raise ValueError(
                f"{prefix}{field.name}={value!r} has no effect with {prefix}{other}={chosen!r}; "
                f"{fix}, or remove {prefix}{field.name}"
            )


def listed(names: Iterable[str]) -> str:
    """The names as a sentence has them: "a, b or c"."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


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


# -- any value ------------------------------------------------------------------------------------


def is_dict(value: Any) -> bool:
    """Whether a value has keys, a ConfigDict included, which is no Mapping."""
    return isinstance(value, Mapping) or hasattr(value, "to_dict")


def check_number(value: Any, path: str) -> None:
    """Raises ValueError for a number that no device or clock can take.

    Integers are int32. Other numbers are finite, and neither too large nor too small for float32,
    as which programs take them. Seconds are at most those that poll(2) takes.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if isinstance(value, int):
        if abs(value) > MOST_INTEGER:
            raise ValueError(
                f"{path} must be from {-MOST_INTEGER} to {MOST_INTEGER}, which an int32 holds, got "
                f"{shown(value)}"
            )
    elif not math.isfinite(value):
        raise ValueError(f"{path} must be a finite number, got {value}")
    elif value and not LEAST_FLOAT <= abs(value) <= MOST_FLOAT:
        raise ValueError(
            f"{path} must be 0 or of a size from {LEAST_FLOAT:.3g} to {MOST_FLOAT:.3g}, which a "
            f"float32 holds, got {value:g}"
        )
    if path.endswith("_seconds") and value > MOST_SECONDS:
        raise ValueError(f"{path} must be at most {MOST_SECONDS} (24 days), got {value:g}")


def check_text(value: Any, path: str) -> None:
    """Raises ValueError for text that no file can hold: bytes of a shell that are not UTF-8."""
    if isinstance(value, str) and (found := not_utf8(value)):
        raise ValueError(f"{path} must be UTF-8 text, got {shown(value)} ({found})")


def check_values(value: Any, path: str, *, of_user: bool = False) -> None:
    """Raises ValueError for a number that no device takes, or text that no file can hold, in a
    value of any form.

    In a dict, which is for a user's own function, numbers have to be finite only, as in JSON.
    """
    if is_dict(value):
        for key in value:
            check_text(key, f"a key of {path}")
            check_values(value[key], f"{path}.{key}", of_user=True)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            check_values(item, f"{path}[{i}]", of_user=of_user)
    elif not of_user or (isinstance(value, float) and not math.isfinite(value)):
        check_number(value, path)
    check_text(value, path)
