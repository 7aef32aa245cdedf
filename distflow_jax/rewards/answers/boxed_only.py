r"""The text of the last box, cleaned: verl's rule for MATH, so that runs can be compared.

The steps are those of `is_equiv` of Hendrycks et al. 2021 (arxiv.org/abs/2103.03874), in its order.
"""

import re

_REPLACED = (
    *(("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac")),
    *(("\\left", ""), ("\\right", ""), ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", "")),
)
_LATER = (("\\%", ""), (" .", " 0."), ("{.", "{0."))
_BARE_ROOT = re.compile(r"\\sqrt(?!\{)(.)")
_BARE_FRACTION = re.compile(r"\\frac(?!\{)(.)(?:(?=\{)|(.))")
_QUOTIENT = re.compile(r"(-?\d+)/(-?\d+)")


def same_after_cleaning(one: str, other: str) -> bool:
    """Whether two texts are equal once their spelling is cleaned."""
    return _cleaned(one) == _cleaned(other)


def _cleaned(text: str) -> str:
    for old, new in _REPLACED:
        text = text.replace(old, new)
    if text.count("\\text{ ") == 1:  # a unit on the right
        text = text.split("\\text{ ")[0]
    for old, new in _LATER:
        text = text.replace(old, new)
    if text.startswith("."):
        text = f"0{text}"
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        text = value
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", text).replace(" ", "")
    text = _BARE_FRACTION.sub(lambda f: f"\\frac{{{f[1]}}}" + (f"{{{f[2]}}}" if f[2] else ""), text)
    if text == "0.5":
        return "\\frac{1}{2}"
    quotient = _QUOTIENT.fullmatch(text)
    return f"\\frac{{{quotient[1]}}}{{{quotient[2]}}}" if quotient else text
