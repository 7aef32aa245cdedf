"""Pictures of observations: cut into patches by their model's layout, and put at their places."""

import dataclasses
from typing import Any

import numpy as np

from distflow_jax.environments.environment import Shown
from distflow_jax.images.picture_files import check_sides, on_white
from distflow_jax.images.placing import SeeingTokenizer, with_patches
from distflow_jax.images.record import MARK, Image, image_of
from distflow_jax.images.turn_images import TurnImages


@dataclasses.dataclass(frozen=True)
class ImageSupport:
    """The images of a model that sees, and their limit."""

    tokenizer: SeeingTokenizer
    most: int  # features that the images of one observation may have: data.max_prompt_length

    def read(self, shown: Shown) -> tuple[np.ndarray, TurnImages]:
        """(Tokens int32 [M], images) of an observation with at least one image.

        Raises ValueError for images that the model cannot take, or too many.
        """
        count = len(shown.images)
        images = [self._image(n, picture, count) for n, picture in enumerate(shown.images)]
        found = [with_patches(image, self.tokenizer.layout) for image in images]
        sizes = [self.tokenizer.layout.size(*image.pixels.shape[:2]) for image in images]
        features = sum(size.features for size in sizes)
        if features > self.most:
            raise ValueError(
                f"an observation's {count} images have {features} features, and those of a turn "
                f"may have at most data.max_prompt_length={self.most}: show fewer or smaller ones, "
                "or lower data.image_tokens"
            )
        text = MARK.join(map(self.tokenizer.text.plain, shown.text.split(MARK)))
        if shown.role is None:
            placed = self.tokenizer.place(text, sizes)
        else:
            placed = self.tokenizer.place_turn(text, sizes, shown.role)
        return placed.tokens, TurnImages(tuple(found), placed.patch)

    def _image(self, number: int, picture: Any, count: int) -> Image:
        place = f"image {number + 1} of an observation's {count}"
        try:
            image = image_of(pixels_of(picture))
            check_sides(*image.pixels.shape[:2])
            self.tokenizer.layout.size(*image.pixels.shape[:2])
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        return image


def check_shown(shown: Shown, sight: ImageSupport | None) -> None:
    """ValueError unless the text has a place for each image, and the model sees."""
    count = len(shown.images)
    if not isinstance(shown.text, str):
        raise ValueError(
            f"an observation with {count} images has {type(shown.text).__name__} in place of its "
            f"text: images stand in text, at {MARK}, and not between token ids"
        )
    marks = shown.text.count(MARK)
    if marks != count:
        raise ValueError(
            f"an observation has {marks} {MARK} in its text for {count} images: write one for "
            "each, in order"
        )
    if count and sight is None:
        raise ValueError(
            f"an observation has {count} images, and the model has no vision tower: use a model "
            "that sees, or give it one by model.vision"
        )


def pixels_of(picture: Any) -> np.ndarray:
    """uint8 [H, W, 3] of an array, or of a picture of Pillow."""
    if hasattr(picture, "convert"):
        return on_white(picture)
    if isinstance(picture, np.ndarray):
        return picture
    raise ValueError(
        f"an image is uint8 [height, width, 3] or a picture of Pillow, got {type(picture).__name__}"
    )
