"""A layout of images as plain as can be: one feature a patch, a token before and after them."""

import dataclasses

import numpy as np
from PIL import Image as Pillow

from distflow_jax.images.record import Image, ImagePatches, ImageSize

START, END, PLACEHOLDER = 201, 202, 203


@dataclasses.dataclass(frozen=True)
class PlainLayout:
    """Pictures become a whole number of patches a side, and at most `most` of them."""

    most: int = 16
    patch: int = 8
    marker: str = ""
    placeholder: int = PLACEHOLDER
    around: str = ""

    def grid(self, height, width):
        """(rows, columns, whether there would be more without the limit)."""
        if height * 50 < width:
            raise ValueError(f"has {width} x {height} pixels, too wide for this family: cut it")
        rows, columns = (max(1, round(side / self.patch)) for side in (height, width))
        shrunk = rows * columns > self.most
        while rows * columns > self.most:
            rows, columns = max(1, rows - 1), max(1, columns - 1)
        return rows, columns, shrunk

    def size(self, height, width):
        rows, columns, shrunk = self.grid(height, width)
        tokens = (START, *[-1] * rows * columns, END)
        return ImageSize(rows * self.patch, columns * self.patch, tokens, shrunk)

    def cut(self, image: Image):
        rows, columns, _ = self.grid(*image.pixels.shape[:2])
        p = self.patch
        resized = Pillow.fromarray(image.pixels).resize((columns * p, rows * p), Pillow.BICUBIC)
        patches = np.array(resized).reshape(rows, p, columns, p, 3).transpose(0, 2, 1, 3, 4)
        places = np.indices((rows, columns), np.int32).reshape(2, -1).T
        count = rows * columns
        return ImagePatches(
            patches.reshape(count, -1), places, np.ones(count, np.int32), count, (rows, columns)
        )
