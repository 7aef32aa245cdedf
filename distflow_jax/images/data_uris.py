"""Images inside of text: data URIs, `data:image/png;base64,...`."""

import base64
import binascii
import io
import re
from collections.abc import Iterable, Sequence

import numpy as np

from distflow_jax.images import pillow
from distflow_jax.images.record import Image
from distflow_jax.parsing.one_line import shown

_URI = re.compile(r"data:(?P<kind>[^,;]*)(?P<options>(;[^,;]*)*),", re.IGNORECASE)
_MOST_START = 256  # characters before the content
_SMALL = 160  # pixels of a side of a picture for people
_QUALITY = 80  # of its JPEG
_MOST_PICTURES = 4  # of a prompt in the record of a sample
_MOST_PROMPTS = 64  # of a file of samples; a page shows fewer


def bytes_of_uri(uri: str, place: str) -> bytes:
    """The content of a data URI; `place` is the start of an error message. Raises ValueError."""
    match = _URI.match(uri[:_MOST_START])
    if not match or ";base64" not in match["options"].lower():
        raise ValueError(
            f"{place}: a data URI must be like data:image/png;base64,..., got {shown(uri)}"
        )
    try:
        return base64.b64decode("".join(uri[match.end() :].split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(
            f"{place}: the data URI is not valid base64 ({error}): write it again"
        ) from None


def small_uri(pixels: np.ndarray) -> str:
    """A small copy of a picture, uint8 [H, W, 3], as a data URI: PNG or JPEG, the shorter one."""
    image = pillow.load()
    picture = image.fromarray(pixels)
    picture.thumbnail((_SMALL, _SMALL), image.Resampling.BOX)
    found = []
    for kind, options in (("png", {"optimize": True}), ("jpeg", {"quality": _QUALITY})):
        out = io.BytesIO()
        picture.save(out, kind, **options)
        found.append(f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}")
    return min(found, key=len)


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
