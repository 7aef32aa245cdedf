"""Column entries survive the trip, and what is one object travels once."""

import struct

import numpy as np
import pytest

from distflow_jax.coordinator.column_codec import decode, encode


def test_entries_come_back_as_they_were():
    entries = [
        np.arange(5, dtype=np.int32),
        np.zeros(0, np.float32),
        np.random.default_rng(0).normal(size=(3, 4, 2)),
        np.array([True, False]),
        np.float32(1.5),
        7,
        -0.25,
        True,
        np.arange(12).reshape(3, 4).T,  # not contiguous
    ]
    back = decode(encode(entries, "x"))
    assert len(back) == len(entries)
    for got, wanted in zip(back, entries, strict=True):
        np.testing.assert_array_equal(got, wanted)
        assert np.asarray(got).dtype == np.asarray(wanted).dtype
        assert np.shape(got) == np.shape(wanted)
    assert decode(b"") == []


def test_an_image_of_eight_samples_travels_once():
    image = np.random.default_rng(0).integers(0, 255, (224, 224, 3), np.uint8)
    data = encode([image] * 8, "pixel_values")
    assert len(data) < image.nbytes + 100
    back = decode(data)
    assert all(entry is back[0] for entry in back)
    np.testing.assert_array_equal(back[0], image)


def test_equal_but_separate_arrays_stay_separate():
    back = decode(encode([np.ones(3), np.ones(3)], "x"))
    assert back[0] is not back[1]


def test_what_cannot_travel_is_named():
    with pytest.raises(ValueError, match="field 'text' holds a dict, which cannot move"):
        encode([{"a": 1}], "text")


@pytest.mark.parametrize("shape", [(-14,), (-1,), (2, -3)])
def test_a_shape_below_zero_is_refused(shape):
    """Read on, the first one would come back to its own beginning for ever."""
    header = b"a" + struct.pack("<BB", 3, len(shape)) + b"|u1"
    data = header + struct.pack(f"<{len(shape)}q", *shape) + bytes(20)
    with pytest.raises(ValueError, match="shape"):
        decode(data)


def test_a_tag_that_is_none_is_refused():
    data = encode([np.arange(3)], "x")
    with pytest.raises(ValueError, match="no tag"):
        decode(b"b" + data[1:])
