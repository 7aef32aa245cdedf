"""Answers of other programs as columns: JSON values become arrays, which response_checks.py checks.

T tokens of a response.
"""

from typing import Any

import numpy as np

from distflow_jax.rollout.foreign.engine_protocol import Answer
from distflow_jax.rollout.response_checks import RefusedAnswer, ResponseLimits, check_response


def checked_columns(
    answer: Answer, limits: ResponseLimits, *, limit: int, held: int, known: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens int32, log-probs float32, versions int32) of an answer, [T] each.

    `limit`: tokens at most; `held`: version when it was requested; `known`: version that the engine
    was given last. Raises RefusedAnswer.
    """
    tokens = _integers(answer.tokens, "token ids")
    logp = _log_probs(answer.logp)
    if answer.version is None:
        version: np.ndarray = np.full(len(tokens), known, np.int64)
    else:
        # the first token may be drawn from logits that the weights before had computed
        version = _integers(answer.version, "versions")
    for name, column in {"log-probs": logp, "versions": version}.items():
        if len(column) != len(tokens):
            raise RefusedAnswer(f"{len(tokens)} tokens with {len(column)} {name}")
    ends = bool(len(tokens)) and int(tokens[-1]) in limits.stops
    ended = bool(answer.ended) or ends
    check_response(tokens, logp, version, limits, limit=limit, ended=ended, versions=(held, known))
    return tokens.astype(np.int32), np.minimum(logp, np.float32(0)), version.astype(np.int32)


def _integers(values: Any, what: str) -> np.ndarray:
    """JSON integers as int64 [T]."""
    if not isinstance(values, list | tuple) or not all(type(value) is int for value in values):
        raise RefusedAnswer(f"{what} that are no integers")
    try:
        return np.array(values, np.int64)
    except OverflowError as error:  # JSON has integers of any size
        raise RefusedAnswer(f"{what} of more than 64 bits") from error


def _log_probs(values: Any) -> np.ndarray:
    """JSON numbers as float32 [T]."""
    if values is None:
        raise RefusedAnswer("no log-probs")
    if not isinstance(values, list | tuple):
        raise RefusedAnswer("log-probs that are no list")
    if not all(type(value) in (int, float) for value in values):
        raise RefusedAnswer("a token without log-prob")
    try:
        logp = np.array(values, np.float64)
    except OverflowError as error:  # JSON has integers of any size
        raise RefusedAnswer("a log-prob that no float holds") from error
    with np.errstate(over="ignore"):
        return logp.astype(np.float32)
