"""Texts to ids beside the event loop, bounded before they are encoded."""

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from distflow_jax.models.tokenizer import Tokenizer

READERS = 2  # threads; a text that is not too long takes each of them milliseconds

T = TypeVar("T")


class PromptReader:
    """Reads requests in threads of its own, so that a long one stops no other."""

    def __init__(self, tokenizer: Tokenizer, max_prompt: int):
        self._tokenizer, self._max_prompt = tokenizer, max_prompt
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
            if len(prompt) > self._max_prompt:
                raise ValueError(
                    f"{len(prompt)} messages have more tokens than the {self._max_prompt} that "
                    "this server reads at most"
                )
            for turn in prompt:
                self.check_length(turn["content"])
        try:
            return self._tokenizer.render(prompt)
        except (ArithmeticError, AttributeError, LookupError, RecursionError) as error:
            raise ValueError(
                f"the chat template rejects the messages: {type(error).__name__}: {error}"
            ) from error

    def check_length(self, text: str) -> None:
        """Raises ValueError for a text that has more tokens than a prompt, whatever they are."""
        if len(text) > self.max_text:
            raise ValueError(
                f"the prompt has {len(text)} characters; this server reads at most "
                f"{self._max_prompt} tokens, which hold at most {self.max_text} characters"
            )


def longest_token(tokenizer: Tokenizer) -> int:
    """Characters of the longest token: a text has at least its length / this tokens."""
    return max(map(len, tokenizer.backend.get_vocab(with_added_tokens=True)))
