"""Images in the messages of a request: data URIs alone, bounded before they are decoded."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from distflow_jax.images.data_uris import bytes_of_uri
from distflow_jax.images.picture_files import PictureFile
from distflow_jax.images.placing import SeeingTokenizer, read_image, size_in_layout
from distflow_jax.images.record import Image, ImageSize
from distflow_jax.parsing.one_line import shown

MAX_IMAGES = 16  # of a request
MAX_URI_BYTES = 16 << 20  # of a request's data URIs together
MAX_PIXELS = 16 << 20  # of one image; decoded it takes three bytes each


class Seen(NamedTuple):
    """Messages with bare parts of type image, and the images in their order."""

    messages: list[dict[str, Any]]
    images: tuple[PictureFile, ...]


def take_images(messages: Sequence[Mapping[str, Any]]) -> Seen:
    """Messages whose contents are text, or lists of parts where they have images.

    Raises ValueError for a part that is neither a text nor an image in a data URI, an image of the
    assistant's, and more or longer images than a request may have. No image is decoded.
    """
    plain, uris = [], list[tuple[str, str]]()
    for index, message in enumerate(messages):
        content = message["content"]
        if isinstance(content, list):
            places = [f"message {index}, part {n}" for n in range(len(content))]
            parts = [_part(p, place, uris) for p, place in zip(content, places, strict=True)]
            content = parts
            if all(part["type"] == "text" for part in parts):
                content = "".join(part["text"] for part in parts)
            elif message["role"] == "assistant":
                raise ValueError(
                    f"message {index} of the assistant has an image, and a model writes text "
                    "alone: move the image to a message of the user"
                )
        plain.append({**message, "content": content})
    if len(uris) > MAX_IMAGES:
        raise ValueError(f"{len(uris)} images are too many; give at most {MAX_IMAGES}")
    size = sum(len(uri) for _, uri in uris)
    if size > MAX_URI_BYTES:
        raise ValueError(
            f"the images have {size >> 20} MiB as data URIs; give at most {MAX_URI_BYTES >> 20}, "
            "or smaller images"
        )
    return Seen(plain, tuple(PictureFile(p, bytes_of_uri(uri, p)) for p, uri in uris))


def sizes_of(images: Sequence[PictureFile], seeing: SeeingTokenizer) -> list[ImageSize]:
    """The sizes at which the model sees the images, of their headers. Raises ValueError."""
    for image in images:
        height, width = image.size()
        if height * width > MAX_PIXELS:
            raise ValueError(
                f"{image.place}: the image has {width} x {height} pixels; this server reads at "
                f"most {MAX_PIXELS}: send a smaller one"
            )
    return [size_in_layout(image, seeing.layout) for image in images]


def read(images: Sequence[PictureFile], seeing: SeeingTokenizer) -> tuple[Image, ...]:
    """The images, decoded one by one and cut. Raises ValueError."""
    return tuple(read_image(image, seeing.layout) for image in images)


def _part(part: Any, place: str, uris: list[tuple[str, str]]) -> dict[str, Any]:
    """The plain form of a part; the URI of an image goes to `uris`, with its place."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind != "image_url":
        raise ValueError(
            f'{place} must be {{"type": "text", "text": "..."}} or {{"type": "image_url", '
            f'"image_url": {{"url": "data:image/png;base64,..."}}}}, got {shown(part)}'
        )
    value = part.get("image_url")
    uri = value.get("url") if isinstance(value, dict) else value
    if not isinstance(uri, str) or not uri[:5].lower() == "data:":
        raise ValueError(
            f"{place}: an image must be a data URI like data:image/png;base64,..., since a server "
            f"fetches nothing and opens no file, got {shown(uri)}"
        )
    uris.append((place, uri))
    return {"type": "image"}
