"""Pictures of prompts in the records of samples, small enough to stand in a page."""

from collections.abc import Sequence

from distflow_jax.images.data_uris import small_uri
from distflow_jax.images.record import Image

_MOST_PICTURES = 4  # of a prompt
_MOST_PROMPTS = 64  # of a file; a page shows fewer


class ShownPictures:
    """Hands out the pictures of the first prompts of a file, each prompt's once."""

    def __init__(self):
        self._shown = set[int]()

    def of(self, number: int, images: Sequence[Image]) -> dict[str, list[str]]:
        """{"images": data URIs} of prompt `number`; {} without images, and the second time."""
        if not images or number in self._shown or len(self._shown) >= _MOST_PROMPTS:
            return {}
        self._shown.add(number)
        return {"images": [small_uri(image.pixels) for image in images[:_MOST_PICTURES]]}
