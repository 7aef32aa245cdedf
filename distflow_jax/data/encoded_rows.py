"""Rows of a data set as tokens, and those that are short enough."""

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from distflow_jax.data.example import Dataset, Example, examples
from distflow_jax.data.row_share import RowShare
from distflow_jax.did_you_mean import suggestion
from distflow_jax.images.placing import Placed, SeeingTokenizer, TextTokenizer, size_in_layout

PromptEncoder = TextTokenizer | SeeingTokenizer


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
    masks: tuple[np.ndarray, ...] = ()  # bool [T] each: what is learned; (): all


class EncodedRows:
    """A data set as a model reads it. ValueErrors name file and row.

    `answers`: answers read from each row (1: `chosen`; 2: `rejected` too). `train_on`: of
    demonstrations the `answer`, or what the chat template marks as `generation`.
    """

    def __init__(
        self, dataset: Dataset, tokenizer: PromptEncoder, answers: int, train_on: str = "answer"
    ):
        self.dataset, self.num_answers = dataset, answers
        self._tokenizer, self._generation = tokenizer, bool(answers) and train_on == "generation"
        self._text = tokenizer.text if isinstance(tokenizer, SeeingTokenizer) else tokenizer

    @property
    def fingerprint(self) -> list[Any]:
        """Settings that the tokens of a row depend on, JSON-able."""
        return [self.num_answers, self._generation, self._text.fingerprint]

    def tokens(self, row: int) -> RowTokens:
        """The tokens of a row without images."""
        if self._generation:
            return self._generated(row)
        with self._named(row):
            text, prompt = self._text.encode_prompt(self.dataset[row].prompt)
        return RowTokens(text, prompt, self.answers(row))

    def place(self, row: int) -> Placed:
        """The tokens of a prompt with images. Raises ValueError for a model without a tower."""
        example, tokenizer = self.dataset[row], self._seeing(row)
        sizes = [size_in_layout(source, tokenizer.layout) for source in example.images]
        with self._named(row):
            return tokenizer.place(example.prompt, sizes)

    def answers(self, row: int, example: Example | None = None) -> tuple[np.ndarray, ...]:
        """Tokens of the row's answers: none, the better one, or the better and the worse one."""
        if not self.num_answers:
            return ()
        example = example or self.dataset[row]
        columns = ("chosen", "rejected")[: self.num_answers]
        answers = [getattr(example, column) for column in columns]
        if None not in answers:
            with self._named(row):
                encode = self._tokenizer.encode_answer
                return tuple(np.asarray(encode(example.prompt, answer)) for answer in answers)
        column = columns[answers.index(None)]
        named = f"data.columns={{{column!r}: {{!r}}}}".format
        near = suggestion(column, example.extra_info, named)
        raise ValueError(
            f"{self.dataset.place(row)}: has no {column!r} answer, which this dag trains "
            "on; give rows with prompt and completion or messages (one answer), or with "
            "prompt, chosen and rejected (a pair)" + (f"; {near}" if near else "")
        )

    def lengths(self, row: int, example: Example, enough: int = 0) -> RowLengths:
        """Tokens of a row; of a prompt that has at most `enough` perhaps a bound (see count)."""
        if self._generation:
            found = self._generated(row)
            return RowLengths(len(found.prompt), 0, len(found.answers[0]))
        if example.images:
            placed = self.place(row)
            tokens, of_images = len(placed.tokens), placed.image_tokens
        else:
            with self._named(row):
                tokens = self._text.count(self._text.render(example.prompt), enough)
            of_images = 0
        answer = max((len(a) for a in self.answers(row, example)), default=0)
        return RowLengths(tokens, of_images, answer)

    def _generated(self, row: int) -> RowTokens:
        """A demonstration: its answer goes from the first token that the template marks to the
        last."""
        example = self.dataset[row]
        with self._named(row):
            if isinstance(example.prompt, str) or example.images:
                raise ValueError("data.train_on=generation needs messages, and no images")
            whole, last = copy.copy(example.prompt), example.chosen
            if last is not None:
                whole += [{"role": "assistant", "content": last}] if isinstance(last, str) else last
            text, ids, mask = self._text.encode_generated(whole)
        first, end = np.flatnonzero(mask)[[0, -1]] + [0, 1]
        return RowTokens(text, ids[:first], (ids[first:end],), (mask[first:end],))

    @contextlib.contextmanager
    def _named(self, row: int) -> Iterator[None]:
        """Puts file and row before the message of an error, and names the chat template."""
        try:
            yield
        except ValueError as error:
            line, prompt = f"{self.dataset.place(row)}: {error}", self.dataset[row].prompt
            if "chat template" in line:
                line += f" (template of {self._text.origin})"
                if not isinstance(prompt, str) and prompt[0]["role"] == "system":
                    line += "; data.system_prompt adds a system message to questions"
            raise ValueError(line) from None

    def _seeing(self, row: int) -> SeeingTokenizer:
        if isinstance(self._tokenizer, SeeingTokenizer):
            return self._tokenizer
        raise ValueError(
            f"{self.dataset.place(row)}: has images, and the model has no vision tower: choose a "
            "model.source that sees images, or rows without them"
        )


Found = tuple[np.ndarray, dict[str, int]]  # rows int64 [N], and how many were left out, by reason


@dataclasses.dataclass(frozen=True)
class TokenLimits:
    """Tokens that a row may have, and what becomes of others."""

    prompt: int
    answer: int
    overlong: str  # as data.overlong


def rows_in_limit(encoded: EncodedRows, most: TokenLimits) -> Found:
    """The rows that a run issues, and how many it leaves out for their prompt, images or answer.

    Over the whole data set, of which each process encodes a share: processes that dropped rows
    from shares of their own would run out of prompts at different steps, and wait for each other
    forever. Raises ValueError for an overlong row where none may be, and if no row is left.
    """
    dataset = encoded.dataset
    rows = np.arange(len(dataset), dtype=np.int64)
    if most.overlong == "truncate_left":
        return _rows_cut_left(encoded, rows, most)
    prompts, images, answers = _lengths(encoded, most).T
    limits = (
        ("prompt", prompts, "data.max_prompt_length", most.prompt),
        ("answer", answers, "rollout.max_response_length", most.answer),
    )
    for what, lengths, name, limit in limits[: 2 if encoded.num_answers else 1]:
        overlong = lengths > limit
        if most.overlong == "error" and overlong.any():
            row = int(overlong.argmax())
            of_images, fix = "", ""
            if what == "prompt" and images[row]:
                of_images = f", {images[row]} of them for its images"
                fix = ", lower data.image_tokens"
            raise ValueError(
                f"{dataset.place(row)}: the {what} has {lengths[row]} tokens{of_images}, more "
                f"than {name} {limit} ({overlong.sum()} of {len(dataset)} rows do, the longest "
                f"{lengths.max()}); raise that{fix}, or set data.overlong to drop or "
                "truncate_left"
            )
        if overlong.all():
            raise ValueError(
                f"{dataset.name}: all {len(dataset)} {what}s have more tokens than {name} "
                f"{limit}, the shortest {lengths.min()}"
            )
    by_text = prompts - images > most.prompt
    by_images = ~by_text & (prompts > most.prompt)
    by_answer = ~by_text & ~by_images & (answers > most.answer) & bool(encoded.num_answers)
    reasons = {"prompt": by_text, "images": by_images, "answer": by_answer}
    keep = ~(by_text | by_images | by_answer)
    if not keep.any():
        raise ValueError(f"{dataset.name}: no row has a prompt and answers within the limits")
    return rows[keep], {why: int(which.sum()) for why, which in reasons.items() if which.any()}


def _lengths(encoded: EncodedRows, most: TokenLimits) -> np.ndarray:
    """RowLengths of all rows, int64 [N, 3]."""
    dataset, share = encoded.dataset, getattr(encoded.dataset, "share", None) or RowShare()
    key = None
    if share.keeps and dataset.first_image_row is None:  # else the tower's layout counts too
        key = ["lengths", dataset.fingerprint, encoded.fingerprint, most.prompt]
        if kept := share.known(key):
            return kept["lengths"]
    first, end = share.of(len(dataset))
    found = []
    with share.agreeing():
        for row, example in enumerate(examples(dataset, first, end), first):
            found.append(encoded.lengths(row, example, most.prompt))
    whole = share.whole(np.array(found, np.int64).reshape(-1, 3))
    if key is not None:
        share.keep(key, lengths=whole)
    return whole


def _rows_cut_left(encoded: EncodedRows, rows: np.ndarray, most: TokenLimits) -> Found:
    """The rows of which something is left. A cut leaves out images whole."""
    dataset = encoded.dataset
    empty = np.zeros(len(rows), bool)
    for row in map(int, rows):
        try:
            encoded.lengths(row, dataset[row], sys.maxsize)
        except StopIteration:  # rows that a program puts while the run trains
            break
        if dataset.first_image_row is not None and dataset[row].images:
            empty[row] = not len(encoded.place(row).last(most.prompt)[0].tokens)
    if empty.all():
        raise ValueError(
            f"{dataset.name}: the images of all {len(rows)} prompts have more tokens than "
            f"data.max_prompt_length {most.prompt}, and stand last: raise that, or lower "
            "data.image_tokens"
        )
    return rows[~empty], {"images": int(empty.sum())} if empty.any() else {}
