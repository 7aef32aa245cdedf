"""`task:digits`: a number to read, written in strokes of varying slant, width and colour."""

import dataclasses
import functools
from typing import Any, ClassVar

from distflow_jax.data.drawn.drawn_task import COLOURS, DrawnTask, Scene
from distflow_jax.data.drawn.hash_stream import HashStream

_SIX = [
    *((0.9, 0.05), (0.4, 0.1), (0.05, 0.55), (0.15, 0.9), (0.55, 1.0)),
    *((0.95, 0.8), (0.8, 0.5), (0.4, 0.48), (0.08, 0.65)),
]
# polylines in a box of 1 x 1, y down
STROKES: dict[str, list[tuple[float, float]]] = {
    "0": [
        *((0.5, 0), (0.85, 0.15), (1, 0.5), (0.85, 0.85), (0.5, 1)),
        *((0.15, 0.85), (0, 0.5), (0.15, 0.15), (0.5, 0)),
    ],
    "1": [(0.2, 0.25), (0.55, 0), (0.55, 1)],
    "2": [(0, 0.2), (0.25, 0), (0.75, 0), (1, 0.25), (0.9, 0.5), (0, 1), (1, 1)],
    "3": [(0, 0.1), (0.5, 0), (1, 0.2), (0.6, 0.47), (1, 0.75), (0.5, 1), (0, 0.9)],
    "4": [(0.75, 1), (0.75, 0), (0, 0.65), (1, 0.65)],
    "5": [
        *((1, 0), (0.1, 0), (0.05, 0.45), (0.6, 0.4), (1, 0.65)),
        *((0.8, 0.95), (0.3, 1), (0, 0.9)),
    ],
    "6": _SIX,
    "7": [(0, 0), (1, 0), (0.4, 1)],
    "8": [
        *((0.5, 0.48), (0.1, 0.25), (0.5, 0), (0.9, 0.25), (0.5, 0.48)),
        *((0, 0.75), (0.5, 1), (1, 0.75), (0.5, 0.48)),
    ],
    "9": [(1 - x, 1 - y) for x, y in _SIX],
}
_MOST_DIGITS = 8


@dataclasses.dataclass(frozen=True)
class Digits(DrawnTask):
    """A number, each digit a line of its own."""

    KIND: ClassVar[str] = "digits"
    ASKS: ClassVar[tuple[str, ...]] = ("number",)

    digits: str = "1-2"  # of a number; "3" or a range

    def _check(self) -> None:
        low, high = self._range("digits")
        if not 1 <= low <= high <= _MOST_DIGITS:
            raise ValueError(
                f"{self.name} digits must be like 2 or 1-3, at most {_MOST_DIGITS}, got "
                f"{self.digits!r}"
            )
        least = 8 * high
        if self._bounds()[0] < least:
            raise ValueError(
                f"{self.name} of {high} digits needs sides of at least {least} pixels, got "
                f"{self.sides!r}: raise sides, or lower digits"
            )

    def _scene(self, stream: HashStream, height: int, width: int) -> Scene:
        length = stream.between(*self._range("digits"))
        first = stream.between(1 if length > 1 else 0, 9)
        answer = str(first) + "".join(str(stream.below(10)) for _ in range(length - 1))
        cell = width / length
        high = height * stream.part(0.5, 0.8)
        wide = min(cell * 0.7, high * stream.part(0.5, 0.75))
        line = max(1, round(min(wide, high) * stream.part(0.1, 0.2)))
        slant = stream.part(-0.12, 0.12)
        colour = stream.pick([name for name in COLOURS if name != "yellow"])
        lines = []
        for i, digit in enumerate(answer):
            left = i * cell + (cell - wide) * stream.part(0.35, 0.65)
            top = (height - high) * stream.part(0.3, 0.7)
            lines.append(
                [
                    (round(left + (x - slant * (y - 0.5)) * wide), round(top + y * high))
                    for x, y in STROKES[digit]
                ]
            )
        wrong = (str(int(answer) + 1), str(max(0, int(answer) - 1) or 2))
        return Scene(
            "Which number is in the picture? Answer with just the number.",
            answer,
            wrong,
            f"{colour} {line} {lines}",
            functools.partial(paint_lines, lines, COLOURS[colour], line),
        )


def paint_lines(
    lines: list[list[tuple[int, int]]], colour: tuple[int, int, int], width: int, draw: Any
) -> None:
    """Draws polylines on an ImageDraw."""
    for points in lines:
        draw.line(points, fill=colour, width=width, joint="curve")


def small_digit(digit: str, x: int, y: int, wide: int, high: int) -> list[tuple[int, int]]:
    """A digit's line in a box whose upper left corner is (x, y)."""
    return [(round(x + a * wide), round(y + b * high)) for a, b in STROKES[digit]]
