"""`task:walk`: a dot and a square on a board, and the step that brings the dot nearer."""

import dataclasses
from typing import Any, ClassVar

from distflow_jax.data.drawn.drawn_task import COLOURS, DrawnTask, Scene
from distflow_jax.data.drawn.hash_stream import HashStream

STEPS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}  # x, y
_LINE = (150, 150, 150)


@dataclasses.dataclass(frozen=True)
class Board:
    """A board of `cells` x `cells`, and where dot and square stand: columns x and rows y."""

    cells: int
    dot: tuple[int, int]
    square: tuple[int, int]

    @classmethod
    def of(cls, objects: str) -> "Board":
        """The board that a row's extra_info["objects"] describes."""
        cells, x, y, to_x, to_y = map(int, objects.split())
        return cls(cells, (x, y), (to_x, to_y))

    @property
    def objects(self) -> str:
        """The board as text."""
        return " ".join(map(str, (self.cells, *self.dot, *self.square)))

    @property
    def distance(self) -> int:
        """Steps from the dot to the square."""
        return sum(abs(a - b) for a, b in zip(self.dot, self.square, strict=True))

    def after(self, step: str) -> "Board":
        """The board after one of STEPS; a dot at the edge stays there."""
        moved = (a + b for a, b in zip(self.dot, STEPS[step], strict=True))
        x, y = (min(max(at, 0), self.cells - 1) for at in moved)
        return dataclasses.replace(self, dot=(x, y))

    def paint(self, draw: Any, height: int, width: int) -> None:
        """Draws it on an ImageDraw of this size."""
        wide, high = (width - 1) / self.cells, (height - 1) / self.cells
        for n in range(self.cells + 1):
            draw.line((round(n * wide), 0, round(n * wide), height), fill=_LINE)
            draw.line((0, round(n * high), width, round(n * high)), fill=_LINE)

        def box(at: tuple[int, int], margin: float) -> tuple[int, ...]:
            x, y = at
            left, top = (x + margin) * wide, (y + margin) * high
            right, bottom = (x + 1 - margin) * wide, (y + 1 - margin) * high
            return tuple(map(round, (left, top, right, bottom)))

        draw.rectangle(box(self.square, 0.15), fill=COLOURS["red"])
        draw.ellipse(box(self.dot, 0.25), fill=COLOURS["blue"])


@dataclasses.dataclass(frozen=True)
class Walk(DrawnTask):
    """Boards on a light ground; the four steps are equally frequent answers.

    The answer goes along the longer of the two ways, which are never equally long.
    """

    KIND: ClassVar[str] = "walk"
    ASKS: ClassVar[tuple[str, ...]] = ("step",)
    LEAST_SIDE: ClassVar[int] = 24

    cells: int = 4  # of a side of the board

    def _check(self) -> None:
        if not 2 <= self.cells <= self._bounds()[0] // 6:
            raise ValueError(
                f"{self.name} cells must be from 2 to {self._bounds()[0] // 6}, a sixth of the "
                f"least side, got {self.cells}"
            )

    def _scene(self, stream: HashStream, height: int, width: int) -> Scene:
        answer = stream.pick(tuple(STEPS))
        far = stream.between(1, self.cells - 1)
        near = stream.between(1 - far, far - 1)
        along = [far * part if part else near for part in STEPS[answer]]
        # a cell from which the whole way lies on the board
        dot = tuple(stream.between(max(0, -a), self.cells - 1 - max(0, a)) for a in along)
        board = Board(self.cells, dot, (dot[0] + along[0], dot[1] + along[1]))
        return Scene(
            "The blue dot walks to the red square. Which step brings it nearer? Answer with one "
            "word: up, down, left or right.",
            answer,
            tuple(other for other in STEPS if other != answer),
            board.objects,
            lambda draw: board.paint(draw, height, width),
        )
