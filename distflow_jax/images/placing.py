"""Prompts with images -> tokens, and the place of every feature.

An image's place is known before there is any token: it is a part of a message, or a mark that the
data set counted. A placeholder that stands in prose is tokenized as the text that it is.
"""

import concurrent.futures
import copy
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from distflow_jax.images.picture_files import PREVIEW, ImageSource, preview
from distflow_jax.images.record import MARK, Image, ImageLayout, ImageSize, image_of

# a conversation of which a chat template can render the next turn
ANSWER = "zqanswerqz"  # a word that no template writes
ANSWERED = ({"role": "user", "content": "."}, {"role": "assistant", "content": ANSWER})
_MOST_WORKERS = 8  # each holds one decoded image

# text, or messages whose content is text or a list of parts {"type": "text" | "image"}
Prompted = str | Sequence[Mapping[str, Any]]


class TextTokenizer(Protocol):
    """The parts of a tokenizer that placing images and reading rows use."""

    origin: str  # the file or folder of its chat template
    fingerprint: str  # of what ids depend on

    def render(self, prompt: Any) -> str:
        """The model's input text."""

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, int32 [T]."""

    def count(self, text: str, enough: int) -> int:
        """Tokens of a text, or a bound of them that is at most `enough`."""

    def plain(self, text: str) -> str:
        """A text of others, of which `encode` makes no control token."""

    def encode_prompt(self, prompt: Any) -> tuple[str, np.ndarray]:
        """Text as the model sees it, and its tokens, int32 [P]."""

    def encode_answer(self, prompt: Any, answer: Any) -> np.ndarray:
        """Tokens of an answer with the end of its turn, int32 [T]."""

    def encode_generated(self, prompt: Any) -> tuple[str, np.ndarray, np.ndarray]:
        """Text before the assistant's first, tokens int32 [T], and which are its, bool [T]."""

    def encode_behind_answer(self, whole: str, role: str) -> np.ndarray:
        """Tokens of a rendered turn that follows the end of an answer, int32 [T]."""


@dataclasses.dataclass(frozen=True, eq=False)
class Placed:
    """A prompt's tokens with those of its images. P tokens.

    `spans` are the first and the last + 1 token of every image, its row or tile tokens included.
    """

    text: str
    tokens: np.ndarray  # int32 [P]
    patch: np.ndarray  # int32 [P]: number of the feature that stands there, -1 for text
    spans: tuple[tuple[int, int], ...]

    @property
    def image_tokens(self) -> int:
        """Tokens of all images."""
        return sum(end - start for start, end in self.spans)

    def last(self, most: int) -> "tuple[Placed, int]":
        """(the last `most` tokens at most, number of images that are left out).

        An image is left out whole: the prompt then begins after it.
        """
        start = max(0, len(self.tokens) - most)
        cut = sum(first < start for first, _ in self.spans)
        if cut:
            start = max(start, self.spans[cut - 1][1])
        features = sum(int((self.patch[a:b] >= 0).sum()) for a, b in self.spans[:cut])
        patch = self.patch[start:]
        kept = Placed(
            self.text,
            self.tokens[start:],
            np.where(patch >= 0, patch - features, -1).astype(np.int32),
            tuple((a - start, b - start) for a, b in self.spans[cut:]),
        )
        return kept, cut


class SeeingTokenizer:
    """A tokenizer, `text`, beside the layout of the images of its model."""

    def __init__(self, tokenizer: TextTokenizer, layout: ImageLayout):
        self.layout, self.text = layout, tokenizer
        self._writes_parts = _writes_parts(tokenizer, layout.marker)

    def encode_answer(self, prompt: Prompted, answer: Any) -> np.ndarray:
        """Ids of an answer with the end of its turn, int32 [T]; the prompt may have images."""
        if not isinstance(prompt, str) and not self._writes_parts:
            prompt = _as_text(prompt, MARK)
        return self.text.encode_answer(prompt, answer)

    def place(self, prompt: Prompted, sizes: Sequence[ImageSize]) -> Placed:
        """The tokens of a prompt with one image of each size, in the order of their places.

        In a prompt that is text every `<image>` is a place; in messages the parts of type image
        are. Raises ValueError if there are more or fewer places than images.
        """
        pieces = self._pieces(prompt, len(sizes))
        self._check(pieces, sizes)
        return self._placed(pieces, self.text.encode(pieces[0]), sizes)

    def place_turn(self, text: str, sizes: Sequence[ImageSize], role: str) -> Placed:
        """The tokens of a turn of `role` behind the model's own, with images at its `<image>`.

        They follow the end token that the model sampled. Raises ValueError as `place` does, and if
        the chat template cannot render such a turn.
        """
        parts: list[dict[str, str]] = []
        for number, piece in enumerate(text.split(MARK)):
            parts += [{"type": "image"}] if number else []
            parts += [{"type": "text", "text": piece}] if piece else []
        turn = [*(dict(message) for message in ANSWERED), {"role": role, "content": parts}]
        pieces = self._pieces(turn, len(sizes))
        self._check(pieces, sizes)
        return self._placed(pieces, self.text.encode_behind_answer(pieces[0], role), sizes)

    def _placed(
        self, pieces: Sequence[str], first: np.ndarray, sizes: Sequence[ImageSize]
    ) -> Placed:
        """The tokens of pieces of text with images between them; `first` int32 [T] of the first
        piece."""
        tokens: list[np.ndarray] = [first]
        patch = [np.full(len(tokens[0]), -1, np.int32)]
        spans, start, features = [], len(tokens[0]), 0
        for size, piece in zip(sizes, pieces[1:], strict=True):
            ids = np.array(size.tokens, np.int32)
            here = ids < 0
            numbers = features + np.cumsum(here, dtype=np.int32) - 1
            spans.append((start, start + len(ids)))
            text = self.text.encode(piece)
            tokens += [np.where(here, self.layout.placeholder, ids), text]
            patch += [np.where(here, numbers, -1), np.full(len(text), -1)]
            start += len(ids) + len(text)
            features += size.features
        return Placed(
            (self.layout.marker or MARK).join(pieces),
            np.concatenate(tokens).astype(np.int32),
            np.concatenate(patch).astype(np.int32),
            tuple(spans),
        )

    def _check(self, pieces: Sequence[str], sizes: Sequence[ImageSize]) -> None:
        if len(pieces) != len(sizes) + 1:
            raise ValueError(
                f"{len(pieces) - 1} places for {len(sizes)} images: the chat template writes an "
                "image's marker by itself, or leaves an image out"
            )

    def _pieces(self, prompt: Prompted, images: int) -> list[str]:
        """The text before, between and after the images."""
        first, *others = self._rendered(prompt, images)
        around = self.layout.around
        pieces = [first, *(around + piece for piece in others)]
        return [*(piece + around for piece in pieces[:-1]), pieces[-1]]

    def _rendered(self, prompt: Prompted, images: int) -> list[str]:
        """The rendered text before, between and after the images."""
        if isinstance(prompt, str):
            return prompt.split(MARK) if images else [prompt]
        if not self._writes_parts:
            mark = _unused(prompt)
            return self.text.render(_as_text(prompt, mark)).split(mark)
        # a marker that the prose spells is hidden while the template writes those of the images
        marker, hidden = self.layout.marker, _unused(prompt)
        text = self.text.render(_hide(prompt, marker, hidden))
        return [piece.replace(hidden, marker) for piece in text.split(marker)]


def size_in_layout(source: ImageSource, layout: ImageLayout) -> ImageSize:
    """The size at which a family sees an image that is not decoded. Raises ValueError."""
    return _named(source.place, layout, *source.size())


def read_image(source: ImageSource, layout: ImageLayout, images: int = 1) -> Image:
    """Decodes an image and cuts it into its family's patches. Raises ValueError.

    `images`: those of its prompt, whose previews together are no larger than one alone.
    """
    image = image_of(source.pixels())
    size = _named(source.place, layout, *image.pixels.shape[:2])
    return with_patches(image, layout, size, images)


def read_images(
    prompts: Sequence[Sequence[ImageSource]], layout: ImageLayout
) -> list[tuple[Image, ...]]:
    """`read_image` of the images of prompts, several at a time: Pillow works without Python's
    lock."""
    read = functools.partial(read_image, layout=layout)
    work = [(source, len(sources)) for sources in prompts for source in sources]
    workers = min(len(work), os.cpu_count() or 1, _MOST_WORKERS)
    if workers < 2:
        images = [read(source, images=number) for source, number in work]
    else:
        with concurrent.futures.ThreadPoolExecutor(workers, "images") as pool:
            images = list(pool.map(lambda one: read(one[0], images=one[1]), work))
    found = iter(images)
    return [tuple(itertools.islice(found, len(sources))) for sources in prompts]


def with_patches(
    image: Image, layout: ImageLayout, size: ImageSize | None = None, images: int = 1
) -> Image:
    """An image with its patches, which are cut once; the pixels become a preview. `images` as of
    read_image."""
    if image.patches is not None:
        return image
    size = size or layout.size(*image.pixels.shape[:2])
    patches = layout.cut(image)
    if patches.features != size.features:
        raise ValueError(
            f"the layout cut {patches.features} features and had announced {size.features}"
        )
    small = preview(image.pixels, math.isqrt(PREVIEW**2 // images))
    return Image(small, image.digest, patches, size.shrunk)


def _named(place: str, layout: ImageLayout, height: int, width: int) -> ImageSize:
    try:
        return layout.size(height, width)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _writes_parts(tokenizer: TextTokenizer, marker: str) -> bool:
    """Whether the chat template writes the marker for a part of type image."""
    if not marker:
        return False
    parts = [{"type": "image"}, {"type": "text", "text": "."}]
    try:
        return tokenizer.render([{"role": "user", "content": parts}]).count(marker) == 1
    except ValueError:  # no template, or one that takes text alone
        return False


def _texts(prompt: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    for message in prompt:
        content = message.get("content") or ""  # a call of tools may have none
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content if part["type"] == "text")


def _unused(prompt: Iterable[Mapping[str, Any]]) -> str:
    """A text of private characters that no message contains."""
    texts, mark = list(_texts(prompt)), "\ue0b5"
    while any(mark in text for text in texts):
        mark += "\ue0b6"
    return mark + "\ue0b7"


def _as_text(prompt: Iterable[Mapping[str, Any]], mark: str) -> list[dict[str, Any]]:
    """Messages whose content is text, with `mark` where an image stands."""
    return _with_contents(
        prompt,
        lambda parts: "".join(part["text"] if part["type"] == "text" else mark for part in parts),
    )


def _hide(prompt: Iterable[Mapping[str, Any]], marker: str, hidden: str) -> list[dict[str, Any]]:
    """Messages with `hidden` for every `marker` of their texts."""

    def parts(content: Any) -> Any:
        return [
            {**part, "text": part["text"].replace(marker, hidden)}
            if part["type"] == "text"
            else part
            for part in content
        ]

    return _with_contents(prompt, parts, lambda text: text.replace(marker, hidden))


def _with_contents(
    prompt: Iterable[Mapping[str, Any]],
    of_parts: Callable[[Any], Any],
    of_text: Callable[[str], str] = str,
) -> list[dict[str, Any]]:
    """A prompt with other contents, and the same variables of its template."""
    found = copy.copy(prompt) if isinstance(prompt, list) else list(prompt)
    for i, message in enumerate(found):
        if (content := message.get("content")) is not None:
            change = of_text if isinstance(content, str) else of_parts
            found[i] = {**message, "content": change(content)}
    return found
