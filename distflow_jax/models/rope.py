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
    """Angular frequency of each pair, float32 [H / 2]: theta^(-2i/H), scaled per wavelength.

    Su et al. 2021 (arxiv.org/abs/2104.09864). `factor` stretches all wavelengths alike (Chen et al.
    2023, arxiv.org/abs/2306.15595).
    """
    freq = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None:
        of_kind = _llama3_share if isinstance(scaling, Llama3Scaling) else _yarn_share
        share = of_kind(scaling, freq, theta)  # 0: stretched in full, 1: untouched
        freq = (1 - share) * freq / scaling.factor + share * freq
    return (freq / factor).astype(np.float32)


def _llama3_share(scaling: Llama3Scaling, freq: np.ndarray, theta: float) -> np.ndarray:
    """As released with Llama 3.1: wavelengths above original/low are stretched, below original/high
    left alone, linear in the turns over the original length in between."""
    wavelength = 2 * np.pi / freq
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return np.clip((scaling.original_max_position / wavelength - low) / (high - low), 0.0, 1.0)


def _yarn_share(scaling: YarnScaling, freq: np.ndarray, theta: float) -> np.ndarray:
    """As released with YaRN (github.com/jquesnelle/yarn): linear in the number of the pair, between
    those that turn beta_fast and beta_slow times over the original length."""
    half, original = len(freq), scaling.original_max_position

    def pair(turns: float) -> float:
        return half * math.log(original / (2 * math.pi * turns)) / math.log(theta)

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)  # of the head dim, as released
    width = last - first or 0.001
    return 1 - np.clip((np.arange(half) - first) / width, 0.0, 1.0)


def rotary_tables(
    position_BT: jax.Array, frequencies: np.ndarray, scale: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Cosines, and sines with the sign that each half of a pair takes: float32 [B, T, 2, H / 2].
    Both times `scale`, see YarnScaling.table_scale."""
    angle = position_BT.astype(jnp.float32)[..., None] * frequencies[None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    return jnp.stack([cos, cos], axis=2), jnp.stack([-sin, sin], axis=2)


def rotate(x_BTNH: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (i, i + H/2) of every head; computed in float32, dtype kept."""
    cos, sin = (t[:, :, None] for t in tables)
    halves = x_BTNH.astype(jnp.float32).reshape(*x_BTNH.shape[:3], 2, -1)
    # halves that change places by `rev`: XLA:CPU takes ten times as long to concatenate them
    out = halves * cos + jax.lax.rev(halves, (3,)) * sin
    return out.reshape(x_BTNH.shape).astype(x_BTNH.dtype)
