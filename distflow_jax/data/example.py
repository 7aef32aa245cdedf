"""Example, one row of a data set, and the interface of data sets."""

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from distflow_jax.images.picture_files import ImageSource

# {"role": "user", "content": "What is 2 + 3?"}; the content of one with images is a list of parts,
# {"type": "text", "text": ...} and {"type": "image"}
Message = dict[str, Any]


class Conversation(list[Message]):
    """Messages, with variables of the chat template: {"tools": [...], "enable_thinking": False}."""

    variables: Mapping[str, Any] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Example:
    """A prompt and the values that its reward function needs.

    `prompt` is plain text, or chat messages for the tokenizer's chat template. `ground_truth` is
    passed to the reward function, which decides its type. `extra_info` holds all columns without a
    field of their own. `chosen` and `rejected` are the two answers of a preference pair; a
    demonstration (TRL's `messages`, `completion`) has only `chosen`; so has an unpaired row, whose
    `label` says whether that answer is desirable (unpaired_rows.py). `images` stand in the prompt's
    parts of type image, in their order; in a prompt that is text, at its `<image>`.
    """

    prompt: str | list[Message]
    data_source: str
    ground_truth: Any = None
    extra_info: dict[str, Any] = dataclasses.field(default_factory=dict)
    ability: str = ""
    chosen: str | list[Message] | None = None
    rejected: str | list[Message] | None = None
    images: tuple[ImageSource, ...] = ()
    label: bool | None = None


class Dataset(Protocol):
    """Random access to examples. Reading a row twice gives equal examples, from any thread.

    `fingerprint` depends on the content: it changes with any row, but not when a file is moved.
    `name` names the data in messages. `first_image_row` is the first row with an image, None
    without any. Data sets of files have `without_truth`, the rows whose ground truth is missing,
    and `share`, the rows that this process encodes (RowShare).
    Where rows depend on the version of a package, an attribute `made_by` names both,
    "pillow==12.0.0", and the fingerprint depends on it.
    """

    name: str
    fingerprint: str
    first_image_row: int | None

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Example: ...

    def place(self, row: int) -> str:
        """The place of a row in messages: file or name, and the row's number there from 1."""


def examples(dataset: Dataset, first: int, end: int) -> Iterator[Example]:
    """The rows from `first` up to `end`, by `dataset.examples` where it reads rows faster so."""
    in_order = getattr(dataset, "examples", None)
    return in_order(first, end) if in_order else map(dataset.__getitem__, range(first, end))


def instruction(text: str, *, system_prompt: str = "", prompt_suffix: str = "") -> list[Message]:
    """Chat messages with `text` as the user's question, after the system prompt if there is one."""
    messages = [{"role": "user", "content": text + prompt_suffix}]
    if system_prompt:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages
