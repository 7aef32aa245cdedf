"""Sequences in packed rows, against loops over plain lists."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.ragged import SHAPE, assert_close, draw, pack, random_sequences

from distflow_jax.algorithms import packed as lib
from distflow_jax.batch import RowShape

SEQUENCES = random_sequences(0)
TWO = RowShape(2, SHAPE.rows, SHAPE.tokens, SHAPE.sequences)
BOTH = pytest.mark.parametrize("shared", [False, True], ids=["own prompts", "shared prompts"])


@BOTH
def test_sums_and_means_of_sequences(shared):
    values = draw(1, SEQUENCES)
    packed = pack(SEQUENCES, 2, shared=shared, shape=TWO)
    for poison in (0.0, np.nan):
        x = packed.tokens(values, poison)
        sums = packed.unpack_sequences(lib.per_sequence(x, packed.rows))
        means = packed.unpack_sequences(lib.sequence_mean(x, packed.rows))
        kept = [v[s.mask] for s, v in zip(SEQUENCES, values, strict=True)]
        assert_close(sums, [np.sum(v, dtype=np.float64) for v in kept])
        assert_close(means, [np.mean(v, dtype=np.float64) if len(v) else 0.0 for v in kept])


@BOTH
def test_what_is_spread_comes_back(shared):
    packed = pack(SEQUENCES, 3, shared=shared, shape=TWO)
    numbers = np.arange(1, len(SEQUENCES) + 1, dtype=np.float32)
    spread = lib.per_token(packed.per_sequence(numbers), packed.rows.segment)
    for s, n, x in zip(SEQUENCES, numbers, packed.unpack(spread), strict=True):
        np.testing.assert_array_equal(x, n)
        assert len(x) == len(s.mask)
    counts = packed.unpack_sequences(lib.counted(packed.rows))
    np.testing.assert_array_equal(counts, [s.mask.any() for s in SEQUENCES])


@BOTH
def test_places_in_a_sequence(shared):
    packed = pack(SEQUENCES, 4, shared=shared, shape=TWO)
    last = packed.unpack(lib.is_last(packed.rows))
    index = packed.unpack(lib.index_in_sequence(packed.rows))
    for s, is_last, place in zip(SEQUENCES, last, index, strict=True):
        np.testing.assert_array_equal(np.flatnonzero(is_last), np.flatnonzero(s.mask)[-1:])
        np.testing.assert_array_equal(place[s.mask], np.arange(s.length))
    assert int(lib.is_last(packed.rows).sum()) == sum(s.mask.any() for s in SEQUENCES)


@BOTH
def test_order_follows_group_and_sample(shared):
    packed = pack(SEQUENCES, 5, shared=shared, shape=TWO)
    got = packed.unpack_sequences(lib.order_of_sequences(packed.rows))
    counts = np.array([s.mask.any() for s in SEQUENCES])
    np.testing.assert_array_equal(got[counts], np.arange(counts.sum()))


def test_recurrence_runs_backwards_and_stops_at_segments():
    """y_t = x_t + decay_t y_{t+1}; lengths that are no power of two, and a decay above 1."""
    rng = np.random.default_rng(6)
    segment = np.array([[1, 1, 1, 2, 2, 7, 3, 3, 3, 3, 0], [0] * 11, [4] * 11], np.int32)
    x = rng.normal(size=segment.shape).astype(np.float32)
    decay = rng.uniform(0, 1.5, segment.shape).astype(np.float32)
    expected = np.zeros(segment.shape)
    for r, row in enumerate(segment):
        for t in range(len(row) - 1, -1, -1):
            same = t + 1 < len(row) and row[t + 1] == row[t]
            after = expected[r, t + 1] if same else 0.0
            expected[r, t] = np.float64(x[r, t]) + np.float64(decay[r, t]) * after
    got = jax.jit(lib.reverse_recurrence)(x, decay, segment)
    assert_close(got, expected)
    shifted = lib.following(jnp.asarray(x), jnp.asarray(segment))
    np.testing.assert_array_equal(shifted[0, [2, 4, 5, 10]], 0)
    np.testing.assert_array_equal(shifted[0, [0, 1, 3]], x[0, [1, 2, 4]])


def test_rank_counts_the_first_key_most():
    a = jnp.array([1, 0, 1, 0], jnp.int32)
    b = jnp.array([0.5, 3.0, -1.0, 2.0])
    np.testing.assert_array_equal(lib.rank(a, b), [3, 1, 2, 0])
