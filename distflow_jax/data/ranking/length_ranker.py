"""Expected response lengths of rows that were never answered, by ridge regression.

The logarithm of a row's mean length is linear in the length of its prompt, its data source, and the
mean of the answered rows next to it in the file: neighbours are often of one kind. It is fitted
anew from what has ended. A pure function of the history, in float64 and rounded, so that all
processes have the same numbers.
"""

from collections.abc import Sequence

import numpy as np

from distflow_jax.data.example import Dataset, Message

NEIGHBOURS = 2  # answered rows on either side
PENALTY = 4.0  # of a standardized coefficient, in rows
LEAST = 16  # answered rows without which all others get the mean
DIGITS = 4  # of an expected length: the last bits of a sum may differ between machines


class LengthRanker:
    """Ranks the rows of one data set."""

    def __init__(self, prompts: Sequence[int], sources: Sequence[str]):
        """`prompts`: length of each row's prompt, in characters; `sources`: the data source of each
        row."""
        length = np.asarray(prompts, np.float64)
        names = sorted(set(sources))
        place = {name: i for i, name in enumerate(names)}
        source = np.zeros((len(length), max(len(names) - 1, 0)))
        for row, name in enumerate(sources):
            if place[name]:
                source[row, place[name] - 1] = 1.0
        self._own = np.column_stack([np.log1p(length), length / 1000.0, source])

    @classmethod
    def of(cls, dataset: Dataset) -> "LengthRanker":
        """The ranker of a data set, of which it reads all rows once."""
        examples = [dataset[row] for row in range(len(dataset))]
        return cls([_characters(e.prompt) for e in examples], [e.data_source for e in examples])

    def expected(self, lengths: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Expected tokens of some rows, float64 [n], as if they had never been answered.

        `lengths`: mean tokens of each row of the data set, [N]; 0: never answered. `rows`: int [n].
        """
        answered = np.flatnonzero(lengths > 0)
        if not len(answered):
            return np.ones(len(rows))
        logs = np.log(lengths[answered].astype(np.float64))
        if len(answered) < LEAST:
            return np.full(len(rows), _rounded(np.exp(logs.mean())))
        known = np.column_stack([self._own[answered], _beside(answered, logs, answered)])
        asked = np.column_stack([self._own[rows], _beside(answered, logs, np.asarray(rows))])
        mean, spread = known.mean(0), known.std(0)
        scale = np.where(spread > 1e-9, spread, np.inf)  # what never differs says nothing
        known, asked = (known - mean) / scale, (asked - mean) / scale
        squares = known.T @ known + PENALTY * np.eye(known.shape[1])
        weights = np.linalg.solve(squares, known.T @ (logs - logs.mean()))
        found = np.clip(logs.mean() + asked @ weights, logs.min(), logs.max())
        return _rounded(np.exp(found))


def _characters(prompt: str | list[Message]) -> int:
    """Length of a prompt's text."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(str(message.get("content", ""))) for message in prompt)


def _beside(answered: np.ndarray, logs: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Mean logarithm of the answered rows next to each of `rows` [n], itself apart, float64 [n].

    `answered`: rows in order, [m]; `logs`: of their lengths, [m].
    """
    first = np.searchsorted(answered, rows, "left")
    after = np.searchsorted(answered, rows, "right")  # behind the row itself, if it was answered
    steps = np.arange(NEIGHBOURS)
    places = np.column_stack([first[:, None] - 1 - steps, after[:, None] + steps])
    there = (places >= 0) & (places < len(answered))
    values = np.where(there, logs[np.clip(places, 0, len(answered) - 1)], 0.0)
    count = there.sum(1)
    return np.where(count, values.sum(1) / np.maximum(count, 1), logs.mean())


def _rounded(values: np.ndarray) -> np.ndarray:
    """Positive numbers [n] with so many digits."""
    scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(values)))
    return np.round(values * scale) / scale
