"""Rewards by rules on the text of a response: its format, an exact match, a number at its end."""

import numbers
import re
import unicodedata
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from distflow_jax.rewards.answers.final_answer import last_box


def tagged_format(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    prompt: str = "",
    tags: Sequence[str] = ("think", "answer"),
) -> float:
    """1.0 if the response is `<think>..</think><answer>..</answer>` and nothing else, else 0.0.

    Each tag must occur once, in the order of `tags`, and enclose some text; white space may stand
    between them. The end of `prompt` may have opened the first one. DeepSeek-AI 2025,
    arxiv.org/abs/2501.12948, sec. 2.2.
    """
    solution_str = with_opened_tag(solution_str, tags[0], prompt)
    rest = solution_str.strip()
    for tag in tags:
        start, end = f"<{tag}>", f"</{tag}>"
        if solution_str.count(start) != 1 or solution_str.count(end) != 1:
            return 0.0
        inside, found, after = rest.removeprefix(start).partition(end)
        if not rest.startswith(start) or not found or not inside.strip():
            return 0.0
        rest = after.lstrip()
    return float(not rest)


def pattern_format(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    pattern: str,
) -> float:
    """1.0 if the whole response, without white space around it, matches the regular expression.

    A dot matches line ends too.
    """
    return float(re.fullmatch(pattern, solution_str.strip(), re.DOTALL) is not None)


def with_opened_tag(response: str, tag: str, prompt: str) -> str:
    """The response, with the opening tag before it if the prompt ends with that."""
    start = f"<{tag}>"
    return start + response if prompt.rstrip().endswith(start) else response


def exact(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    strip: bool = True,
    casefold: bool = False,
) -> float:
    """1.0 if the response equals the ground truth, or one of a list of them, else 0.0.

    A truth that is a number is compared as one, so 5.0 is "5"; text is compared in Unicode's form
    NFC. `strip` ignores white space around both, `casefold` ignores case. A missing truth equals
    nothing.
    """
    truths = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]

    def normal(text: str) -> str:
        text = unicodedata.normalize("NFC", text.strip() if strip else text)
        return text.casefold() if casefold else text

    def equal(truth: Any) -> bool:
        if isinstance(truth, numbers.Real) and not isinstance(truth, bool):
            try:
                return Decimal(solution_str.strip()) == Decimal(str(truth))
            except InvalidOperation:
                return False
        return truth is not None and normal(solution_str) == normal(str(truth))

    return float(any(map(equal, truths)))


METHODS = ("flexible", "strict")
# A minus counts as a sign only where it cannot be a subtraction: in "12-35" the last number is 35.
NUMBER = re.compile(
    r"""(?: (?<![0-9A-Za-z_)\]]) - )?
        \$?
        (?: (?<![/0-9.]) [0-9]{1,18}/0*[1-9][0-9]{0,17} (?![/0-9.]*[0-9])
        | (?: (?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+) (?:\.[0-9]+)? | \.[0-9]+ )
          (?:[eE][-+]?[0-9]{1,3}(?![0-9A-Za-z]))? )""",
    re.VERBOSE,
)
_PLAIN = str.maketrans("−–‑０１２３４５６７８９", "---0123456789")
_FRACTION = re.compile(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
# the 2 of 36 cm^2, of \text{cm}^{2} and of 36 cm2
_EXPONENT = re.compile(
    r"(?<=[A-Za-z}])\^\{?-?[0-9]+\}?|(?<=[0-9])( ?(?:[cdkm]?m|ft|in))[23](?![0-9A-Za-z])"
)
_LATEX_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\,)(?=[0-9]{3})")
AFTER_HASHES = re.compile(r"\#\#\#\#\s*(" + NUMBER.pattern + ")", re.VERBOSE)


def gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    method: str = "flexible",
) -> float:
    """1.0 if the response's final number equals the ground truth, else 0.0.

    The final number is the one after the last `####`; without one, method "flexible" takes that of
    the last box, or else the last number of the response, which need not be meant as an answer.
    Both methods are verl's, which has neither the box, nor `1/2` as one number, nor the 2 of
    `36 cm^2` as none. Commas between thousands (`1,234`, `1{,}234`), a dollar sign, a full stop at
    the end and zeros after the decimal point make no difference.

    Raises:
      ValueError: the ground truth is not a number, or the method is unknown.
    """
    if method not in METHODS:
        raise ValueError(f"gsm8k method must be one of {', '.join(METHODS)}, got {method!r}")
    truth = last_number(str(ground_truth), "strict") or last_number(str(ground_truth), "flexible")
    if truth is None:
        raise ValueError(
            f"gsm8k needs a number as ground truth, got {ground_truth!r}; "
            "use reward.function=math or exact for other answers"
        )
    answer = last_number(solution_str, method)
    return float(answer is not None and answer == truth)


def last_number(text: str, method: str) -> Decimal | Fraction | None:
    """The exact final number of a text; None without one."""
    text = _FRACTION.sub(r"\1/\2", _LATEX_COMMA.sub(",", text.translate(_PLAIN)))
    text = _EXPONENT.sub(r"\1", text)
    found = AFTER_HASHES.findall(text)
    if not found and method == "flexible":
        found = NUMBER.findall(last_box(text) or "") or NUMBER.findall(text)
    if not found:
        return None
    number = found[-1].replace(",", "").replace("$", "")
    return Fraction(number) if "/" in number else Decimal(number)


def zero(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
) -> float:
    """0.0 for every response; the score is then the sum of rollout.environment's rewards."""
    return 0.0
