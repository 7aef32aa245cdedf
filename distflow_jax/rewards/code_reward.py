"""The reward `code`: the hidden cases of a row that the program in a response passes."""

import importlib
from typing import Any

from distflow_jax.config.sandbox_config import SandboxConfig
from distflow_jax.rewards.code.hidden_cases import hidden_cases
from distflow_jax.rewards.code.program_text import program_of
from distflow_jax.rewards.records import ProgramLimits

DEFAULTS = ProgramLimits()


def code(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    prompt: str = "",
    limits: ProgramLimits = DEFAULTS,
    partial: bool = False,
    reference: str = "reference",
) -> dict[str, Any]:
    """1.0 if the program in a response passes all cases of the ground truth, else 0.0.

    code/program_text.py says what the program is, code/hidden_cases.py what the cases are. With
    `partial` the score is the share of cases that pass; a program that ignores its input passes
    some. `reference` names a column with a program that passes, for the check before step 1.

    Returns:
      `score`, and as `answer` the program; "" if the response has none.

    Raises:
      ValueError: the row has no cases, or not one output for each input.
      SandboxError: the sandbox failed again and again, which says nothing about the program.
    """
    cases, program = hidden_cases(ground_truth), program_of(solution_str, prompt)
    verdicts = importlib.import_module("distflow_jax.rewards.code.case_verdicts")
    judge = verdicts.Judge(load(limits.sandbox), limits.seconds, limits.parallel)
    passed = judge.count_passed(program, cases, all_needed=not partial) if program else 0
    score = passed / len(cases) if partial else float(passed == len(cases))
    return {"score": score, "answer": program}


def load(sandbox: SandboxConfig) -> Any:
    """Opens this process's sandbox. Runs without this reward import nothing of it.

    Raises ValueError if the machine allows none from `sandbox.minimum` on.
    """
    return importlib.import_module("distflow_jax.sandbox.sandbox").shared_sandbox(sandbox)
