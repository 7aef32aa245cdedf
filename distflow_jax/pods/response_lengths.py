"""Lengths of a step's responses of which only the mean and the limit are known.

N responses, m tokens of the mean response, L of the longest.
"""

import functools

import numpy as np

from distflow_jax.coordinator.first_fit import Lengths, RowLimits, first_fit_decreasing, rows_bound

_MOST = 4096  # sequences that are packed; more fill rows in proportion


@functools.lru_cache(maxsize=64)
def spread(mean: float, longest: int, count: int) -> np.ndarray:
    """Lengths of N responses, float64 [N] in ascending order.

    Quantiles of the distribution on [0, L] with mean m and the largest entropy, whose density is
    proportional to exp(t x / L): near an exponential one for a small m, uniform for m = L / 2.
    `count`: N.
    """
    if mean >= longest:
        return np.full(count, float(longest))
    low, high = -700.0, 700.0
    for _ in range(60):  # the mean grows with t
        t = (low + high) / 2
        low, high = (t, high) if _mean(t) < mean / longest else (low, t)
    share = (np.arange(count) + 0.5) / count
    # of the distribution function's inverse; for t > 0 by its mirror image, which cannot overflow
    tail = share if t < 0 else 1 - share
    x = np.log1p(tail * np.expm1(-abs(t))) / -abs(t) if abs(t) > 1e-6 else tail
    return longest * (x if t < 0 else 1 - x)


def _mean(t: float) -> float:
    """The mean of the density proportional to exp(t x) on [0, 1]."""
    return 0.5 + t / 12 if abs(t) < 1e-4 else 1 / -np.expm1(-t) - 1 / t


@functools.lru_cache(maxsize=64)
def share_of_rows(
    prompts: int, group: int, prompt: int, mean: float, longest: int, limits: RowLimits
) -> float:
    """Rows that responses of a spread of lengths fill, over the rows of the longest ones.

    They are packed as a run packs them: `prompts` prompts of `prompt` tokens, `group` responses to
    each, in rows with `limits`. A group's responses are of all lengths.
    """
    packed = min(prompts, max(1, _MOST // group))
    sequences = packed * group
    lengths = np.maximum(1, np.rint(spread(mean, longest, sequences))).astype(np.int64)
    rows = first_fit_decreasing(
        Lengths(
            prompt=np.full(sequences, prompt),
            response=lengths,
            group=np.arange(sequences) % packed,
            site=np.zeros(sequences, np.int64),
        ),
        limits,
    )
    return len(rows) / rows_bound(sequences, prompt + longest, limits)
