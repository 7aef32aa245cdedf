"""Rows of a data set as tokens: prompts with the places of their images, and answers."""

from typing import NamedTuple, Protocol

import numpy as np

from distflow_jax.data.example import Dataset, Message
from distflow_jax.did_you_mean import nearest
from distflow_jax.images.placing import Placed, SeeingTokenizer, size_in_layout


class PromptEncoder(Protocol):
    """The methods of a tokenizer that the loader calls."""

    def encode_prompt(self, prompt: str | list[Message]) -> tuple[str, np.ndarray]:
        """Text as the model sees it, and its tokens, int32 [P]."""

    def encode_answer(self, prompt: str | list[Message], answer: str | list[Message]) -> np.ndarray:
        """Tokens of an answer with the end of its turn, int32 [T]."""


class RowLengths(NamedTuple):
    """Tokens of a row."""

    prompt: int
    images: int  # of the prompt's
    answer: int  # of the longest answer that is read


class EncodedRows:
    """A data set as a model reads it. ValueErrors name file and row.

    `answers`: answers read from each row (1: `chosen`; 2: `rejected` too).
    """

    def __init__(self, dataset: Dataset, tokenizer: PromptEncoder, answers: int):
        self.dataset, self.num_answers = dataset, answers
        self._tokenizer = tokenizer

    def place(self, row: int) -> Placed:
        """The tokens of a prompt with images. Raises ValueError for a model without a tower."""
        example, tokenizer = self.dataset[row], self._seeing(row)
        sizes = [size_in_layout(source, tokenizer.layout) for source in example.images]
        try:
            return tokenizer.place(example.prompt, sizes)
        except ValueError as error:
            raise ValueError(f"{self.dataset.place(row)}: {error}") from None

    def answers(self, row: int) -> list[np.ndarray]:
        """Tokens of the row's answers: none, the better one, or the better and the worse one."""
        if not self.num_answers:
            return []
        example = self.dataset[row]
        named = {"chosen": example.chosen, "rejected": example.rejected}
        encoded = []
        for column, answer in list(named.items())[: self.num_answers]:
            if answer is None:
                near = nearest(column, example.extra_info)
                raise ValueError(
                    f"{self.dataset.place(row)}: has no {column!r} answer, which this dag trains "
                    "on; give rows with prompt and completion or messages (one answer), or with "
                    "prompt, chosen and rejected (a pair)"
                    + (f"; did you mean data.columns={{{column!r}: {near!r}}}?" if near else "")
                )
            encoded.append(np.asarray(self._tokenizer.encode_answer(example.prompt, answer)))
        return encoded

    def lengths(self, row: int) -> RowLengths:
        """Tokens of a row, which is encoded for that."""
        example = self.dataset[row]
        answer = max((len(a) for a in self.answers(row)), default=0)
        if example.images:
            placed = self.place(row)
            return RowLengths(len(placed.tokens), placed.image_tokens, answer)
        return RowLengths(len(self._tokenizer.encode_prompt(example.prompt)[1]), 0, answer)

    def _seeing(self, row: int) -> SeeingTokenizer:
        if isinstance(self._tokenizer, SeeingTokenizer):
            return self._tokenizer
        raise ValueError(
            f"{self.dataset.place(row)}: has images, and the model has no vision tower: choose a "
            "model.source that sees images, or rows without them"
        )
