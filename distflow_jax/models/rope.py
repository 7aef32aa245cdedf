"""Rotary position embeddings in split-half form, with Llama 3's frequency scaling.

B batch, T tokens, N heads, H head dim.
"""

import jax
import jax.numpy as jnp
import numpy as np

from distflow_jax.models.config import RopeScaling


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None, factor: float = 1.0
) -> np.ndarray:
    """Angular frequency of each pair, float32 [H / 2]: theta^(-2i/H), scaled per wavelength.

    Su et al. 2021 (arxiv.org/abs/2104.09864); scaling as released with Llama 3.1: wavelengths above
    original/low are stretched by its factor, below original/high left alone, linear in between.
    `factor` stretches all of them alike (Chen et al. 2023, arxiv.org/abs/2306.15595).
    """
    freq = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None:
        wavelength = 2 * np.pi / freq
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        share = (scaling.original_max_position / wavelength - low) / (high - low)
        share = np.clip(share, 0.0, 1.0)  # 0: stretched in full, 1: untouched
        freq = (1 - share) * freq / scaling.factor + share * freq
    return (freq / factor).astype(np.float32)


def rotary_tables(position_BT: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Cosines, and sines with the sign that each half of a pair takes: float32 [B, T, 2, H / 2]."""
    angle = position_BT.astype(jnp.float32)[..., None] * frequencies[None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.stack([cos, cos], axis=2), jnp.stack([-sin, sin], axis=2)


def rotate(x_BTNH: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (i, i + H/2) of every head; computed in float32, dtype kept."""
    cos, sin = (t[:, :, None] for t in tables)
    halves = x_BTNH.astype(jnp.float32).reshape(*x_BTNH.shape[:3], 2, -1)
    # halves that change places by `rev`: XLA:CPU takes ten times as long to concatenate them
    out = halves * cos + jax.lax.rev(halves, (3,)) * sin
    return out.reshape(x_BTNH.shape).astype(x_BTNH.dtype)
