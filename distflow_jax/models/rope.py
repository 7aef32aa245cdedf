"""Rotary position embeddings in split-half form, with Llama 3's frequency scaling.

B batch, T tokens, N heads, H head dim.
"""

import jax
import jax.numpy as jnp
import numpy as np

from distflow_jax.models.config import RopeScaling


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> np.ndarray:
    """Angular frequency of each pair, float32 [H / 2]: theta^(-2i/H), scaled per wavelength.

    Su et al. 2021 (arxiv.org/abs/2104.09864); scaling as released with Llama 3.1: wavelengths above
    original/low are stretched by `factor`, below original/high left alone, linear in between.
    """
    freq = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None:
        wavelength = 2 * np.pi / freq
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        share = (scaling.original_max_position / wavelength - low) / (high - low)
        share = np.clip(share, 0.0, 1.0)  # 0: stretched in full, 1: untouched
        freq = (1 - share) * freq / scaling.factor + share * freq
    return freq.astype(np.float32)


def rotary_tables(position_BT: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), each float32 [B, T, H / 2]."""
    angle = position_BT.astype(jnp.float32)[..., None] * frequencies[None, None, :]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BTNH: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (i, i + H/2) of every head; computed in float32, dtype kept."""
    cos, sin = (t[:, :, None, :] for t in tables)
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    out = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return out.astype(x_BTNH.dtype)
