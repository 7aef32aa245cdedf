"""How images are resized, cut, and named among the tokens."""

import dataclasses
import itertools

import numpy as np
import pytest
from support.seeing_models import CASES

from distflow_jax.images.record import image_of
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.models.vision.image_layout import image_layout, smart_size

WORDS = Tokenizer.byte_level(300)


def test_sizes_keep_the_ratio_and_the_bounds():
    assert smart_size(150, 600, 28, 56 * 56, 28 * 28 * 1280) == (140, 588)
    assert smart_size(28, 28, 28, 56 * 56, 28 * 28 * 1280) == (56, 56)
    # enlarged, an image keeps the upper bound too: thin ones alone, of one factor, may have more
    for height, width in itertools.product(range(20, 400, 7), repeat=2):
        for most in (4, 64):
            high, wide = smart_size(height, width, 32, 32 * 32 * most, 32 * 32 * most)
            assert high % 32 == wide % 32 == 0
            assert high * wide <= 32 * 32 * most or min(high, wide) == 32
    assert smart_size(3000, 4000, 28, 56 * 56, 28 * 28 * 100) == (224, 308)
    with pytest.raises(ValueError, match="300 x 1 has sides whose ratio is above 200"):
        smart_size(1, 300, 28, 56 * 56, 28 * 28 * 1280)


@pytest.mark.parametrize("case", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
@pytest.mark.parametrize("most", [16, 24, 40, 100])
def test_larger_images_are_shrunk_to_the_limit(case, most):
    layout = image_layout(CASES[case].vision, WORDS, most)
    rng = np.random.default_rng(most)
    for _ in range(20):
        height, width = rng.integers(20, 700, 2).tolist()
        size = layout.size(height, width)
        assert size.features <= most
        whole = image_layout(CASES[case].vision, WORDS).size(height, width)
        assert size.shrunk == (size.features < whole.features)
        cut = layout.cut(image_of(rng.integers(0, 256, (height, width, 3), np.uint8)))
        assert cut.features == size.features
        assert len(cut.patches) == cut.features * CASES[case].vision.patches_per_feature


def test_an_image_that_cannot_be_small_enough_is_refused():
    with pytest.raises(ValueError, match="at least 16 tokens; use data.image_tokens=16 or more"):
        image_layout(CASES["gemma3"].vision, WORDS, 15)


def test_tokens_around_features():
    layout = image_layout(CASES["qwen2_5_vl"].vision, WORDS)
    assert layout.size(56, 56).tokens == (46, -1, -1, -1, -1, 45)
    assert layout.placeholder == 47 and layout.marker == ""
    gemma = image_layout(CASES["gemma3"].vision, WORDS)
    assert gemma.size(9, 9).tokens == (46, *(-1,) * 16, 45) and gemma.around == "\n\n"


def test_tiles_have_rows_and_columns():
    names = ["<fake_token_around_image>", "<global-img>", "<image>"]
    names += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2, 3, 4)]
    backend = Tokenizer.byte_level(400).backend
    backend.add_special_tokens(names)
    words = dataclasses.replace(WORDS, backend=backend)
    ids = {name: backend.token_to_id(name) for name in names}
    layout = image_layout(CASES["smolvlm"].vision, words)
    assert layout.marker == "<image>"
    fake, line = ids["<fake_token_around_image>"], WORDS.encode("\n").tolist()
    features = [-1] * 16
    size = layout.size(128, 256)
    assert (size.height, size.width) == (128, 256)
    wanted = []
    for row in (1, 2):
        for column in (1, 2, 3, 4):
            wanted += [fake, ids[f"<row_{row}_col_{column}>"], *features]
        wanted += line if row == 1 else WORDS.encode("\n\n").tolist()
    wanted += [fake, ids["<global-img>"], *features, fake]
    assert list(size.tokens) == wanted
