"""Images of a row: which columns hold them, and where in the prompt each one stands.

| row                                   | places                                                  |
|---------------------------------------|---------------------------------------------------------|
| `images` and text with `<image>`      | one place for each `<image>` (verl)                      |
| parts {"type": "image"}               | the parts; `<image>` in their text is text (TRL)         |
| parts with the image itself           | the same; `image_url` takes a data URI                   |
| `image` or `image_urls`, no places    | before the first text of the user's (TRL, MM-Eureka)     |

Without images a row's `<image>` is text.
"""

import dataclasses
from typing import Any

from distflow_jax.data.message_forms import read_messages
from distflow_jax.data.pictures.image_paths import ImageFolders
from distflow_jax.data.row_checks import bad_value
from distflow_jax.images.picture_files import PictureFile
from distflow_jax.images.record import MARK
from distflow_jax.parsing.one_line import shown

IMAGE_COLUMNS = ("images", "image", "image_urls")
FIRST = ("image", "image_urls")  # stand before the question where it has no place for them
VIDEO_COLUMNS = ("video", "videos")
CONVERSATIONS = "conversations"  # MM-Eureka's messages
_PROMPTED = ("prompt", "messages", "question")
_ANSWERS = ("chosen", "rejected", "completion")
_IMAGE_PARTS = ("image", "image_url", "input_image")
_VIDEO_PARTS = ("video", "video_url", "input_video")


@dataclasses.dataclass(frozen=True)
class ImageColumn:
    """Images that a row's columns hold, in order; `name` is "" without any."""

    name: str = ""
    values: tuple[Any, ...] = ()


def take_images(row: dict[str, Any], place: str) -> tuple[dict[str, Any], ImageColumn]:
    """(the row with contents in their plain form, the images of its columns).

    MM-Eureka's `conversations` become `messages`; a content of text parts becomes text. Parts that
    are images stay.

    Raises:
      ValueError: two columns of images, a video, or a part of an unknown kind.
    """
    for column in VIDEO_COLUMNS:
        if row.get(column):
            raise bad_value(
                place, column, "videos are not read: give single frames in 'images', or drop it"
            )
    named = {column: row[column] for column in IMAGE_COLUMNS if _has(row.get(column))}
    if len(named) > 1:
        raise bad_value(
            place, list(named)[1], f"holds images, and so does {list(named)[0]!r}: leave one out"
        )
    row = {column: value for column, value in row.items() if column not in IMAGE_COLUMNS}
    if CONVERSATIONS in row and not set(_PROMPTED) & set(row):
        row["messages"] = read_messages(row.pop(CONVERSATIONS), place, CONVERSATIONS)
        if isinstance(row["messages"], str):
            raise bad_value(place, CONVERSATIONS, "expected a list of messages, or JSON of one")
    for column in (*_PROMPTED, *_ANSWERS):
        if column in row:
            row[column] = read_messages(row[column], place, column)
        if isinstance(row.get(column), list):
            row[column] = [_plain(m, place, column) for m in row[column]]
    for name, value in named.items():
        values = value if isinstance(value, list) else [value]
        return row, ImageColumn(name, tuple(values))
    return row, ImageColumn()


def place_images(
    prompt: str | list[dict[str, Any]],
    column: ImageColumn,
    folders: ImageFolders,
    place: str,
) -> tuple[str | list[dict[str, Any]], tuple[PictureFile, ...]]:
    """(the prompt with a part of type image at every place, the images in their order).

    A prompt that is text keeps its `<image>`, of which each is a place. No file is opened.

    Raises:
      ValueError: more or fewer places than images, an image in an assistant's turn, or a path that
        is not allowed or does not exist.
    """
    parts = _parts(prompt)
    if not parts and not column.values:
        return prompt, ()
    given = list(column.values)
    if not isinstance(prompt, str):
        prompt, inline = _marked(prompt, column, place)
    elif column.name in FIRST and MARK not in prompt:
        prompt, inline = MARK * len(given) + prompt, []
    else:
        inline = []
    places = [None] * prompt.count(MARK) if isinstance(prompt, str) else inline
    if places.count(None) != len(given):
        raise _count_error(places.count(None), len(given), bool(parts), column, place)
    left = iter(given)
    values = [next(left) if value is None else value for value in places]
    images = tuple(
        folders.open(value, f"{place}, image {number}") for number, value in enumerate(values, 1)
    )
    return prompt, images


def check_answers(row: dict[str, Any], place: str) -> None:
    """Raises ValueError for an image in an answer or a demonstration."""
    for column in _ANSWERS:
        if isinstance(row.get(column), list) and _parts(row[column]):
            raise bad_value(
                place,
                column,
                "has an image, and a policy writes text alone: give the images to the prompt, in "
                "a column of its own",
            )


def _has(value: Any) -> bool:
    return value is not None and value not in ("", [], b"")


def _plain(message: Any, place: str, column: str) -> Any:
    """A message whose content is text, or a list of parts of which at least one is an image."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = [_part(part, place, column) for part in message["content"]]
    if any(part["type"] == "image" for part in parts):
        return {**message, "content": parts}
    return {**message, "content": "".join(part["text"] for part in parts)}


def _part(part: Any, place: str, column: str) -> dict[str, Any]:
    """{"type": "text", "text": ...} or {"type": "image", "image": ... or None} of a part."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _VIDEO_PARTS:
        raise bad_value(place, column, f"a part of type {kind!r}: videos are not read")
    if kind in ("text", "input_text") and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind in _IMAGE_PARTS:
        # a table gives every part the keys of all
        found = next((part[k] for k in ("image", "image_url", "url", "path") if part.get(k)), None)
        return {"type": "image", "image": found}
    raise bad_value(
        place,
        column,
        f"a part of a message is {{'type': 'text', 'text': ...}} or {{'type': 'image'}}, got "
        f"{shown(part)}",
    )


def _parts(prompt: Any) -> list[dict[str, Any]]:
    """The parts of type image of messages."""
    if isinstance(prompt, str):
        return []
    return [
        part
        for message in prompt
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
        if part["type"] == "image"
    ]


def _marked(
    messages: list[dict[str, Any]], column: ImageColumn, place: str
) -> tuple[list[dict[str, Any]], list[Any]]:
    """(messages with bare image parts, the value of each part; None: the column's next one)."""
    by_parts = bool(_parts(messages))
    if (
        not by_parts
        and column.name in FIRST
        and not any(MARK in (m.get("content") or "") for m in messages)
    ):
        messages = _first(messages, len(column.values), place, column.name)
        by_parts = True
    marked, values = [], []
    for index, message in enumerate(messages):
        if (content := message.get("content")) is None:  # a call of tools
            marked.append(message)
            continue
        if not by_parts and message["role"] != "assistant":
            content = _split(content)
        if isinstance(content, list):
            images = [part for part in content if part["type"] == "image"]
            if images and message["role"] == "assistant":
                raise ValueError(
                    f"{place}: message {index} of the assistant has an image, and a policy writes "
                    "text alone: move the image to a message of the user"
                )
            values += [part.get("image") for part in images]
            content = [{"type": "image"} if p["type"] == "image" else p for p in content]
        marked.append({**message, "content": content})
    return marked, values


def _split(text: str) -> str | list[dict[str, Any]]:
    """A text's parts, where it has marks."""
    first, *rest = text.split(MARK)
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}] if first else []
    for piece in rest:
        parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts if rest else text


def _first(
    messages: list[dict[str, Any]], count: int, place: str, column: str
) -> list[dict[str, Any]]:
    """Messages with `count` images before the first text of the user's."""
    for index, message in enumerate(messages):
        if message["role"] == "user":
            text = {"type": "text", "text": message["content"]}
            content = [{"type": "image"} for _ in range(count)] + [text]
            return [
                *messages[:index],
                {**message, "content": content},
                *messages[index + 1 :],
            ]
    raise bad_value(place, column, "no message of the user in which the images could stand")


def _count_error(
    places: int, images: int, by_parts: bool, column: ImageColumn, place: str
) -> ValueError:
    what = "parts of type image without an image" if by_parts else f"{MARK} in its prompt"
    if not column.name:
        return ValueError(
            f"{place}: {places} {what} and no column {', '.join(map(repr, IMAGE_COLUMNS))}: add "
            "the images, or name their column by data.columns"
        )
    fix = f"write one for each image, in order, or change column {column.name!r}"
    if not places and column.name not in FIRST:
        fix += "; data.columns={'image': 'images'} puts all images before the question"
    return bad_value(
        place, column.name, f"{images} image{'s' * (images != 1)} and {places} {what}: {fix}"
    )
