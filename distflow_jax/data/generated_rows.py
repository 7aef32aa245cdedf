"""The common part of generated tasks: a row is a function of (options, row) alone."""

import dataclasses
import functools
import hashlib
import re
from typing import Any

from distflow_jax.data.example import Example, instruction

ONE_IN = 10  # one in so many problems belongs to the held-out split


class GeneratedRows:
    """Base of a frozen dataclass whose fields are the options of a task, with `size`, `held_out`,
    `system_prompt` and `prompt_suffix` among them.

    A subclass has a KIND, `_row`, and a VERSION that changes when equal options give other rows.
    """

    KIND, VERSION = "", "1"
    first_image_row = None

    @property
    def name(self) -> str:
        """Name of the data in messages."""
        return f"task:{self.KIND}"

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of all options: the rows are a function of them."""
        content = f"{self.KIND} {self.VERSION} {dataclasses.astuple(self)}{self._depends_on()}"
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> Example:
        if not 0 <= row < self.size:
            raise IndexError(f"row {row} of {self.size}")
        return self._row(row)

    def place(self, row: int) -> str:
        """Name and number of a row."""
        return f"{self.name}, row {row + 1}"

    def _row(self, row: int) -> Example:
        raise AssertionError(f"{type(self).__name__} has no rows")

    def _depends_on(self) -> str:
        """Text of what rows depend on beside the options."""
        return ""

    def _has(self, problem: str) -> bool:
        """Whether a problem belongs to the split of these rows."""
        return is_held_out(problem) == self.held_out

    def _range(self, option: str) -> tuple[int, int]:
        """(2, 2) of an option "2", (1, 3) of "1-3", (0, 0) of text of another form."""
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", getattr(self, option))
        return (int(match[1]), int(match[2] or match[1])) if match else (0, 0)

    def _prompt(self, question: str) -> list[Any]:
        """The messages of a question."""
        return instruction(
            question, system_prompt=self.system_prompt, prompt_suffix=self.prompt_suffix
        )


def is_held_out(problem: str) -> bool:
    """Whether a problem belongs to the held-out split: one in ten, by a hash of its text."""
    digest = hashlib.sha256(problem.encode()).digest()
    return int.from_bytes(digest[:8], "little") % ONE_IN == 0
