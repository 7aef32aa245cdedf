"""Exact arithmetic on text that a model wrote, bounded in size and time.

Python parses the text, which has no letters; its values are computed here. Numbers are fractions,
so 0.1 + 0.2 is 0.3. Every bound below is on something that the text could make large, so that no
text takes more than milliseconds.
"""

import ast
import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

MAX_LENGTH = 200  # characters
MAX_BITS = 2048  # of a numerator or denominator on the way
MAX_DIGITS = 50  # of a result
_SHOWN_DIGITS = 12  # of a result that is no whole number

_SPELLINGS = str.maketrans({"×": "*", "÷": "/", "·": "*", "\N{MINUS SIGN}": "-", "$": None})
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)", re.ASCII)
_LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)", re.ASCII)
_CHARACTERS = re.compile(r"[0-9.+\-*/%() ]+")
_TOO_LARGE = "a number on the way is too large"
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, as text: "12*7" -> "84", "1,000/8" -> "125".

    Supports + - * / // % ** ^ and parentheses, commas between thousands, × and ÷; a dollar sign is
    looked over. ValueError, in words for the one who wrote it, for anything else.
    """
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression is longer than {MAX_LENGTH} characters")
    text = " ".join(expression.translate(_SPELLINGS).split())
    if not text:
        raise ValueError("the expression is empty")
    text = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    text = _LEADING_ZEROS.sub("", text.replace("^", "**"))
    try:
        if not _CHARACTERS.fullmatch(text):
            raise SyntaxError
        return _shown(_value(ast.parse(text, mode="eval").body, text))
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"not arithmetic: {expression.strip()[:40]!r}") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def _value(node: ast.expr, text: str) -> Fraction:
    """The value of a part of a parsed text. SyntaxError for what is no arithmetic."""
    match node:
        case ast.Constant(value=int() | float()):
            return _bounded(Fraction(text[node.col_offset : node.end_col_offset]))
        case ast.UnaryOp(op=ast.UAdd() | ast.USub()):
            value = _value(node.operand, text)
            return -value if isinstance(node.op, ast.USub) else value
        case ast.BinOp(op=ast.Pow()):
            return _power(_value(node.left, text), _value(node.right, text))
        case ast.BinOp():
            operate = _OPERATIONS[type(node.op)]
            return _bounded(Fraction(operate(_value(node.left, text), _value(node.right, text))))
    raise SyntaxError


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError(_TOO_LARGE)
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """base ** exponent; with an exponent that is no whole number rounded to a float."""
    if exponent.denominator != 1:
        if base < 0:
            raise ValueError("a root of a negative number")
        try:
            return Fraction(float(base) ** float(exponent))
        except OverflowError:
            raise ValueError(_TOO_LARGE) from None
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    # before it is computed: 9 ** 9 ** 9 would fill the memory
    if abs(base) not in (0, 1) and bits * abs(exponent) > MAX_BITS:
        raise ValueError(_TOO_LARGE)
    if abs(base) == 1:  # whatever the exponent; its parity is all that matters
        return base ** (exponent.numerator % 2)
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
