"""Positions of patches in two dimensions: rotary tables, and vectors of a learned grid.

B rows, N patches, A heads, H head dim, D hidden.
"""

import jax
import jax.numpy as jnp
import numpy as np

from distflow_jax.models.vision.vision_config import VisionConfig


def rotary_tables_2d(c: VisionConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and signed sines, float32 [B, N, 2, H / 2] each, of positions int32 [B, N, 2].

    The first half of the pairs turns by the row, the second by the column, both with the same
    frequencies theta^(-4i/H).
    """
    half = c.head_dim // 2
    frequencies = c.rope_theta ** (-np.arange(0, half, 2, dtype=np.float64) / half)
    frequencies = frequencies.astype(np.float32)[None, None, None, :]
    angle = positions.astype(jnp.float32)[..., None] * frequencies
    angle = angle.reshape(*positions.shape[:2], half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.stack([cos, cos], axis=2), jnp.stack([-sin, sin], axis=2)


def rotate_2d(x_BNAH: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (i, i + H/2) of every head by rotary_tables_2d, [B, N, A, H]."""
    cos, sin = (t[:, :, None] for t in tables)
    halves = x_BNAH.astype(jnp.float32).reshape(*x_BNAH.shape[:3], 2, -1)
    out = halves * cos + jax.lax.rev(halves, (3,)) * sin
    return out.reshape(x_BNAH.shape).astype(x_BNAH.dtype)


def grid_vectors(
    c: VisionConfig, table: jax.Array, positions: jax.Array, segments: jax.Array
) -> jax.Array:
    """Vectors [B, N, D] of the learned grid [grid^2, D] at the patches' places.

    Where sizes are free, the corners of an image lie on those of the grid, and the four nearest
    vectors are weighed. A square picture has the grid's size. (transformers finds places by float32
    fractions of a side, which is the same for sides of 14, 16, 26, 27 and 32.) `positions` int32
    [B, N, 2], `segments` int32 [B, N].
    """
    if c.square:
        inside = jnp.clip(positions, 0, c.grid - 1)
        return table[inside[..., 0] * c.grid + inside[..., 1]]
    last = jnp.maximum(_last_positions(positions, segments), 1).astype(jnp.float32)
    place = positions.astype(jnp.float32) * (c.grid - 1) / last
    floor = jnp.clip(jnp.floor(place), 0, c.grid - 1)
    low, share = floor.astype(jnp.int32), place - floor
    total = jnp.zeros((*segments.shape, table.shape[1]), table.dtype)
    for down in (0, 1):
        row = jnp.minimum(low[..., 0] + down, c.grid - 1)
        of_row = share[..., 0] if down else 1 - share[..., 0]
        for right in (0, 1):
            column = jnp.minimum(low[..., 1] + right, c.grid - 1)
            weight = of_row * (share[..., 1] if right else 1 - share[..., 1])
            total = total + weight[..., None] * table[row * c.grid + column]
    return total


def _last_positions(positions: jax.Array, segments: jax.Array) -> jax.Array:
    """Row and column of the last patch of each patch's image, int32 [B, N, 2]."""
    count = segments.shape[1]

    def of_row(position, segment):
        last = jax.ops.segment_max(position, segment, num_segments=count + 1)
        return last[segment]

    return jax.vmap(of_row)(positions, jnp.clip(segments, 0, count))
