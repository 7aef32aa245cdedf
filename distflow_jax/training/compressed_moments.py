"""Adam moments in bfloat16, or in int8 with a scale per block.

Arithmetic is float32: moments are widened, optax takes its step, and the new moments are rounded.
Rounding is stochastic (Gupta et al. 2015, arxiv.org/abs/1502.02551): up or down with probabilities
that give the right mean. Rounded to nearest, an average that moves by less than half a step never
changes. Steps of bfloat16 are 2^-8 to 2^-7 of the number, so with b2 = 0.999 no second moment could
shrink.

int8 divides blocks of 64 to 256 numbers by their largest magnitude (Dettmers et al. 2022,
arxiv.org/abs/2110.02861, sec. 2.1). The paper maps codes to numbers by a table that is denser near
0 ("dynamic tree quantisation"). Here the map is (code / levels)^4, which needs no gathers, as these
are slow on TPUs. Second moments reach down to 2e-10 of the largest in their block, and a positive
one never becomes 0, because Adam divides by it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

_BLOCKS = range(64, 257)


class Blocks(NamedTuple):
    """A moment in codes: sign(code) (code / levels)^4 times the scale of its block."""

    codes: jax.Array  # int8, or uint8 for second moments, in the parameter's shape
    scale: jax.Array  # float32, in that shape with the dim of blocks divided by their size


def is_blocks(x: Any) -> bool:
    """Whether x is a moment in codes, rather than an array."""
    return isinstance(x, Blocks)


def kept_as(
    moments: str, adam: optax.GradientTransformation, *, whole: tuple[str, ...] = ()
) -> optax.GradientTransformation:
    """`adam`, an optax.scale_by_adam, with its moments in the format `moments`, one of
    MOMENTS.

    With int8, small moments stay float32: those of one dim, and those with a name that ends in one
    of `whole`. The state is that of `adam`, with Blocks for moments in codes.
    """
    if moments == "float32":
        return adam
    round_off = _round_to_bfloat16 if moments == "bfloat16" else _round_to_codes

    def init(params):
        state = adam.init(params)

        def empty(path, x, dtype):
            if moments == "bfloat16":
                return x.astype(jnp.bfloat16)
            name = jax.tree_util.keystr(path[-1:], simple=True)
            return x if x.ndim < 2 or name.endswith(whole) else _no_codes(x.shape, dtype)

        def kept(tree, dtype):
            return jax.tree.map_with_path(lambda path, x: empty(path, x, dtype), tree)

        return state._replace(mu=kept(state.mu, jnp.int8), nu=kept(state.nu, jnp.uint8))

    def update(grads, state, params=None):
        wide = state._replace(mu=_widened(state.mu), nu=_widened(state.nu))
        updates, new = adam.update(grads, wide, params)
        mu, nu = [], []
        trees = (new.mu, new.nu, state.mu, state.nu)
        leaves = zip(*(jax.tree.leaves(tree, is_leaf=is_blocks) for tree in trees), strict=True)
        for number, (m, v, old_m, old_v) in enumerate(leaves):
            bits = _noise(m.shape, new.count, number)
            mu.append(round_off(m, old_m, bits & np.uint32(0xFFFF)))
            nu.append(round_off(v, old_v, bits >> np.uint32(16)))
        structure = jax.tree.structure(grads)
        return updates, new._replace(mu=structure.unflatten(mu), nu=structure.unflatten(nu))

    return optax.GradientTransformation(init, update)


def layout_of(kept: Any, layout: NamedSharding) -> Any:
    """Sharding of a moment: that of its parameter, `layout`.

    Scales are divided like the codes, but a dim of blocks that its mesh axes do not divide is
    replicated.
    """
    if not is_blocks(kept):
        return layout
    entries = []
    for size, axes in zip(kept.scale.shape, _entries(layout, kept.scale.ndim), strict=True):
        names = (axes,) if isinstance(axes, str) else axes or ()
        width = int(np.prod([layout.mesh.shape[name] for name in names]))
        entries.append(axes if size % width == 0 else None)
    return Blocks(layout, NamedSharding(layout.mesh, PartitionSpec(*entries)))


def _entries(layout: NamedSharding, ndim: int) -> tuple:
    return (*layout.spec, *[None] * (ndim - len(layout.spec)))


def block_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """(dim, size) of the blocks of a parameter of this shape, independent of the mesh.

    Blocks divide the last dim. For tables [vocabulary, hidden] and their transpose they divide the
    shorter dim, so that rare and frequent tokens share no scale. The size is the one that makes the
    number of blocks divisible by the highest power of two, so that devices have whole blocks.
    """
    dim = len(shape) - 1
    if len(shape) == 2 and shape[0] < shape[1]:
        dim = 0
    size = shape[dim]
    fits = [n for n in _BLOCKS if size % n == 0] or [size]
    return dim, max(fits, key=lambda n: (size // n) & -(size // n))


def _no_codes(shape: tuple[int, ...], dtype: Any) -> Blocks:
    dim, size = block_of(shape)
    blocks = (*shape[:dim], shape[dim] // size, *shape[dim + 1 :])
    return Blocks(jnp.zeros(shape, dtype), jnp.zeros(blocks, jnp.float32))


def _by_block(x: jax.Array) -> tuple[jax.Array, int]:
    """[..., n b, ...] -> [..., n, b, ...], and the index of dim b."""
    dim, size = block_of(x.shape)
    return x.reshape(*x.shape[:dim], -1, size, *x.shape[dim + 1 :]), dim + 1


def _widened(tree: Any) -> Any:
    def one(x):
        if not is_blocks(x):
            return x.astype(jnp.float32)
        codes, inner = _by_block(x.codes)
        share = codes.astype(jnp.float32) / np.float32(jnp.iinfo(codes.dtype).max)
        share = share * jnp.abs(share) * jnp.square(share)
        return (share * jnp.expand_dims(x.scale, inner)).reshape(x.codes.shape)

    return jax.tree.map(one, tree, is_leaf=is_blocks)


def _round_to_bfloat16(x: jax.Array, kept: jax.Array, noise: jax.Array) -> jax.Array:
    """Stochastic rounding: adds 16 random bits to float32's last 16 bits and truncates these.

    Infinity stays. nan may become a number, but the update's guard discards such a step.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
    return jax.lax.bitcast_convert_type((bits >> np.uint32(16)).astype(jnp.uint16), jnp.bfloat16)


def _round_to_codes(x: jax.Array, kept: Any, noise: jax.Array) -> Any:
    if not is_blocks(kept):
        return x
    dtype = kept.codes.dtype
    levels = np.float32(jnp.iinfo(dtype).max)
    blocks, inner = _by_block(x)
    noise, _ = _by_block(noise)
    magnitude = jnp.abs(blocks)
    scale = magnitude.max(inner, keepdims=True)
    share = magnitude / jnp.where(scale > 0, scale, np.float32(1))
    low = jnp.floor(levels * jnp.sqrt(jnp.sqrt(share)))
    least = jnp.float32(0)
    if dtype == jnp.uint8:  # a second moment of 0 would give a step of m / eps
        least = (share > 0).astype(jnp.float32)
    low = jnp.clip(low, least, levels - 1)
    left, right = (jnp.square(jnp.square(code / levels)) for code in (low, low + 1))
    chance = noise.astype(jnp.float32) * np.float32(2**-16)
    codes = low + (share - left > chance * (right - left)).astype(jnp.float32)
    if dtype == jnp.int8:
        codes = jnp.copysign(codes, blocks)
    return Blocks(codes.astype(dtype).reshape(x.shape), jnp.squeeze(scale, inner))


def _noise(shape: tuple[int, ...], count: jax.Array, number: int) -> jax.Array:
    """32 random bits for every element of array `number` in update `count`, uint32.

    The bits depend on the element's index only, so they are the same on every mesh. A hash replaces
    jax.random, because rounding needs many bits of low quality that are never stored in memory.
    """
    place = jnp.zeros(shape, jnp.uint32)
    for dim, size in enumerate(shape):
        iota = jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
        place = place * np.uint32(size & 0xFFFFFFFF) + iota
    seed = _hash(count.astype(jnp.uint32) * np.uint32(0x9E3779B9) + np.uint32(number))
    return _hash(_hash(place) + seed)


def _hash(x: jax.Array) -> jax.Array:
    """Wellons' lowbias32: each input bit flips about half of the output bits.

    nullprogram.com/blog/2018/07/31
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))
