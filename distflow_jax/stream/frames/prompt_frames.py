"""Prompts in frames: their tokens, and the parts of their rows that nodes and environments read.

P tokens of a prompt.
"""

import base64
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.images.record import Image
from distflow_jax.stream.frames.image_frames import patch_of, sent_bytes

_TAG = "__is__"  # of what JSON has no form for


def tokens_name(place: int) -> str:
    """Name of the array of a prompt's tokens in a frame, int32 [P]."""
    return f"prompt{place}"


def prompt_facts(prompt: Prompt) -> dict[str, Any]:
    """The values of a prompt beside its tokens and images, as JSON values.

    ValueError for a value of its row that cannot be sent.
    """
    row = f"row {prompt.row} of the data"
    return {
        "counter": prompt.counter,
        "row": prompt.row,
        "text": prompt.text,
        "data_source": prompt.data_source,
        "ground_truth": to_plain(prompt.ground_truth, f"the ground truth of {row}"),
        "extra_info": to_plain(dict(prompt.extra_info), f"extra_info of {row}"),
        "messages": to_plain(prompt.messages, f"the messages of {row}"),
        "expected": [prompt.expected_length, prompt.expected_spread],
    }


def without_row(prompt: Prompt) -> Prompt:
    """A prompt with what a sampler reads of it alone."""
    return dataclasses.replace(
        prompt, text="", data_source="", ground_truth=None, extra_info={}, messages=None
    )


def request_bytes(prompt: Prompt, *, rows: bool) -> int:
    """Bytes of a prompt in a frame, where they are many; `rows`: with the values of its row.

    ValueError for what a worker cannot get.
    """
    return sent_bytes(prompt) + (len(json.dumps(prompt_facts(prompt))) if rows else 0)


def prompt_of(
    place: int,
    facts: Mapping[str, Any],
    images: Sequence[Image],
    arrays: Mapping[str, np.ndarray],
) -> Prompt:
    """The prompt at a place of a frame that has these `images`, by the numbers in its `facts`:
    tokens int32 [P].

    ValueError for tokens, patches and places whose sizes do not belong together.
    """
    tokens, (length, spread) = arrays[tokens_name(place)], facts["expected"]
    if tokens.dtype != np.int32 or tokens.ndim != 1:
        raise ValueError(f"a frame's prompt {place} is {tokens.dtype}{list(tokens.shape)}")
    own = tuple(images[number] for number in facts.get("images", ()))
    return Prompt(
        counter=int(facts["counter"]),
        row=int(facts["row"]),
        tokens=tokens,
        text=str(facts["text"]),
        data_source=str(facts["data_source"]),
        ground_truth=of_plain(facts["ground_truth"]),
        extra_info=dict(of_plain(facts["extra_info"])),
        expected_length=float(length),
        expected_spread=float(spread),
        images=own,
        patch=patch_of(place, len(tokens), own, arrays),
        messages=of_plain(facts["messages"]),
    )


def to_plain(value: Any, what: str) -> Any:
    """A JSON value. ValueError, which names `what`, for one that cannot be sent."""
    if isinstance(value, np.ndarray | np.generic):
        return _array(value, what)
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list):
        return [to_plain(entry, what) for entry in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "of": [to_plain(entry, what) for entry in value]}
    if isinstance(value, dict):
        pairs = [[to_plain(k, what), to_plain(v, what)] for k, v in value.items()]
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return dict(pairs)
        return {_TAG: "dict", "of": pairs}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "of": base64.b64encode(value).decode()}
    raise ValueError(
        f"{what} has a value of type {type(value).__name__}, which cannot be sent to a worker: let "
        "the data have text, numbers, lists or dicts there, or leave the node to the trainers"
    )


def of_plain(value: Any) -> Any:
    """Inverse of to_plain."""
    if isinstance(value, list):
        return [of_plain(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: of_plain(entry) for key, entry in value.items()}
    if kind == "tuple":
        return tuple(of_plain(entry) for entry in value["of"])
    if kind == "dict":
        return {of_plain(key): of_plain(entry) for key, entry in value["of"]}
    if kind == "bytes":
        return base64.b64decode(value["of"])
    if kind == "objects":
        found = np.empty(len(value["of"]), object)
        for place, entry in enumerate(value["of"]):
            found[place] = of_plain(entry)
        return found
    data = base64.b64decode(value["of"])
    array = np.frombuffer(data, np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    return array if value["kind"] == "array" else array[()]


def _array(value: Any, what: str) -> dict[str, Any]:
    array = np.asarray(value)
    if array.dtype.hasobject:
        if array.ndim != 1:
            raise ValueError(
                f"{what} has an array of objects with {array.ndim} dimensions, which cannot be "
                "sent to a worker: use lists"
            )
        return {_TAG: "objects", "of": [to_plain(entry, what) for entry in array]}
    return {
        _TAG: "array",
        "kind": "array" if isinstance(value, np.ndarray) else "number",
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "of": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode(),
    }
