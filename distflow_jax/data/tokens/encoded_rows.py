"""Rows of a data set as tokens: prompts with the places of their images, and answers."""

import contextlib
import copy
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from distflow_jax.data.example import Dataset, Example, Message
from distflow_jax.did_you_mean import nearest
from distflow_jax.images.placing import Placed, SeeingTokenizer, size_in_layout

TRAIN_ON = ("answer", "generation")


class PromptEncoder(Protocol):
    """The methods of a tokenizer that the loader calls."""

    @property
    def origin(self) -> str:
        """The file or folder of its chat template, for messages."""

    def render(self, prompt: str | list[Message]) -> str:
        """Text as the model sees it. Raises ValueError if the chat template loses a part of it."""

    def count(self, text: str, enough: int) -> int:
        """Tokens of a text, or a bound of them that is at most `enough`."""

    def encode_prompt(self, prompt: str | list[Message]) -> tuple[str, np.ndarray]:
        """Text as the model sees it, and its tokens, int32 [P]."""

    def encode_answer(self, prompt: str | list[Message], answer: str | list[Message]) -> np.ndarray:
        """Tokens of an answer with the end of its turn, int32 [T]."""

    def encode_generated(self, prompt: list[Message]) -> tuple[str, np.ndarray, np.ndarray]:
        """Text before the first text of the assistant's, tokens int32 [T], and whether each is of
        the assistant's, bool [T]."""


class RowLengths(NamedTuple):
    """Tokens of a row."""

    prompt: int
    images: int  # of the prompt's
    answer: int  # of the longest answer that is read


class RowTokens(NamedTuple):
    """A row without images."""

    text: str
    prompt: np.ndarray  # int32 [P]
    answers: tuple[np.ndarray, ...]  # int32 [T] each
    masks: tuple[np.ndarray, ...]  # bool [T] each; (): all tokens of the answers are learned


class EncodedRows:
    """A data set as a model reads it. ValueErrors name file and row.

    `answers`: answers read from each row (1: `chosen`; 2: `rejected` too). `train_on`: of
    demonstrations the `answer`, or what the template marks as `generation` (one of TRAIN_ON).
    """

    def __init__(
        self, dataset: Dataset, tokenizer: PromptEncoder, answers: int, train_on: str = "answer"
    ):
        self.dataset, self.num_answers = dataset, answers
        self._tokenizer, self._generation = tokenizer, bool(answers) and train_on == "generation"
        self._text = tokenizer.text if isinstance(tokenizer, SeeingTokenizer) else tokenizer

    def tokens(self, row: int) -> RowTokens:
        """The tokens of a row without images."""
        example = self.dataset[row]
        if self._generation:
            return self._generated(row, example)
        with self._named(row, example):
            text, prompt = self._text.encode_prompt(example.prompt)
        return RowTokens(text, prompt, self.answers(row), ())

    def place(self, row: int) -> Placed:
        """The tokens of a prompt with images. Raises ValueError for a model without a tower."""
        example, tokenizer = self.dataset[row], self._seeing(row)
        sizes = [size_in_layout(source, tokenizer.layout) for source in example.images]
        with self._named(row, example):
            return tokenizer.place(example.prompt, sizes)

    def answers(self, row: int) -> tuple[np.ndarray, ...]:
        """Tokens of the row's answers: none, the better one, or the better and the worse one."""
        if not self.num_answers:
            return ()
        example = self.dataset[row]
        with self._named(row, example):
            return tuple(
                np.asarray(self._tokenizer.encode_answer(example.prompt, answer))
                for answer in self._given(row, example)
            )

    def check(self, row: int) -> None:
        """Raises ValueError for a row that the chat template does not write in full."""
        example = self.dataset[row]
        if self.num_answers or example.images:
            self.lengths(row)
        else:
            with self._named(row, example):
                self._text.render(example.prompt)

    def lengths(self, row: int, enough: int = 0) -> RowLengths:
        """Tokens of a row, whose prompt is encoded if it may have more than `enough`."""
        example = self.dataset[row]
        if self._generation:
            found = self._generated(row, example)
            return RowLengths(len(found.prompt), 0, len(found.answers[0]))
        answer = max((len(a) for a in self.answers(row)), default=0)
        if example.images:
            placed = self.place(row)
            return RowLengths(len(placed.tokens), placed.image_tokens, answer)
        with self._named(row, example):
            text = self._text.render(example.prompt)
            return RowLengths(self._text.count(text, enough), 0, answer)

    def _given(self, row: int, example: Example) -> list[str | list[Message]]:
        """The answers of a row."""
        named = {"chosen": example.chosen, "rejected": example.rejected}
        given = []
        for column, answer in list(named.items())[: self.num_answers]:
            if answer is None:
                near = nearest(column, example.extra_info)
                raise ValueError(
                    f"has no {column!r} answer, which this dag trains on; give rows with prompt "
                    "and completion or messages (one answer), or with prompt, chosen and rejected "
                    "(a pair)"
                    + (f"; did you mean data.columns={{{column!r}: {near!r}}}?" if near else "")
                )
            given.append(answer)
        return given

    def _generated(self, row: int, example: Example) -> RowTokens:
        """A demonstration from the first token that its template marks to the last."""
        with self._named(row, example):
            if isinstance(example.prompt, str) or example.images:
                raise ValueError(
                    "data.train_on=generation needs messages without images: use data.train_on="
                    "answer for this row's"
                )
            whole, last = copy.copy(example.prompt), example.chosen
            if last is not None:
                turn = {"role": "assistant", "content": last} if isinstance(last, str) else last[0]
                whole.append(turn)
            text, ids, mask = self._text.encode_generated(whole)
        marked = np.flatnonzero(mask)
        first, end = marked[0], marked[-1] + 1
        return RowTokens(text, ids[:first], (ids[first:end],), (mask[first:end],))

    @contextlib.contextmanager
    def _named(self, row: int, example: Example) -> Iterator[None]:
        """Puts file and row before the message of an error."""
        try:
            yield
        except ValueError as error:
            problem = f"{self.dataset.place(row)}: {error}"
            if "chat template" in str(error):
                problem += f" (chat template of {self._text.origin})"
                if not isinstance(example.prompt, str) and example.prompt[0]["role"] == "system":
                    problem += "; data.system_prompt adds the system message of a question"
            raise ValueError(problem) from None

    def _seeing(self, row: int) -> SeeingTokenizer:
        if isinstance(self._tokenizer, SeeingTokenizer):
            return self._tokenizer
        raise ValueError(
            f"{self.dataset.place(row)}: has images, and the model has no vision tower: choose a "
            "model.source that sees images, or rows without them"
        )
