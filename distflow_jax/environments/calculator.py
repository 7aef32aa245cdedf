"""Exact arithmetic on text that a model wrote: a parser of its own, bounded in size and time.

    sum    = product (("+" | "-") product)*
    product = signed (("*" | "/" | "//" | "%") signed)*
    signed = ("+" | "-")* power
    power  = atom [("**" | "^") signed]
    atom   = number | "(" sum ")"

Numbers are fractions, so 0.1 + 0.2 is 0.3. Every bound below is on something that the text could
make large, so that no text takes more than milliseconds.
"""

import re
from decimal import Context, Decimal
from fractions import Fraction

MAX_LENGTH = 200  # characters
MAX_DEPTH = 20  # parentheses and powers inside one another
MAX_BITS = 2048  # of a numerator or denominator on the way
MAX_DIGITS = 50  # of a result
_SHOWN_DIGITS = 12  # of a result that is no whole number

_TOKEN = re.compile(
    r"\s*(?:([0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?(?![0-9])|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
    r"|(\*\*|//|[-+*/%^()]))"
)
_SPELLINGS = str.maketrans({"×": "*", "÷": "/", "·": "*", "\N{MINUS SIGN}": "-", "$": None})


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, as text: "12*7" -> "84", "1,000/8" -> "125".

    Supports + - * / // % ** ^ and parentheses, commas between thousands, × and ÷; a dollar sign is
    looked over. ValueError, in words for the one who wrote it, for anything else.
    """
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression is longer than {MAX_LENGTH} characters")
    parser = _Parser(_tokens(expression.translate(_SPELLINGS).strip()))
    value = parser.sum(0)
    if parser.next is not None:
        raise ValueError(f"expected an operator before {parser.next!r}")
    return _shown(value)


def _tokens(text: str) -> list[str]:
    tokens, start = [], 0
    if not text:
        raise ValueError("the expression is empty")
    while start < len(text):
        found = _TOKEN.match(text, start)
        if not found:
            raise ValueError(f"not arithmetic: {text[start:].strip()[:20]!r}")
        tokens.append((found[1] or found[2]).replace(",", ""))
        start = found.end()
    return tokens


class _Parser:
    """Reads tokens from the left; each method takes one rule of the grammar, at a depth."""

    def __init__(self, tokens: list[str]):
        self._tokens, self._at = tokens, 0

    @property
    def next(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self) -> str:
        token = self.next
        if token is None:
            raise ValueError("the expression ends too early")
        self._at += 1
        return token

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self.next in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            value = _bounded(value + sign * self._product(depth))
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._signed(depth)
        while self.next in ("*", "/", "//", "%"):
            operator, right = self._take(), self._signed(depth)
            if operator == "*":
                value = _bounded(value * right)
                continue
            if not right:
                raise ValueError("division by zero")
            if operator == "/":
                value = _bounded(value / right)
            else:
                value = _bounded(Fraction(value // right) if operator == "//" else value % right)
        return value

    def _signed(self, depth: int) -> Fraction:
        sign = 1
        while self.next in ("+", "-"):
            sign = sign if self._take() == "+" else -sign
        return sign * self._power(depth)

    def _power(self, depth: int) -> Fraction:
        base = self._atom(depth)
        if self.next not in ("**", "^"):
            return base
        self._take()
        return _power(base, self._signed(_deeper(depth)))

    def _atom(self, depth: int) -> Fraction:
        token = self._take()
        if token == "(":
            value = self.sum(_deeper(depth))
            if self.next != ")":
                raise ValueError("a parenthesis is not closed")
            self._take()
            return value
        if token[0] not in "0123456789.":
            raise ValueError(f"expected a number before {token!r}")
        return _bounded(Fraction(token))


def _deeper(depth: int) -> int:
    if depth == MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} parentheses or powers inside one another")
    return depth + 1


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("a number on the way is too large")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """base ** exponent; with an exponent that is no whole number rounded to a float."""
    if not base and exponent < 0:
        raise ValueError("division by zero")
    if exponent.denominator != 1:
        if base < 0:
            raise ValueError("a root of a negative number")
        try:
            return Fraction(float(base) ** float(exponent))
        except OverflowError:
            raise ValueError("a number on the way is too large") from None
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    # before it is computed: 9 ** 9 ** 9 would fill the memory
    if abs(base) not in (0, 1) and bits * abs(exponent) > MAX_BITS:
        raise ValueError("a number on the way is too large")
    if abs(base) in (0, 1):  # whatever the exponent; its parity is all that matters
        exponent = Fraction(2 + exponent.numerator % 2) if exponent else exponent
    return base**exponent.numerator


def _shown(value: Fraction) -> str:
    """A whole number with all of its digits, another one rounded."""
    if abs(value) >= 10**MAX_DIGITS:
        raise ValueError(f"the result has more than {MAX_DIGITS} digits")
    if value.denominator == 1:
        return str(value.numerator)
    rounding = Context(prec=_SHOWN_DIGITS)
    rounded = rounding.divide(Decimal(value.numerator), Decimal(value.denominator))
    plain = -_SHOWN_DIGITS < rounded.adjusted()
    return format(rounded.normalize(rounding), "f" if plain else "e")
