"""Whether two answers are the same: exactly, or to the digits of a decimal truth.

Words, letters, times, ratios and numbers to a base are compared as they are written, everything
else as an expression, parsed and compared by the package math-verify. Constants are compared here:
exactly, whatever their size, since an absolute tolerance makes all small numbers equal.
"""

import contextlib
import functools
import importlib
import logging
import re
import signal
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from distflow_jax.rewards.answers.final_answer import final_answer
from distflow_jax.rewards.answers.normal_form import normal_form, plain_text

_DIGITS = 60  # of constants that are compared; irrational ones are equal if all but 10 are
_LONGEST = 4000  # characters of an expression that is parsed
_LONGEST_CHOICE = 40  # characters of a truth like "(B) 12"
_MOST_RELATIVE = 2e-4  # of a decimal truth: four significant digits
_MARKED = re.compile(r"boxed|fbox|####|<answer>|\banswer\b|(?<!\\)\$|\\[(\[]", re.IGNORECASE)
_ONE_FORMULA = re.compile(r"\s*(?:\\f?boxed\s*\{.*\}|\$+[^$]*\$+)\s*", re.DOTALL)
_WORD = re.compile(r"[^\W\d_]{3,}")
_TEXT = re.compile(r"[^\W\d_][^\d\\=<>+*/^_{}|]*|\([a-z]\)[^\d\\=<>+*/^_{}|]*")
_MATH_WORDS = re.compile(r"\b(?:sin|cos|tan|cot|sec|csc|ln|log|exp|sqrt|pi|and|or|inf|infinity)\b")
_CHOICE = re.compile(r"(?s)(?:option |choice )?(?:\( ?([a-z]) ?\) ?(.*)|([a-z])(?:[.):] ?(.*))?)")
_CLOCK_OR_RATIO = re.compile(r"(\d+(?:\s*:\s*\d+)+)\s*(?:([ap])\.?\s?m\.?)?")
_TO_BASE = re.compile(r"([0-9][0-9a-z]*|[0-9a-f]+)\s*_\s*\{?\s*(\d+)\s*\}?")
_PERCENT = re.compile(r"\\%")
_DEGREES = re.compile(r"\^\\circ|\\text ?\{ ?degrees? ?\}|\bdegrees?\b")
_UNIT = re.compile(r"(?<=[\d}]) [A-Za-z]{2,}(?:/[a-z]+|\^\{?[23]\}?)?$|(?<=\d) ?[A-Za-z]+/[a-z]+$")
_UNIT_INITIAL = re.compile(
    r"(?i)[\d}] ?\\(?:text|mathrm) ?\{ ?(?:square |cubic )?(?!and\b|or\b)([a-z])|\d ([a-z])[a-z]+$"
)
_DECIMAL = re.compile(r"-?\d*\.(\d+)")


class Equality:
    """Comparisons with one truth. Raises ValueError if that cannot be read.

    `timeout_seconds` of processor time bounds each parse and comparison in a main thread; none that
    takes longer is equal.
    """

    def __init__(self, truth: Any, timeout_seconds: int):
        self._limit = timeout_seconds
        self._truth = _final(str(truth).strip())
        self._normal, self._text = normal_form(self._truth), plain_text(self._truth)
        readable = self._text if _is_text(self._text) else self._parsed(self._normal)
        if not readable:
            raise ValueError(f"math cannot parse the ground truth {truth!r}")

    def holds(self, answer: str) -> bool:
        """Whether an answer is the truth. "" is not."""
        if not answer.strip():
            return False
        given, text = normal_form(answer), plain_text(answer)
        if (given and given == self._normal) or (text and text == self._text):
            return True
        units = [_UNIT_INITIAL.search(x) for x in (self._normal, given)]
        if len({(unit[1] or unit[2]).lower() for unit in units if unit}) == 2:
            return False
        if (choice := _same_choice(self._text, text)) is not None:
            if isinstance(choice, bool):
                return choice
            truth, given = choice
            return Equality(truth, self._limit).holds(given)
        for pattern in (_CLOCK_OR_RATIO, _TO_BASE):
            found = [pattern.fullmatch(re.sub(r"[()]", "", x)) for x in (self._text, text)]
            if any(found):
                return all(found) and _written_alike(*found)
        if _is_text(self._text) or _is_text(text):
            return False
        return any(self._same_value(*pair) for pair in _readings(self._normal, given))

    def _same_value(self, truth: str, given: str) -> bool:
        gold, answer = self._parsed(truth), self._parsed(given)
        try:
            with bounded(self._limit):
                return any(_same_expression(g, a, truth) for g in gold for a in answer)
        except (load().errors.TimeoutException, *_sympy_errors()):
            return False

    def _parsed(self, text: str) -> list[Any]:
        """The expressions that math-verify reads in a text."""
        return _parse(text, self._limit)


@functools.cache
def _sympy_errors() -> tuple[type[Exception], ...]:
    """Errors of sympy for expressions that it cannot compare."""
    polynomials = importlib.import_module("sympy.polys.polyerrors").BasePolynomialError
    ours = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
    return (polynomials, *ours)


def _final(truth: str) -> str:
    """The answer in a truth, which may be a whole solution with the answer at its end."""
    choice = len(truth) < _LONGEST_CHOICE and _CHOICE.fullmatch(plain_text(truth))
    if choice or not _MARKED.search(truth):
        return truth
    answer = final_answer(truth)
    if answer and ", " not in answer and not _ONE_FORMULA.fullmatch(truth):
        answer = answer.rsplit("=", 1)[-1].strip() or answer  # of "so $n^2=144$" the last side
    return answer or truth


@functools.lru_cache(maxsize=64)
def _parse(text: str, limit: int) -> list[Any]:
    if len(text) > _LONGEST or "{cases}" in text:
        return [text]
    with bounded(limit):
        found = load().parse(f"\\boxed{{{text}}}", parsing_timeout=None)
    return [x for x in found if not isinstance(x, str)] or found


def _readings(truth: str, given: str) -> list[tuple[str, str]]:
    """Both texts, and both without a percent sign, a degree sign or a unit."""
    pairs = [(truth, given)]
    for sign in (_PERCENT, _DEGREES, _UNIT):
        bare = sign.sub(" ", truth).strip(), sign.sub(" ", given).strip()
        if bare != (truth, given) and all(bare):
            pairs.append(bare)
    return pairs


def _same_choice(truth: str, given: str) -> bool | tuple[str, str] | None:
    """Whether two choices, (A) or (A) 12, are the same; None where there is no choice.

    A pair: the values that have to be compared, as one of the texts has no letter.
    """
    one, other = _CHOICE.fullmatch(truth), _CHOICE.fullmatch(given)
    if one and other:
        return (one[1] or one[3]) == (other[1] or other[3])
    if one and one[1] and one[2]:
        return one[2], given
    if other and other[1] and other[2]:
        return truth, other[2]
    return None


def _is_text(text: str) -> bool:
    return bool(_TEXT.fullmatch(text) and _WORD.search(_MATH_WORDS.sub("", text)))


def _written_alike(one: re.Match, other: re.Match) -> bool:
    parts = [[part.lstrip("0") or "0" for part in re.split(r"\s*:\s*", m[1])] for m in (one, other)]
    return parts[0] == parts[1] and one[2] in (None, other[2])


def _same_expression(truth: Any, given: Any, written: str) -> bool:
    """Whether two expressions of sympy are equal. `written`: the truth's text."""
    package, sympy = load(), importlib.import_module("sympy")
    if isinstance(truth, str) or isinstance(given, str):
        return truth == given
    relative = 0.0
    if truth.has(sympy.Float):
        found = _DECIMAL.search(written)
        size = abs(float(found[0])) if found else 0.0
        half_a_unit = 0.5 * 10.0 ** -len(found[1]) / size if size else 0.0
        relative = min(_MOST_RELATIVE, half_a_unit)
    truth, given = _values(truth, given, sympy)
    truth, given = _exact(truth, sympy), _exact(given, sympy)
    numbers = [isinstance(x, sympy.Expr) and x.is_number for x in (truth, given)]
    if all(numbers):
        return _same_constant(truth, given, relative, sympy)
    return package.verify(
        truth,
        given,
        numeric_precision=_DIGITS,
        allow_set_relation_comp=True,
        timeout_seconds=None,
    )


def _values(truth: Any, given: Any, sympy: ModuleType) -> tuple[Any, Any]:
    """Both expressions; of an assignment x = 7 its value, unless the variables differ."""
    named = [isinstance(x, sympy.Eq) and x.lhs.is_Symbol for x in (truth, given)]
    if all(named):
        return (truth.rhs, given.rhs) if truth.lhs.name == given.lhs.name else (truth, given)
    if named[0] and not isinstance(given, sympy.Rel):
        return truth.rhs, given
    if isinstance(given, sympy.Eq) and not isinstance(truth, sympy.Rel):
        return truth, given.rhs
    return truth, given


def _exact(expression: Any, sympy: ModuleType) -> Any:
    """An expression with its decimals as fractions, evaluated; inequalities in it are one set."""
    same = {x: sympy.Rational(str(x)) for x in expression.atoms(sympy.Float)}
    # math-verify's symbols are real or not, by what else is in the text
    same |= {x: sympy.Symbol(x.name, real=True) for x in expression.atoms(sympy.Symbol)}
    same |= {x: sympy.I for x in same if str(x) == "i"}
    expression = expression.xreplace(same)
    parts = expression.args if isinstance(expression, sympy.FiniteSet) else ()
    related = all(isinstance(x, sympy.Rel | sympy.And) for x in parts)
    if related and len(expression.free_symbols) == 1:
        if not all(isinstance(x, sympy.Eq) for x in parts):
            sets = [x.as_set() for x in parts]
            return sympy.Intersection(*sets) or sympy.Union(*sets)
    return expression.doit() if isinstance(expression, sympy.Expr) else expression


def _same_constant(truth: Any, given: Any, relative: float, sympy: ModuleType) -> bool:
    if truth == given:
        return True
    if truth.is_Rational and given.is_Rational:
        return abs(truth - given) <= relative * abs(truth)
    if not (truth.is_finite and given.is_finite):
        return False
    one, other = truth.evalf(_DIGITS), given.evalf(_DIGITS)
    size = abs(one)
    return bool(abs(one - other) <= max(relative, sympy.Float(10) ** (10 - _DIGITS)) * size)


@contextlib.contextmanager
def bounded(seconds: int) -> Iterator[None]:
    """A block that math-verify's TimeoutException ends after so many seconds of processor time; in
    other threads than the main one, where signals do not arrive, nothing does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        raise load().errors.TimeoutException

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@functools.cache
def load() -> ModuleType:
    """Imports math-verify at first use: with sympy that takes a second."""
    package = importlib.import_module("math_verify")
    importlib.import_module("math_verify.errors")
    # its warnings quote whole responses that cannot be parsed, which is common
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return package
