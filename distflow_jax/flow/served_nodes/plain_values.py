"""Values of a data set's rows as JSON, and back: what reward functions get beside a response."""

import base64
from typing import Any

import numpy as np

_TAG = "__is__"  # of what JSON has no form for


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
