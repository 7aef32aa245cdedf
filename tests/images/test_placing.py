"""Features stand where images are, by place and never by id, in every form of a prompt."""

import dataclasses

import numpy as np
import pytest
import tokenizers
from support.plain_layout import END, PLACEHOLDER, START, PlainLayout

from distflow_jax.images.picture_files import PREVIEW, DrawnPicture
from distflow_jax.images.placing import (
    SeeingTokenizer,
    read_image,
    read_images,
    size_in_layout,
    with_patches,
)
from distflow_jax.images.record import ImageSize, image_of
from distflow_jax.models.tokenizer import Tokenizer

PROSE = "In HTML <image> is no tag."
QUESTION = [
    {"type": "text", "text": f"{PROSE} Is "},
    {"type": "image"},
    {"type": "image"},
    {"type": "text", "text": "larger?"},
]
# as Idefics3's and Qwen2.5-VL's read parts
LISTS_ONLY = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}<image>"
    "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
BOTH = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer_of(template=None):
    tokenizer = Tokenizer.byte_level(300)
    return tokenizer if template is None else dataclasses.replace(tokenizer, chat_template=template)


def sizes_of(layout, *shapes):
    return [layout.size(*shape) for shape in shapes]


def text_of(tokenizer, tokens):
    return tokenizer.decode(tokens, skip_special=False)


MARKERS = [
    (None, ""),
    (LISTS_ONLY, "<image>"),
    (BOTH, "<|vision_start|><|image_pad|><|vision_end|>"),
]


@pytest.mark.parametrize(("template", "marker"), MARKERS)
def test_each_image_has_its_tokens_and_its_features(template, marker):
    tokenizer = tokenizer_of(template)
    layout = PlainLayout(marker=marker)
    seeing = SeeingTokenizer(tokenizer, layout)
    prose = PROSE.replace("<image>", marker or "<image>")
    content = [{"type": "text", "text": f"{prose} Is "}, *QUESTION[1:]]
    messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": content}]
    sizes = sizes_of(layout, (8, 16), (24, 8))
    placed = seeing.place(messages, sizes)
    assert len(placed.tokens) == len(placed.patch)
    np.testing.assert_array_equal(placed.patch[placed.patch >= 0], np.arange(5))
    assert (placed.tokens[placed.patch >= 0] == PLACEHOLDER).all()
    spans = [placed.tokens[a:b].tolist() for a, b in placed.spans]
    assert spans == [
        [START, PLACEHOLDER, PLACEHOLDER, END],
        [START, *[PLACEHOLDER] * 3, END],
    ]
    assert placed.image_tokens == 9
    (first, second), (third, fourth) = placed.spans
    assert second == third
    # the prose is text, the spelled marker included
    whole = tokenizer.render([messages[0], {"role": "user", "content": f"{prose} Is \x00larger?"}])
    before, after = whole.split("\x00")
    assert text_of(tokenizer, placed.tokens[:first]) == before
    assert text_of(tokenizer, placed.tokens[fourth:]) == after
    assert placed.text == before + (marker or "<image>") * 2 + after


@pytest.mark.parametrize(("template", "marker"), MARKERS)
def test_a_prompt_without_images_is_as_without_a_tower(template, marker):
    tokenizer = tokenizer_of(template)
    seeing = SeeingTokenizer(tokenizer, PlainLayout(marker=marker))
    messages = [{"role": "user", "content": f"{PROSE} {marker}"}]
    text, tokens = tokenizer.encode_prompt(messages)
    assert (PROSE + " " + marker) in text
    np.testing.assert_array_equal(tokens, tokenizer.encode(text))
    placed = seeing.place(messages, [])
    assert placed.text == text and (placed.patch == -1).all()
    np.testing.assert_array_equal(placed.tokens, tokens)


def test_a_prompt_of_text_has_its_images_at_the_marks():
    layout = PlainLayout()
    seeing = SeeingTokenizer(tokenizer_of(), layout)
    placed = seeing.place("a<image>b", sizes_of(layout, (8, 8)))
    assert placed.tokens.tolist() == [ord("a"), START, PLACEHOLDER, END, ord("b")]
    assert placed.patch.tolist() == [-1, -1, 0, -1, -1]
    assert seeing.place("a<image>b", []).tokens.tolist() == list(b"a<image>b")


@pytest.mark.parametrize(("template", "marker"), MARKERS)
def test_an_answer_is_that_of_the_same_prompt_without_images(template, marker):
    tokenizer = tokenizer_of(template)
    seeing = SeeingTokenizer(tokenizer, PlainLayout(marker=marker))
    answer = seeing.encode_answer([{"role": "user", "content": QUESTION}], "no")
    plain = tokenizer.encode_answer([{"role": "user", "content": "?"}], "no")
    np.testing.assert_array_equal(answer, plain)
    assert text_of(tokenizer, answer).startswith("no<|im_end|>")


def test_private_characters_in_the_prose_stay():
    layout = PlainLayout()
    seeing = SeeingTokenizer(tokenizer_of(), layout)
    prose = "\ue0b5\ue0b6\ue0b7 \ue0b5\ue0b7"
    content = [{"type": "text", "text": prose}, {"type": "image"}]
    placed = seeing.place([{"role": "user", "content": content}], sizes_of(layout, (8, 8)))
    assert f"{prose}<image>" in placed.text and len(placed.spans) == 1


def test_a_template_that_loses_an_image_is_refused():
    lossy = BOTH.replace("{% if part.type == 'image' %}", "{% if part.type == 'image' and one %}")
    seeing = SeeingTokenizer(tokenizer_of(BOTH), PlainLayout(marker=MARKERS[2][1]))
    seeing.text = tokenizer_of(lossy)
    messages = [{"role": "user", "content": QUESTION}]
    with pytest.raises(ValueError, match="0 places for 2 images: the chat template"):
        seeing.place(messages, sizes_of(PlainLayout(), (8, 8), (8, 8)))


def test_the_end_of_a_prompt_has_whole_images():
    layout = PlainLayout()
    seeing = SeeingTokenizer(tokenizer_of(), layout)
    placed = seeing.place("ab<image>cd<image>ef", sizes_of(layout, (8, 16), (8, 8)))
    assert len(placed.tokens) == 13
    whole, cut = placed.last(13)
    assert cut == 0 and whole.tokens is not placed and len(whole.tokens) == 13
    for most, left, tokens in (
        (12, 0, 12),
        (11, 0, 11),
        (10, 1, 7),
        (7, 1, 7),
        (4, 2, 2),
        (1, 2, 1),
    ):
        end, cut = placed.last(most)
        assert (cut, len(end.tokens)) == (left, tokens)
        np.testing.assert_array_equal(end.tokens, placed.tokens[-tokens:])
        shown = end.patch[end.patch >= 0]
        np.testing.assert_array_equal(shown, np.arange({0: 3, 1: 1, 2: 0}[left]))
        assert len(end.spans) == 2 - left
        for start, stop in end.spans:
            assert end.tokens[start] == START and end.tokens[stop - 1] == END


def test_an_image_is_cut_once_and_shrunk_to_its_limit():
    pixels = np.arange(24 * 40 * 3, dtype=np.uint32).reshape(24, 40, 3).astype(np.uint8)
    source = DrawnPicture("task, image 1", 24, 40, lambda: pixels)
    image = read_image(source, PlainLayout(most=16))
    assert image.digest == image_of(pixels).digest and not image.shrunk
    assert image.patches.features == 15 and image.patches.grid == (3, 5)
    np.testing.assert_array_equal(image.patches.patches[0], pixels[:8, :8].ravel())
    assert with_patches(image, PlainLayout(most=4)) is image
    small = read_image(source, PlainLayout(most=6))
    assert small.shrunk and small.patches.features == 3 and small.digest == image.digest
    wide = DrawnPicture("task, image 1", 2, 200, lambda: pixels)
    with pytest.raises(ValueError, match="^task, image 1: has 200 x 2 pixels, too wide"):
        size_in_layout(wide, PlainLayout())

    class Wrong(PlainLayout):
        def size(self, height, width):
            return ImageSize(8, 8, (-1,) * 99)

    with pytest.raises(ValueError, match="cut 15 features and had announced 99"):
        read_image(source, Wrong())


def test_previews_of_one_prompt_are_together_no_larger_than_one():
    pixels = np.zeros((300, 300, 3), np.uint8)
    source = DrawnPicture("task, image 1", 300, 300, lambda: pixels)
    one, none, seven = read_images([[source], [], [source] * 7], PlainLayout(most=16))
    assert none == () and len(seven) == 7
    assert one[0].pixels.shape == (PREVIEW, PREVIEW, 3)
    assert 0.9 * one[0].pixels.size < sum(x.pixels.size for x in seven) <= one[0].pixels.size


def test_lines_around_images_are_tokenized_with_those_of_the_text():
    """As Gemma 3's processor does, which writes them into the text: runs of lines are tokens."""
    tokenizer = tokenizer_of(LISTS_ONLY.replace("role'] }}: ", "role'] }}\n"))
    runs = [tokenizers.AddedToken("\n" * count, normalized=False) for count in (4, 3, 2)]
    tokenizer.backend.add_tokens(runs)
    layout = PlainLayout(marker="<image>", around="\n\n")
    parts = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Hi"}]
    sight = SeeingTokenizer(tokenizer, layout)
    placed = sight.place([{"role": "user", "content": parts}], sizes_of(layout, (8, 8), (8, 8)))
    whole = "user\n\n\n@\n\n\n\n@\n\nHi<|im_end|>\nassistant: "
    at = tokenizer.encode("@")[0]
    found = [at if token == PLACEHOLDER else token for token in placed.tokens.tolist()]
    found = [token for token in found if token not in (START, END)]
    assert found == tokenizer.encode(whole).tolist()
    assert [placed.tokens[a] for a, _ in placed.spans] == [START, START]
