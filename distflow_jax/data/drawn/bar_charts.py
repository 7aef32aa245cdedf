"""`task:charts`: bar charts, of which the highest bar, their number or a value is asked."""

import dataclasses
from typing import Any, ClassVar

from distflow_jax.data.drawn.digits import paint_lines, small_digit
from distflow_jax.data.drawn.drawn_task import COLOURS, DrawnTask, Scene
from distflow_jax.data.drawn.hash_stream import HashStream
from distflow_jax.parsing.setting_checks import listed

_TOP = 9  # of the axis, which has a line for every whole number
_INK, _PALE = (40, 40, 40), (200, 200, 200)


@dataclasses.dataclass(frozen=True)
class Chart:
    """Bars by colour, with their values, on a picture of this size."""

    bars: tuple[tuple[str, int], ...]
    height: int
    width: int

    def paint(self, draw: Any) -> None:
        """Draws lines with their numbers, bars and axes on an ImageDraw."""
        left, top = max(8, self.width // 10), self.height // 20 + 2
        bottom, right = self.height - self.height // 20 - 3, self.width - 3
        unit = (bottom - top) / _TOP
        high = max(4, int(unit * 0.7))
        for value in range(_TOP + 1):
            y = round(bottom - value * unit)
            draw.line([(left, y), (right, y)], fill=_PALE)
            label = small_digit(str(value), 1, y - high // 2, max(2, high // 2), high)
            if unit >= 6 or value % 3 == 0:
                paint_lines([label], _INK, 1, draw)
        step = (right - left) / len(self.bars)
        for i, (colour, value) in enumerate(self.bars):
            x = left + (i + 0.15) * step
            y = round(bottom - value * unit)
            draw.rectangle((round(x), y, round(x + 0.7 * step), bottom), fill=COLOURS[colour])
        draw.line([(left, top), (left, bottom), (right, bottom)], fill=_INK)


@dataclasses.dataclass(frozen=True)
class BarCharts(DrawnTask):
    """Bars of different colours and different whole values from 1 to 9."""

    KIND: ClassVar[str] = "charts"
    ASKS: ClassVar[tuple[str, ...]] = ("highest", "count", "value")
    LEAST_SIDE: ClassVar[int] = 40
    MOST: ClassVar[int] = len(COLOURS)

    sides: str = "64-128"
    most: int = 4  # bars of a chart

    def _scene(self, stream: HashStream, height: int, width: int) -> Scene:
        count = stream.between(2, self.most)
        colours = stream.several(tuple(COLOURS), count)
        values = stream.several(range(1, _TOP + 1), count)
        bars = tuple(zip(colours, values, strict=True))
        if self.ask == "count":
            answer = str(count)
            question = "How many bars does the chart have? Answer with just the number."
            answers = tuple(str(n) for n in range(2, self.most + 1))
            answers = answers if len(answers) > 1 else ("2", "3")
        elif self.ask == "value":
            colour, value = stream.pick(bars)
            answer, answers = str(value), tuple(str(n) for n in range(1, _TOP + 1))
            question = f"What is the value of the {colour} bar? Answer with just the number."
        else:
            answer = max(bars, key=lambda bar: bar[1])[0]
            answers = tuple(COLOURS)
            question = f"Which bar is the highest? Answer with one word: {listed(answers)}."
        return Scene(
            question,
            answer,
            tuple(other for other in answers if other != answer),
            f"{self.ask} {bars}",
            Chart(bars, height, width).paint,
        )
