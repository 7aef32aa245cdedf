"""The built-in reward functions by name, and how each of them knows an answer."""

import functools
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from distflow_jax.rewards import math_answer, reasoning_gym
from distflow_jax.rewards.answers.equality import Equality
from distflow_jax.rewards.answers.equality import load as load_math_verify
from distflow_jax.rewards.answers.final_answer import final_answer, last_box
from distflow_jax.rewards.code_reward import code
from distflow_jax.rewards.code_reward import load as load_sandbox
from distflow_jax.rewards.geo3k import geo3k
from distflow_jax.rewards.text_rules import (
    exact,
    gsm8k,
    last_number,
    pattern_format,
    tagged_format,
    zero,
)

REWARDS = {
    "gsm8k": gsm8k,
    "math": math_answer.math,
    "boxed_only": math_answer.boxed_only,
    "math_verify": math_answer.math_verify,
    "math_verify_anchored": math_answer.math_verify_anchored,
    "geo3k": geo3k,
    "exact": exact,
    "format": tagged_format,
    "pattern": pattern_format,
    "reasoning_gym": reasoning_gym.reasoning_gym,
    "code": code,
    "zero": zero,
}

MATHEMATICAL = frozenset({"math", "math_verify", "math_verify_anchored", "geo3k"})

# They compare with a ground truth, which every row must have.
NEED_TRUTH = frozenset({"gsm8k", "exact", "boxed_only", "code"}) | MATHEMATICAL

# They run programs, of which they get the `limits`. Failed calls are failures of the sandbox, never
# of a response, which is not scored then.
SANDBOXED = frozenset({"code"})

# f(kwargs of the function): imports packages and opens the sandbox, before any deadline runs
LOAD: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    **dict.fromkeys(MATHEMATICAL, lambda kwargs: load_math_verify()),
    "reasoning_gym": lambda kwargs: reasoning_gym.load(),
    "code": lambda kwargs: load_sandbox(kwargs["limits"].sandbox),
}


def _number(response: str, prompt: str, *, method: str = "flexible", **_: Any) -> str:
    number = last_number(response, method)
    if isinstance(number, Fraction):
        number = Decimal(number.numerator) / number.denominator
    return "" if number is None else format(number.normalize(), "f")


def _final(response: str, prompt: str, **_: Any) -> str:
    return final_answer(response, prompt)


# function -> f(response, prompt, **kwargs of the function) -> its answer, "" for none
ANSWERS: dict[Callable[..., Any], Callable[..., str]] = {
    gsm8k: _number,
    math_answer.boxed_only: lambda response, prompt: last_box(response) or "",
    tagged_format: _final,
    **{REWARDS[name]: _final for name in MATHEMATICAL},
}


def same_answers(function: Callable[..., Any], answers: tuple[str, ...]) -> tuple[int, ...]:
    """For each answer the number of the first one that is the same.

    As text without regard to case; where the function is mathematical, as `math` compares too.
    """
    mathematical = function in {REWARDS[name] for name in MATHEMATICAL}
    texts = [" ".join(answer.split()).casefold() for answer in answers]
    first: dict[str, int] = {}
    compare = functools.cache(_equality)
    for number, text in enumerate(texts):
        if text not in first:
            firsts = dict.fromkeys(first.values()) if mathematical else ()
            equal = (
                i for i in firsts if (same := compare(answers[i])) and same.holds(answers[number])
            )
            first[text] = next(equal, number)
    return tuple(first[text] for text in texts)


def _equality(answer: str) -> Equality | None:
    try:
        return Equality(answer, timeout_seconds=1)
    except ValueError:  # no expression
        return None
