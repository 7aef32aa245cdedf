"""The towers: features and logits of transformers, packed as apart, on any mesh, and gradients.

Nightly: tiles give the features and gradients of the mask, for each tower and kernel.
"""

import functools
import hashlib
import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import PIL
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support.paths import TESTS
from support.seeing import features_alone, logits_alone
from support.seeing_models import CASES, IMAGES, NUM_IMAGES, drawn_params, tokens_of
from support.tiny_model import mesh_of

from distflow_jax.batch import Prompt
from distflow_jax.images.prompt_images import rotary_positions
from distflow_jax.images.record import image_of
from distflow_jax.models.decoder_config import ScalarModel
from distflow_jax.models.lora import divide
from distflow_jax.models.parameters import param_shardings, place_params
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.models.vision.chunks import encode_chunks
from distflow_jax.models.vision.encode import encode, window_segments
from distflow_jax.models.vision.image_layout import image_layout
from distflow_jax.models.vision.patch_attention import WHOLE, Form
from distflow_jax.models.vision.tower_params import tower_params
from distflow_jax.models.vision.vision_config import VisionConfig
from distflow_jax.parallel.rules import use_mesh

FILE = json.loads((TESTS / "golden" / "vision.json").read_text())
GOLDEN = FILE["entries"]
EACH = pytest.mark.parametrize("case", CASES)
# in every test run: a plain tower, and one with deeper levels in the decoder
MOSTLY = pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=[pytest.mark.slow] * (x not in ("smolvlm", "qwen3_vl"))) for x in CASES],
)
# versions of Pillow differ in the order of the passes of a resize
SAME_PIXELS = pytest.mark.skipif(
    PIL.__version__.split(".")[0] != FILE["versions"]["pillow"].split(".")[0],
    reason="another Pillow resizes to other pixels",
)
WORDS = Tokenizer.byte_level(300)


def layout_of(case, most=0):
    return image_layout(CASES[case].vision, WORDS, most)


def packed(case, numbers, padding=0):
    """(patches, positions, segments) of images in one row, with padding in front and behind."""
    cut = [layout_of(case).cut(image_of(IMAGES[n])) for n in numbers]
    size = cut[0].patches.shape[1]
    pad = CASES[case].vision.patches_per_feature * padding
    patches, positions, segments, last = [], [], [], 0
    for x in cut:
        patches.append(x.patches)
        positions.append(x.positions)
        segments.append(x.segments + last)
        last = segments[-1].max()
    noise = np.random.default_rng(1).integers(0, 256, (pad, size), np.uint8)
    zeros = np.zeros((pad, 2), np.int32)
    return (
        np.concatenate([noise, *patches, noise]),
        np.concatenate([zeros, *positions, zeros]),
        np.concatenate([zeros[:, 0], *segments, zeros[:, 0]]),
    )


def params_of(case):
    own = {p: x for p, x in drawn_params(CASES[case]) if p.startswith("vision/")}
    return unflatten_dict(own, sep="/")["vision"]


def features_of(case, row, **options):
    c = CASES[case].vision
    found = jax.jit(lambda p, *row: encode(c, p, *row, **options))(params_of(case), *row)
    return np.asarray(found)


def levels(case, features):
    """[1 + D, M, W]; without DeepStack D is 0."""
    return features if CASES[case].vision.deepstack else features[None]


@SAME_PIXELS
@EACH
def test_pixels_are_those_of_transformers(case):
    c = CASES[case].vision
    for image, golden in zip(IMAGES, GOLDEN[case]["images"], strict=True):
        size = layout_of(case).size(*image.shape[:2])
        cut = layout_of(case).cut(image_of(image))
        assert size.features == cut.features == golden["features"]
        pixels = cut.patches.reshape(-1, c.patch_size, c.patch_size, 3)
        if c.square:  # a whole picture per segment
            places = cut.positions + (cut.segments - 1)[:, None] * [c.grid, 0]
            whole = np.zeros((cut.segments.max() * c.grid, c.grid, *pixels.shape[1:]), np.uint8)
            whole[places[:, 0], places[:, 1]] = pixels
            pixels = whole.transpose(0, 2, 1, 3, 4)
        assert hashlib.sha256(pixels.tobytes()).hexdigest() == golden["pixels"]


@SAME_PIXELS
@EACH
@pytest.mark.parametrize("numbers", [(0,), (2, 0, 1)])
def test_features_are_those_of_transformers(case, numbers):
    """All images in one row, with padding at both ends; 1e-4 as for logits."""
    padding = 3
    found = levels(case, features_of(case, packed(case, numbers, padding)))[:, padding:-padding]
    start = 0
    for number in numbers:
        golden = GOLDEN[case]["images"][number]
        own = found[:, start : start + golden["features"]]
        kept = np.array(golden["kept"])
        assert 0.5 < np.abs(kept).max() < 60
        np.testing.assert_allclose(own[:, golden["rows"]], kept, rtol=0, atol=1e-4)
        np.testing.assert_allclose(own.sum(axis=2), golden["sums"], rtol=0, atol=5e-4)
        start += golden["features"]
    assert start == found.shape[1]


def lone_logits(config, prompt, tokens, params, found):
    return logits_alone(config, params, prompt, tokens, found)


@SAME_PIXELS
@EACH
def test_logits_are_those_of_transformers(case):
    """The whole model: prompts with no, one and three images."""
    config, layout = CASES[case], layout_of(case)
    params = unflatten_dict(dict(drawn_params(config)), sep="/")
    images = [image_of(pixels) for pixels in IMAGES]
    images = [replace(image, patches=layout.cut(image)) for image in images]
    found = jax.jit(lambda p: features_alone(config, p, images))(params)
    for count, golden in zip(NUM_IMAGES, GOLDEN[case]["prompts"], strict=True):
        own = tuple(images[:count])
        tokens, patch = tokens_of(config, [x.patches.features for x in own])
        if "position_ids" in golden:
            positions = rotary_positions(patch, [x.patches for x in own])
            np.testing.assert_array_equal(positions.T, golden["position_ids"])
        patch = patch if count else None
        prompt = Prompt(0, 0, tokens, "", "test", None, {}, images=own, patch=patch)
        run = jax.jit(functools.partial(lone_logits, config, prompt, tokens))
        logits = run(params, found[:count])
        wanted = np.array(golden["logits"])
        assert 1 < np.abs(wanted).max() < 20
        np.testing.assert_allclose(logits[np.array(FILE["positions"])], wanted, rtol=0, atol=1e-4)
        whole = jax.nn.logsumexp(logits, axis=-1)
        np.testing.assert_allclose(whole, golden["logsumexp"], rtol=0, atol=1e-4)


@MOSTLY
def test_rows_of_a_batch_and_devices_do_not_matter(case):
    config, mesh = CASES[case], mesh_of(2, 2)
    params = dict(drawn_params(config))
    placed = place_params(config, params.items(), param_shardings(config, mesh))["vision"]
    one, other = packed(case, (0, 2)), packed(case, (2, 0))
    rows = [np.stack(pair) for pair in zip(one, other, strict=True)]

    @jax.jit
    def run(params, *rows):
        with use_mesh(mesh):
            return encode(config.vision, params, *rows)

    both = np.asarray(run(placed, *rows))
    for number, row in enumerate((one, other)):
        np.testing.assert_allclose(
            both[..., number, :, :], features_of(case, row), rtol=0, atol=2e-5
        )


@MOSTLY
def test_gradients_of_packed_and_separate_images_are_equal(case):
    c, params = CASES[case].vision, params_of(case)

    def loss(params, row, weight, remat):
        found = levels(case, encode(c, params, *row, remat=remat))
        return jnp.sum(jnp.sin(found) * weight)

    rows = [packed(case, (n,)) for n in (0, 2)]
    counts = [len(row[0]) // c.patches_per_feature for row in rows]
    rng = np.random.default_rng(3)
    depth = 1 + len(c.deepstack)
    weights = [rng.standard_normal((depth, n, c.width)).astype(np.float32) for n in counts]
    gradient = jax.jit(jax.grad(loss), static_argnums=3)
    apart = [gradient(params, row, w, "none") for row, w in zip(rows, weights, strict=True)]
    apart = jax.tree.map(np.add, *apart)
    together = gradient(params, packed(case, (0, 2)), np.concatenate(weights, axis=1), "full")
    norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(apart)))
    gap = jax.tree.map(lambda a, b: np.sum(np.square(a - b)), apart, together)
    assert np.sqrt(sum(jax.tree.leaves(gap))) < 1e-5 * norm
    for path, x in flatten_dict(apart, sep="/").items():
        assert np.abs(x).max() > 0, path


def slow(*case):
    """Parameters of a case that is left to the nightly tests."""
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("case", "form"),
    [
        ("smolvlm", Form(16)),
        *(slow(case, Form(16)) for case in ("qwen2_5_vl", "qwen3_vl", "gemma3")),
        # kernels, interpreted, with heads of 8 padded to what they take
        slow("qwen2_5_vl", Form(16, "tpu", 16)),
        slow("qwen2_5_vl", Form(32, "gpu", 16)),
    ],
)
def test_tiles_give_the_features_and_gradients_of_the_mask(case, form, interpreted):
    """A chunk of two images and an empty one, with what the backward pass recomputes."""
    c, params, row = CASES[case].vision, params_of(case), packed(case, (0, 2), padding=4)
    behind = -len(row[0]) % 32
    row = (np.pad(x, ((0, behind), *[(0, 0)] * (x.ndim - 1))) for x in row)
    chunks = [np.stack([x, np.zeros_like(x)])[None] for x in row]

    def loss(params, form, remat):
        found = encode_chunks(c, params, *chunks, form=form, remat=remat)[0]
        return jnp.sum(jnp.sin(found) * weight), found

    # features of padding have no meaning
    valid = chunks[2].reshape(-1, c.patches_per_feature)[:, 0] > 0
    shape = (1 + len(c.deepstack), len(valid), c.width)
    weight = np.random.default_rng(2).standard_normal(shape).astype(np.float32) * valid[:, None]
    gradient = jax.jit(jax.grad(loss, has_aux=True), static_argnums=(1, 2))
    (one, wanted), (other, found) = gradient(params, WHOLE, "none"), gradient(params, form, "full")
    found, wanted = (np.asarray(x)[:, valid] for x in (found, wanted))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    assert np.abs(wanted).max() > 0.5
    norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(one)))
    gap = jax.tree.map(lambda a, b: np.sum(np.square(a - b)), one, other)
    assert np.sqrt(sum(jax.tree.leaves(gap))) < 1e-5 * norm


@pytest.mark.parametrize(
    ("axes", "share"),
    [({"data": 2, "context": 2}, 2), ({"data": 4, "context": 2}, 4), ({"context": 4}, 1)],
)
def test_a_device_encodes_the_rows_of_its_data_rank(axes, share):
    """Context ranks divide a row's tokens, of which a tower's rows know nothing."""
    config = VisionConfig(hidden_size=32, num_layers=1, num_heads=2, mlp_size=64, width=32, grid=8)
    rows = axes.get("data", 1)

    def flops(sizes):
        devices = np.array(jax.devices()[: math.prod(sizes.values())])
        mesh = Mesh(devices.reshape(*sizes.values()), tuple(sizes))
        whole = NamedSharding(mesh, PartitionSpec())
        by_row = NamedSharding(mesh, PartitionSpec("data" if "data" in sizes else None))
        shapes = {path: spec.shape for path, spec in tower_params(config).items()}
        params = {
            path: jax.ShapeDtypeStruct(shape, np.float32, sharding=whole)
            for path, shape in shapes.items()
        }
        arrays = [
            jax.ShapeDtypeStruct((rows, 1, 16, *shape), dtype, sharding=by_row)
            for shape, dtype in (
                ((config.patch_bytes,), np.uint8),
                ((2,), np.int32),
                ((), np.int32),
            )
        ]

        def run(params, *arrays):
            with use_mesh(mesh):
                return encode_chunks(config, unflatten_dict(params, sep="/"), *arrays)

        return jax.jit(run).lower(params, *arrays).compile().cost_analysis()["flops"]

    np.testing.assert_allclose(flops(axes), flops({"data": 1}) / share, rtol=0.05)


def test_windows_are_other_segment_numbers():
    c = CASES["qwen2_5_vl"].vision
    _, positions, segments = packed("qwen2_5_vl", (1, 0), padding=1)
    numbers = np.asarray(window_segments(c, positions[None], segments[None]))[0]
    assert (numbers[:4] == 0).all() and (numbers[-4:] == 0).all()
    for number in np.unique(numbers[numbers > 0]):
        places = positions[numbers == number]
        assert len(np.unique(segments[numbers == number])) == 1
        assert (np.ptp(places, axis=0) < c.window).all()


def test_a_frozen_tower_has_no_trained_parameter():
    config = CASES["qwen2_5_vl"]
    params = unflatten_dict(dict(drawn_params(config)), sep="/")
    trained, frozen = divide(config, params)
    assert "vision" in trained and not frozen
    config = replace(config, vision=replace(config.vision, frozen=True))
    trained, frozen = divide(config, params)
    assert set(frozen) == {"vision"} and "vision" not in trained


def test_a_tower_alone_leaves_the_text_model():
    config = CASES["qwen2_5_vl"]
    params = unflatten_dict(dict(drawn_params(config)), sep="/")
    config = replace(config, vision=replace(config.vision, alone=True))
    trained, frozen = divide(config, params)
    assert set(trained) == {"vision"} and set(frozen) == params.keys() - {"vision"}
    critic = {"trunk": params, "head": 0}
    trained, _ = divide(ScalarModel(config), critic)
    assert trained == {"trunk": {"vision": params["vision"]}, "head": 0}
