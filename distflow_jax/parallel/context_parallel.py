"""Context parallelism: packed rows cut along their length, a part of each for every device.

R rows, L tokens of a row, c devices that share a row (the mesh axis `context`), P = L / 2c tokens
of a piece, T = 2 P = L / c tokens of a part.

Device i has the pieces i and 2c - 1 - i of a row: under a causal mask the work of a token grows
along the row, and so all have the same (Llama 3, arxiv.org/abs/2407.21783, sec. 3.3.2). To the
network a part is a row of its own, T long: only attention looks beyond it, at keys that are
gathered. The R c parts lie by data rank, then by device, then by the rank's rows, so that they are
divided over the mesh without a token on its way. Where a row is whole on a device (c = 1, or no
mesh), everything here gives back what it was given.
"""

import jax
import jax.numpy as jnp

from distflow_jax.parallel.rules import constrain, width


def parts_of_row() -> int:
    """c: the number of parts of each row, 1 where rows are whole."""
    return width("context")


def divide(x: jax.Array) -> jax.Array:
    """[R, L, ...] -> its parts [R c, T, ...].

    Raises ValueError where 2 c does not divide L.
    """
    if parts_of_row() == 1:
        return x
    by_part = _by_part(x).swapaxes(1, 2)
    return _as_batch(by_part)


def unite(x: jax.Array) -> jax.Array:
    """[R c, T, ...] -> [R, L, ...]: the inverse of divide, on every device that shares the row."""
    parts = parts_of_row()
    if parts == 1:
        return x
    by_part = _as_ranks(x).swapaxes(1, 2)  # [ranks, m, c, T, ...]
    front, back = jnp.split(by_part, 2, axis=3)
    pieces = jnp.concatenate([front, jnp.flip(back, axis=2)], axis=2)
    return _as_rows(pieces.reshape(-1, parts * x.shape[1], *x.shape[2:]))


def of_each_part(x: jax.Array) -> jax.Array:
    """[R, ...] -> [R c, ...]: what belongs to a row, beside each of its parts."""
    parts = parts_of_row()
    if parts == 1:
        return x
    by_rank = x.reshape(width("rows"), 1, -1, *x.shape[1:])
    shape = (by_rank.shape[0], parts, *by_rank.shape[2:])
    return _as_batch(jnp.broadcast_to(by_rank, shape))


def sum_over_parts(x: jax.Array) -> jax.Array:
    """[R c, ...] -> [R, ...]: the sum over the parts of each row."""
    if parts_of_row() == 1:
        return x
    by_rank = x.reshape(width("rows"), parts_of_row(), -1, *x.shape[1:])
    return _as_rows(by_rank.sum(1).reshape(-1, *x.shape[1:]))


def in_gathered_order(x: jax.Array) -> jax.Array:
    """[R, L, ...] -> [R c, L, ...]: all of its row beside each part, part after part.

    That is the order in which the devices' parts come together when they are gathered.
    """
    if parts_of_row() == 1:
        return x
    return of_each_part(_by_part(x).reshape(x.shape))


def located(index_RL: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Places in a row, int32 [R, L], as places in each part of it: ([R c, L] bool: whether the part
    has them, int32 [R c, L]: where in the part)."""
    parts, length = parts_of_row(), index_RL.shape[1]
    if parts == 1:
        return jnp.ones(index_RL.shape, bool), index_RL
    piece, rest = jnp.divmod(index_RL, length // (2 * parts))
    is_back = piece >= parts
    owner = jnp.where(is_back, 2 * parts - 1 - piece, piece)
    place = jnp.where(is_back, length // (2 * parts), 0) + rest
    part = jax.lax.broadcasted_iota(jnp.int32, (width("rows"), parts, 1, 1), 1)
    rows = index_RL.shape[0] // width("rows")
    part = jnp.broadcast_to(part, (*part.shape[:2], rows, 1)).reshape(-1, 1)
    return of_each_part(owner) == part, of_each_part(place)


def _by_part(x: jax.Array) -> jax.Array:
    """[R, L, ...] -> [ranks, m, c, T, ...], each part's two pieces one after the other."""
    parts, (rows, length) = parts_of_row(), x.shape[:2]
    if length % (2 * parts):
        raise ValueError(
            f"rows of {length} tokens cannot be cut into 2 x context={2 * parts} pieces; use "
            f"{-(-length // (2 * parts)) * 2 * parts} tokens"
        )
    ranks = width("rows")
    assert rows % ranks == 0, (rows, ranks)
    pieces = x.reshape(ranks, -1, 2 * parts, length // (2 * parts), *x.shape[2:])
    front, back = jnp.split(pieces, 2, axis=2)
    both = jnp.concatenate([front, jnp.flip(back, axis=2)], axis=3)
    # whole on every device that shares the row, so that each cuts its own part out: left to
    # choose, XLA divides the pieces first, and has them change places between devices
    return constrain(both, "rows", *["length"] * (both.ndim - 1))


def _as_ranks(x: jax.Array) -> jax.Array:
    """[R c, T, ...] -> [ranks, c, m, T, ...], gathered over the devices that share a row."""
    by_rank = x.reshape(width("rows"), parts_of_row(), -1, *x.shape[1:])
    return constrain(by_rank, "rows", *["length"] * (by_rank.ndim - 1))


def _as_batch(x: jax.Array) -> jax.Array:
    """[ranks, c, m, ...] -> [R c, ...], divided over ranks and the devices that share a row."""
    x = x.reshape(-1, *x.shape[3:])
    return constrain(x, "parts", *["length"] * (x.ndim - 1))


def _as_rows(x: jax.Array) -> jax.Array:
    return constrain(x, "rows", *["length"] * (x.ndim - 1))
