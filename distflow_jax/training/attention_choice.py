"""How the trainer attends over packed rows: who computes it, by the setting, sizes and platform."""

from collections.abc import Callable
from typing import NamedTuple

from distflow_jax.models.kernels import flash_gpu, flash_tpu

# sides of tiles: below, a CPU's products are too short; above, too much of a tile is masked
_BLOCKS = range(32, 129)
_BLOCKS_OF_SEQUENCE = 5  # the shorter the sequences, the more of a large tile is masked


class AttentionSizes(NamedTuple):
    """What attention is computed of, on one device."""

    row_tokens: int
    longest: int  # tokens of a sequence at most
    rows: int  # at a time
    heads: int  # of queries per key/value head
    head_dim: int
    dtype: str
    row_chunks: int = (
        1  # into how many a row is cut for the devices that share it: a tile is in one
    )
    parts: int = 1  # of a row, of which a device has one


class RowAttention(NamedTuple):
    """What a run attends by."""

    name: str  # masked, blocks or kernel
    block: int  # ForwardConfig.attention_block: tokens of a tile's side, 0: no tiles
    by: str  # ForwardConfig.attention_by
    why: str  # for people


class _Kernel(NamedTuple):
    sides: tuple[int, ...]  # of tiles, the best first
    check: Callable[..., None]


_KERNELS = {
    "gpu": _Kernel(flash_gpu.SIDES, flash_gpu.check_flash_gpu),
    "tpu": _Kernel(flash_tpu.SIDES, flash_tpu.check_flash_tpu),
}


def row_attention(attention: str, platform: str, sizes: AttentionSizes) -> RowAttention:
    """What training.attention stands for: masked, blocks, kernel or auto.

    Raises ValueError where blocks or kernel are asked for and do not fit.
    """
    masked = RowAttention("masked", 0, "loops", "all scores of a row at once")
    if attention == "masked":
        return masked
    loops = platform == "cpu" if attention == "auto" else attention == "blocks"
    try:
        if not loops:
            return _by_kernel(platform, sizes)
        block = block_size(sizes.row_tokens, longest=sizes.longest, pieces=sizes.row_chunks)
    except ValueError as error:
        if attention == "auto":
            return masked._replace(why=f"{masked.why}; {error}")
        raise ValueError(
            f"training.attention={attention!r}: {error}, or attention='masked'"
        ) from error
    return RowAttention(
        "blocks", block, "loops", f"of {block} tokens, without those that are masked"
    )


def block_size(row_tokens: int, *, longest: int, pieces: int = 1) -> int:
    """Tokens of a tile's side on a CPU, by the `longest` sequence; a tile ends within one of the
    `pieces` of a row. Raises ValueError where none fits."""
    best = min(max(longest // _BLOCKS_OF_SEQUENCE, _BLOCKS[0]), _BLOCKS[-1])
    fits = [n for n in _BLOCKS if row_tokens % (pieces * n) == 0]
    if fits:
        return min(fits, key=lambda n: abs(n - best))
    unit = pieces * best
    near = -(-row_tokens // unit) * unit  # up: sequences that fit still do
    raise ValueError(
        f"blocks need {_rows(pieces)} that {_BLOCKS[0]} to {_BLOCKS[-1]} tokens divide, got "
        f"training.row_tokens={row_tokens}; use {near}"
    )


def _rows(pieces: int) -> str:
    return "rows" if pieces == 1 else f"rows in {pieces} pieces (2 x mesh.context)"


def _by_kernel(platform: str, sizes: AttentionSizes) -> RowAttention:
    if platform not in _KERNELS:
        raise ValueError(
            f"there is no kernel for platform {platform!r}, only for {', '.join(_KERNELS)}"
        )
    sides, check = _KERNELS[platform]
    fits = [n for n in sides if sizes.row_tokens % (sizes.row_chunks * n) == 0]
    if not fits:
        unit = sizes.row_chunks * min(sides)
        raise ValueError(
            f"the kernel needs {_rows(sizes.row_chunks)} that {min(sides)} tokens divide, got "
            f"training.row_tokens={sizes.row_tokens}; use {-(-sizes.row_tokens // unit) * unit}"
        )
    refused = []
    for side in fits:
        try:
            check(
                side=side,
                rows=sizes.rows,
                blocks=sizes.row_tokens // sizes.parts // side,
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
