"""Sequences in packed rows: sums over a sequence, values spread over it, scans that end with it.

L tokens per row, S sequences per row at most; any number of dims before these ([R, L] and [R, S],
or [K, R, L] and [K, R, S]). Sequence s of a row is segment s + 1; 0 is padding, and segments above
S are prompts that several sequences share.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from distflow_jax.batch import Rows


def sequence_index(segment: jax.Array, num_sequences: int) -> jax.Array:
    """Slot of the sequence each token belongs to, int32 [..., L]; 0 for padding and shared prompts
    (use response_mask to leave these out)."""
    index = segment - 1
    return jnp.where((index >= 0) & (index < num_sequences), index, 0)


def per_token(sequence: jax.Array, segment: jax.Array) -> jax.Array:
    """Spreads a per-sequence field over its tokens, [..., S] -> [..., L]."""
    index = sequence_index(segment, sequence.shape[-1])
    return jnp.take_along_axis(sequence, index, axis=-1)


def _row_by_row(fn: Callable[..., jax.Array], dims: int) -> Callable[..., jax.Array]:
    # vmap and not a reshape: rows that are divided over devices stay where they are
    for _ in range(dims - 1):
        fn = jax.vmap(fn)
    return fn


def per_sequence(x: jax.Array, rows: Rows) -> jax.Array:
    """Sum of x [..., L] over the response tokens of each sequence, [..., S]; what lies outside
    response_mask does not matter, even inf or nan."""
    size = rows.valid.shape[-1]
    # beyond the last slot: left out of every sum
    index = jnp.where(rows.response_mask, rows.segment - 1, size)

    def one_row(x, index):
        return jax.ops.segment_sum(x, index, num_segments=size)

    return _row_by_row(one_row, x.ndim)(jnp.where(rows.response_mask, x, 0), index)


def sums_of_segments(x: jax.Array, segment: jax.Array, num_segments: int) -> jax.Array:
    """Sums of x [..., L, E] over the tokens of each segment 0 .. num_segments - 1, padding's too;
    [..., num_segments, E]. All of x must be finite."""

    def one_row(x, segment):
        return jax.ops.segment_sum(x, segment, num_segments=num_segments)

    return _row_by_row(one_row, segment.ndim)(x, segment)


def sequence_mean(x: jax.Array, rows: Rows) -> jax.Array:
    """Mean of x [..., L] over the response tokens of each sequence, [..., S]; 0 where none."""
    return per_sequence(x, rows) / jnp.maximum(rows.length, 1).astype(x.dtype)


def counted(rows: Rows) -> jax.Array:
    """Sequences that have a response token, bool [..., S]: one fully masked counts nowhere."""
    return rows.valid & (rows.length > 0)


def _place(like: jax.Array) -> jax.Array:
    """Index of each token in its row, int32 [..., L]."""
    return jax.lax.broadcasted_iota(jnp.int32, like.shape, like.ndim - 1)


def last_index(mask: jax.Array, segment: jax.Array, num_segments: int) -> jax.Array:
    """Place in the row of the last token under `mask` of each segment 0 .. num_segments - 1; -1
    where a segment has none. int32 [..., num_segments]."""
    place = jnp.where(mask, _place(segment), -1)

    def one_row(place, segment):
        return jax.ops.segment_max(place, segment, num_segments=num_segments)

    # a segment with no token at all gives the smallest integer
    return jnp.maximum(_row_by_row(one_row, segment.ndim)(place, segment), -1)


def is_last(rows: Rows) -> jax.Array:
    """Whether a token is the last response token of its sequence, bool [..., L]."""
    mask, segment = rows.response_mask, rows.segment
    size = rows.valid.shape[-1]
    last = last_index(mask, jnp.where(mask, segment, 0), size + 1)[..., 1:]
    return mask & (per_token(last, segment) == _place(segment))


def index_in_sequence(rows: Rows) -> jax.Array:
    """How many response tokens of its sequence lie before a token, int32 [..., L]."""
    mask = rows.response_mask.astype(jnp.int32)
    before = jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - mask
    # the count at the first response token of the sequence, from that at its last one
    at_last = per_sequence(jnp.where(is_last(rows), before, 0), rows)
    return before - per_token(at_last - rows.length + 1, rows.segment)


def following(x: jax.Array, segment: jax.Array) -> jax.Array:
    """x of the next token, 0 where the segment ends; [..., L]."""
    same = segment[..., 1:] == segment[..., :-1]
    after = jnp.where(same, x[..., 1:], 0)
    return jnp.concatenate([after, jnp.zeros_like(x[..., :1])], axis=-1)


def reverse_recurrence(x: jax.Array, decay: jax.Array, segment: jax.Array) -> jax.Array:
    """y_t = x_t + decay_t y_{t+1}, float [..., L]; y is 0 behind the last token of a segment.

    Without that reset the rewards of a row's next sequence would leak into this one. All arguments
    [..., L], finite everywhere. Runs in log2(L) parallel steps (Blelloch 1990, "Prefix sums and
    their applications", sec. 1.4).
    """
    # a decay of 0 at the last token of a segment cuts what would come from the next one
    decay = following(jnp.ones_like(decay), segment) * decay

    def combine(later, earlier):
        decay_later, x_later = later
        decay_earlier, x_earlier = earlier
        return decay_earlier * decay_later, x_earlier + decay_earlier * x_later

    _, y = jax.lax.associative_scan(combine, (decay, x), reverse=True, axis=x.ndim - 1)
    return y


def order_of_sequences(rows: Rows) -> jax.Array:
    """Rank of each sequence by (group, member) among all that count, int32 shaped as rows.group.

    It does not depend on where a sequence lies. What does not count comes last, in no set order.
    """
    shape = rows.group.shape
    keys = (~counted(rows)).astype(jnp.int32), rows.group, rows.member
    return rank(*(key.reshape(-1) for key in keys)).reshape(shape)


def rank(*keys: jax.Array) -> jax.Array:
    """Place of each entry in the order of its keys (the first counts most), int32 [N]."""
    index = jnp.arange(keys[0].shape[0], dtype=jnp.int32)
    *_, order = jax.lax.sort((*keys, index), num_keys=len(keys))
    return jnp.zeros_like(index).at[order].set(index)
