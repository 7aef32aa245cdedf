r"""One spelling of a mathematical answer: LaTeX as people write it -> LaTeX that is parsed.

Every rule joins spellings of the same thing and keeps values apart: `12\,345` is 12345, `3{,}14` is
3.14, `\mathrm{e}` is e, `x ≥ 2` is `x \ge 2`; `1, 234` stays a list.
"""

import re
import unicodedata
from typing import Any

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_SUPERSCRIPT = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+")
_SIGNS = {
    "−": "-", "–": "-", "⁄": "/", "÷": "/", "×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ",
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "°": r"^\circ ", "√": r"\sqrt ", "∅": r"\emptyset ",
    r"\varnothing": r"\emptyset ", r"\{\}": r"\emptyset ", r"\backslash": r"\setminus ",
    r"\imath": "i ", r"\lor": ", ", r"\checkmark": "", **dict.fromkeys("€£¥₹₩₽", ""),
}  # fmt: skip
_SIGN = re.compile("|".join(map(re.escape, _SIGNS)))
_VULGAR = re.compile("[¼-¾⅐-⅞]")


def _digits(number: re.Match) -> str:
    """A number without separators; in 1.234,5 the comma is the decimal one."""
    parts = number[0].split("," if "." in number[0] else " ,")
    return ".".join(re.sub(r"\D", "", part) for part in parts)


_SEPARATOR = r"(?:\\[,!;: ]|~|\{,\}|,\\!|['’]|\{\\,\}| )"
_FUNCTIONS = r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|log|exp"
_UPRIGHT = r"\\(?:math(?:rm|it|bf|sf)|boldsymbol|bm|[mh]box|emph|text[a-z]*|operatorname)\s*"
_ENDS = r"[^\[\](),;]++[,;][^\[\](),;]++"  # of an interval
_RULES: list[tuple[re.Pattern, Any]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        # what only sets the formula
        (r"(?<=[\w)])\*\*(\d+|[A-Za-z]\b|\([^()]*\))", r"^{\1}"),
        (r"\\\$|(?<!\\)\$|(?<!\\)\\[()\[\]]|\*\*|`", ""),
        (r"\\(?:left|right)\s*\.|\\(?:left|right|[bB]igg?)[lr]?(?![A-Za-z])", ""),
        (rf"\\(?:mathrm|operatorname|text)\s*\{{({_FUNCTIONS})\s*\}}", r"\\\1 "),
        (_UPRIGHT + r"\{\s*([eiEI]|[-\d.,]+)\s*\}", r" \1 "),
        (_UPRIGHT + r"\{\s*(-?\d[\d.,]*)(?:\\ |[ ~])([^{}\d]*)\}", r"\1\\text{\2}"),
        (r"\\(?:text)?color\s*\{[a-z]+\}|\\(?:large|Large|huge|bf|rm)(?![A-Za-z])", ""),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        (r"\\log_\s*(?:e(?![A-Za-z])|\{\s*e\s*\})", r"\\ln "),
        (r"\\sqrt\s+(\d+)|\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1\2}"),
        (r"\\text\s*\{\s*(?:per ?cent|pct|\\?%)\s*\}|\b(?:percent|pct)\b|(?<!\\)%", r"\\%"),
        (r"(?:\\deg(?:ree)?\b|\^\s*\{?\s*(?:\\circ|o\b)\s*\}?)(?:\s*[CF]\b)?", r"^\\circ "),
        # lists: "and", "or", and units within
        (r"\\text\s*\{(?>([^{}]*?)\b(?:and|or)\b)([^{}]*)\}", r"\\text{\1}, \\text{\2}"),
        (r"\\text\s*\{\s*\}|(?<=[\d})])\s*\\(?:text|mathrm)\s*\{[^{}\d]*\}(?=\s*,)", ""),
        # of {x : x > 2} and x \in (2, \infty) what follows x; ]2, \infty[ is (2, \infty)
        (r"^\s*\\\{\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?::|\||\\mid)(.*)\\\}\s*$", r"\1"),
        (r"^\s*[A-Za-z]\s*\\in(?![A-Za-z])|^\s*\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])+\s*\)\s*=", ""),
        (r"(?<=[)\]])\s*U\s*(?=[(\[])", r" \\cup "),
        (rf"\]({_ENDS})(?=[\[\]])", r"(\1"),
        (rf"([\[(]{_ENDS})\[", r"\1)"),
        (r"^\s*([-\d./]+)\s*=\s*([A-Za-z])\s*$", r"\2=\1"),
        # thousands, then decimal commas
        (rf"(?<![\d.,])(?<!\\\{{)([1-9]\d{{0,2}}(?:{_SEPARATOR}\d{{3}})+)(?![\d])", _digits),
        (r"(?<![\d.,])[1-9]\d{0,2}(?:(?:\.\d{3})+,\d+(?!\d)|(?:\.\d{3}){2,}(?![\d.]))", _digits),
        (r"(\d)\{,\}(\d)", r"\1.\2"),
        (r"(?<=\d)\\,(?=\d)", ""),
        # powers of ten, mixed numbers
        (r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?)0*(\d+)(?!\w)", r"\1 \\times 10^{\2\3}"),
        (r"(\d)\s*(?:\*|\\cdot|[xX])\s*10\s*\^\s*\{?\s*([-+]?\d+)\}?", r"\1 \\times 10^{\2}"),
        (r"(?<![\w./])(\d+) (\d+)/(\d+)(?![\w/])", r"\1\\frac{\2}{\3}"),
        (r"(?<!\\)\\(?:qquad|quad|[,;:! ])|~", " "),
        (r";|,(?:\s*,)+", ","),
        (r"\s+", " "),
        (r"(?<=\{) | (?=\})", ""),
    ]
]
_COMMA_THOUSANDS = re.compile(r"(?<![\d.,])([1-9]\d{0,2}(?:,\d{3})+)(?!\d|,\d)")
_BETWEEN_INTERVALS = re.compile(r"(?<=[)\]])\s*(?:,|\bor\b|\band\b)\s*(?=[(\[])")
_PLUS_OR_MINUS = re.compile(r"\\pm(?![A-Za-z])")


def normal_form(text: str) -> str:
    r"""The spelling of an answer that is parsed.

    >>> normal_form("12\\,345"), normal_form("3{,}14"), normal_form("x ≥ 2.")
    ('12345', '3.14', 'x \\ge 2')
    """
    text = _SUPERSCRIPT.sub(lambda s: "^{" + s[0].translate(_SUPERSCRIPTS) + "}", text)
    text = _VULGAR.sub(_fraction, text)
    text = _SIGN.sub(lambda sign: _SIGNS[sign[0]], unicodedata.normalize("NFKC", text))
    if "{cases}" in text and "&" not in text:  # equations, not a function by cases
        text = re.sub(r"\\(?:begin|end)\{cases\}", "", text).replace(r"\\", ",")
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".,;:\\ ")
    if not re.match(r"[(\[{]|\\[{lb]", text):  # (1,234) is a pair
        text = _COMMA_THOUSANDS.sub(_digits, text)
    if r"\infty" in text:
        text = _BETWEEN_INTERVALS.sub(r" \\cup ", text)
    if len(_PLUS_OR_MINUS.findall(text)) == 1 and "," not in text:
        text = ", ".join(_PLUS_OR_MINUS.sub(sign, text) for sign in "+-")
    return text


def _fraction(sign: re.Match) -> str:
    above, below = unicodedata.normalize("NFKC", sign[0]).split("⁄")
    return f"\\frac{{{above}}}{{{below}}}"


_TEXT_COMMAND = re.compile(
    r"\\(?:text|math|operatorname|[mh]box|boldsymbol|bm|emph)[a-z]*\s*\{([^{}]*)\}"
)


def plain_text(text: str) -> str:
    r"""An answer without the commands that set it as text, case-folded, one space between words.

    >>> plain_text(r"\textbf{(A)}\ Monday.")
    '(a) monday'
    """
    text = unicodedata.normalize("NFKC", text)
    text = _TEXT_COMMAND.sub(r"\1", _TEXT_COMMAND.sub(r"\1", text))
    text = re.sub(r"\\[,;:! ]|~|[$`*\"“”]", " ", text.replace("{:}", ":"))
    return re.sub(r"\s+", " ", text).strip().rstrip(" .,;:").casefold()
