"""Rotary position embeddings in split-half form, with the frequency scalings of Llama 3 and YaRN.

B batch, T tokens, N heads, H head dim.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from distflow_jax.models.decoder_config import Llama3Scaling, RopeScaling, YarnScaling


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None, factor: float = 1.0
) -> np.ndarray:
    """Angular frequency theta^(-2i/H) of each pair, float32 [H / 2], scaled by wavelength.

    Su et al. 2021 (arxiv.org/abs/2104.09864). `factor` stretches all wavelengths equally (Chen et
    al. 2023, arxiv.org/abs/2306.15595).
    """
    freq = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None:
        unscaled = _llama3_unscaled if isinstance(scaling, Llama3Scaling) else _yarn_unscaled
        share = unscaled(scaling, freq, theta)
        freq = (1 - share) * freq / scaling.factor + share * freq
    return (freq / factor).astype(np.float32)


def _llama3_unscaled(scaling: Llama3Scaling, freq: np.ndarray, theta: float) -> np.ndarray:
    """Unscaled share of each frequency [H / 2] as released with Llama 3.1, 0 to 1.

    0 for wavelengths above original/low, 1 below original/high, linear in the turns over the
    original length in between.
    """
    wavelength = 2 * np.pi / freq
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return np.clip((scaling.original_max_position / wavelength - low) / (high - low), 0.0, 1.0)


def _yarn_unscaled(scaling: YarnScaling, freq: np.ndarray, theta: float) -> np.ndarray:
    """Unscaled share of each frequency [H / 2] as released with YaRN, 1 to 0.

    Linear in the index of the pair, between the pairs that turn beta_fast and beta_slow times over
    the original length (github.com/jquesnelle/yarn).
    """
    half, original = len(freq), scaling.original_max_position

    def pair(turns: float) -> float:
        return half * math.log(original / (2 * math.pi * turns)) / math.log(theta)

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)  # of the head dim, as released
    width = last - first or 0.001
    return 1 - np.clip((np.arange(half) - first) / width, 0.0, 1.0)


def pair_axes(sections: tuple[int, ...], interleaved: bool) -> np.ndarray:
    """Which of (time, row, column) each pair of a head rotates by, int32 [H / 2].

    `sections`: pairs of each. In blocks as in Qwen2-VL (Wang et al. 2024, arxiv.org/abs/2409.12191,
    sec. 2.1), or interleaved as in Qwen3-VL (arxiv.org/abs/2511.21631), where the pairs behind the
    last full turn are those of time.
    """
    if not interleaved:
        return np.repeat(np.arange(3, dtype=np.int32), sections)
    pair = np.arange(sum(sections), dtype=np.int32)
    axis = pair % 3
    return np.where(pair < 3 * np.asarray(sections, np.int32)[axis], axis, 0).astype(np.int32)


def rotary_tables(
    position_BT: jax.Array,
    frequencies: np.ndarray,
    scale: float = 1.0,
    axes: np.ndarray | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Cosines and signed sines of both halves of all pairs, float32 [B, T, 2, H / 2] each.

    Both are multiplied by `scale`, see YarnScaling.table_scale. Positions are int32 [B, T], or [B,
    T, 3] by time, row and column, of which each pair takes the one in `axes`, int32 [H / 2].
    """
    if position_BT.ndim == 3:
        assert axes is not None, "a model without rope_sections has one position per token"
        angle = jnp.take(position_BT, axes, axis=2).astype(jnp.float32) * frequencies[None, None, :]
    else:
        angle = position_BT.astype(jnp.float32)[..., None] * frequencies[None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    return jnp.stack([cos, cos], axis=2), jnp.stack([-sin, sin], axis=2)


def rotate(x_BTNH: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (i, i + H/2) of every head by rotary_tables, [B, T, N, H].

    Computed in float32; the result has the dtype of `x_BTNH`.
    """
    cos, sin = (t[:, :, None] for t in tables)
    halves = x_BTNH.astype(jnp.float32).reshape(*x_BTNH.shape[:3], 2, -1)
    # halves are swapped by `rev`: to concatenate them takes XLA:CPU ten times as long
    out = halves * cos + jax.lax.rev(halves, (3,)) * sin
    return out.reshape(x_BTNH.shape).astype(x_BTNH.dtype)
