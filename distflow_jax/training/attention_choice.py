"""Choice of attention over packed rows and in a tower, by setting, sizes and platform."""

from collections.abc import Callable
from typing import NamedTuple

from distflow_jax.config.implementation_table import (
    IMPLEMENTATIONS,
    ROWS,
    Need,
    candidates,
    named,
    preferred_lacks,
)
from distflow_jax.models.kernels import flash_gpu, flash_tpu
from distflow_jax.models.kernels.library_attention import SPLASH_UNIT
from distflow_jax.models.vision.patch_attention import WHOLE, Form
from distflow_jax.models.vision.vision_config import VisionConfig

# tile sides on a CPU: below, matrix products are too short; above, too much of a tile is masked
_BLOCKS = range(32, 129)
_BLOCKS_OF_SEQUENCE = 5  # the shorter the sequences, the more of a large tile is masked
_TILES_OF_SEQUENCE = 8  # of a kernel: at 8, an eighth of what a causal sequence computes is masked


class AttentionSizes(NamedTuple):
    """Sizes of the attention that one device computes."""

    row_tokens: int
    longest: int  # tokens of a sequence at most
    rows: int  # at a time
    heads: int  # query heads per key/value head
    head_dim: int
    dtype: str
    row_chunks: int = 1  # chunks of a row on the mesh; a tile lies within one of them
    context_shards: int = 1  # shards of a row, one of them per device
    features: frozenset[str] = frozenset()  # of implementation_table.FEATURES, beside packed rows


class RowAttention(NamedTuple):
    """The attention of a run."""

    name: str  # of implementation_table.IMPLEMENTATIONS
    block: int  # ForwardConfig.attention_block: tokens of a tile's side, 0: no tiles
    by: str  # ForwardConfig.attention_by
    why: str  # the reason, as text for the report


class _Kernel(NamedTuple):
    sides: tuple[int, ...]  # tile sides
    check: Callable[..., None]


_KERNELS = {
    "gpu": _Kernel(flash_gpu.SIDES, flash_gpu.check_flash_gpu),
    "tpu": _Kernel(flash_tpu.SIDES, flash_tpu.check_flash_tpu),
}


def row_attention(attention: str, platform: str, sizes: AttentionSizes) -> RowAttention:
    """The first of row_attentions."""
    return row_attentions(attention, platform, sizes)[0]


def row_attentions(attention: str, platform: str, sizes: AttentionSizes) -> list[RowAttention]:
    """Resolves training.attention: all that auto may choose, the preferred one first, or the one
    that is named.

    All scores at once are for sizes that nothing else fits. Raises ValueError if an implementation
    is named and cannot do what is needed, or does not fit the sizes.
    """
    features = sizes.features | {"packed rows"}
    need = Need(ROWS, platform, sizes.head_dim, sizes.dtype, features)
    if attention != "auto":
        one = named("training.attention", attention, need)
        try:
            return [_fitted(one.name, platform, sizes)]
        except ValueError as error:
            raise ValueError(
                f"training.attention={attention!r}: {error}, or attention='masked'"
            ) from error
    found, refused = [], preferred_lacks(need)
    for one in candidates(need):
        if one.name == "masked" and found:
            break
        try:
            found.append(_fitted(one.name, platform, sizes))
        except ValueError as error:
            refused = refused or str(error)
    if refused:
        found[0] = found[0]._replace(why=f"{found[0].why}; {refused}")
    return found


def _fitted(name: str, platform: str, sizes: AttentionSizes) -> RowAttention:
    """The attention of a name for sizes. Raises ValueError, with sizes that fit, if they do not."""
    if name == "masked":
        return RowAttention(name, 0, "loops", "all scores of a row at once")
    if name == "blocks":
        best = sizes.longest // _BLOCKS_OF_SEQUENCE
        block = block_size(sizes.row_tokens, best, row_chunks=sizes.row_chunks)
        why = f"of {block} tokens, without those that are masked"
        return RowAttention(name, block, "loops", why)
    if name == "kernel":
        return _by_kernel(platform, sizes)
    if name == "splash" and sizes.row_tokens % SPLASH_UNIT:
        raise ValueError(
            f"splash attention needs rows divisible by {SPLASH_UNIT} tokens, got "
            f"training.row_tokens={sizes.row_tokens}; use "
            f"{-(-sizes.row_tokens // SPLASH_UNIT) * SPLASH_UNIT}"
        )
    return RowAttention(name, 0, name, "of the whole row")


def tower_form(
    attention: str, platform: str, vision: VisionConfig, dtype: str, *, chunk: int, rows: int
) -> Form:
    """The form of a tower's attention between the patches of a chunk, of `chunk` patches.

    By the setting of rows, see row_attentions: masked, blocks or kernel; for others, which have no
    form for towers, by a kernel on TPUs and by loops elsewhere. With a mask where no tile fits:
    nobody can change the sizes of a tower. `rows` are those that a device encodes at a time, in
    `dtype`.
    """
    if attention == "masked" or chunk <= _BLOCKS[-1]:
        return WHOLE
    kernel = attention == "kernel" or (attention != "blocks" and platform == "tpu")
    try:
        segment = vision.window**2 or (vision.grid**2 if vision.square else chunk)
        if not kernel:
            best = segment if segment <= _BLOCKS[-1] else segment // _BLOCKS_OF_SEQUENCE
            return Form(block_size(chunk, best))
        head_dim = _kernel_head_dim(platform, vision.head_dim)
        named("training.attention", "kernel", Need(ROWS, platform, head_dim, dtype))
        found = _by_kernel(platform, AttentionSizes(chunk, segment, rows, 1, head_dim, dtype))
    except ValueError:
        return WHOLE
    return Form(found.block, found.by, head_dim)


def tile_unit(platform: str) -> int:
    """Tokens of the smallest tile of the platform's kernel; 1 where there is no kernel."""
    return min(_KERNELS[platform].sides) if platform in _KERNELS else 1


def block_size(row_tokens: int, best: int, *, row_chunks: int = 1) -> int:
    """Side of a tile on a CPU in tokens, as near to `best` as there is one.

    A tile lies within one of the `row_chunks` chunks of a row. Raises ValueError if no side fits.
    """
    best = min(max(best, _BLOCKS[0]), _BLOCKS[-1])
    fits = [n for n in _BLOCKS if row_tokens % (row_chunks * n) == 0]
    if fits:
        return min(fits, key=lambda n: abs(n - best))
    unit = row_chunks * best
    near = -(-row_tokens // unit) * unit  # rounded up: sequences that fit now fit then, too
    raise ValueError(
        f"blocks need {_rows(row_chunks)} divisible by a tile of {_BLOCKS[0]} to {_BLOCKS[-1]} "
        f"tokens, got training.row_tokens={row_tokens}; use {near}"
    )


def _kernel_head_dim(platform: str, head_dim: int) -> int:
    """The least head dim of the platform's kernel to which heads can be padded; else `head_dim`."""
    kernels = (x for x in IMPLEMENTATIONS if x.name == "kernel" and platform in x.platforms)
    return next((n for one in kernels for n in one.head_dims if n >= head_dim), head_dim)


def _rows(row_chunks: int) -> str:
    return "rows" if row_chunks == 1 else f"rows of {row_chunks} chunks (2 x mesh.context) each"


def _by_kernel(platform: str, sizes: AttentionSizes) -> RowAttention:
    sides, check = _KERNELS[platform]
    fits = [n for n in sides if sizes.row_tokens % (sizes.row_chunks * n) == 0]
    if not fits:
        unit = sizes.row_chunks * min(sides)
        raise ValueError(
            f"the kernel needs {_rows(sizes.row_chunks)} divisible by {min(sides)} tokens, got "
            f"training.row_tokens={sizes.row_tokens}; use {-(-sizes.row_tokens // unit) * unit}"
        )
    refused = []
    best = max(sizes.longest // _TILES_OF_SEQUENCE, min(sides))
    # the largest that the sequences fill, then larger ones: their list is shorter
    for side in sorted(fits, key=lambda n: -n if n <= best else n):
        try:
            check(
                side=side,
                rows=sizes.rows,
                blocks=sizes.row_tokens // sizes.context_shards // side,
                key_blocks=sizes.row_tokens // side,
                heads=sizes.heads,
                head_dim=sizes.head_dim,
                dtype=sizes.dtype,
            )
        except ValueError as error:
            refused.append(error)
        else:
            why = f"of {side} tokens by a kernel for {platform.upper()}s, without masked ones"
            return RowAttention("kernel", side, platform, why)
    raise refused[0]
