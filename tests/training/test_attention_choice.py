"""The trainer's choice of attention, by the setting, the sizes and the platform."""

import re
from dataclasses import replace

import pytest

from distflow_jax.models.vision.chunks import patch_room
from distflow_jax.models.vision.patch_attention import Form
from distflow_jax.models.vision.vision_config import VisionConfig
from distflow_jax.training.attention_choice import (
    AttentionSizes,
    row_attention,
    tile_unit,
    tower_form,
)

SHARED = frozenset({"shared prompts"})
SIZES = AttentionSizes(2048, 1024, rows=2, heads=4, head_dim=128, dtype="bfloat16", features=SHARED)


def chosen(attention, platform, **sizes):
    return row_attention(attention, platform, SIZES._replace(**sizes))


@pytest.mark.parametrize(
    ("attention", "tokens", "platform", "longest", "side"),
    [
        ("auto", 576, "cpu", 320, 64),
        ("auto", 576, "cpu", 96, 32),
        ("auto", 2048, "cpu", 2048, 128),
        ("auto", 160, "cpu", 320, 80),
        ("auto", 262, "cpu", 320, 0),  # 2 x 131
        ("blocks", 576, "gpu", 320, 64),
        ("masked", 576, "cpu", 320, 0),
    ],
)
def test_side_of_a_tile_of_loops(attention, tokens, platform, longest, side):
    found = chosen(attention, platform, row_tokens=tokens, longest=longest)
    assert (found.name, found.block, found.by) == ("blocks" if side else "masked", side, "loops")


def test_tiles_end_within_a_chunk():
    for tokens, chunks, side in ((1024, 1, 64), (1024, 8, 64), (640, 16, 40), (256, 16, 0)):
        found = chosen("auto", "cpu", row_tokens=tokens, longest=320, row_chunks=chunks)
        assert found.block == side, (tokens, chunks)


def test_a_kernel_where_sizes_fit():
    assert chosen("auto", "tpu")[:3] == ("kernel", 128, "tpu")
    assert chosen("kernel", "tpu", dtype="float32", head_dim=64)[:3] == ("kernel", 128, "tpu")
    # 65,536 tokens have 262,144 tiles of 128 x 128: a scalar memory holds a quarter of these
    assert chosen("auto", "tpu", row_tokens=2**16, rows=1).block == 256
    # long sequences fill larger tiles; as large as memory allows
    assert chosen("auto", "tpu", row_tokens=8192, longest=8192).block == 512
    assert chosen("auto", "tpu", row_tokens=8192, longest=8192, heads=16).block == 256
    assert chosen("auto", "tpu", longest=2048).block == 256
    long_row = dict(row_tokens=2**16, rows=1, context_shards=4, row_chunks=8)
    assert chosen("auto", "tpu", **long_row).block == 128


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (dict(row_tokens=320), "rows divisible by 128 tokens, got .*row_tokens=320; use 384"),
        (dict(row_tokens=1024, row_chunks=16), "rows of 16 chunks .*row_tokens=1024; use 2048"),
        (dict(head_dim=40), "supports head dims divisible by 16 up to 512, and the model's is 40"),
        (dict(row_tokens=2**17), "2 rows of 1024 x 1024 may hold 2097152: use fewer rows"),
        (dict(heads=64), "for 64 query heads x 128 tokens with a head dim of 128, and"),
    ],
)
def test_where_none_fits_auto_says_why_and_kernel_is_refused(sizes, reason):
    found = chosen("auto", "tpu", **sizes)
    assert found.name == "masked" and found.block == 0
    assert re.search(reason, found.why)
    with pytest.raises(ValueError, match=reason):
        chosen("kernel", "tpu", **sizes)


QWEN = VisionConfig(  # of Qwen2.5-VL: heads of 80
    "qwen2_5_vl", 1280, 32, 16, 3420, patch_size=14, window=8, full_layers=(7, 15, 23, 31)
)
GEMMA = VisionConfig("gemma3", 1152, 27, 16, 4304, patch_size=14, merge=4, grid=64)
SMALL = VisionConfig("smolvlm", 96, 3, 4, 192, patch_size=8, merge=2, grid=6)


@pytest.mark.parametrize(
    ("attention", "platform", "vision", "chunk", "wanted"),
    [
        ("auto", "tpu", QWEN, 4096, Form(128, "tpu", 80)),
        ("kernel", "gpu", QWEN, 4096, Form(64, "gpu", 128)),
        ("auto", "tpu", GEMMA, 4096, Form(512, "tpu", 80)),  # heads of 72, whole pictures
        ("auto", "cpu", QWEN, 4096, Form(64)),  # a window
        ("auto", "cpu", GEMMA, 4096, Form(128)),
        ("auto", "cpu", SMALL, 504, Form(36)),  # a picture
        ("blocks", "gpu", SMALL, 504, Form(36)),
        # a mask where it is asked for, where it is not larger than a tile, or where none fits
        ("masked", "tpu", QWEN, 4096, Form()),
        ("auto", "cpu", SMALL, 108, Form()),
        ("kernel", "tpu", QWEN, 4000, Form()),
        ("kernel", "cpu", QWEN, 4096, Form()),
        ("auto", "gpu", QWEN, 4096, Form(64)),
        ("cudnn", "gpu", QWEN, 4096, Form(64)),
    ],
)
def test_a_towers_attention(attention, platform, vision, chunk, wanted):
    assert tower_form(attention, platform, vision, "bfloat16", chunk=chunk, rows=2) == wanted


def test_a_chunk_has_whole_tiles_where_little_is_lost():
    def chunk(vision, image_tokens, tile):
        sizes = dict(longest=2048, image_tokens=image_tokens, rotary=False, tile=tile)
        return patch_room(vision, 8192, **sizes).chunk

    assert [tile_unit(name) for name in ("cpu", "gpu", "tpu")] == [1, 64, 128]
    assert [chunk(QWEN, 1000, tile) for tile in (1, 64, 128)] == [4000, 4032, 4096]
    assert [chunk(QWEN, 120, tile) for tile in (1, 64, 128)] == [480, 512, 512]
    assert chunk(SMALL, 64, 128) == 512
    # an image of 196 patches, two in a chunk: a third more would be padding
    assert chunk(replace(SMALL, grid=14), 64, 128) == 392


def test_what_is_asked_for_and_cannot_be():
    with pytest.raises(ValueError, match="row_tokens=262; use 320, or attention='masked'"):
        chosen("blocks", "cpu", row_tokens=262, longest=320)
    message = r"blocks need rows of 16 chunks \(2 x mesh.context\) .*row_tokens=256; use 1024"
    with pytest.raises(ValueError, match=message):
        chosen("blocks", "gpu", row_tokens=256, longest=320, row_chunks=16)
    with pytest.raises(
        ValueError,
        match="attention='kernel': it runs on TPUs or GPUs, and the devices here are of platform "
        "'cpu'; use 'auto', 'blocks' or 'masked'",
    ):
        chosen("kernel", "cpu")
