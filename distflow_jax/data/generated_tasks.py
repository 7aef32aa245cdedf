"""Built-in generators of problems, `task:NAME?option=value&...`."""

import dataclasses
import hashlib
import math
import re
import urllib.parse
from collections.abc import Callable, Iterator

from distflow_jax.data.drawn.shapes import Shapes
from distflow_jax.data.drawn.walk import Walk
from distflow_jax.data.example import Dataset, Example
from distflow_jax.data.generated_rows import GeneratedRows
from distflow_jax.data.program_task import Programs
from distflow_jax.did_you_mean import hint
from distflow_jax.parsing.checked_fields import at_least
from distflow_jax.parsing.setting_checks import Section, setting

MAX_DRAWS = 10_000  # a split without a problem in so many draws counts as empty


@dataclasses.dataclass(frozen=True)
class Arithmetic(GeneratedRows, Section, name="task:arithmetic "):
    """Arithmetic problems such as `12 + 35`.

    A hash of a problem's text decides its split: for all seeds, sizes and templates, a held-out
    problem never occurs in training data. Within a split, problems are drawn with replacement.
    """

    KIND, VERSION = "arithmetic", "2"

    operands: int = setting(2, at_least(2))  # numbers in a problem
    operators: str = "+"  # any of + - *; usual precedence
    digits: str = "2"  # of each number, "2" (10 to 99) or a range "1-3"; 1 digit is 0 to 9
    size: int = setting(10_000, at_least(1))  # rows
    seed: int = 0
    held_out: bool = False  # the held-out split instead of the training split
    template: str = "What is {problem}? Answer with just the number."
    system_prompt: str = ""
    prompt_suffix: str = ""

    def __post_init__(self):
        super().__post_init__()
        if not self.operators or set(self.operators) - set("+-*"):
            raise ValueError(
                f"task:arithmetic operators must be some of + - *, got {self.operators!r}"
            )
        if "{problem}" not in self.template:
            raise ValueError(
                f"task:arithmetic template must contain {{problem}}, got {self.template!r}"
            )
        self._bounds()
        self.problem(0)

    def _row(self, row: int) -> Example:
        problem = self.problem(row)
        return Example(
            prompt=self._prompt(self.template.replace("{problem}", problem)),
            data_source=self.KIND,
            ground_truth=str(value_of(problem)),
            extra_info={"index": row, "problem": problem},
            ability="math",
            chosen=str(value_of(problem)),
            rejected=str(value_of(problem) + self._mistake(row)),
        )

    def _mistake(self, row: int) -> int:
        """Error of the rejected answer: -9 to 9, not 0."""
        word = next(_random_words(f"{self.seed}/{row}/mistake", 1)) % 18
        return word - 9 if word < 9 else word - 8

    def problem(self, row: int) -> str:
        """The first problem of this row's random stream that belongs to this split."""
        low, high = self._bounds()
        for draw in range(MAX_DRAWS):
            words = _random_words(f"{self.seed}/{row}/{draw}", 2 * self.operands)
            problem = str(low + next(words) % (high - low))
            for _ in range(self.operands - 1):
                operator = self.operators[next(words) % len(self.operators)]
                problem += f" {operator} {low + next(words) % (high - low)}"
            if self._has(problem):
                return problem
        raise ValueError(
            f"task:arithmetic with operands={self.operands}, operators={self.operators}, "
            f"digits={self.digits} has too few problems for a held-out split; use more digits"
        )

    def _bounds(self) -> tuple[int, int]:
        fewest, most = self._range("digits")
        if not 1 <= fewest <= most <= 18:
            raise ValueError(
                f"task:arithmetic digits must be like 2 or 1-3, at most 18, got {self.digits!r}"
            )
        return (0 if fewest == 1 else 10 ** (fewest - 1)), 10**most


def value_of(problem: str) -> int:
    """Value of `a + b * c - d`: products first, then sums, from the left."""
    terms = re.split(r" ([+-]) ", problem)
    value = 0
    for sign, term in zip(["+", *terms[1::2]], terms[::2], strict=True):
        product = math.prod(map(int, term.split(" * ")))
        value += product if sign == "+" else -product
    return value


def _random_words(key: str, count: int) -> Iterator[int]:
    # a hash, not a library's generator: equal problems on every version of Python and NumPy
    data = hashlib.shake_256(key.encode()).digest(8 * count)
    return (int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8))


TASKS: dict[str, Callable[..., Dataset]] = {
    "arithmetic": Arithmetic,
    "shapes": Shapes,
    "walk": Walk,
    "programs": Programs,
}


def open_task(spec: str, *, system_prompt: str = "", prompt_suffix: str = "") -> Dataset:
    """The generator of `task:arithmetic?digits=2&size=1000`. Raises ValueError for a bad option."""
    name, options = parse_spec(spec)
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r} in {spec!r}; {hint(name, TASKS)}")
    factory = TASKS[name]
    fields = {
        field.name: field
        for field in dataclasses.fields(factory)
        if field.name not in ("system_prompt", "prompt_suffix")  # keys of the config
    }
    values = {}
    for key, text in options.items():
        if key not in fields:
            raise ValueError(f"{spec!r}: unknown option {key!r}; {hint(key, fields)}")
        values[key] = _convert(text, fields[key].type, f"{spec!r}: option {key!r}")
    return factory(**values, system_prompt=system_prompt, prompt_suffix=prompt_suffix)


def _convert(text: str, kind: type, place: str) -> str | int | bool:
    if kind is bool:
        if text.lower() not in ("0", "1", "true", "false"):
            raise ValueError(f"{place} must be 0 or 1, got {text!r}")
        return text.lower() in ("1", "true")
    if kind is int:
        if not re.fullmatch(r"-?[0-9]+", text):
            raise ValueError(f"{place} must be a whole number, got {text!r}")
        return int(text)
    return text


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """(name, options as text) of `task:arithmetic?digits=2&operators=+-`.

    Percent escapes are decoded (`%26` for &, `%3D` for =), but `+` stays a plus: it is an operator
    here, not a space as in a web form.

    Raises:
      ValueError: no name, an option without a value, or one given twice.
    """
    _, _, rest = spec.partition(":")
    name, _, query = rest.partition("?")
    if not name:
        raise ValueError(f"{spec!r} has no name after the colon")
    options: dict[str, str] = {}
    for item in filter(None, query.split("&")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{spec!r}: option {item!r} has no value; write {item}=VALUE")
        if key in options:
            raise ValueError(f"{spec!r}: option {key!r} is given twice")
        options[key] = urllib.parse.unquote(value)
    return name, options
