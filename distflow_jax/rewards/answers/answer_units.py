"""Units after a number: whether the units of two answers contradict each other.

A unit of the table is the same under each of its names. Two units of which one is not in the table
are taken to be the same if words of both begin with the same letter: "ways", "different ways".
Exponents and denominators are compared if both units have one.
"""

import re
from typing import NamedTuple

_NAMES = {  # with their other names
    "millimeter": "mm", "centimeter": "cm", "meter": "m", "kilometer": "km",
    "inch": "in inches", "foot": "ft feet", "yard": "yd yds", "mile": "mi",
    "milligram": "mg", "gram": "g", "kilogram": "kg kilo kilos", "ounce": "oz", "pound": "lb lbs",
    "second": "s sec secs", "minute": "min mins", "hour": "h hr hrs", "day": "d", "week": "wk",
    "month": "mo", "year": "yr yrs", "milliliter": "ml", "liter": "l", "gallon": "gal",
    "cent": "¢", "dollar": "usd",
}  # fmt: skip
_ALIASES = {
    alias: name
    for name, others in _NAMES.items()
    for one in (name, name.replace("meter", "metre").replace("liter", "litre"))
    for alias in (one, f"{one}s", *others.split())
}
_RATES = {"mph": "mile/hour", "kph": "kilometer/hour", "kmh": "kilometer/hour"}
_POWERS = {"square": 2, "squared": 2, "sq": 2, "cubic": 3, "cubed": 3, "cu": 3}
_EXPONENT = r"(?:\^\{?(\d)\}?)?"
_UNIT = re.compile(
    r"[\d}] ?\\(?:text|mathrm) ?\{ ?(?!and\b|or\b)([A-Za-z][^{}^\d]*)"
    rf"{_EXPONENT}[ .]*\}}{_EXPONENT}"
    rf"|\d (?!and\b|or\b)([A-Za-z][A-Za-z./ ]*){_EXPONENT}$"
)
_DOLLARS = re.compile(r"\s*-?\s*\\\$\s?-?[\d.]")


class AnswerUnit(NamedTuple):
    """A unit as it is written."""

    words: tuple[str, ...]  # in lower case, by the names of the table; without those of the power
    power: int | None  # 2 for square feet and cm^2; None if it is not written
    below: str  # the denominator, after "per" or a slash; "" without one


def unit_of(written: str, normal: str) -> AnswerUnit | None:
    """The unit of an answer, as it is written and in its normal form; None without one."""
    if _DOLLARS.match(written):
        return AnswerUnit(("dollar",), None, "")
    found = _UNIT.search(normal)
    if found is None:
        return None
    text = (found[1] or found[4]).replace(".", " ").lower().strip()
    above, _, below = re.sub(r"\s+per\s+", "/", _RATES.get(text, text)).partition("/")
    words = above.split()
    powers = [_POWERS[word] for word in words if word in _POWERS]
    powers += [int(digit) for digit in (found[2], found[3], found[5]) if digit]
    rest = tuple(_ALIASES.get(word, word) for word in words if word not in _POWERS)
    below = below.strip()
    return AnswerUnit(rest, powers[0] if powers else None, _ALIASES.get(below, below))


def contradict(one: AnswerUnit | None, other: AnswerUnit | None) -> bool:
    """Whether two units are different ones; an answer without a unit contradicts none."""
    if one is None or other is None:
        return False
    if one.power and other.power and one.power != other.power:
        return True
    if one.below and other.below and one.below != other.below:
        return True
    named = [
        unit.words[0] if unit.words and unit.words[0] in _NAMES else "" for unit in (one, other)
    ]
    if all(named):
        return named[0] != named[1]
    initials = [{word[0] for word in unit.words} for unit in (one, other)]
    return all(initials) and not initials[0] & initials[1]
