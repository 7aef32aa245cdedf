"""Units after a number: whether the units of two answers contradict each other.

Two units of the table do unless they are one under other names. Of two units of which one is not in
the table the first letters of words decide: "ways" and "different ways" agree, "apples" and
"oranges" do not. Powers are compared if both are written, denominators if both are in the table.
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
)
# without a command all of the text is a number and its unit: x^2 y^2 has none
_PLAIN = re.compile(rf"-?[\d.,/ ]*\d (?!and\b|or\b)([A-Za-z][A-Za-z./ ]*){_EXPONENT}")
_DOLLARS = re.compile(r"\s*-?\s*\\\$\s?-?[\d.]")


class AnswerUnit(NamedTuple):
    """A unit as it is written."""

    words: tuple[str, ...]  # in lower case, by the names of the table; without those of a power
    power: int | None  # 2 for square feet and cm^2; None if it is not written, or with `below`
    below: str  # the denominator in the table, after "per" or a slash; "" without one
    by_sign: bool = False  # $: other words than names of the table say no unit ("each", "total")


def unit_of(written: str, normal: str) -> AnswerUnit | None:
    """The unit of an answer, as it is written and in its normal form; None without one."""
    if _DOLLARS.match(written):
        return AnswerUnit(("dollar",), None, "", by_sign=True)
    found = _UNIT.search(normal) or _PLAIN.fullmatch(normal)
    if found is None:
        return None
    text, *exponents = found.groups()
    text = text.replace(".", " ").lower().strip()
    above, *below = re.split(r"/|\s+per\s+", _RATES.get(text, text))
    words = above.split()
    powers = [_POWERS[word] for word in words if word in _POWERS]
    powers += [int(digit) for digit in exponents if digit]
    if len(words) > 1 and words[0] == "in":  # "in total"
        return None
    rest = tuple(_ALIASES.get(word, word) for word in words if word not in _POWERS)
    names = [_ALIASES[word] for part in below[:1] for word in part.split() if word in _ALIASES]
    power = powers[0] if powers and not below else None
    return AnswerUnit(rest, power, names[0] if names else "")


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
    if one.by_sign or other.by_sign:
        return False
    initials = [{word[0] for word in unit.words} for unit in (one, other)]
    return all(initials) and not initials[0] & initials[1]
