"""Chunks of weights: each element in exactly one, and a damaged manifest is an error."""

import itertools
import random

import pytest

from distflow_jax.stream.weight_chunks import (
    ChunkSpec,
    Manifest,
    TensorSpec,
    check_grid,
    checksum,
    cut,
    overlap,
    read_manifest,
)


def cells(chunk):
    return set(
        itertools.product(*(range(a, a + n) for a, n in zip(chunk.start, chunk.shape, strict=True)))
    )


def blocks(draw, shape):
    """Equal blocks of a tensor, as a sharding has them."""
    parts = [draw.choice([d for d in range(1, n + 1) if n % d == 0]) for n in shape]
    size = [n // p for n, p in zip(shape, parts, strict=True)]
    for place in itertools.product(*map(range, parts)):
        yield tuple(p * n for p, n in zip(place, size, strict=True)), tuple(size)


@pytest.mark.parametrize("seed", range(100))
def test_each_element_lies_in_exactly_one_chunk(seed):
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 9) for _ in range(draw.randint(0, 3)))
    most = draw.choice([1, 8, 40, 10_000])
    chunks = [c for start, size in blocks(draw, shape) for c in cut(start, size, 4, most)]
    found = [cell for chunk in chunks for cell in cells(chunk)]
    assert sorted(found) == sorted(itertools.product(*map(range, shape)))
    assert all(c.size * 4 <= max(most, 4) for c in chunks)
    check_grid("x", shape, chunks)
    for chunk in chunks:
        less = [c for c in chunks if c != chunk]
        with pytest.raises(ValueError, match="^x: "):
            check_grid("x", shape, less)
        with pytest.raises(ValueError, match="^x: "):
            check_grid("x", shape, [*chunks, chunk])


@pytest.mark.parametrize("seed", range(50))
def test_overlaps_are_what_two_blocks_have_in_common(seed):
    draw = random.Random(seed)

    def block():
        start = tuple(draw.randint(0, 4) for _ in range(2))
        return ChunkSpec(start, tuple(draw.randint(1, 5) for _ in range(2)))

    one, other = block(), block()
    common = overlap(one, other.start, other.shape)
    assert (common is None) == (not cells(one) & cells(other))
    if common is not None:
        for chunk, index in zip((one, other), common, strict=True):
            places = zip(chunk.start, index, strict=True)
            ranges = [range(a + s.start, a + s.stop) for a, s in places]
            assert set(itertools.product(*ranges)) == cells(one) & cells(other)


def manifest():
    chunks = tuple(
        ChunkSpec(c.start, c.shape, checksum(b"%d" % i))
        for i, c in enumerate(cut((0, 0), (4, 6), 2, 24))
    )
    tensors = {"embed/embedding": TensorSpec((4, 6), "bfloat16", chunks)}
    return Manifest("a1", 7, tensors)


def test_a_manifest_is_read_as_it_was_written():
    assert read_manifest(manifest().encode(), "here") == manifest()


def test_a_damaged_manifest_is_another_one_or_an_error():
    data = manifest().encode()
    for at in range(len(data)):
        for damaged in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]):
            try:
                read_manifest(damaged, "here")
            except ValueError as error:
                assert str(error).startswith("here")
    for text in (
        "[]",
        "{}",
        '{"attempt":"a","version":1,"tensors":{"x":5}}',
        '{"attempt":"a","version":1,"tensors":{"x":[[4],"f",[[0,5,1]]]}}',
        '{"attempt":"a","version":1,"tensors":{"x":[[4],"f",[[0,-1,1]]]}}',
        '{"attempt":"a","version":1,"tensors":{"x":[[1e9],"f",[]]}}',
        '{"attempt":"a","version":1,"tensors":{"x":[[1],"f",[[0,0.5,1]]]}}',
    ):
        with pytest.raises(ValueError, match="^here: "):
            read_manifest(text.encode(), "here")
