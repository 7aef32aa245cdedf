"""Types and ranges of named values: of settings, and in files that strangers wrote.

check_fields(raw, {"num_layers": COUNT, "rope_theta": NUMBER}, "config.json")
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from distflow_jax.parsing.one_line import one_line, shown

MOST_INTEGER = 2**31 - 1  # of sizes, counts and ids: what an int32 holds


@dataclasses.dataclass(frozen=True)
class Kind:
    """The values that a field may hold; `words` describe them in messages."""

    words: str
    fits: Callable[[Any], bool]
    choices: tuple[str, ...] = ()  # all values, where they are names

    def or_null(self) -> "Kind":
        """The same kind, or null."""
        return Kind(f"{self.words} or null", lambda value: value is None or self.fits(value))


def _is_integer(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST_INTEGER


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, of NumPy too; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    whole: Any = value if isinstance(value, numbers.Integral) else 0
    return abs(whole) <= 1 << 64 and (bool(whole) or math.isfinite(value))


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def integer_up_to(most: int) -> Kind:
    """An integer from 1 to `most`."""
    return Kind(f"an integer from 1 to {most}", lambda v: _is_integer(v, 1) and v <= most)


def at_least(least: float) -> Kind:
    """A finite number from `least` on."""
    return Kind(f"at least {least}", lambda value: is_number(value) and value >= least)


def above(least: float) -> Kind:
    """A finite number above `least`."""
    words = f"above {least}" if least else "positive"
    return Kind(words, lambda value: is_number(value) and value > least)


def between(least: float, most: float, ends: str = "[]") -> Kind:
    """A number from `least` to `most`; `ends` has a round bracket for an end that is left out."""
    low, high = ends[0] == "(", ends[1] == ")"
    words = f"{'above' if low else 'at least'} {least} and {'below' if high else 'at most'} {most}"

    def fits(value: Any) -> bool:
        inside = is_number(value) and least <= value <= most
        return inside and not (low and value == least) and not (high and value == most)

    return Kind(words if low or high else f"from {least} to {most}", fits)


def one_of(choices: Iterable[str]) -> Kind:
    """One of these names."""
    names = tuple(choices)
    words = f"one of {', '.join(name or repr('') for name in names)}"
    return Kind(words, lambda value: value in names, names)


COUNT = integer_up_to(MOST_INTEGER)
SIZE = Kind(f"an integer from 0 to {MOST_INTEGER}", lambda value: _is_integer(value, 0))
NUMBER = Kind("a finite number", is_number)
POSITIVE = Kind("a positive finite number", lambda value: is_number(value) and value > 0)
TEXT = Kind("text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
NUMBER_OR_FLAG = Kind(
    "a finite number, or true or false", lambda value: isinstance(value, bool) or is_number(value)
)
OBJECT = Kind("an object", lambda value: isinstance(value, Mapping))
TEXTS = Kind("a list of texts", lambda value: _is_list_of(value, str))
NUMBERS = Kind(
    "a list of finite numbers", lambda value: isinstance(value, list) and all(map(is_number, value))
)
INTEGERS = Kind("a list of integers", lambda value: _is_list_of(value, int))
OBJECTS = Kind("a list of objects", lambda value: _is_list_of(value, Mapping))
IDS = Kind(
    "an id, or a list of ids",
    lambda value: all(_is_integer(i, 0) for i in (value if isinstance(value, list) else [value])),
)


def check_fields(values: Mapping[str, Any], kinds: Mapping[str, Kind], place: str) -> None:
    """Raises ValueError, with the place, for the first field that is there and of another kind."""
    for key, kind in kinds.items():
        if key in values and not kind.fits(values[key]):
            raise ValueError(
                f"{place}: {one_line(key)} must be {kind.words}, got {shown(values[key])}"
            )


def is_missing(value: Any) -> bool:
    """Whether a value is None, NaN, or text or a list without content.

    >>> [is_missing(value) for value in (None, math.nan, " ", [], 0, False)]
    [True, True, True, True, False, False]
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return True
    if isinstance(value, str):
        return not value.strip()
    return hasattr(value, "__len__") and not len(value)
