"""The common part of tasks whose problem is a picture: rows, splits, sizes, the canvas.

A row is a function of (options, row) alone, drawn by Pillow when it is read, without fonts or
files. A hash of a scene's description decides its split: a held-out picture never occurs in
training data, for all seeds and sizes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from distflow_jax.data.drawn.hash_stream import HashStream
from distflow_jax.data.example import Example
from distflow_jax.data.generated_rows import GeneratedRows
from distflow_jax.images import pillow
from distflow_jax.images.picture_files import DrawnPicture
from distflow_jax.parsing.checked_fields import at_least, between, check_fields, one_of

COLOURS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 90, 200),
    "yellow": (240, 200, 20),
    "purple": (140, 60, 170),
    "black": (25, 25, 25),
}
MOST_SIDE = 2048
BRIGHT = 225  # darkest background
MOST_DRAWS = 10_000  # a split without a scene in so many draws counts as empty

Paint = Callable[[Any], None]  # draws on an ImageDraw


@dataclasses.dataclass(frozen=True)
class Scene:
    """A problem: a question about a picture, and how it is painted.

    `objects` describe the picture wholly, but for its size and background.
    """

    question: str
    answer: str
    wrong: tuple[str, ...]  # other answers
    objects: str
    paint: Paint


@dataclasses.dataclass(frozen=True)
class DrawnTask(GeneratedRows):
    """Rows of scenes; a subclass has a KIND, `_scene` and the names of its questions.

    Within a split, scenes are drawn with replacement.
    """

    ASKS: ClassVar[tuple[str, ...]] = ()  # what may be asked; the first is the default
    LEAST_SIDE: ClassVar[int] = 16
    MOST: ClassVar[int] = 0  # largest value of `most`, where a task has it

    first_image_row = 0

    ask: str = ""
    sides: str = "32-96"  # pixels of width and height, each drawn on its own; "64": all alike
    question: str = ""  # instead of the task's own
    size: int = 10_000  # rows
    seed: int = 0
    held_out: bool = False  # the held-out split instead of the training split
    system_prompt: str = ""
    prompt_suffix: str = ""

    def __post_init__(self):
        if not self.ask:
            object.__setattr__(self, "ask", self.ASKS[0])
        _check_ranges(self)
        self._bounds()
        self._check()
        self._problem(0)

    def _check(self) -> None:
        """Raises ValueError for options of the subclass that do not fit."""

    def _scene(self, stream: HashStream, height: int, width: int) -> Scene:
        """A scene on a picture of this size."""
        raise AssertionError(f"{type(self).__name__} draws no scenes")

    @property
    def made_by(self) -> str:
        """Pillow with its version."""
        return f"pillow=={pillow.load().__version__}"

    def _depends_on(self) -> str:
        return f" {pillow.load().__version__}"

    def _row(self, row: int) -> Example:
        scene, height, width, background = self._problem(row)
        messages = self._prompt(self.question or scene.question)
        text = {"type": "text", "text": messages[-1]["content"]}
        messages[-1]["content"] = [{"type": "image"}, text]
        wrong = HashStream(f"{self.seed}/{row}/mistake").pick(scene.wrong)
        draw = functools.partial(_painted, scene.paint, height, width, background)
        return Example(
            prompt=messages,
            data_source=self.KIND,
            ground_truth=scene.answer,
            extra_info={"index": row, "ask": self.ask, "objects": scene.objects},
            ability="vision",
            chosen=scene.answer,
            rejected=wrong,
            images=(DrawnPicture(f"{self.place(row)}, image 1", height, width, draw),),
        )

    def _problem(self, row: int) -> tuple[Scene, int, int, tuple[int, int, int]]:
        """The first scene of this row's stream that belongs to this split, its size and ground."""
        low, high = self._bounds()
        for draw in range(MOST_DRAWS):
            stream = HashStream(f"{self.KIND}/{self.seed}/{row}/{draw}")
            height, width = stream.between(low, high), stream.between(low, high)
            red, green, blue = (stream.between(BRIGHT, 255) for _ in range(3))
            scene = self._scene(stream, height, width)
            content = f"{height} {width} {red} {green} {blue} {scene.objects}"
            if self._has(content):
                return scene, height, width, (red, green, blue)
        raise ValueError(f"{self.name} has no scene of this split; allow more sizes in 'sides'")

    def _bounds(self) -> tuple[int, int]:
        low, high = self._range("sides")
        if not self.LEAST_SIDE <= low <= high <= MOST_SIDE:
            raise ValueError(
                f"{self.name} sides must be like 64 or 32-96, from {self.LEAST_SIDE} to "
                f"{MOST_SIDE} pixels, got {self.sides!r}"
            )
        return low, high


def _check_ranges(task: DrawnTask) -> None:
    kinds = {"ask": one_of(task.ASKS), "size": at_least(1), "most": between(2, task.MOST)}
    check_fields(vars(task), kinds, task.name)


def _painted(paint: Paint, height: int, width: int, background: tuple[int, int, int]) -> np.ndarray:
    picture = pillow.load().new("RGB", (width, height), background)
    paint(pillow.load("ImageDraw").Draw(picture))
    return np.array(picture)
