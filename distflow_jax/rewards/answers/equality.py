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

from distflow_jax.rewards.answers.answer_units import contradict, unit_of
from distflow_jax.rewards.answers.final_answer import final_answer, last_box
from distflow_jax.rewards.answers.normal_form import in_symbols, normal_form, plain_text

_DIGITS = 60  # of constants that are compared; irrational ones are equal if all but 10 are
_ROUNDING = 10.0 ** (10 - _DIGITS)
_POINTS = (-17, -11, -5, -2, 1, 4, 9, 15, 22)  # sevenths, at which functions are compared
_LONGEST = 4000  # characters of an expression that is parsed
_LONGEST_CHOICE = 40  # characters of a truth like "(B) 12"
_MOST_RELATIVE = 2e-4  # of a decimal truth: four significant digits
_MARKED = re.compile(r"boxed|fbox|####|<answer>|\banswer\b|(?<!\\)\$|\\[(\[]", re.IGNORECASE)
_WITH_UNIT = re.compile(r"-?[\d.,]+ *\$[^$]+\$")
_ONE_FORMULA = re.compile(r"\s*(?:\\f?boxed\s*\{.*\}|\$+[^$]*\$+)\s*", re.DOTALL)
_WORD = re.compile(r"[^\W\d_]{3,}")
_TEXT = re.compile(r"[^\W\d_][^\d\\=<>+*/^_{}|]*|\([a-z]\)[^\d\\=<>+*/^_{}|]*")
_PROSE = re.compile(r"(?:i|[^\W\d_]{2,}),? [^\W\d_]{2,}(?![^\W\d_])")  # its numbers are no answers
_MATH_WORDS = re.compile(r"\b(?:sin|cos|tan|cot|sec|csc|ln|log|exp|sqrt|pi|and|or|inf|infinity)\b")
_CHOICE = re.compile(r"(?s)(?:option |choice )?(?:\( ?([a-z]) ?\) ?(.*)|([a-z])(?:[.):] ?(.*))?)")
_LETTERS = re.compile("[A-H]{2,8}")  # of several choices
_LISTED_LETTERS = re.compile(r"\(?[a-h]\)?(?:(?:, ?and|,| and| &) ?\(?[a-h]\)?)+")
_DECISIONS = ("yes", "no", "true", "false")
_CLOCK_OR_RATIO = re.compile(
    r"(\d{1,9}(?:\s*:\s*\d{1,9})+|\d{1,2}(?= ?[ap]\.? ?m))\s*(?:([ap])\.?\s?m\.?)?"
)
_RATIO = re.compile(r"(\d+) ?: ?([1-9]\d*)")
_QUOTIENT = re.compile(r"/|\\[dt]?frac")
_TO_BASE = re.compile(
    r"([0-9][0-9a-z]*|[0-9a-f]+)\s*(?:_\s*\{?\s*(?:base )?|(?:in )?base )\s*(\d+)\s*\}?"
)
_MODULUS = re.compile(r"\\pmod\{(\w+)\}")
_PERCENT = re.compile(r"\\%")
_DEGREES = re.compile(r"\^\\circ|\\text ?\{ ?degrees? ?\}|\bdegrees?\b")
_UNIT = re.compile(
    r"(?<=[\d}]) (?:[A-Za-z]{2,}(?:/[a-z]+|\^\{?[23]\}?)?|[A-Zmsghl])$"
    r"|(?<=\d) ?[A-Za-z]+/[a-z]+(?:\^\{?[23]\}?)?$"
)
_DECIMAL = re.compile(r"-?\d*\.(\d+)")
_DECIMAL_COMMA = re.compile(r"^(-?\d+),(\d+)(?![\d,])")
_VALUE_OF = re.compile(r"^[A-Za-z](?:_\{?\w+\}?)?\([^()=]*\) ?= ?")
_SET = re.compile(r"\\?\{[^{},]*+,[^{}]*+\}")
_TUPLE = re.compile(r"[(\[][^(){}\[\],]*+,[^(){}\[\]]*+[)\]]")


class Equality:
    """Comparisons with one truth. Raises ValueError if that cannot be read.

    `timeout_seconds` of processor time bounds each parse and comparison in a main thread; none that
    takes longer is equal.
    """

    def __init__(self, truth: Any, timeout_seconds: int):
        self._limit = timeout_seconds
        self._truth = in_symbols(_final(_written(truth)))
        self._normal, self._text = normal_form(self._truth), plain_text(self._truth)
        readable = self._text if _is_text(self._text) else self._parsed(self._normal)
        if not readable:
            raise ValueError(f"math cannot parse the ground truth {truth!r}")

    def holds(self, answer: str) -> bool:
        """Whether an answer is the truth. "" is not."""
        if not answer.strip():
            return False
        answer = in_symbols(answer)
        given, text = normal_form(answer), plain_text(answer)
        if (given and given == self._normal) or (text and text == self._text):
            return True
        if self._text in _DECISIONS and re.match(rf"{self._text}[,.;:!] ", text):
            return True
        units = unit_of(self._truth, self._normal), unit_of(answer, given)
        if contradict(*units) or _of_other_kinds(self._normal, given):
            return False
        if _LETTERS.fullmatch(self._truth) and _LISTED_LETTERS.fullmatch(text):
            letters, chosen = list(self._truth.lower()), re.findall(r"\b[a-h]\b", text)
            # a truth like ACD is a set, one like CAB an order
            return letters == (sorted(chosen) if letters == sorted(letters) else chosen)
        if (choice := _same_choice(self._text, text)) is not None:
            if isinstance(choice, bool):
                return choice
            truth, given = choice
            return Equality(truth, self._limit).holds(given)
        for pattern, alike in ((_CLOCK_OR_RATIO, _same_time), (_TO_BASE, _same_digits)):
            found = [pattern.fullmatch(re.sub(r"[()]|^[^=]*=", "", x)) for x in (self._text, text)]
            if all(found):
                return alike(*found)
            if any(found) and not _QUOTIENT.search(self._text + text):
                return False
        if _is_text(self._text) or _is_text(text):
            return False
        pairs = _readings(self._normal, given)
        if "," in self._normal:
            pairs.append((self._normal, normal_form(answer, thousands=False)))
        return any(self._same_value(*pair) for pair in pairs)

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


def _written(truth: Any) -> str:
    """A truth as text; a list of values is all of them."""
    if isinstance(truth, list | tuple):
        return ", ".join(map(_written, truth))
    return truth.decode() if isinstance(truth, bytes) else str(truth).strip()


def _final(truth: str) -> str:
    """The answer in a truth, which may be a whole solution with the answer at its end."""
    choice = len(truth) < _LONGEST_CHOICE and _CHOICE.fullmatch(plain_text(truth))
    if choice or _WITH_UNIT.fullmatch(truth) or not _MARKED.search(truth):
        return truth
    answer = final_answer(truth)
    boxed = answer == last_box(truth) or _ONE_FORMULA.fullmatch(truth)
    if answer and ", " not in answer and not boxed:
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
    """Both texts, both without a percent or degree sign, a unit or a modulus, and what else fits.

    Beside a decimal truth 3,14 is a decimal and x \\approx 3.14 one, 2:3 is a quotient beside one,
    and f(3) = 7 is 7.
    """
    pairs = [(truth, given)]
    for sign in (_PERCENT, _DEGREES, _UNIT, _MODULUS):
        bare = sign.sub(" ", truth).strip(), sign.sub(" ", given).strip()
        if bare != (truth, given) and all(bare):
            pairs.append(bare)
    if _DECIMAL.match(truth):
        pairs.append((truth, _DECIMAL_COMMA.sub(r"\1.\2", given.rpartition("\\approx")[2].strip())))
    if "=" not in given:
        pairs.append((_VALUE_OF.sub("", truth), given))
    ratios = [
        _RATIO.sub(r"\\frac{\1}{\2}", x) if _RATIO.fullmatch(x) else x for x in (truth, given)
    ]
    return [*dict.fromkeys([*pairs, (ratios[0], ratios[1])])]


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
    words = _MATH_WORDS.sub("", text)
    return bool(_TEXT.fullmatch(text) and _WORD.search(words) or _PROSE.match(words))


def _of_other_kinds(truth: str, given: str) -> bool:
    """Whether moduli or brackets of two normal forms contradict each other."""
    moduli = [_MODULUS.findall(x) for x in (truth, given)]
    if all(moduli) and moduli[0] != moduli[1]:
        return True
    return any(
        _SET.fullmatch(a) and _TUPLE.fullmatch(b) for a, b in ((truth, given), (given, truth))
    )


def _same_digits(truth: re.Match, given: re.Match) -> bool:
    """Whether two numbers to a base are the same."""
    return truth[1].lstrip("0") == given[1].lstrip("0") and truth[2] == given[2]


def _same_time(truth: re.Match, given: re.Match) -> bool:
    """Whether two times or ratios are the same; 2:30 PM is 14:30, and 12:00 may be without PM."""
    written, in_day = [], []
    for found in (truth, given):
        hour, *rest = (int(part) for part in found[1].split(":"))
        rest = rest or [0]
        written.append([hour, *rest])
        in_day.append([hour % 12 + 12 * (found[2] == "p") if found[2] else hour, *rest])
    if truth[2] is None:
        return written[0] in (written[1], in_day[1])
    return in_day[0] == in_day[1] and (given[2] is not None or written[0] != written[1])


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
    options = {"numeric_precision": _DIGITS, "allow_set_relation_comp": True}
    same = package.verify(truth, given, timeout_seconds=None, **options)
    return same or _same_function(truth, given, sympy)


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
    return bool(abs(one - other) <= max(relative, _ROUNDING) * size)


def _same_function(truth: Any, given: Any, sympy: ModuleType) -> bool:
    """Whether two expressions with the same variables agree wherever both are real."""
    if not all(isinstance(x, sympy.Expr) for x in (truth, given)):
        return False
    variables = sorted(truth.free_symbols, key=str)
    if not variables or truth.free_symbols != given.free_symbols:
        return False
    agreed = 0
    for number in _POINTS:
        point = {v: sympy.Rational(number + 3 * i, 7) for i, v in enumerate(variables)}
        one, other = (x.subs(point).evalf(_DIGITS) for x in (truth, given))
        if one.is_real is not True and other.is_real is not True:
            continue
        if not (one.is_real and other.is_real and abs(one - other) <= abs(one) * _ROUNDING):
            return False
        agreed += 1
    return agreed > len(_POINTS) // 3


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
