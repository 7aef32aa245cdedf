"""Checks of answers of engines: JSON values become columns, which response_checks.py looks at."""

from collections.abc import Collection

import numpy as np

from distflow_jax.rollout.foreign.engine_protocol import Answer
from distflow_jax.rollout.response_checks import (
    RefusedAnswer,
    ResponseLimits,
    check_logp,
    check_tokens,
)


def checked_columns(
    answer: Answer, *, vocab_size: int, limit: int, stops: Collection[int], held: int, known: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens int32, log-probs float32, versions int32) of an answer, [T] each.

    `limit`: tokens at most; `stops`: ids that end a response; `held`: version when it was
    requested; `known`: version that the engine was given last. Raises RefusedAnswer.
    """
    tokens = _tokens(answer, ResponseLimits(vocab_size, stops), limit)
    logp = _logp(answer, len(tokens))
    if answer.version is None:
        return tokens, logp, np.full(len(tokens), known, np.int32)
    if len(answer.version) != len(tokens):
        raise RefusedAnswer(f"{len(tokens)} tokens with {len(answer.version)} versions")
    version = np.array(answer.version, np.int64)
    # the first token may be drawn from logits that the weights before had computed
    wrong = version[(version < held) | (version > known)]
    if len(wrong):
        raise RefusedAnswer(
            f"a token of version {wrong[0]}, where this run loaded {held} to {known}: another "
            "client loads weights into this engine, or it was started again"
        )
    return tokens, logp, version.astype(np.int32)


def _tokens(answer: Answer, limits: ResponseLimits, limit: int) -> np.ndarray:
    """The ids, int32 [T]."""
    if not all(type(token) is int for token in answer.tokens):
        raise RefusedAnswer("token ids that are no integers")
    try:
        tokens = np.array(answer.tokens, np.int64)
    except OverflowError as error:  # JSON has integers of any size
        raise RefusedAnswer("a token id that no vocabulary has") from error
    ends = bool(len(tokens)) and answer.tokens[-1] in limits.stops
    check_tokens(tokens, limits, limit, ended=answer.ended or ends)
    return tokens.astype(np.int32)


def _logp(answer: Answer, count: int) -> np.ndarray:
    """The log-probs, float32 [T]."""
    if answer.logp is None:
        raise RefusedAnswer("no log-probs")
    if len(answer.logp) != count:
        raise RefusedAnswer(f"{count} tokens with {len(answer.logp)} log-probs")
    if not all(type(value) in (int, float) for value in answer.logp):
        raise RefusedAnswer("a token without log-prob")
    try:
        logp = np.array(answer.logp, np.float64)
    except OverflowError as error:  # JSON has integers of any size
        raise RefusedAnswer("a log-prob that no float holds") from error
    with np.errstate(over="ignore"):
        logp = logp.astype(np.float32)
    check_logp(logp)
    return np.minimum(logp, np.float32(0))
