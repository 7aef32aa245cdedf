"""Texts and images of requests beside the event loop, bounded before they are encoded or decoded.

Images of messages are data URIs alone.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from distflow_jax.images.data_uris import bytes_of_uri
from distflow_jax.images.picture_files import PictureFile
from distflow_jax.images.placing import SeeingTokenizer, read_image, size_in_layout
from distflow_jax.images.record import Image, ImageSize
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.parsing.one_line import shown

READERS = 2  # threads; a text that is not too long takes each of them milliseconds

# of a template that does not take the messages
_TEMPLATE_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError)

T = TypeVar("T")


class ReadPrompt(NamedTuple):
    """A prompt as the model takes it."""

    text: str
    tokens: np.ndarray  # int32 [P]
    images: tuple[Image, ...] = ()
    patch: np.ndarray | None = None  # int32 [P], see batch.Prompt; None without images


class PromptReader:
    """Reads requests in threads of its own, so that a long one stops no other.

    `seeing`: the tokenizer with the layout of images, of a model with a tower.
    """

    def __init__(
        self, tokenizer: Tokenizer, max_prompt: int, seeing: SeeingTokenizer | None = None
    ):
        self._tokenizer, self._max_prompt, self._seeing = tokenizer, max_prompt, seeing
        self.image_bytes = 0 if seeing is None else MAX_URI_BYTES  # of a request
        self.max_text = max_prompt * longest_token(tokenizer)
        self._threads = concurrent.futures.ThreadPoolExecutor(READERS, "read requests")

    async def apart(self, read: Callable[..., T], *arguments: object) -> T:
        """The result of read(*arguments), computed in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, read, *arguments)

    def close(self) -> None:
        """Ends the threads when they have nothing to read."""
        self._threads.shutdown(wait=False)

    def encode(self, text: str) -> np.ndarray:
        """Text -> ids, int32 [T]. ValueError for a text that must have more than `max_prompt`."""
        self.check_length(text)
        # of a batch: the package then lets other threads of Python run meanwhile
        (encoding,) = self._tokenizer.backend.encode_batch([text], add_special_tokens=False)
        return np.array(encoding.ids, np.int32)

    def render(self, prompt: str | list[dict]) -> str:
        """The model's input text, see Tokenizer.render. ValueError if it rejects the messages."""
        if not isinstance(prompt, str):
            self._check_count(prompt)
            for turn in prompt:
                self.check_length(turn["content"])
        try:
            return self._tokenizer.render(prompt)
        except _TEMPLATE_ERRORS as error:
            raise _rejected(error) from error

    def place(
        self,
        messages: list[dict],
        images: Sequence[PictureFile],
        check: Callable[[np.ndarray], None],
    ) -> ReadPrompt:
        """The prompt of messages with images, decoded once `check` takes the ids, int32 [P].

        Raises ValueError for a model without a tower, and for images that it cannot take.
        """
        if self._seeing is None:
            raise ValueError(
                f"{images[0].place} is an image, and the model has no vision tower: send text alone"
            )
        self._check_count(messages)
        parts = [p for m in messages if isinstance(m["content"], list) for p in m["content"]]
        texts = [m["content"] for m in messages if isinstance(m["content"], str)]
        self.check_length("".join(texts + [p["text"] for p in parts if p["type"] == "text"]))
        sizes = sizes_of(images, self._seeing)
        try:
            placed = self._seeing.place(messages, sizes)
        except _TEMPLATE_ERRORS as error:
            raise _rejected(error) from error
        check(placed.tokens)
        return ReadPrompt(placed.text, placed.tokens, read(images, self._seeing), placed.patch)

    def _check_count(self, messages: list[dict]) -> None:
        if len(messages) > self._max_prompt:
            raise ValueError(
                f"{len(messages)} messages have more tokens than the {self._max_prompt} that "
                "this server reads at most"
            )

    def check_length(self, text: str) -> None:
        """Raises ValueError for a text that has more tokens than a prompt, whatever they are."""
        if len(text) > self.max_text:
            raise ValueError(
                f"the prompt has {len(text)} characters; this server reads at most "
                f"{self._max_prompt} tokens, which hold at most {self.max_text} characters"
            )


def _rejected(error: Exception) -> ValueError:
    return ValueError(f"the chat template rejects the messages: {type(error).__name__}: {error}")


def longest_token(tokenizer: Tokenizer) -> int:
    """Characters of the longest token: a text has at least its length / this tokens."""
    return max(map(len, tokenizer.backend.get_vocab(with_added_tokens=True)))


MAX_IMAGES = 16  # of a request
MAX_URI_BYTES = 16 << 20  # of a request's data URIs together
MAX_PIXELS = 16 << 20  # of one image; decoded it takes three bytes each


class ImageMessages(NamedTuple):
    """Messages with bare parts of type image, and the images in their order."""

    messages: list[dict[str, Any]]
    images: tuple[PictureFile, ...]


def take_images(messages: Sequence[Mapping[str, Any]]) -> ImageMessages:
    """Messages whose contents are text, or lists of parts where they have images.

    Raises ValueError for a part that is neither a text nor an image in a data URI, an image of the
    assistant's, and more or longer images than a request may have. No image is decoded.
    """
    plain, uris = [], list[tuple[str, str]]()
    for index, message in enumerate(messages):
        content = message["content"]
        if isinstance(content, list):
            places = [f"message {index}, part {n}" for n in range(len(content))]
            parts = [_part(p, place, uris) for p, place in zip(content, places, strict=True)]
            content = parts
            if all(part["type"] == "text" for part in parts):
                content = "".join(part["text"] for part in parts)
            elif message["role"] == "assistant":
                raise ValueError(
                    f"message {index} of the assistant has an image, and a model writes text "
                    "alone: move the image to a message of the user"
                )
        plain.append({**message, "content": content})
    if len(uris) > MAX_IMAGES:
        raise ValueError(f"{len(uris)} images are too many; give at most {MAX_IMAGES}")
    size = sum(len(uri) for _, uri in uris)
    if size > MAX_URI_BYTES:
        raise ValueError(
            f"the images have {size >> 20} MiB as data URIs; give at most {MAX_URI_BYTES >> 20}, "
            "or smaller images"
        )
    return ImageMessages(plain, tuple(PictureFile(p, bytes_of_uri(uri, p)) for p, uri in uris))


def sizes_of(images: Sequence[PictureFile], seeing: SeeingTokenizer) -> list[ImageSize]:
    """The sizes at which the model sees the images, of their headers. Raises ValueError."""
    for image in images:
        height, width = image.size()
        if height * width > MAX_PIXELS:
            raise ValueError(
                f"{image.place}: the image has {width} x {height} pixels; this server reads at "
                f"most {MAX_PIXELS}: send a smaller one"
            )
    return [size_in_layout(image, seeing.layout) for image in images]


def read(images: Sequence[PictureFile], seeing: SeeingTokenizer) -> tuple[Image, ...]:
    """The images, decoded one by one and cut. Raises ValueError."""
    return tuple(read_image(image, seeing.layout) for image in images)


def _part(part: Any, place: str, uris: list[tuple[str, str]]) -> dict[str, Any]:
    """The plain form of a part; the URI of an image goes to `uris`, with its place."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind != "image_url":
        raise ValueError(
            f'{place} must be {{"type": "text", "text": "..."}} or {{"type": "image_url", '
            f'"image_url": {{"url": "data:image/png;base64,..."}}}}, got {shown(part)}'
        )
    value = part.get("image_url")
    uri = value.get("url") if isinstance(value, dict) else value
    if not isinstance(uri, str) or not uri[:5].lower() == "data:":
        raise ValueError(
            f"{place}: an image must be a data URI like data:image/png;base64,..., since a server "
            f"fetches nothing and opens no file, got {shown(uri)}"
        )
    uris.append((place, uri))
    return {"type": "image"}
