"""`task:shapes`: how many shapes there are, which colour one has, or where it is."""

import dataclasses
import functools
from typing import Any, ClassVar

from distflow_jax.data.drawn.drawn_task import COLOURS, DrawnTask, Scene
from distflow_jax.data.drawn.hash_stream import HashStream
from distflow_jax.parsing.setting_checks import listed

KINDS = ("circle", "square", "triangle", "cross")
ASKED_COLOURS = ("red", "green", "blue", "yellow")
PLACES = ("left", "right", "top", "bottom")
_GRID = 3  # cells of a side, of which each holds at most one shape


@dataclasses.dataclass(frozen=True)
class Shape:
    """A shape: centre and half of its side in pixels."""

    kind: str
    colour: str
    x: int
    y: int
    radius: int

    def paint(self, draw: Any) -> None:
        """Draws it on an ImageDraw."""
        x, y, r, fill = self.x, self.y, self.radius, COLOURS[self.colour]
        if self.kind == "circle":
            draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)
        elif self.kind == "square":
            draw.rectangle((x - r, y - r, x + r, y + r), fill=fill)
        elif self.kind == "triangle":
            draw.polygon([(x, y - r), (x + r, y + r), (x - r, y + r)], fill=fill)
        else:
            arm = max(1, r // 3)
            draw.rectangle((x - r, y - arm, x + r, y + arm), fill=fill)
            draw.rectangle((x - arm, y - r, x + arm, y + r), fill=fill)


@dataclasses.dataclass(frozen=True)
class Shapes(DrawnTask):
    """Circles, squares, triangles and crosses on a light ground.

    All answers are equally frequent: `most` numbers, four colours, four places.
    """

    KIND: ClassVar[str] = "shapes"
    ASKS: ClassVar[tuple[str, ...]] = ("count", "colour", "position")
    LEAST_SIDE: ClassVar[int] = 24
    MOST: ClassVar[int] = _GRID**2

    most: int = 4  # shapes of a picture, where their number is asked

    def _scene(self, stream: HashStream, height: int, width: int) -> Scene:
        if self.ask == "count":
            numbers = tuple(str(n + 1) for n in range(self.most))
            answer = stream.pick(numbers)
            cells = stream.several(range(_GRID * _GRID), int(answer))
            shapes = [_in_cell(stream, cell, height, width) for cell in cells]
            question, answers = "How many shapes are in the picture? Answer with a number.", numbers
        elif self.ask == "colour":
            answer = stream.pick(ASKED_COLOURS)
            cell = stream.below(_GRID * _GRID)
            shapes = [dataclasses.replace(_in_cell(stream, cell, height, width), colour=answer)]
            question, answers = "What colour is the shape?", ASKED_COLOURS
        else:
            answer = stream.pick(PLACES)
            shapes = [_at_place(stream, answer, height, width)]
            question, answers = "Where in the picture is the shape?", PLACES
        if self.ask != "count":
            question += f" Answer with one word: {listed(answers)}."
        return Scene(
            question,
            answer,
            tuple(other for other in answers if other != answer),
            "; ".join(f"{s.colour} {s.kind} {s.x} {s.y} {s.radius}" for s in shapes),
            functools.partial(_paint, shapes),
        )


def _in_cell(stream: HashStream, cell: int, height: int, width: int) -> Shape:
    """A shape inside one cell of the grid, so that no two touch."""
    high, wide = height / _GRID, width / _GRID
    radius = max(2, int(min(high, wide) * stream.part(0.25, 0.42)))
    row, column = divmod(cell, _GRID)
    free_x, free_y = wide / 2 - radius - 1, high / 2 - radius - 1
    x = (column + 0.5) * wide + stream.part(-1, 1) * max(0, free_x)
    y = (row + 0.5) * high + stream.part(-1, 1) * max(0, free_y)
    return Shape(stream.pick(KINDS), stream.pick(tuple(COLOURS)), round(x), round(y), radius)


def _at_place(stream: HashStream, place: str, height: int, width: int) -> Shape:
    radius = max(2, int(min(height, width) * stream.part(0.08, 0.14)))
    far, middle = stream.part(0.16, 0.24), stream.part(0.4, 0.6)
    x, y = {
        "left": (far, middle),
        "right": (1 - far, middle),
        "top": (middle, far),
        "bottom": (middle, 1 - far),
    }[place]
    return Shape(
        stream.pick(KINDS), stream.pick(tuple(COLOURS)), round(x * width), round(y * height), radius
    )


def _paint(shapes: list[Shape], draw: Any) -> None:
    for shape in shapes:
        shape.paint(draw)
