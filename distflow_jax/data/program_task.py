"""`task:programs`: functions or programs to write, with hidden cases that verify them."""

import dataclasses
import hashlib
import re
from typing import Any

from distflow_jax.data.drawn.drawn_task import is_held_out
from distflow_jax.data.drawn.hash_stream import HashStream
from distflow_jax.data.example import Example, instruction
from distflow_jax.data.operations import MOST_DRAWS, STARTS, Composition
from distflow_jax.parsing.checked_fields import at_least, one_of
from distflow_jax.parsing.setting_checks import Section, setting

_AFTER = {"calls": "", "asserts": "", "stdin": ")"}  # a program's expression, by form


@dataclasses.dataclass(frozen=True)
class Programs(Section, name="task:programs "):
    """Problems such as "reverses it, then makes it upper case". A row is a function of (options,
    row) alone.

    The ground truth is what the reward `code` takes; `extra_info["reference"]` is a program that
    is right. A hash of the operations decides a problem's split: for all seeds, sizes and forms, a
    held-out composition never occurs in training data. Problems are drawn with replacement.
    """

    operations: str = "2-3"  # composed in a problem, a number or a range
    kinds: str = "+".join(STARTS)  # of what a program gets
    form: str = setting("calls", one_of(_AFTER))  # of the cases: the program defines f, or prints
    cases: int = setting(6, at_least(3))  # hidden cases of a problem
    shown: int = setting(1, at_least(0))  # examples in the question, beside the hidden cases
    begin: bool = False  # the prompt ends with the program up to its expression
    hints: bool = False  # the expression of each operation in the question, for small models
    size: int = setting(10_000, at_least(1))  # rows
    seed: int = 0
    held_out: bool = False  # the held-out split instead of the training split
    system_prompt: str = ""
    prompt_suffix: str = ""

    def __post_init__(self):
        super().__post_init__()
        unknown = set(self.kinds.split("+")) - STARTS.keys()
        if unknown:
            raise ValueError(
                f"task:programs kinds must be some of {'+'.join(STARTS)}, got {self.kinds!r}"
            )
        self._bounds()
        self._problem(0)

    @property
    def name(self) -> str:
        """Name of the data in messages."""
        return "task:programs"

    @property
    def first_image_row(self) -> None:
        """No row has an image."""

    @property
    def fingerprint(self) -> str:
        """Hash of all options: the rows are a function of them."""
        return hashlib.sha256(f"programs 1 {dataclasses.astuple(self)}".encode()).hexdigest()[:32]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> Example:
        if not 0 <= row < self.size:
            raise IndexError(f"row {row} of {self.size}")
        composition, inputs, outputs = self._problem(row)
        shown, hidden = slice(0, self.shown), slice(self.shown, None)
        question = _question(composition, inputs[shown], outputs[shown], self.form)
        question += f" Use {composition.hints}." if self.hints else ""
        prompt = instruction(
            question, system_prompt=self.system_prompt, prompt_suffix=self.prompt_suffix
        )
        before = _before(composition, self.form)
        wrong = Composition(composition.start, composition.steps[:-1])
        right, wrong = (f"{before}{c.expression}{_AFTER[self.form]}" for c in (composition, wrong))
        begun = f"```python\n{before.rstrip()}" if self.begin else ""
        if begun:
            prompt.append({"role": "assistant", "content": begun})
        return Example(
            prompt=prompt,
            data_source="programs",
            ground_truth=_truth(composition, inputs[hidden], outputs[hidden], self.form),
            extra_info={"index": row, "operations": len(composition.steps), "reference": right},
            ability="code",
            chosen=f"```python\n{right}\n```".removeprefix(begun),
            rejected=f"```python\n{wrong}\n```".removeprefix(begun),
        )

    def place(self, row: int) -> str:
        """Name and number of a row."""
        return f"{self.name}, row {row + 1}"

    def _problem(self, row: int) -> tuple[Composition, list[Any], list[Any]]:
        """The first problem of this row's stream that belongs to this split, with its cases."""
        low, high = self._bounds()
        for draw in range(MOST_DRAWS):
            stream = HashStream(f"programs/{self.seed}/{row}/{draw}")
            start = stream.pick(STARTS[stream.pick(self.kinds.split("+"))])
            composition = Composition.drawn(stream, start, stream.between(low, high))
            if is_held_out(composition.description) != self.held_out:
                continue
            cases = composition.cases(stream, self.shown + self.cases)
            if cases:
                return composition, *cases
        raise ValueError(
            f"{self.name} has no problem of this split; allow more kinds or operations"
        )

    def _bounds(self) -> tuple[int, int]:
        match = re.fullmatch(r"([0-9])(?:-([0-9]))?", self.operations)
        fewest, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= fewest <= most <= 5:
            raise ValueError(
                "task:programs operations must be like 2 or 1-3, at most 5, got "
                f"{self.operations!r}"
            )
        return fewest, most


def _question(composition: Composition, inputs: list[Any], outputs: list[Any], form: str) -> str:
    start = composition.start
    if form == "stdin":
        shown = [f" For the input {_line(i)} it prints {o}." for i, o in _pairs(inputs, outputs)]
        return (
            f"Write a Python program that reads {start.words} from a line of standard input, "
            f"{composition.words}, and prints the result." + "".join(shown)
        )
    shown = [f" For example, f({i!r}) returns {o!r}." for i, o in _pairs(inputs, outputs)]
    return (
        f"Write a Python function f({start.name}) that takes {start.words}, {composition.words}, "
        "and returns the result." + "".join(shown)
    )


def _truth(composition: Composition, inputs: list[Any], outputs: list[Any], form: str) -> Any:
    if form == "asserts":
        return [f"assert f({i!r}) == {o!r}" for i, o in _pairs(inputs, outputs)]
    if form == "stdin":
        return {"inputs": [f"{_line(i)}\n" for i in inputs], "outputs": [f"{o}\n" for o in outputs]}
    return {"fn_name": "f", "inputs": [[i] for i in inputs], "outputs": outputs}


def _before(composition: Composition, form: str) -> str:
    """A program up to its expression."""
    start = composition.start
    if form == "stdin":
        return f"{start.name} = {start.read}\nprint("
    return f"def f({start.name}):\n    return "


def _line(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _pairs(inputs: list[Any], outputs: list[Any]) -> zip:
    return zip(inputs, outputs, strict=True)
