"""Texts to ids beside the event loop, bounded before they are encoded."""

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from distflow_jax.images.picture_files import PictureFile
from distflow_jax.images.placing import SeeingTokenizer
from distflow_jax.images.record import Image
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.serving.message_images import MAX_URI_BYTES, read, sizes_of

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
