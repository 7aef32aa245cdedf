r"""One spelling of a mathematical answer: LaTeX as people write it -> LaTeX that is parsed.

Every rule joins spellings of the same thing and keeps values apart: `12\,345` is 12345, `3{,}14` is
3.14, `\mathrm{e}` is e, `x ≥ 2` is `x \ge 2`; `1, 234` stays a list.
"""

import re
import unicodedata

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_SUPERSCRIPT = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+")
_SIGNS = {
    "−": "-", "–": "-", "⁄": "/", "÷": "/", "×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ",
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "°": r"^\circ ", "√": r"\sqrt ", "∅": r"\emptyset ",
    "€": "", "£": "", "¥": "",
}  # fmt: skip
_SIGN = re.compile("|".join(map(re.escape, _SIGNS)))
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_SEPARATOR = r"(?:\\[,!;: ]|~|\{,\}|,\\!|'|\{\\,\}| )"
_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        # what only sets the formula
        (r"\\\$|(?<!\\)\$|(?<!\\)\\[()\[\]]|\*\*|`", ""),
        (r"\\(?:left|right)\s*\.|\\(?:left|right|[bB]igg?)[lr]?(?![A-Za-z])", ""),
        (r"\\(?:displaystyle|textstyle|limits|phantom\{[^{}]*\})(?![A-Za-z])", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:math(?:rm|it|bf)|text(?:rm|it|bf)?|operatorname)\s*\{\s*([A-Za-z])\s*\}", r" \1 "),
        (r"\\(?:mathrm|operatorname|text)\s*\{(ln|log|exp|sin|cos|tan)\}", r"\\\1 "),
        (r"\\(?:text)?color\s*\{[a-z]+\}|\\(?:large|Large|huge|bf|rm)(?![A-Za-z])", ""),
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\math(?:rm|bf|it)\s*\{([-\d.,]+)\}", r"\1"),
        (r"\\leq?slant(?![A-Za-z])|<=", r"\\le "),
        (r"\\geq?slant(?![A-Za-z])|>=", r"\\ge "),
        (r"\\log_\s*(?:e(?![A-Za-z])|\{\s*e\s*\})", r"\\ln "),
        (r"√\s*(\d+)", r"\\sqrt{\1}"),
        (r"\\sqrt\s+(\d+)", r"\\sqrt{\1}"),
        (r"\\text\s*\{\s*(?:percent|pct)\s*\}|\b(?:percent|pct)\b|(?<!\\)%", r"\\%"),
        (r"^\s*[A-Za-z]\s*\\in(?![A-Za-z])", ""),
        # thousands, then decimal commas
        (rf"(?<![\d.,^_{{])([1-9]\d{{0,2}}(?:{_SEPARATOR}\d{{3}})+)(?![\d])", "thousands"),
        (r"(?<![\d.,])([1-9]\d{0,2}(?:\.\d{3}){2,})(?![\d.])", "thousands"),
        (r"(?<![\d.,])([1-9]\d{0,2}(?:\.\d{3})+),(\d+)(?!\d)", "german"),
        (r"(\d)\{,\}(\d)", r"\1.\2"),
        # powers of ten
        (r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?)0*(\d+)(?!\w)", r"\1 \\times 10^{\2\3}"),
        (r"(\d)\s*(?:\*|\\cdot|[xX])\s*10\s*\^\s*\{?\s*([-+]?\d+)\}?", r"\1 \\times 10^{\2}"),
        (r"\\(?:qquad|quad|[,;:! ])", " "),
        (r"~", " "),
        (r"\s+", " "),
    ]
]
_COMMA_THOUSANDS = re.compile(r"(?<![\d.,])([1-9]\d{0,2}(?:,\d{3})+)(?!\d|,\d)")
_BRACKETED = re.compile(r"^\s*[(\[{\\].*,.*[)\]}]\s*$", re.DOTALL)


def normal_form(text: str) -> str:
    r"""The spelling of an answer that is parsed.

    >>> normal_form("12\\,345"), normal_form("3{,}14"), normal_form("x ≥ 2.")
    ('12345', '3.14', 'x \\ge 2')
    """
    text = _SUPERSCRIPT.sub(lambda s: "^{" + s[0].translate(_SUPERSCRIPTS) + "}", text)
    text = _VULGAR.sub(_fraction, text)
    text = _SIGN.sub(lambda sign: _SIGNS[sign[0]], unicodedata.normalize("NFKC", text))
    for pattern, replacement in _RULES:
        if replacement == "thousands":
            text = pattern.sub(_digits, text)
        elif replacement == "german":
            text = pattern.sub(lambda m: _digits(m[1]) + "." + m[2], text)
        else:
            text = pattern.sub(replacement, text)
    if not _BRACKETED.match(text):  # (1,234) is a pair
        text = _COMMA_THOUSANDS.sub(_digits, text)
    return text.strip().rstrip(".,;:").strip()


def _digits(number: re.Match | str) -> str:
    return re.sub(r"\D", "", number if isinstance(number, str) else number[0])


def _fraction(sign: re.Match) -> str:
    above, below = unicodedata.normalize("NFKC", sign[0]).split("⁄")
    return f"\\frac{{{above}}}{{{below}}}"


_TEXT_COMMAND = re.compile(r"\\(?:text|math|operatorname|mbox)[a-z]*\s*\{([^{}]*)\}")


def plain_text(text: str) -> str:
    r"""An answer without the commands that set it as text, case-folded, one space between words.

    >>> plain_text(r"\textbf{(A)}\ Monday.")
    '(a) monday'
    """
    text = unicodedata.normalize("NFKC", text)
    text = _TEXT_COMMAND.sub(r"\1", text)
    text = re.sub(r"\\[,;:! ]|~|[$`*\"“”]", " ", text)
    return re.sub(r"\s+", " ", text).strip(" .,;:!").casefold()
