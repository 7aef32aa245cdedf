"""Operations on strings, lists and integers, in words and as Python, and what they compose to."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from distflow_jax.data.drawn.hash_stream import HashStream

MOST_DRAWS = 1_000  # compositions tried for a problem, and inputs for its cases


class ValueKind(NamedTuple):
    """A kind of values: the name of one, in words, how a program reads it, and how one is drawn."""

    name: str
    words: str
    read: str  # from a line of standard input
    draw: Callable[[HashStream], Any]


_WORDS = (
    "apple Banana cherry Delta eagle Forest garden Hello island Jacket kitten Lemon meadow Night "
    "orange Paper queen River summer Table under Violet window Yellow zebra"
).split()


def _text(stream: HashStream) -> str:
    return " ".join(stream.pick(_WORDS) for _ in range(stream.between(1, 3)))


def _integers(stream: HashStream) -> list[int]:
    return [stream.between(-9, 30) for _ in range(stream.between(4, 7))]


TEXT = ValueKind("s", "a string s", "input()", _text)
LIST = ValueKind("xs", "a list of integers xs", "[int(x) for x in input().split()]", _integers)
NUMBER = ValueKind("n", "an integer n", "int(input())", lambda stream: stream.between(0, 999))
_MARKS = {",": "commas", ";": "semicolons", " ": "spaces", "/": "slashes"}
LINES = {
    mark: ValueKind(
        "s",
        f"a string s of integers with {name} between them",
        "input()",
        lambda stream, mark=mark: mark.join(map(str, _integers(stream))),
    )
    for mark, name in _MARKS.items()
}
STARTS = {"strings": [TEXT], "lists": [LIST], "numbers": [NUMBER], "parsing": [*LINES.values()]}


class Operation(NamedTuple):
    """An operation: in words, and as an expression of the value {x}.

    {k} in both is a number from 2 to 5, {j} one from 2 to 20, {a} and {b} are letters, {m} is a
    mark.
    """

    takes: ValueKind
    gives: ValueKind
    words: str
    expression: str


OPERATIONS = (
    Operation(TEXT, TEXT, "reverses it", "{x}[::-1]"),
    Operation(TEXT, TEXT, "makes it upper case", "{x}.upper()"),
    Operation(TEXT, TEXT, "makes it lower case", "{x}.lower()"),
    Operation(TEXT, TEXT, "swaps upper and lower case", "{x}.swapcase()"),
    Operation(TEXT, TEXT, "takes its first {k} characters", "{x}[:{k}]"),
    Operation(TEXT, TEXT, "takes its last {k} characters", "{x}[-{k}:]"),
    Operation(TEXT, TEXT, "removes its first {k} characters", "{x}[{k}:]"),
    Operation(TEXT, TEXT, "removes its last {k} characters", "{x}[:-{k}]"),
    Operation(TEXT, TEXT, "repeats it {k} times", "({x} * {k})"),
    Operation(TEXT, TEXT, "replaces '{a}' by '{b}'", "{x}.replace('{a}', '{b}')"),
    Operation(TEXT, TEXT, "removes '{a}'", "{x}.replace('{a}', '')"),
    Operation(TEXT, TEXT, "adds '{m}' at the end", "({x} + '{m}')"),
    Operation(TEXT, TEXT, "adds '{m}' at the start", "('{m}' + {x})"),
    Operation(TEXT, TEXT, "takes its last word", "{x}.split()[-1]"),
    Operation(TEXT, NUMBER, "counts its characters", "len({x})"),
    Operation(TEXT, NUMBER, "counts its words", "len({x}.split())"),
    Operation(TEXT, NUMBER, "counts '{a}' in it", "{x}.count('{a}')"),
    Operation(LIST, LIST, "reverses it", "{x}[::-1]"),
    Operation(LIST, LIST, "sorts it", "sorted({x})"),
    Operation(LIST, LIST, "takes its first {k} elements", "{x}[:{k}]"),
    Operation(LIST, LIST, "takes its last {k} elements", "{x}[-{k}:]"),
    Operation(LIST, LIST, "removes its first {k} elements", "{x}[{k}:]"),
    Operation(LIST, LIST, "adds {j} to each element", "[x + {j} for x in {x}]"),
    Operation(LIST, LIST, "multiplies each element by {j}", "[x * {j} for x in {x}]"),
    Operation(LIST, LIST, "keeps its even elements", "[x for x in {x} if x % 2 == 0]"),
    Operation(LIST, LIST, "keeps its elements above {j}", "[x for x in {x} if x > {j}]"),
    Operation(LIST, NUMBER, "takes the sum", "sum({x})"),
    Operation(LIST, NUMBER, "takes the largest element", "max({x})"),
    Operation(LIST, NUMBER, "takes the smallest element", "min({x})"),
    Operation(LIST, NUMBER, "counts its elements", "len({x})"),
    Operation(NUMBER, NUMBER, "adds {j} to it", "({x} + {j})"),
    Operation(NUMBER, NUMBER, "subtracts {j} from it", "({x} - {j})"),
    Operation(NUMBER, NUMBER, "multiplies it by {j}", "({x} * {j})"),
    Operation(NUMBER, NUMBER, "squares it", "({x} ** 2)"),
    Operation(NUMBER, NUMBER, "takes its remainder modulo {j}", "({x} % {j})"),
    Operation(NUMBER, NUMBER, "divides it by {j}, rounding down", "({x} // {j})"),
    Operation(NUMBER, TEXT, "turns it into a string", "str({x})"),
    *(
        Operation(
            line, LIST, "reads the integers", f"[int(part) for part in {{x}}.split('{mark}')]"
        )
        for mark, line in LINES.items()
    ),
)


@dataclasses.dataclass(frozen=True)
class Composition:
    """Operations one after another on a value of a kind."""

    start: ValueKind
    steps: tuple[Operation, ...]  # without places for numbers and letters

    @classmethod
    def drawn(cls, stream: HashStream, start: ValueKind, count: int) -> "Composition":
        """A random composition of `count` operations."""
        kind, steps = start, []
        for _ in range(count):
            step = stream.pick([step for step in OPERATIONS if step.takes == kind])
            one, other = stream.several("aeiourst", 2)
            filled = {"k": stream.between(2, 5), "j": stream.between(2, 20), "a": one, "b": other}
            filled["m"] = stream.pick("!?.#-")
            expression = step.expression.format(x="{x}", **filled)
            steps.append(step._replace(words=step.words.format(**filled), expression=expression))
            kind = step.gives
        return cls(start, tuple(steps))

    @property
    def words(self) -> str:
        """The operations as a sentence has them."""
        return ", then ".join(step.words for step in self.steps)

    @property
    def hints(self) -> str:
        """The expressions of the operations, each of a value of its kind."""
        alone = (Composition(step.takes, (step,)).expression for step in self.steps)
        return " and ".join(alone)

    @property
    def description(self) -> str:
        """The composition as text; it decides the split."""
        return f"{self.start.words}: {self.words}"

    @property
    def expression(self) -> str:
        """The result as a Python expression of `start.name`."""
        found = self.start.name
        for step in self.steps:
            found = step.expression.replace("{x}", found)
        wrapped = self.steps and self.steps[-1].expression.startswith("(")
        return found[1:-1] if wrapped else found

    def results(self, values: Sequence[Any]) -> list[Any]:
        """The result for each value. Raises what the operations do, IndexError or ValueError."""
        function = eval(f"lambda {self.start.name}: {self.expression}")  # text of this module alone
        return [function(value) for value in values]

    def cases(self, stream: HashStream, count: int) -> tuple[list[Any], list[Any]] | None:
        """`count` different inputs and their outputs; None if they cannot tell it from a simpler
        program: one that leaves out an operation, or gives the same for half of the inputs."""
        inputs: list[Any] = []
        for _ in range(MOST_DRAWS):
            value = self.start.draw(stream)
            if value not in inputs:
                inputs.append(value)
            if len(inputs) == count:
                break
        try:
            outputs = self.results(inputs)
        except (IndexError, ValueError):  # the last word of an empty string, the largest of none
            return None
        if 2 * max(outputs.count(output) for output in outputs) > count:
            return None
        shorter = [self.steps[:i] + self.steps[i + 1 :] for i in range(len(self.steps))] + [()]
        if any(_same(Composition(self.start, steps), inputs, outputs) for steps in shorter):
            return None
        return inputs, outputs


def _same(other: Composition, inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
    try:
        return list(map(str, other.results(inputs))) == list(map(str, outputs))  # as printed
    except (AttributeError, IndexError, TypeError, ValueError):  # operations of other kinds
        return False
