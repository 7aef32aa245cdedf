"""Checks of answers of engines: what is wrong with one costs that response, not the run."""

from collections.abc import Collection

import numpy as np

from distflow_jax.rollout.foreign.engine_protocol import Answer

MOST_LOGP = 1e-3  # above 0: rounding of an engine in float16


class RefusedAnswer(ValueError):
    """An answer that is not used; the message says why, in one line."""


def checked_columns(
    answer: Answer, *, vocab_size: int, limit: int, stops: Collection[int], held: int, known: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens int32, log-probs float32, versions int32) of an answer, [T] each.

    `limit`: tokens at most; `stops`: ids that end a response; `held`: version when it was
    requested; `known`: version that the engine was given last. Raises RefusedAnswer.
    """
    tokens = _tokens(answer, vocab_size, limit, stops)
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


def _tokens(answer: Answer, vocab_size: int, limit: int, stops: Collection[int]) -> np.ndarray:
    """The ids, int32 [T]."""
    count = len(answer.tokens)
    if not count:
        raise RefusedAnswer("no token")
    if not all(type(token) is int for token in answer.tokens):
        raise RefusedAnswer("token ids that are no integers")
    if count > limit:
        raise RefusedAnswer(f"{count} tokens, where at most {limit} were requested")
    for place, token in enumerate(answer.tokens):
        if not 0 <= token < vocab_size:
            raise RefusedAnswer(f"token id {token}, outside the vocabulary of {vocab_size}")
        if token in stops and place < count - 1:
            raise RefusedAnswer(f"end token {token} at place {place}, and {count} tokens")
    ends = answer.tokens[-1] in stops
    if answer.ended and not ends:
        raise RefusedAnswer(
            f"an end at token {answer.tokens[-1]}, which is no end token here: the engine leaves "
            "the end token out, or has others"
        )
    if not ends and count < limit:
        raise RefusedAnswer(
            f"an end after {count} of {limit} tokens without an end token: the engine's context "
            "may be too short"
        )
    return np.array(answer.tokens, np.int32)


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
    wrong = logp[~(np.isfinite(logp) & (logp <= MOST_LOGP))]
    if len(wrong):
        raise RefusedAnswer(f"the log-prob {wrong[0]:g}")
    return np.minimum(logp, np.float32(0))
