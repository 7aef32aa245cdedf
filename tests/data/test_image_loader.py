"""The loader places, decodes and cuts images, and counts their tokens."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
from support.plain_layout import END, PlainLayout
from test_image_rows import PIXELS, folder, opened, user  # noqa: F401  a fixture

from distflow_jax.batch import Samples
from distflow_jax.config.data_config import DataConfig
from distflow_jax.coordinator.batch_metrics import batch_metrics, gather_table
from distflow_jax.data.dataset import open_dataset
from distflow_jax.data.loader import Loader, describe_dropped
from distflow_jax.data.prefetch import Prefetch
from distflow_jax.images.placing import SeeingTokenizer
from distflow_jax.images.record import image_of
from distflow_jax.models.tokenizer import Tokenizer

TEXT = 40  # tokens that the chat template and the words of these prompts take at most


def loader_of(dataset, *, layout=None, answers=0, **config):
    tokenizer = SeeingTokenizer(Tokenizer.byte_level(300), layout or PlainLayout())
    config = DataConfig(**{"prompts_per_step": 2, "max_prompt_length": 200} | config)
    return Loader(dataset, tokenizer, config, seed=0, answers=answers, max_answer=16)


def rows_of(*numbers):
    """A row for each number of images."""
    paths = [f"pictures/{i}.png" for i in range(3)]
    return [
        {"prompt": user("<image>" * n + "?"), "completion": "yes"}
        | ({"images": paths[:n]} if n else {})
        for n in numbers
    ]


def test_prompts_have_their_images_and_the_places_of_their_features(folder):  # noqa: F811
    loader = loader_of(opened(folder, *rows_of(2, 0, 3)), shuffle=False, prompts_per_step=3)
    two, none, three = next(loader)
    assert none.images == () and none.patch is None
    for prompt, count in ((two, 2), (three, 3)):
        assert len(prompt.images) == count
        assert [i.digest for i in prompt.images] == [image_of(p).digest for p in PIXELS[:count]]
        features = sum(image.patches.features for image in prompt.images)
        assert prompt.patch.dtype == np.int32 and prompt.patch.shape == prompt.tokens.shape
        np.testing.assert_array_equal(prompt.patch[prompt.patch >= 0], np.arange(features))
        assert all(image.patches.patches.dtype == np.uint8 for image in prompt.images)
    assert loader.sees and loader.dropped == 0 and loader.dropped_for == {}


def test_the_loaders_thread_gives_what_the_caller_would(folder):  # noqa: F811
    dataset = opened(folder, *rows_of(1, 2, 3, 0))
    with Prefetch(loader_of(dataset)) as ahead:
        steps = zip(itertools.islice(ahead, 6), loader_of(dataset), strict=False)
        for prefetched, here in steps:
            for a, b in zip(prefetched, here, strict=True):
                np.testing.assert_array_equal(a.tokens, b.tokens)
                for x, y in zip(a.images, b.images, strict=True):
                    assert x.digest == y.digest
                    np.testing.assert_array_equal(x.patches.patches, y.patches.patches)


def test_tokens_of_images_count_against_the_longest_prompt(folder):  # noqa: F811
    dataset = opened(folder, *rows_of(0, 1, 2, 3))
    lengths = [len(loader_of(dataset, shuffle=False).prompt(row).tokens) for row in range(4)]
    assert lengths[0] < lengths[1] < lengths[2] < lengths[3]
    with pytest.raises(
        ValueError,
        match=r"row 3: the prompt has \d+ tokens, (\d+) of them for its "
        r"images, more than data.max_prompt_length .* lower data.image_tokens",
    ):
        loader_of(dataset, max_prompt_length=lengths[1])
    kept = loader_of(dataset, max_prompt_length=lengths[1], overlong="drop")
    assert kept.rows.tolist() == [0, 1]
    assert kept.dropped == 2 and kept.dropped_for == {"images": 2}
    long = opened(folder, *rows_of(0, 1), {"prompt": user("?" * 300), "completion": "yes"})
    kept = loader_of(long, max_prompt_length=lengths[0], overlong="drop", prompts_per_step=1)
    assert kept.dropped_for == {"prompt": 1, "images": 1}
    said = describe_dropped(kept.dropped_for)
    assert said == "2 overlong prompts were dropped: 1 by their text, 1 by their images"
    assert describe_dropped({"prompt": 2, "answer": 1}) == "3 overlong prompts were dropped"


def test_a_prompt_cut_from_the_left_has_whole_images(folder):  # noqa: F811
    dataset = opened(folder, *rows_of(3))
    config = {"prompts_per_step": 1, "overlong": "truncate_left"}
    whole = loader_of(dataset, **config).prompt(0)
    for most in range(1, len(whole.tokens) + 1):
        prompt = loader_of(dataset, max_prompt_length=most, **config).prompt(0)
        assert len(prompt.tokens) <= most
        np.testing.assert_array_equal(prompt.tokens, whole.tokens[-len(prompt.tokens) :])
        kept = len(prompt.images)
        assert [i.digest for i in prompt.images] == [i.digest for i in whole.images[3 - kept :]]
        assert (prompt.patch is None) == (not kept)
        if kept:
            features = sum(image.patches.features for image in prompt.images)
            np.testing.assert_array_equal(prompt.patch[prompt.patch >= 0], np.arange(features))
            assert (prompt.tokens == END).sum() == kept


def test_a_prompt_of_which_a_cut_leaves_nothing_is_dropped(folder):  # noqa: F811
    last = {"prompt": "look: <image>", "images": ["pictures/0.png"]}
    config = {"prompts_per_step": 1, "overlong": "truncate_left", "max_prompt_length": 2}
    loader = loader_of(opened(folder, *rows_of(1), last), **config)
    assert loader.rows.tolist() == [0] and loader.dropped_for == {"images": 1}
    with pytest.raises(ValueError, match="the images of all 1 prompts have more tokens"):
        loader_of(opened(folder, last), **config)


def test_demonstrations_have_images_before_them(folder):  # noqa: F811
    loader = loader_of(opened(folder, *rows_of(1, 2)), answers=1, shuffle=False)
    one, two = next(loader)
    np.testing.assert_array_equal(one.answers[0], two.answers[0])
    assert len(one.images) == 1 and len(two.images) == 2


@pytest.mark.parametrize("overlong", ["error", "truncate_left"])
def test_rows_with_images_need_a_tower_and_a_family_that_takes_them(folder, overlong):  # noqa: F811
    dataset = opened(folder, *rows_of(0, 1))
    config = DataConfig(prompts_per_step=1, overlong=overlong)
    with pytest.raises(ValueError, match="row 2: has images, and the model has no vision tower"):
        Loader(dataset, Tokenizer.byte_level(300), config, seed=0)

    class Narrow(PlainLayout):
        def grid(self, height, width):
            raise ValueError("is too small for this family: enlarge it")

    with pytest.raises(ValueError, match=r"row 2, image 1 \(pictures/0.png\): is too small for"):
        loader_of(dataset, layout=Narrow(), overlong=overlong)


def test_shrunk_images_are_counted_once_a_prompt():
    dataset = open_dataset("task:shapes?sides=32-96&size=50")
    loader = loader_of(dataset, layout=PlainLayout(most=50), prompts_per_step=20)
    prompts = next(loader)
    shrunk = sum(image.shrunk for prompt in prompts for image in prompt.images)
    assert 0 < shrunk < 20
    twice = [prompt for prompt in prompts for _ in range(2)]
    uid = np.array([(p.counter, i % 2) for i, p in enumerate(twice)])
    empty = [np.zeros(1, np.int32)] * 40
    samples = Samples(twice, uid, empty, empty)
    metrics = batch_metrics(gather_table(samples, images=True), np.ones(1, np.int64))
    assert metrics["data/images"] == 20 and metrics["data/images_shrunk"] == shrunk
    plain = batch_metrics(gather_table(samples), np.ones(1, np.int64))
    assert plain == {name: x for name, x in metrics.items() if not name.startswith("data/")}


def test_a_run_on_text_does_not_import_pillow():
    code = (
        "import sys; from distflow_jax.data.dataset import open_dataset; "
        "from distflow_jax.data.loader import DataConfig, Loader; "
        "from distflow_jax.models.tokenizer import Tokenizer; "
        "data = open_dataset('task:arithmetic?size=40'); "
        "next(Loader(data, Tokenizer.byte_level(300), DataConfig(), seed=0)); "
        "assert not any(name.partition('.')[0] == 'PIL' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
