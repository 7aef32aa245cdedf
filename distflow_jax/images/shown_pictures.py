"""Pictures of prompts in the records of samples, small enough to stand in a page."""

from collections.abc import Iterable, Sequence

from distflow_jax.images.data_uris import small_uri
from distflow_jax.images.record import Image

_MOST_PICTURES = 4  # of a prompt
_MOST_PROMPTS = 64  # of a file; a page shows fewer


def first_of_prompts(uids: Iterable[list[int]]) -> list[list[int]]:
    """The records of a file that show pictures: each prompt's first, of the first prompts.

    `uids`: [prompt counter, sample] of records whose prompts have images.
    """
    first: dict[int, list[int]] = {}
    for uid in sorted(uids):
        first.setdefault(uid[0], uid)
    return list(first.values())[:_MOST_PROMPTS]


def pictures(images: Sequence[Image]) -> list[str]:
    """Data URIs of a prompt's first images."""
    return [small_uri(image.pixels) for image in images[:_MOST_PICTURES]]
