"""Attention tile by tile: that over the whole mask, in float64, whatever the side of a tile, by
loops and by the kernels of GPUs and TPUs, interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distflow_jax.models.attention import UNLIMITED, InRow, packed_mask, within
from distflow_jax.models.block_attention import block_attention
from distflow_jax.models.kernels import flash_tpu
from distflow_jax.models.kernels.tiles import Reach, tiles_of

quickly = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
HEADS, KV_HEADS, HEAD_DIM, LENGTH = 6, 2, 8, 96
# per row: (segment, parent, tokens), one after the other
ROWS = {
    "one causal sequence": [(1, 1, LENGTH)],
    "short ones": [(n, n, 7) for n in range(1, 13)],
    "a shared prompt": [(9, 9, 40), (1, 9, 20), (2, 9, 3), (3, 9, 30)],
    "two shared prompts and one alone": [
        (9, 9, 17),
        (1, 9, 16),
        (2, 9, 5),
        (3, 3, 11),
        (10, 10, 9),
        (4, 10, 30),
    ],
    "padding": [],
}


def laid_out(parts):
    segment = np.concatenate([np.full(n, s, np.int32) for s, _, n in parts] + [np.zeros(0, int)])
    parent = np.concatenate([np.full(n, p, np.int32) for _, p, n in parts] + [np.zeros(0, int)])
    return (np.pad(x.astype(np.int32), (0, LENGTH - len(x))) for x in (segment, parent))


def positions(parts):
    """Positions in the sequence: a segment with a parent continues where the parent ends."""
    length = {s: n for s, _, n in parts}
    found = [np.arange(n) + (length[p] if p != s else 0) for s, p, n in parts]
    found = np.concatenate([*found, np.zeros(0, int)]).astype(np.int32)
    return np.pad(found, (0, LENGTH - len(found)))


SEGMENT, PARENT = (np.stack(x) for x in zip(*map(laid_out, ROWS.values()), strict=True))
POSITION = np.stack([positions(parts) for parts in ROWS.values()])


def inputs(dtype=np.float32):
    rng = np.random.default_rng(0)
    shape = len(ROWS), LENGTH
    q, g = rng.normal(size=(2, *shape, HEADS, HEAD_DIM))
    k, v = rng.normal(size=(2, *shape, KV_HEADS, HEAD_DIM))
    g[SEGMENT == 0] = 0  # nothing is learned from padding
    return tuple(x.astype(dtype) for x in (q, k, v, g))


def mask_of(window=None, in_row=None):
    mask = np.asarray(packed_mask(jnp.asarray(SEGMENT), jnp.asarray(PARENT), in_row))
    back = POSITION[:, :, None] - POSITION[:, None]
    return mask if window is None else mask & (back < window)


def statement(q, k, v, g, window=None, in_row=None):
    """(output, gradients of q, k, v) of softmax(q k / sqrt(H)) v under the mask, in float64."""
    mask = mask_of(window, in_row)[:, None]
    group, scale = HEADS // KV_HEADS, HEAD_DIM**-0.5
    q, k, v, g = (x.astype(np.float64).swapaxes(1, 2) for x in (q, k, v, g))
    wide_k, wide_v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = np.where(mask, q @ wide_k.swapaxes(2, 3) * scale, -np.inf)
    top = scores.max(-1, keepdims=True)
    weight = np.where(mask, np.exp(scores - np.where(np.isinf(top), 0, top)), 0)
    weight /= np.maximum(weight.sum(-1, keepdims=True), 1e-300)
    out = weight @ wide_v
    d_weight = g @ wide_v.swapaxes(2, 3)
    d_scores = weight * (d_weight - (weight * d_weight).sum(-1, keepdims=True)) * scale

    def by_group(x):
        return x.reshape(len(x), KV_HEADS, group, LENGTH, HEAD_DIM).sum(2)

    d_q, d_k = d_scores @ wide_k, by_group(d_scores.swapaxes(2, 3) @ q)
    d_v = by_group(weight.swapaxes(2, 3) @ g)
    return [x.swapaxes(1, 2) for x in (out, d_q, d_k, d_v)]


@pytest.mark.parametrize(
    ("by", "side"),
    [
        *(("loops", side) for side in (8, 16, 32, 96)),
        ("gpu", 32),
        ("tpu", 32),
    ],
)
def test_output_and_gradients(by, side, interpreted):
    q, k, v, g = inputs()

    @quickly
    def got(q, k, v):
        tiles = tiles_of(jnp.asarray(SEGMENT), jnp.asarray(PARENT), side)
        attend = functools.partial(block_attention, tiles=tiles, implementation=by)
        out, back = jax.vjp(attend, q, k, v)
        return out, *back(g)

    for mine, wanted in zip(got(q, k, v), statement(q, k, v, g), strict=True):
        np.testing.assert_allclose(mine, wanted, atol=2e-6, rtol=1e-5)


def test_the_tpu_kernel_computes_heads_apart_where_tiles_are_large(interpreted, monkeypatch):
    monkeypatch.setattr(flash_tpu, "_SCORES", 32 * 32)
    assert flash_tpu._part(32, 32 * HEADS // KV_HEADS) == 32
    test_output_and_gradients("tpu", 32, interpreted)


@pytest.mark.parametrize(
    ("by", "side", "window"),
    [
        *(("loops", *case) for case in ((8, 1), (8, 5), (16, 33), (32, 20))),
        ("gpu", 32, 20),
        ("tpu", 32, 20),
    ],
)
def test_windows(by, side, window, interpreted):
    """A token sees the last `window` of its sequence, shared prompt included; tiles before that
    are not read, and where all are listed the mask alone gives the same."""
    q, k, v, g = inputs()
    segment, parent, position = map(jnp.asarray, (SEGMENT, PARENT, POSITION))

    @quickly
    def got(q, k, v, window):
        reach = Reach(position, position, window)
        near = tiles_of(segment, parent, side, reach=reach)
        attend = functools.partial(block_attention, reach=reach, implementation=by)
        out, back = jax.vjp(functools.partial(attend, tiles=near), q, k, v)
        every = tiles_of(segment, parent, side)
        return (out, *back(g)), attend(q, k, v, tiles=every), near

    mine, from_all, tiles = got(q, k, v, jnp.int32(window))
    for x, wanted in zip(mine, statement(q, k, v, g, window), strict=True):
        np.testing.assert_allclose(x, wanted, atol=2e-6, rtol=1e-5)
    np.testing.assert_allclose(from_all, mine[0], atol=1e-6)
    n = LENGTH // side
    held = mask_of(window).reshape(len(SEGMENT), n, side, n, side).any((2, 4))
    for row, block in np.ndindex(held.shape[:2]):
        listed = np.asarray(tiles.keys)[row, block, : np.asarray(tiles.num_keys)[row, block]]
        np.testing.assert_array_equal(listed, np.flatnonzero(held[row, block]))
    whole = got(q, k, v, jnp.int32(UNLIMITED))[0]
    for x, wanted in zip(whole, statement(q, k, v, g), strict=True):
        np.testing.assert_allclose(x, wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("by", "side"), [("loops", 8), ("loops", 32), ("gpu", 32), ("tpu", 32)])
def test_places_behind_a_token_let_it_see_ahead(by, side, interpreted):
    """Spans of a segment in which tokens see each other both ways, across tiles, and others that
    do not; and one row in which all of a segment do."""
    place = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), SEGMENT.shape)
    until = place.copy()
    for row, first, last in ((0, 5, 40), (1, 8, 13), (2, 70, 92), (3, 2, 16)):
        assert len(np.unique(SEGMENT[row, first : last + 1])) == 1
        until[row, first : last + 1] = last
    for number in np.unique(SEGMENT[1]):
        until[1, SEGMENT[1] == number] = LENGTH
    in_row = InRow(*map(jnp.asarray, (until, SEGMENT, place)))
    q, k, v, g = inputs()

    @quickly
    def got(q, k, v):
        tiles = tiles_of(jnp.asarray(SEGMENT), jnp.asarray(PARENT), side, in_row)
        attend = functools.partial(block_attention, tiles=tiles, implementation=by)
        out, back = jax.vjp(attend, q, k, v)
        return (out, *back(g)), tiles

    mine, tiles = got(q, k, v)
    for x, wanted in zip(mine, statement(q, k, v, g, in_row=in_row), strict=True):
        np.testing.assert_allclose(x, wanted, atol=2e-6, rtol=1e-5)
    n = LENGTH // side
    held = mask_of(in_row=in_row).reshape(len(SEGMENT), n, side, n, side).any((2, 4))
    np.testing.assert_array_equal(tiles.num_keys, held.sum(2))
    np.testing.assert_array_equal(tiles.num_queries, held.sum(1))


def test_a_window_is_of_positions_and_not_of_places():
    """The first token of a second response sees the end of its prompt, not the first response."""
    position = jnp.asarray(POSITION)
    row = list(ROWS).index("a shared prompt")
    sees = np.asarray(within(position, position, jnp.int32(3)))[row] & mask_of()[row]
    assert np.flatnonzero(sees[60]).tolist() == [38, 39, 60]


@pytest.mark.parametrize("by", ["loops", "gpu", "tpu"])
def test_bfloat16_sums_in_float32(by, interpreted):
    q, k, v, g = (jnp.asarray(x, jnp.bfloat16) for x in inputs())
    tiles = tiles_of(jnp.asarray(SEGMENT), jnp.asarray(PARENT), 16)
    attend = functools.partial(block_attention, tiles=tiles, implementation=by)
    out, back = quickly(lambda *x: jax.vjp(attend, *x))(q, k, v)
    exact = statement(*(np.asarray(x, np.float64) for x in (q, k, v, g)))
    for mine, wanted in zip((out, *back(g)), exact, strict=True):
        assert mine.dtype == jnp.bfloat16
        error = np.abs(np.asarray(mine, np.float64) - wanted)
        assert error.max() < 0.02 * max(1, np.abs(wanted).max())


@pytest.mark.parametrize("side", [8, 16, 32])
def test_tiles_are_those_that_hold_a_pair(side):
    tiles = tiles_of(jnp.asarray(SEGMENT), jnp.asarray(PARENT), side)
    mask = np.asarray(packed_mask(jnp.asarray(SEGMENT), jnp.asarray(PARENT)))
    n = LENGTH // side
    held = mask.reshape(len(mask), n, side, n, side).any((2, 4))
    for lists, counts, wanted in (
        (tiles.keys, tiles.num_keys, held),
        (tiles.queries, tiles.num_queries, held.swapaxes(1, 2)),
    ):
        for row, block in np.ndindex(wanted.shape[:2]):
            listed = np.asarray(lists)[row, block, : np.asarray(counts)[row, block]]
            np.testing.assert_array_equal(listed, np.flatnonzero(wanted[row, block]))
    assert np.asarray(tiles.num_keys)[list(ROWS).index("padding")].sum() == 0


def test_a_side_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="blocks of 36 tokens do not divide rows of 96; use 32"):
        tiles_of(jnp.asarray(SEGMENT), jnp.asarray(PARENT), 36)
