"""`task:programs`: functions or programs to write, with hidden cases that verify them."""

import dataclasses
from typing import Any, NamedTuple

from distflow_jax.data.drawn.hash_stream import HashStream
from distflow_jax.data.example import Example
from distflow_jax.data.generated_rows import GeneratedRows
from distflow_jax.data.operations import MOST_DRAWS, STARTS, Composition
from distflow_jax.parsing.checked_fields import at_least, one_of
from distflow_jax.parsing.setting_checks import Section, setting


class _ProgramForm(NamedTuple):
    """The question, an example, and a program before and after its expression, as templates.

    {start} is a ValueKind, {words} the operations; {i}, {line} and {o} are an input, also as a line
    of text, and its output.
    """

    question: str
    example: str
    before: str
    after: str


_FUNCTION = _ProgramForm(
    "Write a Python function f({start.name}) that takes {start.words}, {words}, and returns the "
    "result.",
    " For example, f({i!r}) returns {o!r}.",
    "def f({start.name}):\n    return ",
    "",
)
_PROGRAM = _ProgramForm(
    "Write a Python program that reads {start.words} from a line of standard input, {words}, and "
    "prints the result.",
    " For the input {line} it prints {o}.",
    "{start.name} = {start.read}\nprint(",
    ")",
)
_FORMS = {"calls": _FUNCTION, "asserts": _FUNCTION, "stdin": _PROGRAM}  # of the cases


@dataclasses.dataclass(frozen=True)
class Programs(GeneratedRows, Section, name="task:programs "):
    """Problems such as "reverses it, then makes it upper case".

    The ground truth is what the reward `code` takes; `extra_info["reference"]` is a program that
    is right. A hash of the operations decides a problem's split: for all seeds, sizes and forms, a
    held-out composition never occurs in training data. Problems are drawn with replacement.
    """

    KIND = "programs"

    operations: str = "2-3"  # composed in a problem, a number or a range
    kinds: str = "+".join(STARTS)  # of what a program gets
    form: str = setting("calls", one_of(_FORMS))  # of the cases: the program defines f, or prints
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

    def _row(self, row: int) -> Example:
        composition, inputs, outputs = self._problem(row)
        form, start = _FORMS[self.form], composition.start
        question = form.question.format(start=start, words=composition.words)
        for i, o in zip(inputs[: self.shown], outputs[: self.shown], strict=True):
            question += form.example.format(i=i, line=_line(i), o=o)
        question += f" Use {composition.hints}." if self.hints else ""
        prompt, before = self._prompt(question), form.before.format(start=start)
        wrong = Composition(start, composition.steps[:-1])
        right, wrong = (f"{before}{c.expression}{form.after}" for c in (composition, wrong))
        begun = f"```python\n{before.rstrip()}" if self.begin else ""
        if begun:
            prompt.append({"role": "assistant", "content": begun})
        return Example(
            prompt=prompt,
            data_source=self.KIND,
            ground_truth=_truth(self.form, inputs[self.shown :], outputs[self.shown :]),
            extra_info={"index": row, "operations": len(composition.steps), "reference": right},
            ability="code",
            chosen=f"```python\n{right}\n```".removeprefix(begun),
            rejected=f"```python\n{wrong}\n```".removeprefix(begun),
        )

    def _problem(self, row: int) -> tuple[Composition, list[Any], list[Any]]:
        """The first problem of this row's stream that belongs to this split, with its cases."""
        low, high = self._bounds()
        for draw in range(MOST_DRAWS):
            stream = HashStream(f"programs/{self.seed}/{row}/{draw}")
            start = stream.pick(STARTS[stream.pick(self.kinds.split("+"))])
            composition = Composition.drawn(stream, start, stream.between(low, high))
            if not self._has(composition.description):
                continue
            cases = composition.cases(stream, self.shown + self.cases)
            if cases:
                return composition, *cases
        raise ValueError(
            f"{self.name} has no problem of this split; allow more kinds or operations"
        )

    def _bounds(self) -> tuple[int, int]:
        fewest, most = self._range("operations")
        if not 1 <= fewest <= most <= 5:
            raise ValueError(
                "task:programs operations must be like 2 or 1-3, at most 5, got "
                f"{self.operations!r}"
            )
        return fewest, most


def _truth(form: str, inputs: list[Any], outputs: list[Any]) -> Any:
    """The cases in the form that the reward `code` takes."""
    if form == "asserts":
        return [f"assert f({i!r}) == {o!r}" for i, o in zip(inputs, outputs, strict=True)]
    if form == "stdin":
        return {"inputs": [f"{_line(i)}\n" for i in inputs], "outputs": [f"{o}\n" for o in outputs]}
    return {"fn_name": "f", "inputs": [[i] for i in inputs], "outputs": outputs}


def _line(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
