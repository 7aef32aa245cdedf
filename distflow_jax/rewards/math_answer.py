"""Mathematical answers, compared as expressions by the package math-verify."""

import functools
import importlib
import logging
import threading
from types import ModuleType
from typing import Any


def math(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    timeout_seconds: int = 3,
) -> float:
    r"""1.0 if the response's final expression equals the ground truth, else 0.0.

    LaTeX (`\boxed{\frac{1}{2}}`, `$0.5$`) and plain expressions (`1/2`) are understood; the ground
    truth may be either, or bare LaTeX. math-verify gives up on a parse or a comparison after
    `timeout_seconds`, which then counts as wrong.

    Raises:
      ValueError: the ground truth cannot be parsed.
    """
    # Its limits are alarm signals, which exist in a main thread only: a worker's calls run there.
    in_main_thread = threading.current_thread() is threading.main_thread()
    limit = timeout_seconds if in_main_thread else None
    truth = str(ground_truth)
    if "boxed" not in truth and "$" not in truth:
        truth = f"\\boxed{{{truth}}}"
    gold = load().parse(truth, parsing_timeout=limit)
    if not gold:
        raise ValueError(f"math cannot parse the ground truth {ground_truth!r}")
    answer = load().parse(solution_str, parsing_timeout=limit)
    return float(load().verify(gold, answer, timeout_seconds=limit))


@functools.cache
def load() -> ModuleType:
    """The package, imported when first needed: with sympy it takes a second."""
    package = importlib.import_module("math_verify")
    # its warnings repeat whole responses that it could not read, which is nothing unusual
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return package
