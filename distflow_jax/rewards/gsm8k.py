"""Numeric answers in the style of GSM8K (Cobbe et al. 2021, arxiv.org/abs/2110.14168)."""

import re
from decimal import Decimal
from typing import Any

METHODS = ("flexible", "strict")
# A minus counts as a sign only where it cannot be a subtraction: in "12-35" the last number is 35.
NUMBER = re.compile(
    r"""(?: (?<![0-9A-Za-z_)\]]) - )?
        \$?
        (?: (?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+) (?:\.[0-9]+)? | \.[0-9]+ )""",
    re.VERBOSE,
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

    The final number is the one after the last `####`; without one, method "flexible" takes the last
    number of the response. It is verl's rule: a number that merely occurs is an answer. Commas
    between thousands (`1,234`, `1{,}234`), a dollar sign, a full stop at the end and zeros after
    the decimal point make no difference.

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


def last_number(text: str, method: str) -> Decimal | None:
    """The exact final number of a text; None without one."""
    text = _LATEX_COMMA.sub(",", text.replace("\N{MINUS SIGN}", "-"))
    found = AFTER_HASHES.findall(text)
    if not found and method == "flexible":
        found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None
