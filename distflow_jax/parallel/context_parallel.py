"""Context parallelism: packed rows divided along their length, one shard per device.

R rows, L tokens of a row, c devices that share a row (the mesh axis `context`), P = L / 2c tokens
of a chunk, T = 2 P = L / c tokens of a shard.

Device i has the chunks i and 2c - 1 - i of a row. Under a causal mask the work per token grows
along the row, so this gives all devices equal work (Llama 3, arxiv.org/abs/2407.21783, sec. 3.3.2).
The network treats a shard as a row of T tokens; only attention reads beyond it, from gathered keys.
The R c shards are ordered by data rank, then device, then row of the rank, so that no token moves
when they are divided over the mesh. Where rows are not divided (c = 1, or no mesh), all functions
return their input.
"""

import jax
import jax.numpy as jnp

from distflow_jax.parallel.rules import constrain, width


def context_shards() -> int:
    """Number of context shards of each row, c; 1 where rows are not divided."""
    return width("context")


def divide(x: jax.Array) -> jax.Array:
    """Divides rows into context shards: [R, L, ...] -> [R c, T, ...].

    Raises ValueError if 2 c does not divide L.
    """
    if context_shards() == 1:
        return x
    by_shard = _by_shard(x).swapaxes(1, 2)
    return _as_batch(by_shard)


def unite(x: jax.Array) -> jax.Array:
    """Gathers rows from their shards: [R c, T, ...] -> [R, L, ...], the inverse of divide.

    Every device that shares a row gets all of it.
    """
    shards = context_shards()
    if shards == 1:
        return x
    by_shard = _as_ranks(x).swapaxes(1, 2)  # [ranks, m, c, T, ...]
    front, back = jnp.split(by_shard, 2, axis=3)
    chunks = jnp.concatenate([front, jnp.flip(back, axis=2)], axis=2)
    return _as_rows(chunks.reshape(-1, shards * x.shape[1], *x.shape[2:]))


def of_each_shard(x: jax.Array) -> jax.Array:
    """Repeats a value per row for each of its shards: [R, ...] -> [R c, ...]."""
    shards = context_shards()
    if shards == 1:
        return x
    by_rank = x.reshape(width("rows"), 1, -1, *x.shape[1:])
    shape = (by_rank.shape[0], shards, *by_rank.shape[2:])
    return _as_batch(jnp.broadcast_to(by_rank, shape))


def sum_over_shards(x: jax.Array) -> jax.Array:
    """Sums over the shards of each row: [R c, ...] -> [R, ...]."""
    if context_shards() == 1:
        return x
    by_rank = x.reshape(width("rows"), context_shards(), -1, *x.shape[1:])
    return _as_rows(by_rank.sum(1).reshape(-1, *x.shape[1:]))


def in_gathered_order(x: jax.Array) -> jax.Array:
    """Repeats whole rows for each shard, in gathered order: [R, L, ...] -> [R c, L, ...].

    Gathered order is shard after shard, the order of an all-gather over the devices.
    """
    if context_shards() == 1:
        return x
    return of_each_shard(_by_shard(x).reshape(x.shape))


def located(index_RL: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Converts indices into rows, int32 [R, L], to indices into each shard.

    Returns (whether the shard holds the token, bool [R c, L]; its index there, int32 [R c, L]).
    """
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
    """[R, L, ...] -> [ranks, m, c, T, ...], the two chunks of each shard one after the other."""
    shards, (rows, length) = context_shards(), x.shape[:2]
    if length % (2 * shards):
        raise ValueError(
            f"rows of {length} tokens cannot be divided into 2 x context={2 * shards} chunks; use "
            f"{-(-length // (2 * shards)) * 2 * shards} tokens"
        )
    ranks = width("rows")
    assert rows % ranks == 0, (rows, ranks)
    chunks = x.reshape(ranks, -1, 2 * shards, length // (2 * shards), *x.shape[2:])
    front, back = jnp.split(chunks, 2, axis=2)
    both = jnp.concatenate([front, jnp.flip(back, axis=2)], axis=3)
    # whole on every device that shares the row, so that each slices out its own shard: otherwise
    # XLA divides the chunks first, and then exchanges them between devices
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
