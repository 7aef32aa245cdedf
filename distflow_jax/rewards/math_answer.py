"""Reward for mathematical answers, compared as expressions by the package math-verify."""

import functools
import importlib
import logging
import re
import threading
from types import ModuleType
from typing import Any

_BEGINS_FORMULA = re.compile(r"(?<!\\)\$")  # a dollar, but not that of \$18.90


def math(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    timeout_seconds: int = 3,
) -> float:
    r"""1.0 if the response's final expression equals the ground truth, else 0.0.

    LaTeX (`\boxed{\frac{1}{2}}`, `$0.5$`) and plain expressions (`1/2`) are parsed; the ground
    truth may be either, or bare LaTeX. A parse or comparison that takes longer than
    `timeout_seconds` counts as wrong.

    Raises:
      ValueError: the ground truth cannot be parsed.
    """
    # its limits are alarm signals, which only a main thread has: a worker calls in its main thread
    in_main_thread = threading.current_thread() is threading.main_thread()
    limit = timeout_seconds if in_main_thread else None
    gold = _parsed_truth(str(ground_truth), limit)
    if not gold:
        raise ValueError(f"math cannot parse the ground truth {ground_truth!r}")
    answer = load().parse(solution_str, parsing_timeout=limit)
    return float(load().verify(gold, answer, timeout_seconds=limit))


def _parsed_truth(truth: str, limit: int | None) -> list[Any]:
    """Expressions that math-verify reads in a ground truth; empty where there are none."""
    gold = []
    if "boxed" in truth or _BEGINS_FORMULA.search(truth):
        gold = load().parse(truth, parsing_timeout=limit)
    return gold or load().parse(f"\\boxed{{{truth}}}", parsing_timeout=limit)


@functools.cache
def load() -> ModuleType:
    """Imports the package at first use: with sympy that takes a second."""
    package = importlib.import_module("math_verify")
    # its warnings quote whole responses that cannot be parsed, which is common
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return package
