"""Checks of responses that another program has sampled, before one of their tokens counts.

What is wrong with a response costs that response, not the run: RefusedAnswer says it in one line.
T tokens of a response, P of its prompt.
"""

import dataclasses
from collections.abc import Collection

import numpy as np

from distflow_jax.images.patch_chunks import PatchSizes
from distflow_jax.rollout.requests import Response

MOST_LOGP = 1e-3  # above 0: rounding of an engine in float16
NO_LOGP = -9999.0  # by which vLLM says -inf


class RefusedAnswer(ValueError):
    """A response that is not used; the message says why, in one line."""


@dataclasses.dataclass(frozen=True)
class ResponseLimits:
    """Limits that every response of a run's model keeps to.

    Attributes:
      vocab_size: ids of tokens are below it.
      stops: ids that end a response, or a turn of one.
      experts: (layers, experts of a token, experts of a layer) where they are recorded.
      max_turns: of a response where environments answer between turns; 0: there are none.
      turn_length: tokens of one turn, the end token included; 0: as many as its response may have.
      images: sizes of the patches that the model's tower reads; None: it has none.
    """

    vocab_size: int
    stops: Collection[int]
    experts: tuple[int, int, int] | None = None
    max_turns: int = 0
    turn_length: int = 0
    images: PatchSizes | None = None


def check_response(
    tokens: np.ndarray,
    logp: np.ndarray,
    version: np.ndarray,
    limits: ResponseLimits,
    *,
    limit: int,
    ended: bool | None,
    versions: tuple[int, int],
) -> None:
    """Raises RefusedAnswer for a response of one turn that no sampler of this run has made: ids int
    [T], log-probs float [T], versions int [T].

    `limit`, `ended`: see check_tokens; `versions`: the lowest and the highest that may be.
    """
    check_tokens(tokens, limits, limit, ended=ended)
    check_logp(logp)
    check_versions(version, *versions)


def check_columns(response: Response, mask: np.ndarray) -> None:
    """Raises RefusedAnswer unless each token has its columns, in their types; `mask`: bool [T],
    what was sampled."""
    wanted = {
        "tokens": (response.tokens, np.int32),
        "log-probs": (response.logp, np.float32),
        "margins": (response.margin, np.float32),
        "versions": (response.version, np.int32),
        "marks of what was sampled": (mask, np.bool_),
    }
    count = len(response.tokens)
    for name, (column, dtype) in wanted.items():
        if column.dtype != dtype or column.ndim != 1:
            kind = f"{column.dtype}{list(column.shape)}"
            raise RefusedAnswer(f"{name} as {kind}, where {np.dtype(dtype).name}[T] are wanted")
        if len(column) != count:
            raise RefusedAnswer(f"{count} tokens with {len(column)} {name}")


def check_tokens(
    tokens: np.ndarray, limits: ResponseLimits, limit: int, *, ended: bool | None
) -> None:
    """Raises RefusedAnswer for tokens int [T] that no response of one turn has.

    `limit`: tokens at most; `ended`: whether an end token is said to be the last one; None: the
    response is under way.
    """
    count = len(tokens)
    if ended is not None and not count:
        raise RefusedAnswer("no token")
    if count > limit:
        raise RefusedAnswer(f"{count} tokens, where at most {limit} were requested")
    check_vocabulary(tokens, limits)
    places = np.flatnonzero(np.isin(tokens, list(limits.stops)))
    early = places[places < count - (ended is not None)]
    if len(early):
        raise RefusedAnswer(f"end token {tokens[early[0]]} at place {early[0]}, and {count} tokens")
    if ended and not len(places):
        raise RefusedAnswer(
            f"an end at token {tokens[-1]}, which is no end token here: the engine leaves the end "
            "token out, or has others"
        )
    if ended is False and len(places):
        raise RefusedAnswer(f"an end at the limit, and end token {tokens[-1]} is the last one")
    if ended is not None and not len(places) and count < limit:
        raise RefusedAnswer(
            f"an end after {count} of {limit} tokens without an end token: the engine's context "
            "may be too short"
        )


def check_vocabulary(tokens: np.ndarray, limits: ResponseLimits) -> None:
    """Raises RefusedAnswer for an id outside the vocabulary, int [T]."""
    wrong = tokens[(tokens < 0) | (tokens >= limits.vocab_size)]
    if len(wrong):
        raise RefusedAnswer(f"token id {wrong[0]}, outside the vocabulary of {limits.vocab_size}")


def check_versions(version: np.ndarray, least: int, newest: int) -> None:
    """Raises RefusedAnswer for versions, int [T], of weights that were not there."""
    wrong = version[(version < least) | (version > newest)]
    if len(wrong):
        raise RefusedAnswer(
            f"a token of version {wrong[0]}, and versions {least} to {newest} were there: it was "
            "started again, or has weights of another run"
        )


def check_logp(logp: np.ndarray) -> None:
    """Raises RefusedAnswer for what is no log-prob, float [T]."""
    wrong = logp[~((logp > NO_LOGP) & (logp <= MOST_LOGP))]  # nan, too
    if len(wrong):
        raise RefusedAnswer(f"the log-prob {wrong[0]:g}")


def check_experts(
    response: Response, experts_of: tuple[int, int, int] | None, prompt_tokens: int
) -> None:
    """Raises RefusedAnswer for experts that the model's router cannot have chosen; `experts_of`: as
    of ResponseLimits, None where the request wants none."""
    found = response.routed_experts
    if (found is None) != (experts_of is None):
        raise RefusedAnswer("no experts" if found is None else "experts, and none are recorded")
    if found is None or experts_of is None:
        return
    layers, chosen, experts = experts_of
    wanted = (prompt_tokens + len(response.tokens), layers, chosen)
    if found.dtype not in (np.int8, np.int16) or found.shape != wanted:
        raise RefusedAnswer(f"experts as {found.dtype}{list(found.shape)}, {list(wanted)} wanted")
    if found.size and not -1 <= found.min() <= found.max() < experts:
        raise RefusedAnswer(f"an expert outside the {experts} of a layer")
