"""Length penalty that is added to scores."""

import numpy as np


def overlong_penalty(
    response_length_N: np.ndarray,
    *,
    max_response_length: int,
    buffer: int,
    factor: float = 1.0,
    cap: bool = False,
) -> np.ndarray:
    """Soft penalty of long responses: min(-(len - (Lmax - buffer)) / buffer * factor, 0).

    Yu et al. 2025 (DAPO), arxiv.org/abs/2503.14476, eq. 13. It starts `buffer` tokens before the
    limit and reaches -factor at the limit.

    Args:
      response_length_N: int [N], tokens of each response.
      max_response_length: Lmax, tokens.
      buffer: tokens before Lmax in which the penalty grows.
      factor: penalty at Lmax.
      cap: clip the penalty at -1.

    Returns:
      float32 [N], to be added to the scores.

    Raises:
      ValueError: `buffer` is not between 1 and `max_response_length`.
    """
    if not 0 < buffer <= max_response_length:
        raise ValueError(
            f"reward.overlong_buffer {buffer} must lie between 1 and the longest response "
            f"{max_response_length}"
        )
    over_N = np.asarray(response_length_N, np.float64) - (max_response_length - buffer)
    penalty_N = np.minimum(-over_N / buffer * factor, 0.0)
    return np.maximum(penalty_N, -1.0 if cap else -np.inf).astype(np.float32)
