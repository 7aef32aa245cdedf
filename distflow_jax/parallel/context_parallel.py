"""Context parallelism: packed rows cut along their length, a shard of each for every device.

R rows, L tokens of a row, c devices that share a row (the mesh axis `context`), P = L / 2c tokens
of a chunk, T = 2 P = L / c tokens of a shard.

Device i has the chunks i and 2c - 1 - i of a row: under a causal mask the work of a token grows
along the row, and so all have the same (Llama 3, arxiv.org/abs/2407.21783, sec. 3.3.2). To the
network a shard is a row of its own, T long: only attention looks beyond it, at keys that are
gathered. The R c shards lie by data rank, then by device, then by the rank's rows, so that they are
divided over the mesh without a token on its way. Where a row is whole on a device (c = 1, or no
mesh), everything here gives back what it was given.
"""

import jax
import jax.numpy as jnp

from distflow_jax.parallel.rules import constrain, width


def context_shards() -> int:
    """c: the number of shards of each row, 1 where rows are whole."""
    return width("context")


def divide(x: jax.Array) -> jax.Array:
    """[R, L, ...] -> its shards [R c, T, ...].

    Raises ValueError where 2 c does not divide L.
    """
    if context_shards() == 1:
        return x
    by_shard = _by_shard(x).swapaxes(1, 2)
    return _as_batch(by_shard)


def unite(x: jax.Array) -> jax.Array:
    """[R c, T, ...] -> [R, L, ...]: the inverse of divide, on every device that shares the row."""
    shards = context_shards()
    if shards == 1:
        return x
    by_shard = _as_ranks(x).swapaxes(1, 2)  # [ranks, m, c, T, ...]
    front, back = jnp.split(by_shard, 2, axis=3)
    chunks = jnp.concatenate([front, jnp.flip(back, axis=2)], axis=2)
    return _as_rows(chunks.reshape(-1, shards * x.shape[1], *x.shape[2:]))


def of_each_shard(x: jax.Array) -> jax.Array:
    """[R, ...] -> [R c, ...]: what belongs to a row, beside each of its shards."""
    shards = context_shards()
    if shards == 1:
        return x
    by_rank = x.reshape(width("rows"), 1, -1, *x.shape[1:])
    shape = (by_rank.shape[0], shards, *by_rank.shape[2:])
    return _as_batch(jnp.broadcast_to(by_rank, shape))


def sum_over_shards(x: jax.Array) -> jax.Array:
    """[R c, ...] -> [R, ...]: the sum over the shards of each row."""
    if context_shards() == 1:
        return x
    by_rank = x.reshape(width("rows"), context_shards(), -1, *x.shape[1:])
    return _as_rows(by_rank.sum(1).reshape(-1, *x.shape[1:]))


def in_gathered_order(x: jax.Array) -> jax.Array:
    """[R, L, ...] -> [R c, L, ...]: all of its row beside each shard, shard after shard.

    That is the order in which the devices' shards come together when they are gathered.
    """
    if context_shards() == 1:
        return x
    return of_each_shard(_by_shard(x).reshape(x.shape))


def located(index_RL: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Places in a row, int32 [R, L], as places in each shard of it: ([R c, L] bool: whether the
    shard has them, int32 [R c, L]: where in the shard)."""
    shards, length = context_shards(), index_RL.shape[1]
    if shards == 1:
        return jnp.ones(index_RL.shape, bool), index_RL
    chunk, rest = jnp.divmod(index_RL, length // (2 * shards))
    is_back = chunk >= shards
    owner = jnp.where(is_back, 2 * shards - 1 - chunk, chunk)
    place = jnp.where(is_back, length // (2 * shards), 0) + rest
    shard = jax.lax.broadcasted_iota(jnp.int32, (width("rows"), shards, 1, 1), 1)
    rows = index_RL.shape[0] // width("rows")
    shard = jnp.broadcast_to(shard, (*shard.shape[:2], rows, 1)).reshape(-1, 1)
    return of_each_shard(owner) == shard, of_each_shard(place)


def _by_shard(x: jax.Array) -> jax.Array:
    """[R, L, ...] -> [ranks, m, c, T, ...], each shard's two chunks one after the other."""
    shards, (rows, length) = context_shards(), x.shape[:2]
    if length % (2 * shards):
        raise ValueError(
            f"rows of {length} tokens cannot be cut into 2 x context={2 * shards} chunks; use "
            f"{-(-length // (2 * shards)) * 2 * shards} tokens"
        )
    ranks = width("rows")
    assert rows % ranks == 0, (rows, ranks)
    chunks = x.reshape(ranks, -1, 2 * shards, length // (2 * shards), *x.shape[2:])
    front, back = jnp.split(chunks, 2, axis=2)
    both = jnp.concatenate([front, jnp.flip(back, axis=2)], axis=3)
    # whole on every device that shares the row, so that each cuts its own shard out: left to
    # choose, XLA divides the chunks first, and has them change places between devices
    return constrain(both, "rows", *["length"] * (both.ndim - 1))


def _as_ranks(x: jax.Array) -> jax.Array:
    """[R c, T, ...] -> [ranks, c, m, T, ...], gathered over the devices that share a row."""
    by_rank = x.reshape(width("rows"), context_shards(), -1, *x.shape[1:])
    return constrain(by_rank, "rows", *["length"] * (by_rank.ndim - 1))


def _as_batch(x: jax.Array) -> jax.Array:
    """[ranks, c, m, ...] -> [R c, ...], divided over ranks and the devices that share a row."""
    x = x.reshape(-1, *x.shape[3:])
    return constrain(x, "shards", *["length"] * (x.ndim - 1))


def _as_rows(x: jax.Array) -> jax.Array:
    return constrain(x, "rows", *["length"] * (x.ndim - 1))
