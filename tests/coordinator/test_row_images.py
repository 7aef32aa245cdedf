"""Patches beside rows: a prompt's once in each row, in chunks, and the same after a transfer."""

from types import SimpleNamespace

import numpy as np
import pytest
from support.seeing import MODELS, seeing_prompt, seeing_samples, sizes_of
from support.tiny_model import rows_of, sequences_of

from distflow_jax.batch import RowShape
from distflow_jax.coordinator.assignment import PackingPlan, Shares, StepLengths
from distflow_jax.coordinator.first_fit import RowLimits
from distflow_jax.coordinator.row_images import encoded_images, pack_images
from distflow_jax.images.patch_chunks import MOST_SEGMENTS, ChunkPlan, PatchSizes, chunks_for
from distflow_jax.images.prompt_images import (
    content_keys,
    from_bytes,
    prompt_images,
    rotary_positions,
    to_bytes,
)
from distflow_jax.images.record import ImagePatches
from distflow_jax.images.turn_images import TurnImages
from distflow_jax.layout import Layout
from distflow_jax.models.vision.encode import window_segments

SHAPE = RowShape(1, 6, 128, 8)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shared", [True, False])
def test_a_prompts_patches_stand_once_in_its_row(name, shared):
    model, samples = MODELS[name], seeing_samples(MODELS[name], groups=4)
    rows, placement = rows_of(samples, SHAPE, shared=shared)
    images = [prompt_images(p.images, p.patch) for p in samples.prompt]
    table, sizes = sequences_of(samples), sizes_of(model, SHAPE.tokens)
    packed = pack_images(table, images, placement, sizes)
    for at, members in placement.rows():
        groups = {table.group[i]: images[i] for i in members}
        own = [x for x in groups.values() if x is not None]
        assert (packed.segments[at] > 0).sum() == sum(len(x.patches) for x in own)
        flat = packed.patches[at].reshape(-1, sizes.patch_bytes)
        copies = 1 if shared else len(members)
        of_images = packed.patch[at] >= 0
        assert of_images.sum() <= copies * sum(x.features for x in own)
        assert (rows.segment[at][of_images] > 0).all()
        for x in own:  # the patches of each feature are those of the prompt
            wanted = x.patches.reshape(x.features, -1)
            found = flat.reshape(-1, sizes.merge * sizes.patch_bytes)[packed.patch[at][of_images]]
            assert all((found == row).all(1).any() for row in wanted)
    pairs = {(at, table.group[i]) for at, members in placement.rows() for i in members}
    count = sum(len(samples.prompt[table.group.index(group)].images) for _, group in pairs)
    encoded = encoded_images(table, images, placement, window=4)
    assert encoded[0] == count > 0
    # all patches that the rows hold, and the pairs within each of their segments
    numbers = packed.segments.reshape(-1, sizes.chunk)
    sizes_of_segments = np.concatenate([np.bincount(row)[1:] for row in numbers])
    assert encoded[1] == sizes_of_segments.sum()
    assert encoded[2] == np.square(sizes_of_segments).sum()
    assert encoded[1] <= encoded[3] <= encoded[2]
    assert encoded_images(table, images, placement)[3] == 0


def test_patches_of_a_window_lie_side_by_side():
    """A picture of 5 x 3 features, in windows of 2 x 2; each feature is found at its place."""
    merge, side, at = 4, 2, []
    for row, column in np.ndindex(5, 3):
        at += [(row * side + a, column * side + b) for a, b in np.ndindex(side, side)]
    count = len(at)
    patches = np.arange(count, dtype=np.uint8)[:, None].repeat(3, axis=1)
    cut = ImagePatches(patches, np.array(at, np.int32), np.ones(count, np.int32), 15, (5, 3))
    sizes = PatchSizes(2 * count, 1, 3, 2, merge, window=4)
    plan, chunks = ChunkPlan(sizes), sizes.empty()
    for first in (0, 15):
        where = plan.add(cut, chunks)
        assert sorted(where) == list(range(first, first + 15))
        found = chunks.patches[0].reshape(-1, merge, 3)[where].reshape(count, 3)
        np.testing.assert_array_equal(found, patches)
        places = chunks.positions[0].reshape(-1, merge, 2)[where].reshape(count, 2)
        np.testing.assert_array_equal(places, at)
    windows = [tuple(x) for x in (chunks.positions[0, :count] // 4).tolist()]
    assert windows == sorted(windows)


def test_a_chunk_has_no_more_images_than_its_windows_have_numbers():
    one = ImagePatches(np.ones((4, 3), np.uint8), np.zeros((4, 2), np.int32), np.ones(4), 1, (1, 1))
    sizes = PatchSizes(4 * 2050, 2, 3, 2, 4, window=4)
    plan, chunks = ChunkPlan(sizes), sizes.empty()
    for _ in range(2 * MOST_SEGMENTS):
        assert plan.add(one, chunks) is not None
    assert plan.add(one, chunks) is None
    numbers = window_segments(SimpleNamespace(window=4), chunks.positions, chunks.segments)
    assert all(len(np.unique(row[row > 0])) == MOST_SEGMENTS for row in np.asarray(numbers))


def test_rows_that_several_processes_hold_are_counted_by_one():
    layout = Layout("mesh", (("data", 2), ("fsdp", 1), ("tensor", 4)))
    plan = PackingPlan(RowLimits(64, 4, False), 1, 2, {layout: 1}, layout)
    uid = np.arange(2)
    lengths = StepLengths(uid, uid, uid + 3, uid + 3)
    of = [Shares.make(plan, lengths, processes=n) for n in (1, 2, 8)]
    counts = [[shares.counts_rows(p) for p in range(shares.processes)] for shares in of]
    assert counts == [[True], [True] * 2, [True, False, False, False] * 2]


def test_a_prompt_is_the_same_at_another_process():
    prompt = seeing_prompt(MODELS["qwen2_5_vl"], 1, 2)
    images = prompt_images(prompt.images, prompt.patch)
    tokens, found = from_bytes(to_bytes(prompt.tokens, images))
    np.testing.assert_array_equal(tokens, prompt.tokens)
    for name in ("patch", "patches", "positions", "segments", "rotary"):
        np.testing.assert_array_equal(getattr(found, name), getattr(images, name))
        assert getattr(found, name).dtype == getattr(images, name).dtype
    assert (found.count, found.features, found.shift) == (2, images.features, images.shift)


def test_rotary_positions_of_an_image_and_the_text_behind_it():
    cut = ImagePatches(np.zeros((24, 3), np.uint8), np.zeros((24, 2)), np.ones(24), 6, (2, 3))
    patch = np.array([-1, -1, 0, 1, 2, 3, 4, 5, -1], np.int32)
    found = rotary_positions(patch, [cut])
    assert found.tolist() == [
        *([0, 0, 0], [1, 1, 1]),
        *([2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]),
        [5, 5, 5],
    ]


def test_keys_tell_images_and_keep_text():
    model = MODELS["smolvlm"]
    one, other = (seeing_prompt(model, 1, 1, seed=seed) for seed in (0, 1))
    found = content_keys(one.tokens, one.patch, one.images)
    text = one.patch < 0
    np.testing.assert_array_equal(found[text], one.tokens[text])
    assert (found[~text] < 0).all() and len(set(found[~text])) == (~text).sum()
    np.testing.assert_array_equal(found, content_keys(one.tokens, one.patch, one.images))
    assert (content_keys(one.tokens, one.patch, other.images)[~text] != found[~text]).all()


def test_chunks_have_room_for_any_images_of_so_many_features():
    rng = np.random.default_rng(0)
    for _ in range(200):
        chunk, left, filled = 64, int(rng.integers(1, 100)), []
        most = chunks_for(left, 4, chunk)
        while left:
            size = 4 * int(rng.integers(1, min(left, chunk // 4) + 1))
            left -= size // 4
            place = next((i for i, n in enumerate(filled) if n + size <= chunk), None)
            if place is None:
                filled.append(size)
            else:
                filled[place] += size
        assert len(filled) <= most


def test_a_picture_stands_once_in_a_row_for_all_responses_that_show_it():
    """But twice where one response shows it twice: its tokens see each other, not the others."""
    model, samples = MODELS["qwen2_5_vl"], seeing_samples(MODELS["qwen2_5_vl"], groups=2)
    prompt = seeing_prompt(model, 9, 2, seed=3)
    (one, other), first = prompt.images, prompt.images[0].patches.features
    count = first + other.patches.features
    once = TurnImages((one, other), np.arange(-1, count + 3, dtype=np.int32))
    once.patch[count + 1 :] = -1
    twice = TurnImages((one, one), np.arange(-1, 2 * first + 1, dtype=np.int32))
    twice.patch[-1] = -1
    shown = [once, None, twice, once, twice, None]
    for i, turns in enumerate(shown):
        if turns is not None:
            samples.response[i] = np.full(len(turns.patch), 5, np.int32)
            samples.response_mask[i] = turns.patch < 0
    rows, placement = rows_of(samples, SHAPE, shared=True)
    images = [prompt_images(p.images, p.patch) for p in samples.prompt]
    table, sizes = sequences_of(samples), sizes_of(model, SHAPE.tokens)
    packed = pack_images(table, images, placement, sizes, shown)
    text = pack_images(table, images, placement, sizes)
    patches_of = {image.digest: len(image.patches.patches) for image in prompt.images}
    for at, members in placement.rows():
        kinds = {key for i in members if shown[i] is not None for key in shown[i].keys}
        more = sum(patches_of[key[0]] for key in kinds)
        assert (packed.segments[at] > 0).sum() == (text.segments[at] > 0).sum() + more
        flat = packed.patches[at].reshape(-1, sizes.merge * sizes.patch_bytes)
        for i in members:
            if shown[i] is None:
                continue
            slot = members.index(i)
            here = rows.segment[at] == slot + 1
            features = np.concatenate([c.patches for c in shown[i].cut])
            found = flat[packed.patch[at][here & (packed.patch[at] >= 0)]]
            np.testing.assert_array_equal(found, features.reshape(len(found), -1))
            size = len(samples.prompt[i].tokens)
            shift = 0 if images[i] is None else images[i].shift
            np.testing.assert_array_equal(packed.rotary[at][here], shown[i].rotary(size + shift))
    encoded = encoded_images(table, images, placement, 4, shown)
    before = encoded_images(table, images, placement, 4)
    keys = [
        {key for i in members if shown[i] is not None for key in shown[i].keys}
        for _, members in placement.rows()
    ]
    assert encoded[0] == before[0] + sum(map(len, keys))
    assert encoded[1] == (packed.segments > 0).sum()
