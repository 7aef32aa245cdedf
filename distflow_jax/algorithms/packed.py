"""Operations on sequences in packed rows: sums, broadcasts and scans per sequence.

L tokens per row, S sequences per row at most, after any leading dims ([R, L] and [R, S], or
[K, R, L] and [K, R, S]). Sequence s of a row is segment s + 1. Segment 0 is padding; segments above
S are shared prompts.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from distflow_jax.batch import Rows


def sequence_index(segment: jax.Array, num_sequences: int) -> jax.Array:
    """Index s of the sequence that each token belongs to, int32 [..., L].

    Padding and tokens of shared prompts get 0; response_mask excludes both.
    """
    index = segment - 1
    return jnp.where((index >= 0) & (index < num_sequences), index, 0)


def per_token(sequence: jax.Array, segment: jax.Array) -> jax.Array:
    """Spreads a per-sequence field over its tokens, [..., S] -> [..., L]."""
    index = sequence_index(segment, sequence.shape[-1])
    return jnp.take_along_axis(sequence, index, axis=-1)


def _row_by_row(fn: Callable[..., jax.Array], dims: int) -> Callable[..., jax.Array]:
    # vmap, not a reshape: a reshape would move rows that are divided over devices
    for _ in range(dims - 1):
        fn = jax.vmap(fn)
    return fn


def _over_sequences(reduce: Callable[..., jax.Array], x: jax.Array, rows: Rows) -> jax.Array:
    """A segment reduction of x [..., L] over the response tokens of each sequence, [..., S]."""
    size = rows.valid.shape[-1]
    # `size` is out of range for the reduction, which drops these tokens
    index = jnp.where(rows.response_mask, rows.segment - 1, size)

    def one_row(x, index):
        return reduce(x, index, num_segments=size)

    return _row_by_row(one_row, x.ndim)(jnp.where(rows.response_mask, x, 0), index)


def per_sequence(x: jax.Array, rows: Rows) -> jax.Array:
    """Sum of x [..., L] over the response tokens of each sequence, [..., S].

    Values outside response_mask are ignored, even inf and nan.
    """
    return _over_sequences(jax.ops.segment_sum, x, rows)


def sums_of_segments(x: jax.Array, segment: jax.Array, num_segments: int) -> jax.Array:
    """Sums of x [..., L, E] over the tokens of each segment, [..., num_segments, E].

    Segments are 0 .. num_segments - 1, padding included. All of x must be finite.
    """

    def one_row(x, segment):
        return jax.ops.segment_sum(x, segment, num_segments=num_segments)

    return _row_by_row(one_row, segment.ndim)(x, segment)


def sequence_mean(x: jax.Array, rows: Rows) -> jax.Array:
    """Mean of x [..., L] over the response tokens of each sequence, [..., S]; 0 without tokens."""
    return per_sequence(x, rows) / jnp.maximum(rows.length, 1).astype(x.dtype)


def sequence_max(x: jax.Array, rows: Rows) -> jax.Array:
    """Largest x [..., L] of the response tokens of each sequence, [..., S]; -inf without tokens.

    Values outside response_mask are ignored, even inf and nan.
    """
    return _over_sequences(jax.ops.segment_max, x, rows)


def counted(rows: Rows) -> jax.Array:
    """Mask of sequences with at least one response token, bool [..., S].

    Sequences outside this mask count in no mean, group or denominator.
    """
    return rows.valid & (rows.length > 0)


def _place(like: jax.Array) -> jax.Array:
    """Index of each token in its row, int32 shaped as `like`, [..., L]."""
    return jax.lax.broadcasted_iota(jnp.int32, like.shape, like.ndim - 1)


def last_index(mask: jax.Array, segment: jax.Array, num_segments: int) -> jax.Array:
    """Index in the row of the last token under `mask` of each segment, int32 [..., num_segments].

    `mask` and `segment` are [..., L]; segments are 0 .. num_segments - 1. -1 for a segment without
    such a token.
    """
    place = jnp.where(mask, _place(segment), -1)

    def one_row(place, segment):
        return jax.ops.segment_max(place, segment, num_segments=num_segments)

    # segment_max of a segment without any token is the smallest integer
    return jnp.maximum(_row_by_row(one_row, segment.ndim)(place, segment), -1)


def is_last(rows: Rows) -> jax.Array:
    """Mask of the last response token of each sequence, bool [..., L]."""
    mask, segment = rows.response_mask, rows.segment
    size = rows.valid.shape[-1]
    last = last_index(mask, jnp.where(mask, segment, 0), size + 1)[..., 1:]
    return mask & (per_token(last, segment) == _place(segment))


def index_in_sequence(rows: Rows) -> jax.Array:
    """Number of response tokens of the same sequence before each token, int32 [..., L]."""
    mask = rows.response_mask.astype(jnp.int32)
    before = jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - mask
    # the count at a sequence's first response token is that at the last one - length + 1
    at_last = per_sequence(jnp.where(is_last(rows), before, 0), rows)
    return before - per_token(at_last - rows.length + 1, rows.segment)


def following(x: jax.Array, segment: jax.Array) -> jax.Array:
    """x [..., L] of the next token of the same segment, [..., L]; 0 at the end of a segment."""
    same = segment[..., 1:] == segment[..., :-1]
    after = jnp.where(same, x[..., 1:], 0)
    return jnp.concatenate([after, jnp.zeros_like(x[..., :1])], axis=-1)


def reverse_recurrence(x: jax.Array, decay: jax.Array, segment: jax.Array) -> jax.Array:
    """Reverse linear recurrence y_t = x_t + decay_t y_{t+1} within each segment, float [..., L].

    y is 0 after the last token of a segment, so the rewards of a row's next sequence do not leak
    into this one. All arguments are [..., L] and finite everywhere. Runs in log2(L) parallel steps
    (Blelloch 1990, "Prefix sums and their applications", sec. 1.4).
    """
    # a decay of 0 at the last token of a segment cuts the recurrence there
    decay = following(jnp.ones_like(decay), segment) * decay

    def combine(later, earlier):
        decay_later, x_later = later
        decay_earlier, x_earlier = earlier
        return decay_earlier * decay_later, x_earlier + decay_earlier * x_later

    _, y = jax.lax.associative_scan(combine, (decay, x), reverse=True, axis=x.ndim - 1)
    return y


def order_of_sequences(rows: Rows) -> jax.Array:
    """Rank of each sequence by (group, member), int32 shaped as rows.group, [..., S].

    The rank does not depend on packing. Sequences outside `counted` come last, in no set order.
    """
    shape = rows.group.shape
    keys = (~counted(rows)).astype(jnp.int32), rows.group, rows.member
    return rank(*(key.reshape(-1) for key in keys)).reshape(shape)


def rank(*keys: jax.Array) -> jax.Array:
    """Rank of each entry in lexicographic order of its keys [N], the first key first; int32 [N]."""
    index = jnp.arange(keys[0].shape[0], dtype=jnp.int32)
    *_, order = jax.lax.sort((*keys, index), num_keys=len(keys))
    return jnp.zeros_like(index).at[order].set(index)
