r"""One spelling of a mathematical answer: LaTeX as people write it -> LaTeX that is parsed.

Every rule joins spellings of the same thing and keeps values apart: `12\,345` is 12345, `3{,}14` is
3.14, `\mathrm{e}` is e, `x ≥ 2` is `x \ge 2`; `1, 234` stays a list.
"""

import re
import unicodedata
from typing import Any

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_SUPERSCRIPT = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+")
_SUBSCRIPT = re.compile("[₀-₉]+")
_SIGNS = {
    **dict.fromkeys("−–‐", "-"), "⁄": "/", "÷": "/", "×": r"\times ",
    **dict.fromkeys("⋅·", r"\cdot "), r"\langle": "(", r"\rangle": ")", "∛": r"\sqrt[3]",
    r"\varphi": r"\phi ", r"\varepsilon": r"\epsilon ", r"\underline": "", r"\ensuremath": "",
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


def _repeating(number: re.Match) -> str:
    """A repeating decimal as a fraction: 0.1666... is 15/90."""
    whole, fixed, block = number.groups()
    top = int(whole + fixed + block) - int("0" + whole + fixed)
    return f"\\frac{{{top}}}{{{(10 ** len(block) - 1) * 10 ** len(fixed)}}}"


_SEPARATOR = r"(?:\\[,!;: ]|~|\{,\}|, ?\\! ?|['’]|\{\\,\}|\\(?:text|mathrm|mathord)\{,\}| )"
_TRIGONOMETRIC = "(?:sin|cos|tan|cot|sec|csc)"
_FUNCTIONS = rf"(?:arc)?{_TRIGONOMETRIC}h?|ln|log|exp"
_DOTS = r"(?:\.{3}|\\[lc]?dots(?![A-Za-z]))"
_MOD = r"(?:\\text\s*\{\s*mod\s*\}|\\?mod)"
_CURRENCY = r"(?:USD?|EUR|GBP|INR|CNY|RMB|Rs\.?)"
_POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_UNIT_TEXT = r"\\(?:text|mathrm)\s*\{([^{}]*)\}(?:\^\{?\d\}?)?"
_SUCH_THAT = (
    r"(?:[,;(]|\\(?:text|mathrm)\s*\{\s*(?:for|where|with)\b[^{}]*\})(?:\s|~|\\q?quad|\\[ ,;])*"
)
_BELOW = r"(?:<|\\leq?(?![A-Za-z]))"
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
        (_UPRIGHT + r"\{\s*(?!,)([eiEI]|[-\d.,]+|\^\\circ *)\s*\}", r" \1 "),
        (r"\\math(?:rm|it|bf|sf)\s+([eiEI])(?![A-Za-z])", r" \1 "),
        (_UPRIGHT + r"\{\s*(-?\d[\d.,]*)(?:\\ |[ ~])([^{}\d]*)\}", r"\1\\text{\2}"),
        (r"\\(?:text)?color\s*\{[a-z]+\}|\\(?:large|Large|huge|bf|rm)(?![A-Za-z])", ""),
        (r"\\[hv]?phantom\s*\{[^{}]*\}", ""),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        (rf"(?<![A-Za-z\\])({_FUNCTIONS}|sqrt)(?=\s*(?:[\^_({{\\\d|]|[a-zα-ω](?![a-z])))", r"\\\1"),
        (r"\\lg(?![A-Za-z])", r"\\log_{10} "),
        (r"\\log_\s*(?:e(?![A-Za-z])|\{\s*e\s*\})", r"\\ln "),
        (r"\\sqrt(\[\d+\])?\s*(?:(\d+)|\(([^()]*)\))", r"\\sqrt\1{\2\3}"),
        (r"(\\[dt]?binom)\s*(\d)\s*(\d)", r"\1{\2}{\3}"),
        (rf"\(\s*{_MOD}\s*(\w+)\s*\)|\\[pb]mod\s*\{{?\s*(\w+)\s*\}}?", r"\\pmod{\1\2}"),
        (r"(?<![\d.,])(\d{0,18})\.(\d{0,18})\\(?:overline|bar|dot)\s*\{?(\d{1,18})\}?", _repeating),
        (rf"(?<![\d.,])(\d{{0,18}})\.(\d{{0,6}}?)(\d{{1,6}}?)\3{{2,9}}{_DOTS}", _repeating),
        (_DOTS, r"\\Xi "),  # an element of its list
        (r"\\text\s*\{\s*(?:per ?cent|pct|\\?%)\s*\}|\b(?:percent|pct)\b|(?<!\\)%", r"\\%"),
        (r"(?:\\deg(?:ree)?\b|\^\s*\{?\s*(?:\\circ|o\b)\s*\}?)(?:\s*[CF]\b)?", r"^\\circ "),
        (
            rf"(\\{_TRIGONOMETRIC})\s*(?:\(\s*([\d.]+)\s*\^\\circ\s*\)|([\d.]+)\s*\^\\circ)",
            r"\1(\\frac{\2\3\\pi}{180})",
        ),
        # money, and numbers with words
        (rf"^\s*(?:\\text\s*\{{\s*)?{_CURRENCY}\s*\}}?\s*(?=-?[\d.])", ""),
        *(
            (rf"(?<=\d)(\s*\\text\s*\{{)?\s*{word}\b", rf" \\times 10^{{{power}}}\1")
            for word, power in _POWERS.items()
        ),
        # lists: "and", "or", and units within
        (r"\\text\s*\{(?>([^{}]*?)\b(?:and|or)\b)([^{}]*)\}", r"\\text{\1}, \\text{\2}"),
        (r"\\text\s*\{\s*\}|(?<=[\d})])\s*\\(?:text|mathrm)\s*\{[^{}\d]*\}(?=\s*,)", ""),
        (rf"\\[dt]?frac\s*\{{\s*{_UNIT_TEXT}\s*\}}\s*\{{\s*{_UNIT_TEXT}\s*\}}", r"\\text{\1}"),
        # of {x : x > 2} and x \in (2, \infty) what follows x; ]2, \infty[ is (2, \infty)
        (r"\\mathbb\s*\{?R\}?\s*(?:\^\{?\+\}?|_\{?\s*(?:\+|>\s*0)\s*\}?)", r"(0,\\infty)"),
        (r"(\\mathbb\s*\{?R\}?)\s*-\s*(?=\\\{)", r"\1 \\setminus "),
        (
            r"^\s*\\?\{\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?::|\||\\mid)(.*?)\\?\}\s*$",
            r"\1",
        ),
        (r"^\s*([A-Za-z])\s*\\in\s*\\mathbb\s*\{?R\}?\s*,(?=.*\1)", ""),
        (rf"{_SUCH_THAT}[a-z]\s*\\in\s*\\math(?:bb|bf)\s*\{{?Z\}}?\s*\)?\s*$", ""),
        (rf"^\s*-\\infty\s*{_BELOW}\s*[A-Za-z]\s*{_BELOW}\s*\+?\\infty\s*$", r"\\mathbb{R}"),
        (rf"^\s*-\\infty\s*{_BELOW}(?=\s*[A-Za-z])|(?<=[A-Za-z]) ?{_BELOW} ?\+?\\infty\s*$", ""),
        (r"^\s*(?=\\(?:le|ge|ne)q?(?:slant)?(?![A-Za-z])|[<>])", "x "),
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
        (r"(\d)\s*(?:[*xX]|\\cdot|\\times)\s*10\s*\^\s*\{?\s*([-+]?\d+)\}?", r"\1 \\times 10^{\2}"),
        (r"(?<![\w./])(\d+) (\d+)/(\d+)(?![\w/])", r"\1\\frac{\2}{\3}"),
        (r"(?<!\\)\\(?:qquad|quad|[,;:! ])|~", " "),
        (r";|,(?:\s*,)+", ","),
        (r"\s+", " "),
        (r"(?<=\{) | (?=\})", ""),
        (r"_\{(\w)\}", r"_\1"),
    ]
]
_COMMA_THOUSANDS = re.compile(r"(?<![\d.,])([1-9]\d{0,2}(?:,\d{3})+)(?!\d|,\d)")
_BETWEEN_INTERVALS = re.compile(r"(?<=[)\]])\s*(?:,|\bor\b|\band\b)\s*(?=[(\[])")
_PLUS_OR_MINUS = re.compile(r"\\pm(?![A-Za-z])")
_MOST_SIDES = 20  # of a chain of equations
_NO_CHAIN = re.compile(r"[,<>!]|\\[lgn]e|\b(?:or|and)\b|[^\s=] +[A-Za-z](?:_\w+)? *=")
_PAIRS = ("()", "[]", "{}")
_IN_WORDS = {
    r"\emptyset": re.compile(r"(?:there (?:is|are) )?no (?:real )?(?:solutions?|roots?)|empty set"),
    r"\infty": re.compile("infinity"),
    r"\mathbb{R}": re.compile(r"(?:set of )?(?:all |any )?real numbers?|all reals"),
}


def normal_form(text: str, *, thousands: bool = True) -> str:
    r"""The spelling of an answer that is parsed. `thousands`: 12,345 is one number, not a list.

    >>> normal_form("12\\,345"), normal_form("3{,}14"), normal_form("x ≥ 2.")
    ('12345', '3.14', 'x \\ge 2')
    """
    text = _SUPERSCRIPT.sub(lambda s: "^{" + s[0].translate(_SUPERSCRIPTS) + "}", text)
    text = _SUBSCRIPT.sub(lambda s: "_{" + unicodedata.normalize("NFKC", s[0]) + "}", text)
    text = _VULGAR.sub(_fraction, text)
    text = _SIGN.sub(lambda sign: _SIGNS[sign[0]], unicodedata.normalize("NFKC", text))
    if "{cases}" in text and "&" not in text:  # equations, not a function by cases
        text = re.sub(r"\\(?:begin|end)\{cases\}", "", text).replace(r"\\", ",")
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".,;:\\ ")
    if thousands and not re.match(r"[(\[{]|\\[{lb]", text):  # (1,234) is a pair
        text = _COMMA_THOUSANDS.sub(_digits, text)
    if not thousands:
        text = re.sub(r",(?=\d)", ", ", text)
    sides = re.split(r"=(?![^{}]*\})", text) if text.count("=") < _MOST_SIDES else []
    if len(sides) > 2 and not _NO_CHAIN.search(text):
        text = sides[-1].strip()  # of x = 3 + 4 = 7 the value
    if r"\infty" in text:
        text = _BETWEEN_INTERVALS.sub(r" \\cup ", text)
    parts = text.split(",")
    if any(part.count(opened) != part.count(closed) for part in parts for opened, closed in _PAIRS):
        return text
    return ",".join(
        ", ".join(_PLUS_OR_MINUS.sub(sign, part) for sign in "+-")
        if len(_PLUS_OR_MINUS.findall(part)) == 1
        else part
        for part in parts
    )


def _fraction(sign: re.Match) -> str:
    above, below = unicodedata.normalize("NFKC", sign[0]).split("⁄")
    return f"\\frac{{{above}}}{{{below}}}"


def in_symbols(text: str) -> str:
    """The symbol of a set that the text names in words, as "no solution"; else the text."""
    words = plain_text(text)
    return next((sign for sign, named in _IN_WORDS.items() if named.fullmatch(words)), text)


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
    text = re.sub(r"\{:\}|\\colon(?![A-Za-z])|(?<=\d)\s+to\s+(?=\d)", ":", text).replace("’", "'")
    text = re.sub(r"\\[,;:! ]|~|[$`*\"“”]", " ", text)
    text = re.sub(r"\s+", " ", text).strip().rstrip(" .,;:").casefold()
    return re.sub(r"^(?:an?|the) (?=[a-z]{3})", "", text)
