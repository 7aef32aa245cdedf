"""Reward for an exact match."""

import numbers
import unicodedata
from decimal import Decimal, InvalidOperation
from typing import Any


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
