"""A stream of random numbers from a text, equal on every version of Python and NumPy."""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
_BLOCK = 64  # words of one hash


class HashStream:
    """Whole numbers drawn from a key, one after another."""

    def __init__(self, key: str):
        self._key = key
        self._words: list[int] = []
        self._blocks = 0

    def below(self, limit: int) -> int:
        """A number from 0 to limit - 1."""
        if not self._words:
            data = hashlib.shake_256(f"{self._key}/{self._blocks}".encode()).digest(8 * _BLOCK)
            self._words = [
                int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)
            ]
            self._blocks += 1
        return self._words.pop() % limit

    def between(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        return low + self.below(high - low + 1)

    def part(self, low: float, high: float) -> float:
        """A number from low to high in 1,024 steps."""
        return low + (high - low) * self.below(1025) / 1024

    def pick(self, choices: Sequence[T]) -> T:
        """One of the choices."""
        return choices[self.below(len(choices))]

    def several(self, choices: Sequence[T], count: int) -> list[T]:
        """`count` different choices in random order."""
        left = list(choices)
        return [left.pop(self.below(len(left))) for _ in range(count)]
